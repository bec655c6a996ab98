"""What the roles of the sm90 backward kernel pass to each other, by subject."""

from __future__ import annotations

import dataclasses
import enum

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms.barriers import Handover, StageRing, TmaRing
from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.mask import blocks_of
from cuteflash.core.tile import KeyTile, QueryBlocks
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm90.handout import Handout
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.sm90 import WARPGROUP


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    KEYS_READ = 1  # all consumers, and a warpgroup for dQ: K and V have been read, dK and dV may take their place
    TURN = 2  # + warpgroup: this warpgroup may issue its products (ping-pong)
    DQ_READ = 5  # + part: a warpgroup has read the fp32 sum of its dQ so far, and rounded numbers may take its place


class Sum(enum.IntEnum):
    """What the others have added to a tile of dQ, when a block that may be the last one gets a stage of sdQ for it."""

    PARTIAL = 0  # not all: this block adds its part in memory
    WHOLE = 1  # all: the sum is in the stage, and this block's part completes it
    NONE = 2  # there are no others


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
    store_dq: cute.CopyAtom | None  # if blocks store some of it
    gdQ: cute.Tensor | None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors; dK and dV are staged in the place of K and V."""

    sK: cute.Tensor  # (tile_n, head_dim, kv_stage)
    sV: cute.Tensor  # (tile_n, head_dim_v, kv_stage)
    sQ: cute.Tensor  # (tile_m, head_dim, q_stage)
    sdO: cute.Tensor  # (tile_m, head_dim_v, do_stage)
    sdS: cute.Tensor  # (tile_m, tile_n, ds_stage)
    sLSE: cute.Tensor  # (tile_m, q_stage) fp32, times log2(e)
    sDelta: cute.Tensor  # (tile_m, do_stage) fp32
    sdQ: cute.Tensor  # (part elements, parts) fp32, in the order of the fragments
    sdQ_rounded: cute.Tensor | None  # (rows, columns, 2 parts): every other one begins where a part of sdQ does
    sums: cute.Tensor | None  # (parts,) int32, `Sum`, if last blocks round


@dataclasses.dataclass(frozen=True)
class Rings:
    """TMA rings, and what passes between the consumers and the warps that add dQ and store dK and dV."""

    k: TmaRing
    v: TmaRing
    q: TmaRing
    do: TmaRing
    ds: StageRing  # to what computes dQ; consumers that do so themselves know when a stage is free
    dq: tuple[Handover, ...]  # one a stage of sdQ, side by side in memory
    gradients: cute.Pointer  # mbarriers, one a stage of K: dK and dV of its tile are in the place of K and V
    steps: cute.Pointer  # mbarrier, a phase a tile: the consumers have read Q of its last step

    def gradients_of(self, wave: Int32) -> cute.Pointer:
        """That of the block's `wave`-th tile; its phases are those of the ring of K.

        The consumers may be done with the next tile, too, before the warp that stores looks.
        """
        return self.gradients + self.k.stage(wave)

    def dq_of(self, index: Int32) -> Handover:
        """That of a stage known at run time."""
        first = self.dq[0]
        return Handover(first.full + 2 * index, first.empty + 2 * index)


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: BwdLaunch
    tile: KeyTile | None  # of packed sequences, if it is the only one of the block
    handout: Handout | None  # of packed sequences, if blocks are persistent
    workspace: WorkspaceTensors

    def held_stage(self, head: Int32, m_block: Int32) -> Int32:
        """The stage of sdQ that holds a query tile of the `head`-th query head of a KV head."""
        launch = self.launch
        return head * blocks_of(launch.lengths.seqlen_q, launch.tile_m) + m_block


@dataclasses.dataclass(frozen=True)
class Visit:
    """A block's visit to a key tile.

    Attributes:
        tile, blocks: its keys, and the query blocks that see some of them.
        wave: position of its K and V in their rings: how many tiles the block visited before.
        start: position of its first Q and dO in theirs: how many steps the block did before.
        item: how many tiles of the order the block took before: a visit is to one, or to one of its key tiles.
    """

    tile: KeyTile
    blocks: QueryBlocks
    wave: Int32
    start: Int32
    item: Int32


def readers_of_keys(traits: BwdTraitsSm90) -> int:
    """Threads that read K or V from shared memory."""
    return (traits.mma_warpgroups + traits.is_dq_apart) * WARPGROUP
