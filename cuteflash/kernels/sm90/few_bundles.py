"""What the roles of the sm90 kernel for few rows pass to each other; names are those of `bundles.py`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass.cute as cute

from cuteflash.core.launch import Launch
from cuteflash.core.scales import Scales
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
