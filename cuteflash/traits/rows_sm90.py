"""Rows of fwd/sm_90a/sm90.

`cuteflash sweep apply --shipped` rewrites this file; `measured` says what a sweep found for a row.
"""

from __future__ import annotations

from cuteflash.traits.row import (
    BF16,
    BRIEF,
    CAUSAL,
    DECODE,
    FULL,
    LONG,
    SHORT,
    SOFTCAP,
    TINY,
    VARLEN,
    WINDOW,
    Row,
    fwd_sm90,
)

ROWS: tuple[Row, ...] = (
    fwd_sm90(
        32,
        64,
        64,
        FULL,
        lengths=TINY + BRIEF,
        without=VARLEN,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=4,
    ),
    fwd_sm90(
        32,
        64,
        64,
        CAUSAL,
        lengths=TINY + BRIEF + SHORT,
        without=VARLEN,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=4,
    ),
    fwd_sm90(
        32,
        64,
        64,
        FULL + CAUSAL,
        lengths=TINY + BRIEF,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=2,
    ),
    fwd_sm90(
        32, 192, 128, FULL + CAUSAL, lengths=LONG, q_in_regs=True, fixed_max=True, exp_rows_before_wait=0
    ).measured("NVIDIA H200", "2026-11-22", 363),
    fwd_sm90(
        32, 192, 128, FULL, lengths=TINY + BRIEF + SHORT, q_in_regs=True, fixed_max=True, exp_rows_before_wait=0
    ).measured("NVIDIA H200", "2026-11-22", 308),
    fwd_sm90(
        32,
        128,
        128,
        CAUSAL + WINDOW,
        lengths=TINY + BRIEF + SHORT + LONG,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
    ).measured("NVIDIA H200", "2026-11-22", 214),
    fwd_sm90(32, 192, 128, FULL, q_in_regs=True),
    fwd_sm90(32, 192, 112, q_in_regs=True),
    fwd_sm90(
        64, 192, 128, FULL + CAUSAL, lengths=LONG, q_stage=2, fixed_max=True, repair_apart=True, exp_rows_before_wait=0
    ).measured("NVIDIA H200", "2026-11-22", 557),
    fwd_sm90(
        64,
        64,
        64,
        FULL,
        lengths=TINY + BRIEF,
        without=SOFTCAP + VARLEN,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=3,
    ),
    fwd_sm90(
        64,
        64,
        64,
        CAUSAL,
        lengths=TINY + BRIEF + SHORT,
        without=SOFTCAP + VARLEN,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=3,
    ).measured("NVIDIA H200", "2026-11-27", 306),
    fwd_sm90(
        64,
        64,
        64,
        FULL + CAUSAL,
        lengths=TINY + BRIEF,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=2,
    ),
    fwd_sm90(
        64,
        192,
        128,
        FULL,
        lengths=TINY + BRIEF + SHORT,
        q_stage=2,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
    ).measured("NVIDIA H200", "2026-11-22", 472),
    fwd_sm90(
        64,
        128,
        128,
        CAUSAL + WINDOW,
        lengths=TINY + BRIEF + SHORT + LONG,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
    ).measured("NVIDIA H200", "2026-11-22", 334),
    fwd_sm90(
        64, 128, 256, FULL, dtypes=BF16, lengths=DECODE, without=SOFTCAP, q_in_regs=True, p_in_regs=False
    ).measured("NVIDIA H200", "2026-11-21", 16),
    fwd_sm90(64, 192, 128, FULL, rescale_in_product=True),
    fwd_sm90(64, 192, 96, kv_stage=4, q_in_regs=True),
    fwd_sm90(
        96,
        64,
        64,
        FULL + CAUSAL,
        lengths=TINY,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=2,
    ),
    fwd_sm90(
        96, 192, 112, FULL + CAUSAL, lengths=LONG, q_stage=2, fixed_max=True, repair_apart=True, exp_rows_before_wait=0
    ).measured("NVIDIA H200", "2026-11-22", 686),
    fwd_sm90(
        96,
        128,
        128,
        FULL + CAUSAL,
        lengths=TINY + BRIEF + SHORT + LONG,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
    ).measured("NVIDIA H200", "2026-11-22", 496),
    fwd_sm90(96, 128, 128, WINDOW, lengths=TINY + BRIEF + SHORT + LONG, kv_stage=3, q_in_regs=True).measured(
        "NVIDIA H200", "2026-11-22", 464
    ),
    fwd_sm90(96, 128, 128, q_in_regs=True),
    fwd_sm90(
        128,
        64,
        64,
        FULL + CAUSAL,
        lengths=TINY,
        pingpong=False,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
        blocks_per_sm=2,
    ),
    fwd_sm90(128, 128, 128, lengths=TINY + BRIEF + SHORT + LONG, q_stage=2, fixed_max=True, repair_apart=True).measured(
        "NVIDIA H200", "2026-11-22", 660
    ),
    fwd_sm90(128, 128, 128, q_in_regs=True).measured("NVIDIA H200", "2026-11-21", 492),
    fwd_sm90(160, 128, 80, FULL + CAUSAL, lengths=LONG, q_in_regs=True, fixed_max=True, repair_apart=True).measured(
        "NVIDIA H200", "2026-11-22", 689
    ),
    fwd_sm90(
        160, 128, 64, lengths=TINY + BRIEF + SHORT + LONG, kv_stage=3, q_in_regs=True, fixed_max=True, repair_apart=True
    ).measured("NVIDIA H200", "2026-11-22", 564),
    fwd_sm90(160, 128, 96, FULL, q_in_regs=True),
    fwd_sm90(160, 128, 96),
    fwd_sm90(
        192,
        128,
        64,
        CAUSAL,
        lengths=TINY + BRIEF + SHORT + LONG,
        head_dim_v=128,
        kv_stage=3,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
    ).measured("NVIDIA H200", "2026-11-24", 709),
    fwd_sm90(
        192,
        128,
        96,
        lengths=TINY + BRIEF + SHORT + LONG,
        head_dim_v=128,
        q_in_regs=True,
        fixed_max=True,
        repair_apart=True,
    ).measured("NVIDIA H200", "2026-11-22", 632),
    fwd_sm90(192, 128, 112, head_dim_v=128, q_in_regs=True),
    fwd_sm90(
        192, 128, 64, lengths=TINY + BRIEF + SHORT + LONG, q_in_regs=True, fixed_max=True, repair_apart=True
    ).measured("NVIDIA H200", "2026-11-22", 625),
    fwd_sm90(192, 128, 80, q_in_regs=True, rescale_in_product=True).measured("NVIDIA H200", "2026-11-21", 562),
    fwd_sm90(224, 128, 64, lengths=TINY + BRIEF + SHORT + LONG, fixed_max=True).measured(
        "NVIDIA H200", "2026-11-22", 591
    ),
    fwd_sm90(224, 128, 96, share_q_o=True, rescale_in_product=True),
    fwd_sm90(224, 128, 64, rescale_in_product=True),
    fwd_sm90(
        256,
        64,
        64,
        FULL + CAUSAL,
        lengths=TINY,
        q_stage=2,
        pingpong=False,
        fixed_max=True,
        repair_apart=True,
        exp_rows_before_wait=0,
    ),
    fwd_sm90(256, 128, 64, lengths=TINY + BRIEF + SHORT + LONG, share_q_o=True, fixed_max=True).measured(
        "NVIDIA H200", "2026-11-22", 654
    ),
    fwd_sm90(256, 128, 80, share_q_o=True, rescale_in_product=True).measured("NVIDIA H200", "2026-11-21", 655),
    fwd_sm90(256, 128, 48, rescale_in_product=True),
)
