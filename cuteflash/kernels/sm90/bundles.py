"""What the roles of the sm90 forward kernel pass to each other, by subject."""

from __future__ import annotations

import dataclasses
import enum

import cutlass.cute as cute

from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.launch import Launch
from cuteflash.kernels.sm90.handout import Handout


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    EPILOGUE = 1  # + warpgroup: O is in shared memory
    TURN = 4  # + warpgroup: this warpgroup may issue its products (ping-pong)


@dataclasses.dataclass(frozen=True)
class Tma:
    """TMA descriptors and the coordinate tensors they are sliced with: (rows, columns, heads, batch).

    Those of packed sequences are as `cuteflash.kernels.sm90.ragged` makes them.
    """

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_o: cute.CopyAtom
    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gO: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors."""

    sQ: cute.Tensor  # (64, head_dim, warpgroups x q_stage)
    sQ_boxes: cute.Tensor  # (box rows, head_dim, warpgroups x q_stage), the same data
    sK: cute.Tensor  # (tile_n, head_dim, kv_stage)
    sV: cute.Tensor  # (tile_n, head_dim_v, kv_stage)
    sVt: cute.Tensor  # (head_dim_v, tile_n, kv_stage), the same data
    sO: cute.Tensor  # (64, head_dim_v, warpgroups)
    sO_boxes: cute.Tensor  # (box rows, head_dim_v, warpgroups), the same data
    sP: cute.Tensor | None  # (64, tile_n, warpgroups)


@dataclasses.dataclass(frozen=True)
class Rings:
    """TMA rings; K and V positions run on from tile to tile."""

    q: TmaRing
    k: TmaRing
    v: TmaRing


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: Launch
    handout: Handout | None  # of packed sequences
    mLSE: cute.Tensor | None  # (b, h_q, s_q)
