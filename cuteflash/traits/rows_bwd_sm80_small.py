"""Rows of bwd/sm_86/sm80, bwd/sm_89/sm80, bwd/sm_120/sm80."""

from __future__ import annotations

from cuteflash.traits.row import Row, bwd_sm80

ROWS: tuple[Row, ...] = (
    bwd_sm80(32, 64, 128, 8, dq_warps=4),
    bwd_sm80(64, 64, 128, 8, dq_warps=4),
    bwd_sm80(96, 64, 64, 8, dq_warps=4),
    bwd_sm80(128, 64, 64, 8, dq_warps=4, stages=1),
    bwd_sm80(160, 64, 64, 8, dq_warps=4, stages=1),
    bwd_sm80(192, 32, 64, 8, dkv_warps=2, stages=1),
    bwd_sm80(192, 32, 32, 4, s_warps=2, dkv_warps=2, stages=1),
    bwd_sm80(224, 32, 32, 4, s_warps=2, dkv_warps=2),
    bwd_sm80(256, 32, 32, 4, s_warps=2, dkv_warps=2, stages=1),
)
