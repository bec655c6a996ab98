"""Forward rows of sm_90a/sm80.

`cuteflash sweep apply --shipped` rewrites this file; what was measured with a row stands beside it.
"""

from __future__ import annotations

from cuteflash.traits.row import BF16, CAUSAL, EVEN, FP16, LONG, SHORT, FwdRow, fwd_sm80

ROWS: tuple[FwdRow, ...] = (
    fwd_sm80(
        32,
        64,
        64,
        4,
        CAUSAL,
        dtypes=BF16,
        shapes=SHORT + LONG,
        softcap=False,
        kv_stage=2,
        q_in_regs=True,
        blocks_per_sm=4,
    ),  # NVIDIA H200, 2026-11-21, 218 TFLOP/s
    fwd_sm80(
        32, 128, 32, 4, CAUSAL, dtypes=FP16, shapes=SHORT + LONG, softcap=False, kv_stage=2, blocks_per_sm=4
    ),  # NVIDIA H200, 2026-11-21, 198 TFLOP/s
    fwd_sm80(
        32, 128, 64, 4, EVEN, shapes=SHORT + LONG, softcap=False, kv_stage=3, q_in_regs=True, blocks_per_sm=3
    ),  # NVIDIA H200, 2026-11-21, 257 TFLOP/s
    fwd_sm80(
        64, 128, 64, 4, EVEN + CAUSAL, shapes=SHORT, softcap=False, kv_stage=2, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 250 TFLOP/s
    fwd_sm80(
        64, 128, 64, 4, EVEN + CAUSAL, shapes=LONG, softcap=False, q_in_regs=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 338 TFLOP/s
    fwd_sm80(
        96, 64, 128, 4, CAUSAL, dtypes=BF16, shapes=SHORT, softcap=False, blocks_per_sm=3
    ),  # NVIDIA H200, 2026-11-21, 206 TFLOP/s
    fwd_sm80(
        96, 128, 96, 4, CAUSAL, dtypes=BF16, shapes=LONG, softcap=False, lse=False, kv_stage=2
    ),  # NVIDIA H200, 2026-11-21, 334 TFLOP/s
    fwd_sm80(
        96, 256, 64, 8, EVEN, shapes=SHORT + LONG, softcap=False, kv_stage=2
    ),  # NVIDIA H200, 2026-11-21, 322 TFLOP/s
    fwd_sm80(
        128, 128, 48, 4, EVEN, shapes=SHORT, softcap=False, kv_stage=2, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 326 TFLOP/s
    fwd_sm80(128, 128, 48, 4, EVEN, dtypes=BF16, kv_stage=2, blocks_per_sm=2),  # NVIDIA H200, 2026-11-21, 387 TFLOP/s
    fwd_sm80(
        192,
        128,
        96,
        8,
        CAUSAL,
        dtypes=BF16,
        shapes=LONG,
        softcap=False,
        lse=False,
        kv_stage=2,
        q_in_regs=True,
        cutlass_symbol=True,
    ),  # NVIDIA H200, 2026-11-21, 364 TFLOP/s
    fwd_sm80(
        192, 128, 96, 8, EVEN + CAUSAL, dtypes=FP16, shapes=LONG, softcap=False, kv_stage=2, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 380 TFLOP/s
    fwd_sm80(
        192,
        128,
        64,
        8,
        EVEN,
        dtypes=BF16,
        shapes=SHORT + LONG,
        softcap=False,
        kv_stage=2,
        q_in_regs=True,
        cutlass_symbol=True,
    ),  # NVIDIA H200, 2026-11-21, 348 TFLOP/s
    fwd_sm80(192, 128, 128, 8, EVEN + CAUSAL, shapes=SHORT, softcap=False),  # NVIDIA H200, 2026-11-21, 238 TFLOP/s
    fwd_sm80(
        256, 128, 64, 8, EVEN, dtypes=BF16, shapes=LONG, softcap=False, kv_stage=2, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 356 TFLOP/s
    fwd_sm80(
        256, 128, 96, 8, EVEN, dtypes=FP16, shapes=LONG, softcap=False, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 367 TFLOP/s
    fwd_sm80(
        256, 128, 96, 8, CAUSAL, dtypes=BF16, shapes=LONG, softcap=False, lse=False, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 336 TFLOP/s
    fwd_sm80(
        256, 64, 64, 4, EVEN + CAUSAL, softcap=False, lse=False, cutlass_symbol=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 279 TFLOP/s
    fwd_sm80(256, 64, 64, 4, EVEN, cutlass_symbol=True, blocks_per_sm=2),
)
