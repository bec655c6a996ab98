"""Rows of the sm80 forward that split keys, of all targets, written by hand.

The time is that of reading K and V, so that as many key blocks are in flight as fit, of two thread blocks a
multiprocessor if there is room: one reads on while the other ends a tile. Of each head dim the first rows are those of
Hopper, the next those of targets with less shared memory.
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import SOFTCAP, VARLEN, Row, fwd_sm80


def _split(head_dim: int, tile_n: int, kv_stage: int, blocks_per_sm: int, **more: Any) -> Row:
    return fwd_sm80(head_dim, 64, tile_n, 4, kv_stage=kv_stage, blocks_per_sm=blocks_per_sm, splits=True, **more)


ROWS: tuple[Row, ...] = (
    _split(32, 128, 3, 2),
    _split(32, 64, 3, 2),
    _split(64, 64, 4, 2),
    _split(64, 64, 3, 1),
    _split(96, 64, 3, 2),
    _split(96, 64, 2, 1),
    _split(128, 64, 3, 2),
    _split(128, 64, 2, 2),
    _split(128, 64, 2, 1),
    _split(160, 64, 2, 2, q_in_regs=True),
    _split(160, 64, 2, 1),
    _split(160, 32, 2, 1),
    _split(192, 32, 3, 2, q_in_regs=True),
    _split(192, 64, 2, 1),
    _split(192, 32, 2, 1),
    _split(224, 32, 2, 2, q_in_regs=True),
    _split(224, 32, 4, 1),
    _split(224, 32, 2, 1),
    _split(256, 32, 2, 2, q_in_regs=True, without=SOFTCAP + VARLEN),
    _split(256, 32, 2, 2),
    _split(256, 32, 4, 1),
    _split(256, 32, 2, 1),
)
