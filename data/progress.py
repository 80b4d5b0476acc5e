"""Show how far a prepare script is: a bar on a terminal, a line now and then in a file or pipe.

progress = Progress("data/mine", total=1_000_000, done=250_000)
progress.update(50_000)
progress.close()
"""

import shutil
import sys
import time

from . import need

LINE_EVERY = 60  # seconds


class Progress:
    """Counts tokens on stderr: with tqdm if that is a terminal, otherwise in a line every LINE_EVERY seconds."""

    def __init__(self, label, total, done=0):
        """label: what is written; total: about how many tokens; done: how many of them an earlier run has written."""
        self.label, self.total, self.done, self.first = label, max(1, total), done, done
        self.started = self.shown = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            # A terminal that does not know its size (0 by 0) gets 80 by 24; tqdm itself would show nothing.
            columns, rows = shutil.get_terminal_size()
            label = label if len(label) <= 30 else "..." + label[-27:]  # it must not take the bar's place
            options = dict(initial=done, unit="tok", unit_scale=True, desc=label, ncols=columns, nrows=rows)
            self.bar = need("tqdm").tqdm(total=total, **options)
        elif done:
            self._print_line()

    def update(self, tokens):
        """Count more tokens as done."""
        self.done += tokens
        if self.bar is not None:
            self.bar.update(tokens)
        elif time.monotonic() - self.shown >= LINE_EVERY:
            self._print_line()

    def close(self):
        """End the bar's line."""
        if self.bar is not None:
            self.bar.close()

    def _print_line(self):
        self.shown = time.monotonic()
        line = f"{self.label}: {min(100, 100 * self.done / self.total):.0f}% of about {self.total:,} tokens"
        if self.done > self.first:
            rate = (self.done - self.first) / (self.shown - self.started)
            line += f", {rate:,.0f} tokens/s, {max(0, self.total - self.done) / rate / 60:,.0f} minutes left"
        print(line, file=sys.stderr, flush=True)
