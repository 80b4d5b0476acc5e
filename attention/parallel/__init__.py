"""Attention over a sequence that is spread over ranks."""


def pieces_of(rank, size, balanced):
    """Return the numbers of the pieces that a rank of `size` holds, out of size or, if `balanced`, 2 * size of them."""
    return (rank, 2 * size - 1 - rank) if balanced else (rank,)
