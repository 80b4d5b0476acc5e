"""Show how far a program is: a bar on a terminal.

with bar(total=1_000_000, desc="prompt") as progress:
    progress.update(50_000)

with ticking(bar_format="training: {elapsed}"):         # also shown while a step takes long; elsewhere as a line
    train()
"""

import io
import os
import sys
import threading
from contextlib import contextmanager
from functools import partial

from . import need


def bar(iterable=None, **options):
    """Return a tqdm bar on stderr with these options. Elsewhere than on a terminal it shows nothing (bar.disable)."""
    tqdm = need("tqdm").tqdm
    if not sys.stderr.isatty():
        return tqdm(iterable, disable=True)
    size = os.get_terminal_size(sys.stderr.fileno())
    known = {} if size.columns and size.lines else {"ncols": 80, "nrows": 24}  # 0 by 0 where nobody has set a size
    return tqdm(iterable, **known, **options)


@contextmanager
def ticking(iterable=None, **options):
    """Yield a bar that is also shown, after 2 s and then every 10 s, while one step of it takes long; elsewhere than on
    a terminal as a line on stderr."""
    if sys.stderr.isatty():
        progress = bar(iterable, **options)
        show = progress.refresh
    else:
        progress = need("tqdm").tqdm(iterable, file=io.StringIO(), **options)
        show = partial(print, progress, file=sys.stderr)
    ended = threading.Event()

    def tick():
        seconds = 2
        while not ended.wait(seconds):
            show()
            seconds = 10

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield progress
    finally:
        ended.set()
        progress.close()
