"""Rows of fwd/sm_90a/sm90 for e4m3, written by hand. Notes are in `tables`."""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import (
    BLOCK_SCALES,
    BRIEF,
    CAUSAL,
    FULL,
    LONG,
    SHORT,
    SOFTCAP,
    TINY,
    VARLEN,
    WINDOW,
    Row,
    fwd_fp8_sm90,
)

FIXED: dict[str, Any] = {"fixed_max": True, "repair_apart": True}
AHEAD: dict[str, Any] = {**FIXED, "exp_rows_before_wait": 1}
TWO_LEVEL: dict[str, Any] = {**FIXED, "two_level": True}
TWO_LEVEL_AHEAD: dict[str, Any] = {**AHEAD, "two_level": True}
# Blocks that a mask cuts keep the maxima, too.
CUT: dict[str, Any] = {"masked_by_fixed_max": True}
RESIDENT: dict[str, Any] = {**TWO_LEVEL, **CUT, "pingpong": False, "blocks_per_sm": 3}
UP_TO_SHORT = TINY + BRIEF + SHORT

ROWS: tuple[Row, ...] = (
    fwd_fp8_sm90(32, 192, 128, **TWO_LEVEL),
    fwd_fp8_sm90(32, 192, 128, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(64, 64, 64, FULL, lengths=TINY + BRIEF, **RESIDENT),
    fwd_fp8_sm90(64, 192, 128, FULL, lengths=UP_TO_SHORT, q_stage=2, pingpong=False, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 128, FULL + CAUSAL, lengths=LONG, q_stage=2, **CUT, **TWO_LEVEL),
    fwd_fp8_sm90(64, 64, 64, CAUSAL, lengths=UP_TO_SHORT, **RESIDENT),
    fwd_fp8_sm90(64, 192, 128, FULL + CAUSAL, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 96, **TWO_LEVEL),
    fwd_fp8_sm90(64, 64, 64, FULL, lengths=TINY + BRIEF, turns_v=True, **RESIDENT),
    fwd_fp8_sm90(64, 192, 128, FULL, lengths=UP_TO_SHORT, q_stage=2, pingpong=False, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 128, FULL + CAUSAL, lengths=LONG, q_stage=2, turns_v=True, **CUT, **TWO_LEVEL),
    fwd_fp8_sm90(64, 64, 64, CAUSAL, lengths=UP_TO_SHORT, turns_v=True, **RESIDENT),
    fwd_fp8_sm90(64, 192, 128, FULL + CAUSAL, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 96, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 64, turns_v=True, without=BLOCK_SCALES, **TWO_LEVEL),  # lent to 32 columns of V
    fwd_fp8_sm90(64, 192, 128, WINDOW, **TWO_LEVEL),  # of block scales
    fwd_fp8_sm90(64, 192, 128, WINDOW, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(96, 128, 128, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(96, 128, 128, turns_v=True, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(128, 128, 128, CAUSAL, lengths=UP_TO_SHORT, without=SOFTCAP, q_stage=2, **CUT, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(
        128,
        128,
        128,
        CAUSAL,
        lengths=UP_TO_SHORT,
        without=SOFTCAP + VARLEN,
        q_stage=2,
        turns_v=True,
        **CUT,
        **TWO_LEVEL_AHEAD,
    ),
    fwd_fp8_sm90(128, 128, 128, without=SOFTCAP, q_stage=2, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(128, 128, 128, without=SOFTCAP + VARLEN, q_stage=2, turns_v=True, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(128, 128, 128, q_stage=2, **TWO_LEVEL),
    fwd_fp8_sm90(128, 128, 128, q_stage=2, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(160, 128, 64, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(160, 128, 64, q_stage=2, turns_v=True, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(192, 128, 128, head_dim_v=128, without=SOFTCAP, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(192, 128, 128, head_dim_v=128, turns_v=True, without=SOFTCAP + VARLEN, **TWO_LEVEL_AHEAD),
    fwd_fp8_sm90(192, 128, 128, head_dim_v=128, **TWO_LEVEL),
    fwd_fp8_sm90(192, 128, 128, head_dim_v=128, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(192, 128, 128, **AHEAD),
    fwd_fp8_sm90(192, 128, 128, turns_v=True, **FIXED),
    fwd_fp8_sm90(224, 128, 128, **AHEAD),
    fwd_fp8_sm90(224, 128, 128, turns_v=True, stages_o=False, **AHEAD),
    fwd_fp8_sm90(256, 128, 128, CAUSAL, **CUT, **AHEAD),
    fwd_fp8_sm90(256, 128, 128, CAUSAL, without=VARLEN, turns_v=True, stages_o=False, **CUT, **FIXED),
    fwd_fp8_sm90(256, 128, 128, **AHEAD),
    fwd_fp8_sm90(256, 128, 128, without=VARLEN, turns_v=True, stages_o=False, **AHEAD),
    fwd_fp8_sm90(256, 128, 64, kv_stage=3, turns_v=True, **AHEAD),
)
