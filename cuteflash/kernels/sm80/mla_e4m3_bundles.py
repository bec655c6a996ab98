"""What the latent-attention decode from an e4m3 cache has beside `mla_bundles.py`."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.kernels.sm80.mla_bundles import MlaFragments, MlaTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class E4m3Tiles(MlaTiles):
    """Shared-memory tensors, sK of 288 pairs of bytes; where two begin, of which chunks are addressed by hand."""

    start_q: cute.Pointer
    start_k: cute.Pointer
    scales: cute.Tensor  # (tile_m,) fp32: factors of the rows' products with K


@dataclasses.dataclass(frozen=True, kw_only=True)
class E4m3Fragments(MlaFragments):
    """One thread's operands, accumulators and running softmax.

    rQ is ((2, 2, 2), groups of 16 rows, steps of a warp); acc_O has of 16 columns the even ones first.

    Attributes:
        lane: in the thread's warp.
        warp: index in the block, by which it has columns of O.
        key_part: of the step's keys, which the warp multiplies.
        row_scale: of the thread's rows, what the products with K are multiplied with.
    """

    lane: Int32
    warp: Int32
    key_part: Int32
    row_scale: cute.Tensor
