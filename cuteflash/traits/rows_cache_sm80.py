"""Rows of the sm80 forward for 16-bit Q and e4m3 caches, of all targets that convert e4m3.

They are written by hand; no sweep knows them. Of each head dim the first rows are those of Hopper, the next those of
targets with 99 KiB a block. Every warp converts all of a block's keys for its own rows: two blocks on a multiprocessor
overlap that with the products.
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import LONG, SHORT, Row, fwd_cache_sm80


def _few(head_dim: int, tile_n: int, kv_stage: int, blocks_per_sm: int = 2, **more: Any) -> tuple[Row, Row]:
    """A row for few queries that splits keys, and one that does not."""
    more |= {"kv_stage": kv_stage, "blocks_per_sm": blocks_per_sm}
    split, whole = (fwd_cache_sm80(head_dim, 64, tile_n, 4, splits=splits, **more) for splits in (True, False))
    return split, whole


def _many(head_dim: int, tile_n: int, kv_stage: int, num_warps: int = 8, **more: Any) -> Row:
    """A row for many queries."""
    return fwd_cache_sm80(head_dim, 128, tile_n, num_warps, lengths=SHORT + LONG, kv_stage=kv_stage, **more)


HELD: dict[str, Any] = {"q_in_regs": True}

ROWS: tuple[Row, ...] = (
    _many(64, 64, 4, **HELD),
    _many(128, 64, 3, **HELD),
    *_few(32, 128, 8, **HELD),
    *_few(32, 128, 5, **HELD),
    *_few(64, 128, 6, **HELD),
    *_few(64, 128, 2, **HELD),
    *_few(96, 64, 8, **HELD),
    *_few(96, 64, 3, **HELD),
    *_few(128, 64, 6, **HELD),
    *_few(128, 64, 2, **HELD),
    *_few(160, 64, 4, **HELD),
    *_few(160, 64, 3, 1, **HELD),
    *_few(192, 32, 6),
    *_few(192, 32, 5, 1),
    *_few(224, 64, 3),
    *_few(224, 64, 2, 1),
    *_few(256, 32, 5),
    *_few(256, 32, 4, 1),
)
