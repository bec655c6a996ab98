"""Rows of bwd/sm_90a/sm80.

`cuteflash sweep apply --shipped` rewrites this file; `measured` says what a sweep found for a row.
"""

from __future__ import annotations

from cuteflash.traits.row import BF16, CAUSAL, DETERMINISTIC, FP16, FULL, SOFTCAP, Row, bwd_sm80

ROWS: tuple[Row, ...] = (
    bwd_sm80(32, 64, 128, 8, dq_warps=4, vector_add=True),
    bwd_sm80(
        64,
        32,
        128,
        4,
        FULL,
        dtypes=BF16,
        without=SOFTCAP + DETERMINISTIC,
        dq_warps=1,
        double_buffer=False,
        vector_add=True,
        blocks_per_sm=2,
    ),
    bwd_sm80(
        64,
        32,
        128,
        4,
        CAUSAL,
        dtypes=BF16,
        without=SOFTCAP + DETERMINISTIC,
        dq_warps=1,
        fresh_addresses=True,
        vector_add=True,
        blocks_per_sm=2,
    ),
    bwd_sm80(
        64,
        32,
        128,
        4,
        FULL + CAUSAL,
        dtypes=FP16,
        without=SOFTCAP + DETERMINISTIC,
        double_buffer=False,
        vector_add=True,
        blocks_per_sm=2,
    ),
    bwd_sm80(64, 64, 128, 8, dq_warps=4, vector_add=True),
    bwd_sm80(96, 64, 128, 8, without=SOFTCAP, dq_warps=4, vector_add=True),
    bwd_sm80(96, 64, 64, 8, dq_warps=4, vector_add=True),
    bwd_sm80(128, 64, 128, 8, FULL, without=SOFTCAP + DETERMINISTIC, double_buffer=False, vector_add=True),
    bwd_sm80(128, 64, 128, 8, CAUSAL, dtypes=BF16, without=SOFTCAP, double_buffer=False, vector_add=True),
    bwd_sm80(128, 64, 128, 8, FULL + CAUSAL, without=SOFTCAP, s_warps=8, double_buffer=False, vector_add=True),
    bwd_sm80(128, 64, 64, 8, dq_warps=4, vector_add=True),
    bwd_sm80(160, 64, 64, 8, dq_warps=4, vector_add=True),
    bwd_sm80(192, 64, 64, 8, dkv_warps=2, vector_add=True),
    bwd_sm80(192, 64, 64, 8, dq_warps=4, vector_add=True),
    bwd_sm80(224, 64, 64, 8, dq_warps=4, vector_add=True),
    bwd_sm80(256, 64, 64, 8, s_warps=2, dkv_warps=2, double_buffer=False, vector_add=True),
    bwd_sm80(256, 64, 64, 8, dq_warps=4, vector_add=True),
)
