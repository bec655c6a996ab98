"""Forward rows of sm_90a/sm90.

`cuteflash sweep apply --shipped` rewrites this file; what was measured with a row stands beside it.
"""

from __future__ import annotations

from cuteflash.traits.row import BF16, CAUSAL, DECODE, EVEN, FP16, LONG, SHORT, WINDOW, FwdRow, fwd_sm90

ROWS: tuple[FwdRow, ...] = (
    fwd_sm90(
        32, 192, 128, dtypes=FP16, shapes=SHORT + LONG, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 222 TFLOP/s
    fwd_sm90(
        32, 192, 128, dtypes=BF16, shapes=SHORT + LONG, softcap=False, kv_stage=3, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 239 TFLOP/s
    fwd_sm90(32, 192, 128, EVEN, q_in_regs=True),
    fwd_sm90(32, 192, 112, q_in_regs=True),
    fwd_sm90(
        64, 128, 256, EVEN, dtypes=BF16, shapes=DECODE, softcap=False, q_in_regs=True, p_in_regs=False
    ),  # NVIDIA H200, 2026-11-21, 16 TFLOP/s
    fwd_sm90(
        64, 128, 176, EVEN, dtypes=BF16, shapes=SHORT, softcap=False, kv_stage=3, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 437 TFLOP/s
    fwd_sm90(
        64, 128, 144, CAUSAL, dtypes=FP16, shapes=SHORT, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 246 TFLOP/s
    fwd_sm90(
        64, 128, 176, EVEN, dtypes=FP16, shapes=SHORT, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 392 TFLOP/s
    fwd_sm90(
        64, 128, 128, CAUSAL + WINDOW, dtypes=BF16, shapes=SHORT, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 264 TFLOP/s
    fwd_sm90(
        64, 128, 128, WINDOW, dtypes=BF16, shapes=LONG, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 367 TFLOP/s
    fwd_sm90(
        64, 192, 96, CAUSAL + WINDOW, shapes=LONG, softcap=False, kv_stage=4, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 466 TFLOP/s
    fwd_sm90(
        64, 192, 128, EVEN + WINDOW, shapes=SHORT + LONG, softcap=False, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 413 TFLOP/s
    fwd_sm90(64, 192, 128, EVEN, rescale_in_product=True),
    fwd_sm90(64, 192, 96, kv_stage=4, q_in_regs=True),
    fwd_sm90(
        96, 128, 176, CAUSAL, dtypes=FP16, shapes=LONG, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 599 TFLOP/s
    fwd_sm90(96, 192, 112, EVEN, shapes=LONG, softcap=False),  # NVIDIA H200, 2026-11-21, 643 TFLOP/s
    fwd_sm90(
        96, 128, 128, CAUSAL, dtypes=BF16, shapes=LONG, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 591 TFLOP/s
    fwd_sm90(
        96, 128, 128, WINDOW, dtypes=FP16, shapes=LONG, softcap=False, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 450 TFLOP/s
    fwd_sm90(
        96, 128, 128, shapes=SHORT + LONG, softcap=False, kv_stage=3, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 380 TFLOP/s
    fwd_sm90(96, 128, 128, q_in_regs=True),
    fwd_sm90(128, 128, 192, EVEN, shapes=LONG, softcap=False, share_q_o=True),  # NVIDIA H200, 2026-11-21, 716 TFLOP/s
    fwd_sm90(128, 128, 128, q_in_regs=True),  # NVIDIA H200, 2026-11-21, 492 TFLOP/s
    fwd_sm90(160, 128, 96, EVEN, q_in_regs=True),
    fwd_sm90(160, 128, 96),
    fwd_sm90(
        192, 128, 112, EVEN + CAUSAL, dtypes=BF16, shapes=LONG, softcap=False, head_dim_v=128, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 742 TFLOP/s
    fwd_sm90(
        192, 128, 64, dtypes=BF16, shapes=SHORT + LONG, softcap=False, head_dim_v=128, kv_stage=3, q_in_regs=True
    ),  # NVIDIA H200, 2026-11-21, 442 TFLOP/s
    fwd_sm90(192, 128, 112, head_dim_v=128, q_in_regs=True),
    fwd_sm90(
        192, 128, 96, EVEN + CAUSAL, dtypes=FP16, shapes=LONG, softcap=False, share_q_o=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 752 TFLOP/s
    fwd_sm90(
        192, 128, 96, EVEN, dtypes=BF16, shapes=LONG, softcap=False, share_q_o=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 782 TFLOP/s
    fwd_sm90(
        192, 128, 80, CAUSAL, dtypes=BF16, shapes=LONG, softcap=False, q_in_regs=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 720 TFLOP/s
    fwd_sm90(
        192, 128, 80, WINDOW, dtypes=FP16, shapes=LONG, softcap=False, q_in_regs=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 531 TFLOP/s
    fwd_sm90(
        192, 128, 64, CAUSAL + WINDOW, shapes=SHORT + LONG, softcap=False, q_in_regs=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 376 TFLOP/s
    fwd_sm90(192, 128, 80, q_in_regs=True, rescale_in_product=True),  # NVIDIA H200, 2026-11-21, 562 TFLOP/s
    fwd_sm90(224, 128, 96, share_q_o=True, rescale_in_product=True),
    fwd_sm90(224, 128, 64, rescale_in_product=True),
    fwd_sm90(
        256, 128, 64, CAUSAL + WINDOW, shapes=SHORT, softcap=False, share_q_o=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 336 TFLOP/s
    fwd_sm90(
        256, 128, 64, EVEN, dtypes=BF16, shapes=SHORT, softcap=False, share_q_o=True, rescale_in_product=True
    ),  # NVIDIA H200, 2026-11-21, 607 TFLOP/s
    fwd_sm90(256, 128, 80, share_q_o=True, rescale_in_product=True),  # NVIDIA H200, 2026-11-21, 655 TFLOP/s
    fwd_sm90(256, 128, 48, rescale_in_product=True),
)
