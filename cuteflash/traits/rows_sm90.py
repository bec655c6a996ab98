"""Forward rows of sm_90a/sm90.

`cuteflash sweep apply --shipped` rewrites this file; what was measured with a row stands beside it.
"""

from __future__ import annotations

from cuteflash.traits.row import EVEN, FwdRow, fwd_sm90

ROWS: tuple[FwdRow, ...] = (
    fwd_sm90(32, 192, 128, EVEN, q_in_regs=True),
    fwd_sm90(32, 192, 112, q_in_regs=True),
    fwd_sm90(64, 192, 128, EVEN, rescale_in_product=True),
    fwd_sm90(64, 192, 96, kv_stage=4, q_in_regs=True),
    fwd_sm90(96, 128, 128, q_in_regs=True),
    fwd_sm90(128, 128, 128, q_in_regs=True),
    fwd_sm90(160, 128, 96, EVEN, q_in_regs=True),
    fwd_sm90(160, 128, 96),
    fwd_sm90(192, 128, 112, head_dim_v=128, q_in_regs=True),
    fwd_sm90(192, 128, 80, q_in_regs=True, rescale_in_product=True),
    fwd_sm90(224, 128, 96, share_q_o=True, rescale_in_product=True),
    fwd_sm90(224, 128, 64, rescale_in_product=True),
    fwd_sm90(256, 128, 80, share_q_o=True, rescale_in_product=True),
    fwd_sm90(256, 128, 48, rescale_in_product=True),
)
