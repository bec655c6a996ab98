"""The parts of a backward's workspace (`cuteflash.core.workspace`) as tensors."""

from __future__ import annotations

import dataclasses
from typing import Self

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cuteflash.arguments import BwdTensors, PackedTensors
from cuteflash.core.bwd_launch import LONE_HEADS, adds_in_turn, flat_order, held_dq
from cuteflash.core.launch import lengths_of
from cuteflash.core.lengths import Index, Lengths, Sequence
from cuteflash.core.schedule import Order, TileOrder
from cuteflash.core.tile import all_see, stores_dq
from cuteflash.core.tile_numbers import first_tile
from cuteflash.core.workspace import PARTS, Workspace
from cuteflash.problem import BwdProblem, MaskKind
from cuteflash.traits.base import BwdTraits


@dataclasses.dataclass(frozen=True)
class WorkspaceTile:
    """The parts of one query tile of one head."""

    lse_log2: cute.Tensor  # (tile_m,)
    delta: cute.Tensor  # (tile_m,)
    dq: cute.Tensor | None  # (tile_m * head_dim,), in the order of the main kernel's fragments
    turns: cute.Tensor | None  # (PARTS,), int32


@dataclasses.dataclass(frozen=True)
class WorkspaceTensors:
    """A workspace, fp32; rows are those of all sequences, each padded to whole tiles.

    Attributes:
        lse_log2, delta: (rows, heads)
        dq: (tile_m * head_dim, tiles of all sequences, heads); None if dQ needs no sum in memory.
        turns: (PARTS, tiles of all sequences, heads), int32; None likewise.
        tiles: query tiles of one sequence; of packed sequences, of all together.
        cu_q: where packed sequences begin; None if dense.
        tile_m: rows of a tile.
    """

    lse_log2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor | None
    turns: cute.Tensor | None
    tiles: Int32
    cu_q: cute.Tensor | None
    tile_m: cutlass.Constexpr[int]

    @classmethod
    def of(cls, mW: cute.Tensor, workspace: Workspace, cu_q: cute.Tensor | None) -> Self:
        """The parts of `mW` (n,), as `workspace` places them. Offsets between heads and parts have 64 bits."""
        tile_m, head_dim = workspace.tile_m, workspace.head_dim
        tiles = workspace.batch * workspace.tiles
        rows = Int64(tiles) * tile_m
        statistic = cute.make_layout((tiles * tile_m, workspace.heads), stride=(1, cute.assume(rows, divby=tile_m)))
        part = cute.assume(rows * workspace.heads, divby=tile_m)
        dq = turns = None
        if const_expr(head_dim > 0):
            elements = tile_m * head_dim
            strides = (cute.assume(stride, divby=elements) for stride in (Int64(elements), rows * head_dim))
            layout = cute.make_layout((elements, tiles, workspace.heads), stride=(1, *strides))
            dq = cute.make_tensor(mW.iterator + 2 * part, layout)
            shape, strides = (PARTS, tiles, workspace.heads), (Int64(tiles) * workspace.heads, 1, Int64(tiles))
            counters = cute.recast_ptr(mW.iterator + (2 + head_dim) * part, dtype=Int32)
            turns = cute.make_tensor(counters, cute.make_layout(shape, stride=strides))
        return cls(
            lse_log2=cute.make_tensor(mW.iterator, statistic),
            delta=cute.make_tensor(mW.iterator + part, statistic),
            dq=dq,
            turns=turns,
            tiles=workspace.tiles,
            cu_q=cu_q,
            tile_m=tile_m,
        )

    def first_tile(self, sequence: Int32, first_q: Index | None = None) -> Int32:
        """The first tile of a sequence; nothing is loaded if it is known where its queries begin."""
        if self.cu_q is None:
            return sequence * self.tiles
        return first_tile(self.cu_q[sequence] if first_q is None else first_q, sequence, self.tile_m)

    def tile(self, m_block: Int32, head: Int32, sequence: Int32, first_q: Index | None = None) -> WorkspaceTile:
        """The parts of query tile `m_block` of a head of a sequence; `first_q` as for `first_tile`."""
        index = self.first_tile(sequence, first_q) + m_block
        lse_log2, delta = (
            cute.local_tile(part[None, head], (self.tile_m,), (index,)) for part in (self.lse_log2, self.delta)
        )
        dq, turns = (None if part is None else part[None, index, head] for part in (self.dq, self.turns))
        return WorkspaceTile(lse_log2, delta, dq, turns)

    def first_number(self, head: Int32, sequence: Int32, first_q: Index | None = None) -> Int32:
        """The number of the first query tile of a head of a sequence, of all heads' tiles in turn.

        `first_q` as for `first_tile`.
        """
        return head * self.turns.shape[1] + self.first_tile(sequence, first_q)

    def turn(self, number: Int32, part: int) -> cute.Pointer:
        """How many have been at a part of the tile of a number."""
        return self.turns[part, None, None].iterator + number

    def sum(self, number: Int32) -> cute.Pointer:
        """dQ of the tile of a number."""
        return self.dq.iterator + Int64(number) * cute.size(self.dq.shape[0])

    def row(self, token: Int32, sequence: Int32) -> Int32:
        """The row of a query, counted from the beginning of its sequence."""
        return self.first_tile(sequence) * self.tile_m + token


@dataclasses.dataclass(frozen=True)
class WorkspacePlace:
    """A query tile of a workspace, and where its rows are in Q and O.

    Attributes:
        m_block: which tile of its head and sequence it is.
        head: query head; the first of them if a block takes several.
        sequence: its sequence's number in the batch.
        batch: entry of the batch mode; packed sequences have one entry.
        first_row: its first row, counted as Q and O are.
        rows: how many rows its sequence has from there on; 0 or less if the tile does not exist.
        exists: whether it has a row; those of a dense batch all do.
        has_sum: whether it exists and key blocks add to its dQ in memory, instead of the only one that stores it.
    """

    m_block: Int32
    head: Int32
    sequence: Int32
    batch: Index
    first_row: Int32
    rows: Int32
    exists: Boolean | bool
    has_sum: Boolean | bool


@dataclasses.dataclass(frozen=True)
class WorkspaceTiles:
    """All query tiles of a workspace, for a kernel that has work at each, or with `skips_lone` only where dQ is a sum.

    With `all_rounded` blocks of the main kernel have rounded each sum that there is. `lone_tiles` as in `BwdTraits`.
    """

    order: Order
    heads: Int32
    heads_per_kv: Int32
    heads_at_once: cutlass.Constexpr[int]  # of a block, with the same tile of each
    lengths: Lengths
    is_packed: cutlass.Constexpr[bool]
    skips_lone: cutlass.Constexpr[bool]
    all_rounded: cutlass.Constexpr[bool]
    lone_tiles: cutlass.Constexpr[bool]
    held_dq: cutlass.Constexpr[int]
    mask: cutlass.Constexpr[MaskKind]
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    @classmethod
    def of(
        cls,
        traits: BwdTraits,
        problem: BwdProblem,
        tensors: BwdTensors,
        packed: PackedTensors,
        workspace: Workspace,
        skips_lone: bool,
    ) -> Self:
        """The tiles of a call; `tensors` as `batched` returns them."""
        is_packed = packed.cu_seqlens_q is not None
        all_rounded = skips_lone and traits.last_rounds and adds_in_turn(traits, problem)
        skips_lone = skips_lone and traits.lone_tiles
        at_once = LONE_HEADS if is_packed and skips_lone else 1
        heads = workspace.heads if at_once == 1 else (workspace.heads + at_once - 1) // at_once
        order: Order
        if is_packed:
            rows, alike = tensors.q.shape[1], traits.lone_blocks
            order = flat_order(packed.cu_seqlens_q, rows, heads, workspace.tile_m, alike)
        else:
            order = TileOrder(workspace.tiles, heads, workspace.batch, Int32(1), longest_first=False)
        heads = workspace.heads, workspace.heads // tensors.k.shape[2], at_once
        lone = skips_lone, all_rounded, traits.lone_tiles, held_dq(traits, problem)
        tile = problem.scores.mask, workspace.tile_m, traits.tile_n
        return cls(order, *heads, lengths_of(tensors, packed), is_packed, *lone, *tile)

    def blocks(self) -> Int32:
        """How many blocks to launch, at least 1: the host knows if there is nothing to do in a dense batch."""
        if not (self.skips_lone or self.all_rounded) or not self.lengths.are_known:
            return self.order.size()
        return Int32(cutlass.select_(self._is_done(self.lengths), 1, self.order.size()))

    def has_work(self, place: WorkspacePlace) -> Boolean | bool:
        """Whether there is something to do at a tile."""
        return place.has_sum if self.skips_lone else place.exists

    def place(self, index: Int32) -> WorkspacePlace:
        """The tile with number `index`; a whole warp calls it."""
        m_block, head, sequence = self.order.tile(index)
        lengths = self.lengths.sequence(sequence)
        first = m_block * self.tile_m
        rows = lengths.seqlen_q - first
        exists = has_sum = rows > 0 if self.is_packed else True
        if self.lone_tiles:
            has_sum = exists & cutlass.not_(self._is_done(lengths))
        return WorkspacePlace(
            m_block=m_block,
            head=head * self.heads_at_once,
            sequence=sequence,
            batch=0 if self.is_packed else sequence,
            first_row=lengths.first_q + first,
            rows=rows,
            exists=exists,
            has_sum=has_sum,
        )

    def _is_done(self, lengths: Lengths | Sequence) -> Boolean:
        """Whether dQ of a sequence is stored by blocks that compute it."""
        seqlen_q, seqlen_k = lengths.seqlen_q, lengths.seqlen_k
        if self.all_rounded:
            return all_see(seqlen_q, seqlen_k, self.mask)
        tiles = self.tile_m, self.tile_n
        return stores_dq(seqlen_q, seqlen_k, self.mask, self.heads_per_kv, tiles, self.held_dq)

    def each_head(self, place: WorkspacePlace, work: cutlass.Constexpr) -> None:
        """Call `work(place)` with each head that a block takes of the tile at `place`; a whole block calls it."""
        if self.heads_at_once == 1:
            work(place)
        else:
            self._each_of_several(place, work)

    @cute.jit
    def _each_of_several(self, place: WorkspacePlace, work: cutlass.Constexpr):
        end = cutlass.min(place.head + self.heads_at_once, self.heads)
        for head in cutlass.range(place.head, end, unroll=1):
            work(dataclasses.replace(place, head=head))
            cute.arch.sync_threads()  # what a head has in shared memory has been read


def workspace_of(traits: BwdTraits, tensors: BwdTensors, packed: PackedTensors) -> Workspace:
    """The workspace of a call; `tensors` as `batched` returns them."""
    batch, rows, heads, _ = tensors.q.shape
    if packed.cu_seqlens_q is None:
        return traits.workspace(batch, heads, rows)
    return traits.workspace_packed(packed.cu_seqlens_q.shape[0] - 1, heads, rows)
