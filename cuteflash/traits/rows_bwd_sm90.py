"""Rows of bwd/sm_90a/sm90, by hand.

One pass up to head dim 128. Two passes serve what one pass has no registers left for: wider heads, softcaps, and
deterministic calls with a window at head dim 128. Long loops take more queries a step, since much of a step is latency.
"""

from __future__ import annotations

from cuteflash.traits.row import (
    CAUSAL,
    DETERMINISTIC,
    FULL,
    LONG,
    SOFTCAP,
    WINDOW,
    Row,
    bwd_sm90,
    bwd_two_pass_sm90,
)

ROWS: tuple[Row, ...] = (
    bwd_sm90(
        32,
        64,
        without=SOFTCAP,
        k_in_regs=True,
        v_in_regs=True,
        keep_thread=True,
        dq="apart",
        pingpong=False,
        kv_stage=2,
        q_stage=3,
        do_stage=3,
        persistent=True,
    ),
    bwd_two_pass_sm90(32, 64, k_stage=3, v_stage=3),
    bwd_sm90(
        64,
        96,
        FULL,
        lengths=LONG,
        without=SOFTCAP,
        keep_thread=True,
        dq="apart",
        pingpong=False,
        q_stage=3,
        do_stage=3,
        in_turn=True,
    ),
    bwd_sm90(
        64,
        96,
        CAUSAL,
        lengths=LONG,
        without=SOFTCAP + DETERMINISTIC,
        keep_thread=True,
        dq="apart",
        pingpong=False,
    ),
    bwd_sm90(
        64,
        64,
        without=SOFTCAP,
        k_in_regs=True,
        v_in_regs=True,
        dq="apart",
        pingpong=False,
        kv_stage=2,
        q_stage=3,
        do_stage=3,
        persistent=True,
    ),
    bwd_two_pass_sm90(64, 64, k_stage=3, v_stage=3),
    bwd_sm90(96, 64, without=SOFTCAP, delta_early=False, keep_thread=True, dq="apart", pingpong=False),
    bwd_two_pass_sm90(96, 64, k_stage=3, v_stage=3),
    bwd_sm90(
        128,
        80,
        FULL,
        lengths=LONG,
        without=SOFTCAP + DETERMINISTIC,
        delta_early=False,
        keep_thread=True,
        dq="transposed",
    ),
    bwd_sm90(128, 64, FULL + CAUSAL, without=SOFTCAP),
    bwd_sm90(128, 64, WINDOW, without=SOFTCAP + DETERMINISTIC),
    bwd_two_pass_sm90(128, 64, k_stage=2, v_stage=2),
    bwd_two_pass_sm90(160, 64, WINDOW, k_stage=4, v_stage=2),  # three stages of both: the producer spills
    bwd_two_pass_sm90(160, 64, k_stage=3, v_stage=3),
    bwd_two_pass_sm90(192, 64, k_stage=3, v_stage=2),
    bwd_two_pass_sm90(224, 48, k_stage=2, v_stage=2),
    bwd_two_pass_sm90(256, 48),
)
