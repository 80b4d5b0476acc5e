"""Measure the kernels' tile sizes on the GPU at hand: python -m sympow.tune [--help]

The measured sizes go into ~/.cache/sympow/table.json (below $XDG_CACHE_HOME, if that is set).
"""

import sys

from .kernels.tune import main

if __name__ == "__main__":
    sys.exit(main())
