"""What the sm80 latent-attention decode from 16-bit rows has beside `mla_bundles.py`."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute

from cuteflash.kernels.sm80.mla_bundles import MlaFragments, MlaTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTiles(MlaTiles):
    """Shared-memory tensors; sK has 576 columns. What is kept of Q in registers lies over what is used later."""

    sVt: cute.Tensor  # (512, tile_n, kv_stage), the same data as sK


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeFragments(MlaFragments):
    """One thread's operands, accumulators and running softmax.

    Attributes:
        rK, rVt: fragments of the products' other operands.
        copy_q, copy_k, copy_v: ldmatrix slices; tSsQ, tSsK, tOsVt what they read.
    """

    rK: cute.Tensor
    rVt: cute.Tensor
    copy_q: cute.TiledCopy
    copy_k: cute.TiledCopy
    copy_v: cute.TiledCopy
    tSsQ: cute.Tensor
    tSsK: cute.Tensor
    tOsVt: cute.Tensor
