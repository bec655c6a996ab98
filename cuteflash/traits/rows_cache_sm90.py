"""Rows of fwd/sm_90a/sm90 for 16-bit Q and e4m3 caches, written by hand.

The time of decoding is that of reading K and V, half as long as with 16 bits. So many stored tiles are in flight, and K
and V are converted by a warpgroup each, up to head dim 128: a product with 256 columns needs more registers than 512
threads are launched with. Many queries share the conversion of a tile: they take 128 rows. Few rows of split keys are
those of `rows_few_sm90.py`.
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import BRIEF, LONG, SHORT, TINY, Row, fwd_cache_sm90


def _few(head_dim: int, tile_n: int, stored_stage: int, converting_warpgroups: int = 1, **more: Any) -> tuple[Row, Row]:
    """A row for few queries that splits keys, and one that does not."""
    more |= {"pingpong": False, "stored_stage": stored_stage, "converting_warpgroups": converting_warpgroups}
    split, whole = (fwd_cache_sm90(head_dim, 64, tile_n, splits=splits, **more) for splits in (True, False))
    return split, whole


def _many(head_dim: int, tile_n: int, stored_stage: int, **more: Any) -> Row:
    """A row for many queries."""
    return fwd_cache_sm90(head_dim, 128, tile_n, lengths=TINY + BRIEF + SHORT + LONG, stored_stage=stored_stage, **more)


# A warpgroup for each half of the keys.
PAIR: dict[str, Any] = {"key_warpgroups": 2, "q_in_regs": True, "exp_rows_before_wait": 0}

ROWS: tuple[Row, ...] = (
    _many(64, 128, 4),
    _many(128, 64, 4),
    *_few(32, 128, 8, **PAIR),
    *_few(64, 128, 6, **PAIR),
    *_few(96, 128, 3, **PAIR),
    *_few(128, 96, 3, **PAIR),
    *_few(160, 64, 4),
    *_few(192, 64, 3),
    *_few(224, 64, 2),
    *_few(256, 64, 2, share_q_o=True),
    *_few(256, 32, 4),
)
