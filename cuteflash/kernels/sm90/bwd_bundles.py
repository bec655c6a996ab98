"""What the roles of the sm90 backward kernel pass to each other, by subject."""

from __future__ import annotations

import dataclasses
import enum

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms.barriers import Handover, TmaRing
from cuteflash.core.launch import BwdLaunch
from cuteflash.kernels.common.workspace import WorkspaceTensors


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    EPILOGUE = 1  # all consumers: K and V have been read; dK and dV are in their place
    TURN = 2  # + warpgroup: this warpgroup may issue its products (ping-pong)


@dataclasses.dataclass(frozen=True)
class Tma:
    """TMA descriptors and the coordinate tensors they are sliced with: (rows, columns, heads, batch)."""

    load_q: cute.CopyAtom
    load_do: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_dk: cute.CopyAtom
    store_dv: cute.CopyAtom
    gQ: cute.Tensor
    gdO: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gdK: cute.Tensor
    gdV: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors; dK and dV are staged in the place of K and V."""

    sK: cute.Tensor  # (tile_n, head_dim, 1)
    sV: cute.Tensor  # (tile_n, head_dim_v, 1)
    sQ: cute.Tensor  # (tile_m, head_dim, q_stage)
    sdO: cute.Tensor  # (tile_m, head_dim_v, do_stage)
    sdS: cute.Tensor  # (tile_m, tile_n, ds_stage)
    sLSE: cute.Tensor  # (tile_m, q_stage) fp32, times log2(e)
    sDelta: cute.Tensor  # (tile_m, do_stage) fp32
    sdQ: cute.Tensor  # (part elements, parts) fp32, in the order of the fragments


@dataclasses.dataclass(frozen=True)
class Rings:
    """TMA rings (K and V have one tile each), and what passes between the consumers and the warps that add dQ."""

    k: TmaRing
    v: TmaRing
    q: TmaRing
    do: TmaRing
    ds: cute.Pointer  # an mbarrier: all consumers have written dS of a step
    dq: tuple[Handover, ...]  # one a consumer warpgroup, side by side in memory

    def dq_of(self, index: Int32) -> Handover:
        """That of a warpgroup known at run time."""
        first = self.dq[0]
        return Handover(first.full + 2 * index, first.empty + 2 * index)


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: BwdLaunch
    workspace: WorkspaceTensors
