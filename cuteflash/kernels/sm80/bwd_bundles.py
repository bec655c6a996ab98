"""What the functions of the sm80 backward kernel pass to each other, by subject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.atoms import sm80 as atoms
from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.scores import ScoreTile
from cuteflash.core.tile import KeyTile, QueryBlocks
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.problem import MaskKind


@dataclasses.dataclass(frozen=True)
class LoneRows:
    """What only lone tiles touch of the query rows.

    Attributes:
        gdQ: (rows, columns, heads, batch), then without the batch.
        gO: likewise; None if a kernel before this one computes delta, as with sinks, whose gradient needs it.
        lse, dlse: (rows, heads, batch), likewise; dlse is None for a problem without it, too.
    """

    gdQ: cute.Tensor
    gO: cute.Tensor | None
    lse: cute.Tensor | None
    dlse: cute.Tensor | None

    def map(self, change: Callable[[cute.Tensor | None], cute.Tensor | None]) -> LoneRows:
        """The same of changed tensors."""
        return LoneRows(*(change(getattr(self, field.name)) for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class BwdOperands:
    """Global tensors as (rows, columns, heads, batch)."""

    gQ: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gdO: cute.Tensor
    gdK: cute.Tensor
    gdV: cute.Tensor
    lone: LoneRows | None


@dataclasses.dataclass(frozen=True)
class BwdTiles:
    """Shared-memory tensors; dK and dV are staged in the place of K and V."""

    sK: cute.Tensor  # (tile_n, head_dim, 1)
    sV: cute.Tensor  # (tile_n, head_dim_v, 1)
    sQ: cute.Tensor  # (tile_m, head_dim, stages)
    sdO: cute.Tensor  # (tile_m, head_dim_v, stages)
    sdS: cute.Tensor  # (tile_n, tile_m)
    sP: cute.Tensor | None  # (tile_n, tile_m); None if P stays in registers
    sO: cute.Tensor | None  # (tile_m, head_dim_v, stages); None without lone tiles
    sLSE: cute.Tensor  # (tile_m, stages) fp32
    sDelta: cute.Tensor  # (tile_m, stages) fp32


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block works with, and which of its threads this is."""

    operands: BwdOperands
    workspace: WorkspaceTensors
    tiles: BwdTiles
    thread: Int32


@dataclasses.dataclass(frozen=True)
class QuerySources:
    """What the loads of Q, dO and the row statistics need.

    Attributes:
        gQ, gdO: (rows, columns, heads) of the batch entry.
        lone: of a lone tile; None of any other.
        seqlen_q: rows of Q and dO.
        first_head: the first query head of the KV head.
        sequence: the sequence's number in the batch.
    """

    gQ: cute.Tensor
    gdO: cute.Tensor
    lone: LoneRows | None
    workspace: WorkspaceTensors
    tiles: BwdTiles
    thread: Int32
    seqlen_q: Int32
    first_head: Int32
    sequence: Int32

    @property
    def sums_rows(self) -> bool:
        """Whether the block computes delta."""
        return self.lone is not None and self.lone.gO is not None


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a product: its registers, and how ldmatrix fills them if it has not yet.

    Attributes:
        fragment: registers of all k-blocks.
        fetches: of the fragment, at most one.
    """

    fragment: cute.Tensor
    fetches: tuple[atoms.Fetch, ...] = ()


@dataclasses.dataclass(frozen=True)
class Gradients:
    """One thread's accumulators.

    Attributes:
        thread: index in the block.
        mma_s, mma_dkv, mma_dq: the products' divisions over warps.
        acc_S, acc_dP, acc_dK, acc_dV, acc_dQ: accumulators.
        scores: S^T as (keys, queries).
        bounds: (keys, 2) the queries [lo, hi) that see each key of this thread.
    """

    thread: Int32
    mma_s: cute.TiledMma
    mma_dkv: cute.TiledMma
    mma_dq: cute.TiledMma
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    acc_dQ: cute.Tensor
    scores: ScoreTile
    bounds: cute.Tensor


@dataclasses.dataclass(frozen=True)
class KeyWork:
    """What a block works on.

    Attributes:
        launch: of all blocks.
        tile: its keys.
        blocks: the query blocks that see them.
        is_descending: query blocks are visited from the last to the first.
    """

    launch: BwdLaunch
    tile: KeyTile
    blocks: QueryBlocks
    is_descending: cutlass.Constexpr[bool]

    def of_tile(self, n_block: Int32 | int) -> KeyWork:
        """The same of another key tile of the sequence."""
        tile = dataclasses.replace(self.tile, n_block=n_block, first_key=n_block * self.tile.tile_n)
        return dataclasses.replace(self, tile=tile, blocks=tile.query_blocks())

    @property
    def first_head(self) -> Int32:
        """The first query head of the tile's KV head."""
        return self.tile.head * self.launch.heads_per_kv

    def segments(self, mask: MaskKind) -> list[tuple[Int32, Int32, bool]]:
        """The query blocks [lo, hi), and whether they are masked, in the order in which they are visited."""
        blocks = self.blocks
        found = [(blocks.lo, blocks.full_lo, True), (blocks.full_lo, blocks.full_hi, False)]
        if mask == "window":
            found.append((blocks.full_hi, blocks.hi, True))
        return found[::-1] if self.is_descending else found

    def first(self) -> Int32:
        """The first query block of a head."""
        return self.blocks.hi - 1 if self.is_descending else self.blocks.lo

    @cute.jit
    def after(self, head: Int32, m_block: Int32):
        """The (query head, block) to visit after one."""
        head, m_block = self._neighbour(head, m_block, 1)
        return head, m_block

    @cute.jit
    def before(self, head: Int32, m_block: Int32):
        """The (query head, block) visited before one."""
        head, m_block = self._neighbour(head, m_block, -1)
        return head, m_block

    @cute.jit
    def _neighbour(self, head: Int32, m_block: Int32, way: cutlass.Constexpr[int]):
        m_block += -way if const_expr(self.is_descending) else way
        if m_block >= self.blocks.hi:
            head, m_block = head + way, self.blocks.lo
        elif m_block < self.blocks.lo:
            head, m_block = head + way, self.blocks.hi - 1
        return head, m_block
