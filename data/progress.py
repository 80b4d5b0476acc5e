"""Show how far a program is: a bar on a terminal.

with bar(total=1_000_000, desc="prompt") as progress:
    progress.update(50_000)
"""

import os
import sys

from . import need


def bar(iterable=None, line_every=None, **options):
    """Return a tqdm bar on stderr with these options.

    Elsewhere than on a terminal it shows nothing (bar.disable), or with line_every its state after so many seconds.
    """
    tqdm = need("tqdm").tqdm
    if not sys.stderr.isatty():
        if line_every is None:
            return tqdm(iterable, disable=True)
        return tqdm(iterable, mininterval=line_every, delay=line_every, miniters=1, **options)
    size = os.get_terminal_size(sys.stderr.fileno())
    known = {} if size.columns and size.lines else {"ncols": 80, "nrows": 24}  # 0 by 0 where nobody has set a size
    return tqdm(iterable, **known, **options)
