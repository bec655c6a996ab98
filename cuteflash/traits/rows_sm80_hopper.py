"""Forward rows of sm_90a/sm80.

`cuteflash sweep apply --shipped` rewrites this file; what was measured with a row stands beside it.
"""

from __future__ import annotations

from cuteflash.traits.row import BF16, CAUSAL, EVEN, FP16, LONG, SHORT, WINDOW, FwdRow, fwd_sm80

ROWS: tuple[FwdRow, ...] = (
    fwd_sm80(
        32, 128, 64, 4, EVEN, shapes=SHORT + LONG, softcap=False, kv_stage=3, q_in_regs=True, blocks_per_sm=3
    ),  # NVIDIA H200, 2026-11-21, 261 TFLOP/s
    fwd_sm80(
        32,
        128,
        64,
        4,
        CAUSAL,
        dtypes=FP16,
        shapes=LONG,
        softcap=False,
        lse=False,
        kv_stage=3,
        q_in_regs=True,
        blocks_per_sm=3,
    ),  # NVIDIA H200, 2026-11-21, 249 TFLOP/s
    fwd_sm80(
        32, 64, 64, 4, CAUSAL + WINDOW, shapes=SHORT + LONG, kv_stage=2, q_in_regs=True, blocks_per_sm=4
    ),  # NVIDIA H200, 2026-11-21, 207 TFLOP/s
    fwd_sm80(
        64, 256, 64, 8, EVEN, dtypes=FP16, shapes=LONG, kv_stage=2, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 341 TFLOP/s
    fwd_sm80(
        64, 128, 64, 4, EVEN + CAUSAL, dtypes=BF16, shapes=LONG, q_in_regs=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 326 TFLOP/s
    fwd_sm80(
        64, 128, 64, 4, CAUSAL, dtypes=FP16, shapes=LONG, softcap=False, q_in_regs=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 326 TFLOP/s
    fwd_sm80(64, 128, 64, 4, shapes=SHORT + LONG, kv_stage=2, blocks_per_sm=2),  # NVIDIA H200, 2026-11-21, 262 TFLOP/s
    fwd_sm80(
        96, 64, 128, 4, CAUSAL, dtypes=FP16, shapes=SHORT, softcap=False, lse=False, blocks_per_sm=3
    ),  # NVIDIA H200, 2026-11-21, 226 TFLOP/s
    fwd_sm80(
        96, 64, 128, 4, CAUSAL, dtypes=BF16, shapes=SHORT, softcap=False, blocks_per_sm=3
    ),  # NVIDIA H200, 2026-11-21, 226 TFLOP/s
    fwd_sm80(
        96, 256, 64, 8, EVEN, dtypes=FP16, shapes=SHORT + LONG, softcap=False, lse=False, kv_stage=2
    ),  # NVIDIA H200, 2026-11-21, 317 TFLOP/s
    fwd_sm80(
        96, 256, 64, 8, CAUSAL, dtypes=FP16, shapes=SHORT + LONG, kv_stage=2
    ),  # NVIDIA H200, 2026-11-21, 317 TFLOP/s
    fwd_sm80(
        96, 128, 96, 4, EVEN, dtypes=BF16, shapes=SHORT + LONG, softcap=False, kv_stage=2
    ),  # NVIDIA H200, 2026-11-21, 343 TFLOP/s
    fwd_sm80(
        96, 128, 96, 4, CAUSAL, dtypes=BF16, shapes=SHORT + LONG, softcap=False, lse=False, kv_stage=2
    ),  # NVIDIA H200, 2026-11-21, 343 TFLOP/s
    fwd_sm80(
        96,
        64,
        64,
        4,
        WINDOW,
        dtypes=FP16,
        shapes=SHORT + LONG,
        softcap=False,
        kv_stage=2,
        q_in_regs=True,
        blocks_per_sm=3,
    ),  # NVIDIA H200, 2026-11-21, 261 TFLOP/s
    fwd_sm80(
        96, 64, 64, 4, WINDOW, dtypes=BF16, shapes=SHORT + LONG, lse=False, kv_stage=2, q_in_regs=True, blocks_per_sm=3
    ),  # NVIDIA H200, 2026-11-21, 261 TFLOP/s
    fwd_sm80(
        128, 128, 48, 4, EVEN, dtypes=FP16, shapes=SHORT, softcap=False, lse=False, kv_stage=2, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 334 TFLOP/s
    fwd_sm80(128, 128, 48, 4, EVEN, dtypes=BF16, kv_stage=2, blocks_per_sm=2),  # NVIDIA H200, 2026-11-21, 334 TFLOP/s
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
    ),  # NVIDIA H200, 2026-11-21, 351 TFLOP/s
    fwd_sm80(192, 128, 128, 8, CAUSAL, shapes=SHORT, softcap=False),  # NVIDIA H200, 2026-11-21, 243 TFLOP/s
    fwd_sm80(
        192, 128, 96, 8, EVEN, dtypes=FP16, shapes=LONG, softcap=False, kv_stage=2, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 359 TFLOP/s
    fwd_sm80(
        192, 128, 96, 8, CAUSAL, dtypes=FP16, shapes=LONG, kv_stage=2, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 359 TFLOP/s
    fwd_sm80(
        192, 128, 64, 8, EVEN + WINDOW, shapes=SHORT + LONG, kv_stage=2, q_in_regs=True, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 295 TFLOP/s
    fwd_sm80(
        256, 128, 64, 8, EVEN, dtypes=BF16, shapes=LONG, kv_stage=2, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 352 TFLOP/s
    fwd_sm80(
        256, 128, 96, 8, EVEN, dtypes=FP16, shapes=LONG, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 356 TFLOP/s
    fwd_sm80(
        256, 128, 96, 8, CAUSAL, dtypes=BF16, shapes=LONG, softcap=False, lse=False, cutlass_symbol=True
    ),  # NVIDIA H200, 2026-11-21, 314 TFLOP/s
    fwd_sm80(
        256, 64, 64, 4, CAUSAL, dtypes=FP16, shapes=SHORT + LONG, softcap=False, cutlass_symbol=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 275 TFLOP/s
    fwd_sm80(
        256, 64, 64, 4, CAUSAL, dtypes=BF16, shapes=SHORT + LONG, lse=False, cutlass_symbol=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 275 TFLOP/s
    fwd_sm80(
        256, 64, 64, 4, WINDOW, shapes=SHORT + LONG, softcap=False, lse=False, cutlass_symbol=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 275 TFLOP/s
    fwd_sm80(
        256, 64, 64, 4, EVEN + CAUSAL, softcap=False, lse=False, cutlass_symbol=True, blocks_per_sm=2
    ),  # NVIDIA H200, 2026-11-21, 275 TFLOP/s
    fwd_sm80(256, 64, 64, 4, EVEN, cutlass_symbol=True, blocks_per_sm=2),  # NVIDIA H200, 2026-11-21, 275 TFLOP/s
)
