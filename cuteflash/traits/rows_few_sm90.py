"""Rows of fwd/sm_90a/sm90 for up to 8, 16 or 32 query rows and e4m3 caches, written by hand.

K and V are converted where they are multiplied, see `cuteflash.kernels.sm90.few`.
"""

from __future__ import annotations

from cuteflash.traits.row import Row, fwd_few_sm90

ROWS: tuple[Row, ...] = (
    fwd_few_sm90(32, 8, 256, 6),
    fwd_few_sm90(32, 16, 256, 6),
    fwd_few_sm90(32, 32, 256, 6),
    fwd_few_sm90(64, 8, 256, 4),
    fwd_few_sm90(64, 16, 256, 4),
    fwd_few_sm90(64, 32, 256, 4),
    fwd_few_sm90(96, 8, 128, 5),
    fwd_few_sm90(96, 16, 128, 5),
    fwd_few_sm90(128, 8, 128, 3),
    fwd_few_sm90(128, 16, 128, 3),
    fwd_few_sm90(160, 8, 128, 3),
    fwd_few_sm90(192, 8, 128, 3),
    fwd_few_sm90(224, 8, 128, 2),
    fwd_few_sm90(256, 8, 128, 2),
)
