"""What the roles of the sm90 kernel for few rows pass to each other; names are those of `bundles.py`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.launch import Launch
from cuteflash.core.scales import Scales
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import OnlineSoftmax
from cuteflash.kernels.common.partials import Partials
from cuteflash.kernels.sm90.bundles import Rings


@dataclasses.dataclass(frozen=True)
class FewTma:
    """TMA descriptors and the coordinate tensors they are sliced with: (rows, columns, heads, batch)."""

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom | None  # None: rows of K and V are looked up one by one, and gK and gV are the caches
    load_v: cute.CopyAtom | None
    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor


@dataclasses.dataclass(frozen=True)
class FewTiles:
    """Shared-memory tensors."""

    sQ_boxes: cute.Tensor  # (box rows, head_dim, 1)
    loaded_k: cute.Tensor  # (tile_n, pairs of bytes, kv_stage), as TMA writes it
    sV: cute.Tensor  # likewise
    base: cute.Pointer  # the block's shared memory


@dataclasses.dataclass(frozen=True)
class FewBlock:
    """The values that all warps of a block use."""

    tma: FewTma
    tiles: FewTiles
    rings: Rings
    launch: Launch
    mLSE: cute.Tensor | None  # (b, h_q, s_q)
    scales: Scales
    partials: Partials
    arrival: cute.Tensor  # (1,) Int32 in shared memory

    handout: ClassVar[None] = None  # keys are split: each block knows its tiles


@dataclasses.dataclass(frozen=True)
class FewWarp:
    """One consumer warp's fragments and running softmax.

    Attributes:
        index: of the consumer warps.
        lane: of the warp.
        lane_rows: where the first of the lane's rows of K, and of V, begins in a tile, in bytes.
        mma: m16n8k16.
        rQ: Qᵀ, ((2, 2), rows / 8, head_dim / 16), permuted as K is.
        acc_S, acc_O: Sᵀ and Oᵀ, ((2, 2), keys or columns / 16, rows / 8).
        scores: Sᵀ as (rows, keys).
        out: Oᵀ as (rows, columns).
        bounds: visible keys of each row of this thread.
    """

    index: Int32
    lane: Int32
    lane_rows: tuple[Int32, Int32]
    mma: cute.TiledMma
    rQ: cute.Tensor
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: ScoreTile
    out: cute.Tensor
    softmax: OnlineSoftmax
    bounds: cute.Tensor
