"""Rows of fwd/sm_90a/sm90 for 16-bit Q and e4m3 caches, written by hand.

The time of decoding is that of reading K and V, half as long as with 16 bits. So many stored tiles are in flight, and K
and V are converted by a warpgroup each. Many queries read a tile of K and V only once for 128 rows.
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import Row, fwd_cache_sm90


def _decode(head_dim: int, tile_n: int, stored_stage: int, **more: Any) -> tuple[Row, Row]:
    """A row for few queries that splits keys, and one that does not."""
    more |= {"pingpong": False, "converting_warpgroups": 2, "stored_stage": stored_stage}
    split, whole = (fwd_cache_sm90(head_dim, 64, tile_n, splits=splits, **more) for splits in (True, False))
    return split, whole


ROWS: tuple[Row, ...] = (
    *_decode(32, 128, 8),
    *_decode(64, 128, 6),
    *_decode(96, 64, 8),
    *_decode(128, 64, 8, q_in_regs=True, exp_rows_before_wait=0),
    *_decode(160, 64, 4),
    *_decode(192, 64, 2),
    *_decode(256, 32, 2),
)
