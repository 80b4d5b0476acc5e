"""Show how far a program is: a bar on a terminal, elsewhere a line after 2 s and then every 10 s.

with bar(total=1_000_000, desc="prompt") as progress:
    progress.update(50_000)
with waiting("reading out/demo"):
    ...
"""

import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager

from . import need

STARTED = time.monotonic()  # when the program began, but for its first imports
FIRST_LINE, NEXT_LINE = 2.0, 10.0  # seconds without a terminal, after the start and after the line before


def bar(iterable=None, lines=False, **options):
    """Return a tqdm bar on stderr with these options.

    Elsewhere than on a terminal, or with `lines`, its state is printed as lines, also where it does not move. The next
    one is due at the time bar.due.
    """
    tqdm = need("tqdm").tqdm
    if lines or not sys.stderr.isatty():
        progress = tqdm(iterable, file=open(os.devnull, "w"), ncols=0, **options)
        progress.due = time.monotonic() + FIRST_LINE
        threading.Thread(target=_print_lines, args=(weakref.ref(progress),), daemon=True).start()
        return progress
    size = os.get_terminal_size(sys.stderr.fileno())
    known = {} if size.columns and size.lines else {"ncols": 80, "nrows": 24}  # 0 by 0 where nobody has set a size
    return tqdm(iterable, **known, **options)


@contextmanager
def waiting(text, shown=True):
    """Print a text and the time so far as lines, on a terminal too, while a block or a decorated function runs."""
    with bar(lines=True, bar_format=f"{text}: {{elapsed}}", disable=not shown):
        yield


def _print_lines(reference):
    while not getattr(progress := reference(), "disable", True):  # which close() sets
        if time.monotonic() >= progress.due:
            progress.due = time.monotonic() + NEXT_LINE
            print(progress, file=sys.stderr, flush=True)
        del progress  # a bar that is dropped is closed
        time.sleep(0.1)
