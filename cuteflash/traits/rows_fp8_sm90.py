"""Rows of fwd/sm_90a/sm90 for 8-bit operands, written by hand: no sweep measures them yet.

Rows that take only Vᵀ stand first; those that turn V serve all other calls. O and the product beside it (`two_level`)
fit into the registers up to 160 columns. Beyond, a sum over many keys is cut to 13 fraction bits in each step, which
shows if V has a mean: 18 % at 16k keys. The mean is then better taken out of V (`v_mean`).
"""

from __future__ import annotations

from typing import Any

from cuteflash.traits.row import BLOCK_SCALES, Row, fwd_fp8_sm90

FIXED: dict[str, Any] = {"fixed_max": True, "repair_apart": True}
TWO_LEVEL: dict[str, Any] = {**FIXED, "two_level": True}

ROWS: tuple[Row, ...] = (
    fwd_fp8_sm90(32, 192, 128, **TWO_LEVEL),
    fwd_fp8_sm90(32, 192, 128, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 96, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 96, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(64, 192, 64, turns_v=True, without=BLOCK_SCALES, **TWO_LEVEL),  # lent to 32 columns of V
    fwd_fp8_sm90(64, 128, 128, turns_v=True, **TWO_LEVEL),  # for scales of 128 tokens
    fwd_fp8_sm90(96, 128, 128, **TWO_LEVEL),
    fwd_fp8_sm90(96, 128, 128, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(128, 128, 128, q_stage=2, **TWO_LEVEL),
    fwd_fp8_sm90(128, 128, 128, q_stage=2, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(160, 128, 64, **TWO_LEVEL),
    fwd_fp8_sm90(160, 128, 64, q_stage=2, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(192, 128, 128, head_dim_v=128, **TWO_LEVEL),
    fwd_fp8_sm90(192, 128, 128, head_dim_v=128, turns_v=True, **TWO_LEVEL),
    fwd_fp8_sm90(192, 128, 128, **FIXED),
    fwd_fp8_sm90(192, 128, 128, turns_v=True, **FIXED),
    fwd_fp8_sm90(224, 128, 128, **FIXED),
    fwd_fp8_sm90(224, 128, 64, q_stage=2, turns_v=True, **FIXED),
    fwd_fp8_sm90(256, 128, 128, **FIXED),
    fwd_fp8_sm90(256, 128, 64, turns_v=True, **FIXED),
)
