"""Rows of bwd/sm_90a/sm80.

`cuteflash sweep apply --shipped` rewrites this file; `measured` says what a sweep found for a row.
"""

from __future__ import annotations

from cuteflash.traits.row import Row, bwd_sm80

ROWS: tuple[Row, ...] = (bwd_sm80(128, 64, 128, 8),)
