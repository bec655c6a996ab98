"""Rows of bwd/sm_90a/sm90, by hand.

One pass up to head dim 128; a softcap takes the registers that it has left, so two passes serve it there, too.
"""

from __future__ import annotations

from cuteflash.traits.row import CAUSAL, FULL, LONG, SOFTCAP, WINDOW, Row, bwd_sm90, bwd_two_pass_sm90

ROWS: tuple[Row, ...] = (
    bwd_sm90(32, 128, without=SOFTCAP, dq="rows"),
    bwd_two_pass_sm90(32, 64, k_stage=3, v_stage=3),
    bwd_sm90(64, 128, without=SOFTCAP, dq="rows"),
    bwd_two_pass_sm90(64, 64, k_stage=3, v_stage=3),
    bwd_sm90(96, 64, without=SOFTCAP, dq="turns", pingpong=False),
    bwd_two_pass_sm90(96, 64, k_stage=3, v_stage=3),
    bwd_sm90(128, 80, FULL + CAUSAL, lengths=LONG, without=SOFTCAP, dq="transposed"),
    bwd_sm90(128, 64, without=SOFTCAP),
    bwd_two_pass_sm90(128, 64, k_stage=2, v_stage=2),
    bwd_two_pass_sm90(160, 64, WINDOW, k_stage=4, v_stage=2),  # three stages of both: the producer spills
    bwd_two_pass_sm90(160, 64, k_stage=3, v_stage=3),
    bwd_two_pass_sm90(192, 64, k_stage=3, v_stage=2),
    bwd_two_pass_sm90(224, 48, k_stage=2, v_stage=2),
    bwd_two_pass_sm90(256, 48),
)
