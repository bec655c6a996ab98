"""Forward rows of sm_90a/sm80.

`cuteflash sweep apply --shipped` rewrites this file; what was measured with a row stands beside it.
"""

from __future__ import annotations

from cuteflash.traits.row import BF16, CAUSAL, EVEN, FwdRow, fwd_sm80

ROWS: tuple[FwdRow, ...] = (
    fwd_sm80(128, 128, 48, 4, EVEN, dtypes=BF16, kv_stage=2, blocks_per_sm=2),
    fwd_sm80(256, 64, 64, 4, EVEN + CAUSAL, cutlass_symbol=True, blocks_per_sm=2),
)
