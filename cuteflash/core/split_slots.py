"""Where the partial results of split keys lie, see `cuteflash.core.split`. For Python ints and traced values.

o      (2 blocks, tile_m, head_dim_v)   fp32, of slot 2 s: a tile that began before the share of seat s,
lse    (2 blocks, tile_m)               of slot 2 s + 1: one that begins in it
"""

from __future__ import annotations

from typing import Any

Index = Any  # a Python int or a traced cutlass.Int32
LEAST_KEYS = 128  # of a share: fewer are read sooner than merged


def slot_of(seat: Index, begins: Index) -> Index:
    """The slot of a seat's part of a tile; `begins` is 1 if the tile begins in the seat's share, else 0."""
    return 2 * seat + begins


def partials_size(blocks: int, rows: int, columns: int) -> int:
    """Elements of all slots of `rows` rows and `columns` columns, and of their log-sum-exps."""
    return 2 * blocks * rows * (columns + 1)
