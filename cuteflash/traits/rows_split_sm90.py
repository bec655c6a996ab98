"""Rows of fwd/sm_90a/sm90 that split keys, written by hand.

The time is that of reading K and V, by one consumer warpgroup. 96 kB in flight a multiprocessor keep memory busy; if it
is more, heads drift out of step (docs/performance.md, "Decoding"). One block a multiprocessor has half as many parts to
merge as two.
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import ALL, FULL, LSE, SINK, SOFTCAP, VARLEN, Row, fwd_sm90


def _split(head_dim: int, tile_n: int, kv_stage: int, masks: tuple[str, ...] = ALL, **more: Any) -> Row:
    return fwd_sm90(head_dim, 64, tile_n, masks, kv_stage=kv_stage, pingpong=False, splits=True, **more)


# Two blocks have few registers, so that only the simplest problems take them.
PAIR: dict[str, Any] = {"blocks_per_sm": 2, "without": SOFTCAP + LSE + SINK + VARLEN}

ROWS: tuple[Row, ...] = (
    _split(32, 128, 5, FULL, **PAIR),
    _split(32, 128, 8),
    _split(64, 128, 3, q_in_regs=True),
    _split(96, 64, 3, FULL, **PAIR),
    _split(96, 96, 4),
    _split(128, 64, 3, q_in_regs=True, exp_rows_before_wait=0),
    _split(160, 128, 2),
    _split(192, 96, 3, head_dim_v=128),
    _split(192, 64, 3),
    _split(224, 64, 2),
    _split(256, 64, 2),
)
