"""Rows of fwd/sm_90a/sm80.

`cuteflash sweep apply --shipped` rewrites this file; `measured` says what a sweep found for a row.
"""

from __future__ import annotations

from cuteflash.traits.row import (
    BF16,
    BRIEF,
    CAUSAL,
    DECODE,
    FP16,
    FULL,
    LONG,
    LSE,
    SHORT,
    SOFTCAP,
    TINY,
    VARLEN,
    WINDOW,
    Row,
    fwd_sm80,
)

ROWS: tuple[Row, ...] = (
    fwd_sm80(
        32,
        128,
        64,
        4,
        FULL,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=SOFTCAP + VARLEN,
        kv_stage=3,
        q_in_regs=True,
        blocks_per_sm=3,
    ).measured("NVIDIA H200", "2026-11-21", 261),
    fwd_sm80(
        32,
        128,
        64,
        4,
        CAUSAL,
        dtypes=FP16,
        lengths=LONG,
        without=SOFTCAP + LSE,
        kv_stage=3,
        q_in_regs=True,
        blocks_per_sm=3,
    ).measured("NVIDIA H200", "2026-11-21", 249),
    fwd_sm80(
        32, 64, 64, 4, CAUSAL + WINDOW, lengths=TINY + BRIEF + SHORT + LONG, kv_stage=2, q_in_regs=True, blocks_per_sm=4
    ).measured("NVIDIA H200", "2026-11-21", 207),
    fwd_sm80(64, 256, 64, 8, FULL, dtypes=FP16, lengths=LONG, kv_stage=2, q_in_regs=True).measured(
        "NVIDIA H200", "2026-11-21", 341
    ),
    fwd_sm80(64, 128, 64, 4, FULL, dtypes=BF16, lengths=LONG, q_in_regs=True, blocks_per_sm=2).measured(
        "NVIDIA H200", "2026-11-21", 326
    ),
    fwd_sm80(64, 128, 64, 4, CAUSAL, dtypes=BF16, lengths=LONG, without=LSE, q_in_regs=True, blocks_per_sm=2).measured(
        "NVIDIA H200", "2026-11-21", 326
    ),
    fwd_sm80(
        64, 128, 64, 4, CAUSAL, dtypes=BF16, lengths=LONG, q_in_regs=True, late_addresses=True, blocks_per_sm=2
    ).measured("NVIDIA H200", "2026-11-21", 326),
    fwd_sm80(
        64, 128, 64, 4, CAUSAL, dtypes=FP16, lengths=LONG, without=SOFTCAP + LSE, q_in_regs=True, blocks_per_sm=2
    ).measured("NVIDIA H200", "2026-11-21", 326),
    fwd_sm80(
        64,
        128,
        64,
        4,
        CAUSAL,
        dtypes=FP16,
        lengths=LONG,
        without=SOFTCAP,
        q_in_regs=True,
        late_addresses=True,
        blocks_per_sm=2,
    ).measured("NVIDIA H200", "2026-11-21", 326),
    fwd_sm80(64, 128, 64, 4, CAUSAL, lengths=DECODE, q_in_regs=True, late_addresses=True, blocks_per_sm=2),
    fwd_sm80(64, 128, 64, 4, lengths=TINY + BRIEF + SHORT + LONG, kv_stage=2, blocks_per_sm=2).measured(
        "NVIDIA H200", "2026-11-21", 262
    ),
    fwd_sm80(
        96,
        64,
        128,
        4,
        CAUSAL,
        dtypes=FP16,
        lengths=TINY + BRIEF + SHORT,
        without=SOFTCAP + LSE + VARLEN,
        blocks_per_sm=3,
    ).measured("NVIDIA H200", "2026-11-21", 226),
    fwd_sm80(
        96, 64, 128, 4, CAUSAL, dtypes=BF16, lengths=TINY + BRIEF + SHORT, without=SOFTCAP + VARLEN, blocks_per_sm=3
    ).measured("NVIDIA H200", "2026-11-21", 226),
    fwd_sm80(
        96, 256, 64, 8, FULL, dtypes=FP16, lengths=TINY + BRIEF + SHORT + LONG, without=SOFTCAP + LSE, kv_stage=2
    ).measured("NVIDIA H200", "2026-11-21", 317),
    fwd_sm80(
        96, 256, 64, 8, CAUSAL, dtypes=FP16, lengths=TINY + BRIEF + SHORT + LONG, without=VARLEN, kv_stage=2
    ).measured("NVIDIA H200", "2026-11-21", 317),
    fwd_sm80(
        96, 128, 96, 4, FULL, dtypes=BF16, lengths=TINY + BRIEF + SHORT + LONG, without=SOFTCAP, kv_stage=2
    ).measured("NVIDIA H200", "2026-11-21", 343),
    fwd_sm80(
        96,
        128,
        96,
        4,
        CAUSAL,
        dtypes=BF16,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=SOFTCAP + LSE + VARLEN,
        kv_stage=2,
    ).measured("NVIDIA H200", "2026-11-21", 343),
    fwd_sm80(
        96,
        64,
        64,
        4,
        WINDOW,
        dtypes=FP16,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=SOFTCAP + VARLEN,
        kv_stage=2,
        q_in_regs=True,
        blocks_per_sm=3,
    ).measured("NVIDIA H200", "2026-11-21", 261),
    fwd_sm80(
        96,
        64,
        64,
        4,
        WINDOW,
        dtypes=BF16,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=LSE + VARLEN,
        kv_stage=2,
        q_in_regs=True,
        blocks_per_sm=3,
    ).measured("NVIDIA H200", "2026-11-21", 261),
    fwd_sm80(
        128,
        128,
        48,
        4,
        FULL,
        dtypes=FP16,
        lengths=TINY + BRIEF + SHORT,
        without=SOFTCAP + LSE + VARLEN,
        kv_stage=2,
        late_addresses=True,
        blocks_per_sm=2,
    ).measured("NVIDIA H200", "2026-11-21", 334),
    fwd_sm80(128, 128, 48, 4, FULL, dtypes=BF16, without=VARLEN, kv_stage=2, blocks_per_sm=2).measured(
        "NVIDIA H200", "2026-11-21", 334
    ),
    fwd_sm80(
        192,
        128,
        96,
        8,
        CAUSAL,
        dtypes=BF16,
        lengths=LONG,
        without=SOFTCAP + LSE + VARLEN,
        kv_stage=2,
        q_in_regs=True,
        cutlass_symbol=True,
    ).measured("NVIDIA H200", "2026-11-21", 351),
    fwd_sm80(192, 128, 128, 8, CAUSAL, lengths=TINY + BRIEF + SHORT, without=SOFTCAP).measured(
        "NVIDIA H200", "2026-11-21", 243
    ),
    fwd_sm80(
        192, 128, 96, 8, FULL, dtypes=FP16, lengths=LONG, without=SOFTCAP + VARLEN, kv_stage=2, q_in_regs=True
    ).measured("NVIDIA H200", "2026-11-21", 359),
    fwd_sm80(192, 128, 96, 8, CAUSAL, dtypes=FP16, lengths=LONG, without=VARLEN, kv_stage=2, q_in_regs=True).measured(
        "NVIDIA H200", "2026-11-21", 359
    ),
    fwd_sm80(
        192,
        128,
        64,
        8,
        FULL + WINDOW,
        lengths=TINY + BRIEF + SHORT + LONG,
        kv_stage=2,
        q_in_regs=True,
        cutlass_symbol=True,
    ).measured("NVIDIA H200", "2026-11-21", 295),
    fwd_sm80(256, 128, 64, 8, FULL, dtypes=BF16, lengths=LONG, kv_stage=2, cutlass_symbol=True).measured(
        "NVIDIA H200", "2026-11-21", 352
    ),
    fwd_sm80(256, 128, 96, 8, FULL, dtypes=FP16, lengths=LONG, cutlass_symbol=True).measured(
        "NVIDIA H200", "2026-11-21", 356
    ),
    fwd_sm80(
        256, 128, 96, 8, CAUSAL, dtypes=BF16, lengths=LONG, without=SOFTCAP + LSE + VARLEN, cutlass_symbol=True
    ).measured("NVIDIA H200", "2026-11-21", 314),
    fwd_sm80(
        256,
        64,
        64,
        4,
        CAUSAL,
        dtypes=FP16,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=SOFTCAP,
        cutlass_symbol=True,
        blocks_per_sm=2,
    ).measured("NVIDIA H200", "2026-11-21", 275),
    fwd_sm80(
        256,
        64,
        64,
        4,
        CAUSAL,
        dtypes=BF16,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=LSE,
        cutlass_symbol=True,
        blocks_per_sm=2,
    ).measured("NVIDIA H200", "2026-11-21", 275),
    fwd_sm80(
        256,
        64,
        64,
        4,
        WINDOW,
        lengths=TINY + BRIEF + SHORT + LONG,
        without=SOFTCAP + LSE + VARLEN,
        cutlass_symbol=True,
        blocks_per_sm=2,
    ).measured("NVIDIA H200", "2026-11-21", 275),
    fwd_sm80(256, 64, 64, 4, FULL + CAUSAL, without=SOFTCAP + LSE, cutlass_symbol=True, blocks_per_sm=2).measured(
        "NVIDIA H200", "2026-11-21", 275
    ),
    fwd_sm80(256, 64, 64, 4, FULL, without=VARLEN, cutlass_symbol=True, blocks_per_sm=2).measured(
        "NVIDIA H200", "2026-11-21", 275
    ),
)
