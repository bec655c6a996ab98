"""Rows of fwd/sm_80/sm80.

`cuteflash sweep apply --shipped` rewrites this file; `measured` says what a sweep found for a row.
"""

from __future__ import annotations

from cuteflash.traits.row import CAUSAL, FULL, WINDOW, Row, fwd_sm80

ROWS: tuple[Row, ...] = (
    fwd_sm80(32, 128, 128, 8),
    fwd_sm80(64, 128, 64, 4, FULL, kv_stage=2, blocks_per_sm=2),
    fwd_sm80(64, 128, 64, 4, CAUSAL, q_in_regs=True, blocks_per_sm=2),
    fwd_sm80(64, 128, 64, 4, blocks_per_sm=2),
    fwd_sm80(96, 128, 64, 8),
    fwd_sm80(128, 64, 64, 4, kv_stage=2, q_in_regs=True, blocks_per_sm=2),
    fwd_sm80(160, 128, 64, 8),
    fwd_sm80(192, 128, 64, 8),
    fwd_sm80(224, 64, 32, 4, WINDOW),
    fwd_sm80(224, 128, 64, 8),
    fwd_sm80(256, 64, 32, 4, WINDOW),
    fwd_sm80(256, 128, 64, 8),
)
