"""Where the partial results of split keys lie, see `cuteflash.core.split`. For Python ints and traced values.

o      (2 blocks, tile_m, head_dim_v)   fp32, of slot 2 s: a tile that began before the share of seat s,
lse    (2 blocks, tile_m)               of slot 2 s + 1: one that begins in it

The metadata of launches that are scheduled, int32, what `cuteflash.get_scheduler_metadata` returns:

starts    (blocks, 4)    where block b's share begins, see `cuteflash.core.split.Start`
arrivals  (blocks,)      parts of the tile that begins in the share of seat s; 0 before a launch and after it
"""

from __future__ import annotations

from typing import Any

Index = Any  # a Python int or a traced cutlass.Int32
LEAST_KEYS = 128  # of a share: fewer are read sooner than merged
START_WORDS = 4


def slot_of(seat: Index, begins: Index) -> Index:
    """The slot of a seat's part of a tile; `begins` is 1 if the tile begins in the seat's share, else 0."""
    return 2 * seat + begins


def partials_size(blocks: int, rows: int, words: int) -> int:
    """fp32 elements of all slots of `rows` rows; `words` of a row: its O and its log-sum-exp."""
    return 2 * blocks * rows * words


def metadata_size(blocks: int) -> int:
    """Words of the metadata of launches of so many blocks."""
    return (START_WORDS + 1) * blocks


def metadata_blocks(size: Index) -> Index:
    """Blocks of launches whose metadata has so many words."""
    return size // (START_WORDS + 1)
