"""In which order the key blocks of a deterministic backward add to a tile of dQ: by ascending key.

A key block adds to the query tiles that see it, from the last to the first. So does each key block before it, which was
launched earlier, or drawn earlier by a block that runs (`cuteflash.kernels.sm90.handout`): a block never waits for one
that may not run yet. The source runs on Python ints and on traced values alike.
"""

from __future__ import annotations

import cutlass

from cuteflash.core.mask import Index, IntervalMask


def turn_of(mask: IntervalMask, n_block: Index, m_block: Index, tile_m: int, tile_n: int) -> Index:
    """How many key blocks add to query tile `m_block` before `n_block`, which adds to it."""
    if not mask.kind == "window":
        return n_block
    first = m_block * tile_m
    last = cutlass.min(first + tile_m, mask.seqlen_q) - 1
    return n_block - mask.n_blocks(first, last, tile_n)[0]
