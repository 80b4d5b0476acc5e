"""Which tile sizes a kernel runs with."""

from typing import NamedTuple


class Config(NamedTuple):
    BM: int  # queries a tile
    BN: int  # keys a tile
    warps: int
    stages: int
    maxnreg: int = 0


def choose(kernel, dtype, D, p, gated, device):
    return Config(32, 32, 4, 2)
