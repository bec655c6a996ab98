"""What the roles of the sm90 forward kernel pass to each other, by subject."""

from __future__ import annotations

import dataclasses
import enum

import cutlass.cute as cute

from cuteflash.atoms.barriers import Ring, TmaRing
from cuteflash.core.launch import Launch
from cuteflash.core.scales import Scales
from cuteflash.kernels.common.partials import Partials
from cuteflash.kernels.sm90.handout import Handout
from cuteflash.traits.cache_sm90 import WARPS as CONVERTING_WARPS
from cuteflash.traits.fp8_sm90 import TURNING_WARPS


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    EPILOGUE = 1  # + warpgroup: O is in shared memory
    TURN = 4  # + warpgroup: this warpgroup may issue its products (ping-pong)
    HANDED = 7  # a part of O of some keys is in shared memory, or has left it


@dataclasses.dataclass(frozen=True)
class Tma:
    """TMA descriptors and the coordinate tensors they are sliced with: (rows, columns, heads, batch).

    Those of packed sequences are as `cuteflash.kernels.sm90.ragged` makes them.
    """

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom | None  # None: rows of K and V are looked up one by one, and gK and gV are the caches
    load_v: cute.CopyAtom | None
    store_o: cute.CopyAtom | None  # None: O is not staged, and gO is O itself
    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gO: cute.Tensor
    load_shared_k: cute.CopyAtom | None = None  # of the columns of K that all heads share, if they are apart
    gShared_k: cute.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors."""

    sQ: cute.Tensor  # (64, head_dim, warpgroups x q_stage)
    sQ_boxes: cute.Tensor  # (box rows, head_dim, warpgroups x q_stage), the same data
    sK: cute.Tensor  # as the product reads it: (tile_n, head_dim, kv_stage)
    loaded_k: cute.Tensor  # as TMA writes it: the same data, unless it is converted
    sV: cute.Tensor  # as TMA writes it: (tile_n, head_dim_v, kv_stage); Vᵀ, if it is given: (head_dim_v, tile_n, ..)
    sVt: (
        cute.Tensor
    )  # as the product reads it: (head_dim_v, tile_n, kv_stage), the same data unless V is turned or converted
    sO: cute.Tensor | None  # (64, head_dim_v, warpgroups), if it is staged
    sO_boxes: cute.Tensor | None  # (box rows, head_dim_v, warpgroups), the same data
    sP: cute.Tensor | None  # (64, tile_n, warpgroups)
    turned_v: cute.Pointer | None = None  # the bytes of sVt, and
    stored_v: cute.Pointer | None = None  # those of sV, if V is turned
    base: cute.Pointer | None = None  # the block's shared memory, if K and V are converted


@dataclasses.dataclass(frozen=True)
class Rings:
    """Rings of tiles; K and V positions run on from tile to tile.

    Attributes:
        q, k: filled by TMA; K, if its rows are looked up one by one, by threads.
        v: what the consumers read, filled as K or by the warps that turn V; with `stored_k` both by those that convert.
        stored_v: V as it is stored, filled by TMA, if it is turned; if it is converted, as K otherwise is.
        stored_k: likewise of K, if it is converted.
    """

    q: TmaRing
    k: Ring
    v: Ring
    stored_v: Ring | None = None
    stored_k: Ring | None = None

    def init(self, consumer_warps: int, copying_threads: int) -> None:
        """Initialise the mbarriers; one thread of the block calls it, a fence and a block barrier follow.

        `copying_threads` fill K and V, or TMA if there are none.
        """
        filling = filling_k = filling_v = copying_threads or 1
        if self.stored_v is not None:
            filling_v = TURNING_WARPS
            self.stored_v.init_for(filling, TURNING_WARPS)
        if self.stored_k is not None:
            filling_k = CONVERTING_WARPS
            self.stored_k.init_for(filling, CONVERTING_WARPS)
        self.q.init(consumer_warps)
        self.k.init_for(filling_k, consumer_warps)
        self.v.init_for(filling_v, consumer_warps)

    @property
    def loaded_k(self) -> Ring:
        """The ring of K as it is loaded."""
        return self.k if self.stored_k is None else self.stored_k

    @property
    def loaded_v(self) -> Ring:
        """The ring of V as it is loaded."""
        return self.v if self.stored_v is None else self.stored_v


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: Launch
    handout: Handout | None  # of packed sequences
    mLSE: cute.Tensor | None  # (b, h_q, s_q)
    scales: Scales | None  # of 8-bit operands and caches
    partials: Partials | None = None  # of split keys
    arrival: cute.Tensor | None = None  # (1,) Int32 in shared memory, of split keys, too
