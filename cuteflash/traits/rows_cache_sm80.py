"""Rows of the sm80 forward for 16-bit Q and e4m3 caches, of all targets that convert e4m3.

They are written by hand; no sweep knows them. Of each head dim the first rows are those of Hopper, the next those of
targets with 99 KiB a block.

Every warp converts all of its block's keys for its own rows: two blocks on a multiprocessor overlap that with products.
"""

from __future__ import annotations

import functools
from typing import Any

from cuteflash.traits.row import Row, fwd_cache_sm80


def _row(head_dim: int, tile_n: int, kv_stage: int, blocks_per_sm: int = 2, **more: Any) -> Row:
    return fwd_cache_sm80(head_dim, 64, tile_n, 4, kv_stage=kv_stage, blocks_per_sm=blocks_per_sm, **more)


_split, _whole = (functools.partial(_row, splits=splits) for splits in (True, False))


def _rows(*sizes: int, **more: Any) -> tuple[Row, Row]:
    """A row that splits keys, and one that does not."""
    return _split(*sizes, **more), _whole(*sizes, **more)


HELD: dict[str, Any] = {"q_in_regs": True}

ROWS: tuple[Row, ...] = (
    *_rows(32, 128, 8, **HELD),
    *_rows(32, 128, 5, **HELD),
    *_rows(64, 128, 6, **HELD),
    *_rows(64, 128, 2, **HELD),
    *_rows(96, 64, 8, **HELD),
    *_rows(96, 64, 3, **HELD),
    *_rows(128, 64, 4, **HELD),
    *_rows(128, 64, 2, **HELD),
    *_rows(160, 64, 4, **HELD),
    _split(160, 64, 3, 1),  # held, it spills 24 bytes with every option at once
    _whole(160, 64, 3, 1, **HELD),
    *_rows(192, 32, 6),
    *_rows(192, 32, 5, 1),
    *_rows(224, 64, 3),
    *_rows(224, 64, 2, 1),
    *_rows(256, 32, 5),
    *_rows(256, 32, 4, 1),
    *_rows(256, 32, 5, head_dim_v=64, **HELD),
    *_rows(256, 32, 4, 1, head_dim_v=64, **HELD),
)
