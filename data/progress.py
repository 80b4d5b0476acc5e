"""Show how far a program is: a bar on a terminal, and of a prepare script a line now and then in a file or pipe.

with bar(total=1_000_000, desc="prompt") as shown:          # in every program
    shown.update(50_000)

progress = Progress("data/mine", total=1_000_000, done=250_000)
progress.update(50_000)
progress.close()
"""

import os
import sys
import time

from . import need

LINE_EVERY = 60  # seconds


def bar(**options):
    """Return a tqdm bar on stderr with these options; elsewhere than on a terminal it shows nothing (bar.disable)."""
    tqdm = need("tqdm").tqdm
    if not sys.stderr.isatty():
        return tqdm(disable=True)
    size = os.get_terminal_size(sys.stderr.fileno())
    known = {} if size.columns and size.lines else {"ncols": 80, "nrows": 24}  # 0 by 0 where nobody has set a size
    return tqdm(file=sys.stderr, **known, **options)


class Progress:
    """Counts tokens on stderr: with a bar if that is a terminal, otherwise in a line every LINE_EVERY seconds."""

    def __init__(self, label, total, done=0):
        """label: what is written; total: about how many tokens, None if that is not known; done: how many of them an
        earlier run has written."""
        self.label, self.total, self.done, self.first = label, total and max(1, total), done, done
        self.started = self.shown = time.monotonic()
        short = label if len(label) <= 30 else "..." + label[-27:]  # it must not take the bar's place
        self.bar = bar(total=total, initial=done, unit="tok", unit_scale=True, desc=short)
        if self.bar.disable and done:
            self._print_line()

    def update(self, tokens):
        """Count more tokens as done."""
        self.done += tokens
        self.bar.update(tokens)
        if self.bar.disable and time.monotonic() - self.shown >= LINE_EVERY:
            self._print_line()

    def close(self):
        """End the bar's line."""
        self.bar.close()

    def _print_line(self):
        self.shown = time.monotonic()
        line = f"{self.label}: about {self.done:,} tokens"
        if self.total:
            line = f"{self.label}: {min(100, 100 * self.done / self.total):.0f}% of about {self.total:,} tokens"
        if self.done > self.first:
            rate = (self.done - self.first) / (self.shown - self.started)
            line += f", {rate:,.0f} tokens/s"
            line += f", {max(0, self.total - self.done) / rate / 60:,.0f} minutes left" if self.total else ""
        print(line, file=sys.stderr, flush=True)
