"""TMA loads: by a producer warp for all tiles of its block, or by a consumer's warp between its steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.launch import Launch
from cuteflash.core.split import each_part
from cuteflash.core.tile import KeyBlocks, QueryTile
from cuteflash.core.tile_numbers import first_tile
from cuteflash.kernels.sm90.bundles import Block
from cuteflash.kernels.sm90.handout import visit_tiles
from cuteflash.kernels.sm90.paged_load import GatherSource, OneWarpSource, make_paged_sources
from cuteflash.kernels.sm90.ragged import sequence_columns, sequence_rows
from cuteflash.problem import SHARED_COLUMNS, TRANSPOSED_KEYS


@dataclasses.dataclass(frozen=True)
class TmaSource:
    """Where K or V comes from: key blocks of one head and sequence, by TMA. A whole warp calls it.

    Attributes:
        ring: which tile is in which stage.
        boxes: (box, key block) in global memory.
        stages: (box, stage) in shared memory.
    """

    atom: cute.CopyAtom
    ring: TmaRing
    boxes: cute.Tensor
    stages: cute.Tensor

    def __call__(self, position: Int32, n_block: Int32) -> None:
        """Load a key block as tile `position` of the ring, once its stage is free."""
        barrier = self.ring.acquire(position)
        stage = self.stages[None, self.ring.stage(position)]
        cute.copy(self.atom, self.boxes[None, n_block], stage, tma_bar_ptr=barrier)


@dataclasses.dataclass(frozen=True)
class TwoPartSource:
    """Where K comes from if its last columns are shared by all heads: two boxes for each key block, likewise.

    Attributes:
        ring: which tile is in which stage; a stage is full once both boxes are there.
        first, shared: (atom, (box, key block) in global memory, (box, stage) in shared memory) of either part.
    """

    ring: TmaRing
    first: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]
    shared: tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]

    def __call__(self, position: Int32, n_block: Int32) -> None:
        """Load a key block as tile `position` of the ring, once its stage is free."""
        barrier = self.ring.acquire(position)
        for atom, boxes, stages in (self.first, self.shared):
            cute.copy(atom, boxes[None, n_block], stages[None, self.ring.stage(position)], tma_bar_ptr=barrier)


@dataclasses.dataclass(frozen=True)
class QuerySource:
    """Where Q comes from: one box a warpgroup, by TMA. A whole warp calls it.

    Attributes:
        ring: which tile is in which stage.
        boxes: (box, n) in global memory.
        stages: (box, n) in shared memory, each stage being as many boxes as there are warpgroups.
        first_box: the tile's first box in global memory.
    """

    atom: cute.CopyAtom
    ring: TmaRing
    boxes: cute.Tensor
    stages: cute.Tensor
    first_box: Int32
    warpgroups: cutlass.Constexpr[int]

    def __call__(self, position: Int32) -> None:
        """Load the tile's queries as tile `position` of the ring, once its stage is free."""
        barrier = self.ring.acquire(position)
        first = self.ring.stage(position) * self.warpgroups
        for wg in range(self.warpgroups):
            box = self.boxes[None, self.first_box + wg]
            cute.copy(self.atom, box, self.stages[None, first + wg], tma_bar_ptr=barrier)


@dataclasses.dataclass(frozen=True)
class TileLoads:
    """The loads of one query tile."""

    q: Any  # `QuerySource`, or as `make_paged_sources` wraps it
    k: Any  # `TmaSource`, `TwoPartSource`, or as `make_paged_sources` makes it; called with a position and a key block
    v: Any
    blocks: KeyBlocks

    def find(self, n_block: Int32) -> None:
        """Look up where the rows of a key block lie, if they lie in pages."""
        for source in (self.k, self.v):
            if isinstance(source, OneWarpSource | GatherSource):
                source.find(n_block)


def query_rows(kernel, tensor: cute.Tensor, tile: QueryTile) -> cute.Tensor:
    """The rows of a tile's head and sequence in the coordinates of Q or O: (rows, columns)."""
    if kernel.problem.storage.q == "dense":
        return tensor[None, None, tile.head, tile.batch]
    return sequence_rows(tensor, tile.packed_heads, tile.head, tile.first_q, tile.mask.seqlen_q)


def key_rows(kernel, tensor: cute.Tensor, tile: QueryTile, is_shared: bool = False) -> cute.Tensor:
    """The rows of a tile's sequence and head, or of the one that all share, in the coordinates of K or V."""
    head = Int32(0) if is_shared else tile.kv_head
    if kernel.problem.storage.k == "dense":
        return tensor[None, None, head, tile.kv_batch]
    return sequence_rows(tensor, 1, head, tile.first_k, tile.mask.seqlen_k)


def value_columns(kernel, tensor: cute.Tensor, tile: QueryTile) -> cute.Tensor:
    """The keys of a tile's head and sequence in the coordinates of Vᵀ: (columns of V, keys)."""
    if kernel.problem.storage.k == "dense":
        return tensor[None, None, tile.kv_head, tile.kv_batch]
    first = first_tile(tile.first_k, tile.sequence, TRANSPOSED_KEYS) * TRANSPOSED_KEYS
    return sequence_columns(tensor, tile.kv_head, first, tile.mask.seqlen_k)


def make_tile_loads(kernel, block: Block, tile: QueryTile, blocks: KeyBlocks) -> TileLoads:
    """The sources of a query tile."""
    tma, tiles, rings = block.tma, block.tiles, block.rings
    traits = kernel.traits
    gQ = cute.local_tile(query_rows(kernel, tma.gQ, tile), kernel.query_box(traits.head_dim), (None, 0))
    tQsQ, tQgQ = atoms.tma_partition(tma.load_q, tiles.sQ_boxes, gQ)
    warpgroups = traits.mma_warpgroups
    q = QuerySource(tma.load_q, rings.q, tQgQ, tQsQ, tile.m_block * warpgroups, warpgroups)
    if kernel.problem.storage.k == "paged":
        return TileLoads(*make_paged_sources(kernel, block, tile, q), blocks)
    if kernel.problem.operands.transposed_v:
        gV = cute.local_tile(value_columns(kernel, tma.gV, tile), (traits.head_dim_v, traits.tile_n), (0, None))
    else:
        gV = cute.local_tile(key_rows(kernel, tma.gV, tile), (traits.tile_n, kernel.loaded_columns[1]), (None, 0))
    tVsV, tVgV = atoms.tma_partition(tma.load_v, tiles.sV, gV)
    return TileLoads(
        q=q,
        k=make_key_source(kernel, block, tile),
        v=TmaSource(tma.load_v, rings.loaded_v, tVgV, tVsV),
        blocks=blocks,
    )


def make_key_source(kernel, block: Block, tile: QueryTile) -> TmaSource | TwoPartSource:
    """The source of K for a query tile."""
    tma, sK, tile_n, cols = block.tma, block.tiles.loaded_k, kernel.traits.tile_n, kernel.loaded_columns[0]
    if not kernel.problem.operands.shares_k:
        gK = cute.local_tile(key_rows(kernel, tma.gK, tile), (tile_n, cols), (None, 0))
        tKsK, tKgK = atoms.tma_partition(tma.load_k, sK, gK)
        return TmaSource(tma.load_k, block.rings.loaded_k, tKgK, tKsK)
    own = cols - SHARED_COLUMNS
    parts = []
    for atom, tensor, first, count in (
        (tma.load_k, tma.gK, 0, own),
        (tma.load_shared_k, tma.gShared_k, own, cols - own),
    ):
        rows = key_rows(kernel, tensor, tile, is_shared=first > 0)
        gPart = cute.local_tile(rows, (tile_n, count), (None, 0))
        stages, boxes = atoms.tma_partition(atom, columns_of_tile(sK, first, count), gPart)
        parts.append((atom, boxes, stages))
    return TwoPartSource(block.rings.k, *parts)


def columns_of_tile(tile: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Columns of a swizzled (rows, columns, stages) tile, whole slabs of it, as a tile of their own."""
    (rows, (slab, _), stages), (row_strides, (step, slab_stride), stage_strides) = tile.layout.shape, tile.layout.stride
    layout = cute.make_layout(
        (rows, (slab, count // slab), stages), stride=(row_strides, (step, slab_stride), stage_strides)
    )
    return cute.make_tensor(tile.iterator + first // slab * slab_stride, layout)


@cute.jit
def load_ahead(loads: TileLoads, n_block: Int32, position: Int32):
    """Load K and V of a key block, if the tile has it, by the block's first warp; the other warps do nothing."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        if n_block >= loads.blocks.lo:
            loads.k(position, n_block)
            loads.v(position, n_block)


@cute.jit
def load_first(kernel: cutlass.Constexpr, loads: TileLoads, q_pos: Int32, kv_pos: Int32):
    """Load Q and all but one stage of K and V, by the block's first warp."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        loads.q(q_pos)
    for i in cutlass.range_constexpr(kernel.traits.kv_stage - 1):
        load_ahead(loads, loads.blocks.hi - 1 - i, kv_pos + i)


def await_block_and_launch() -> None:
    """Wait until the block's barriers are set up, and for the end of the launch ahead; see `load` for other warps."""
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()


@cute.jit
def load(kernel: cutlass.Constexpr, block: Block):
    """Load every tile of this block; a whole warp calls it, or several if they look up rows of K and V.

    In a kernel that splits keys, each finds its first tile, and looks up where its keys lie, before it waits until the
    block's barriers are set up; and before the end of the launch ahead, if that takes no device memory.
    """
    visit, launch = functools.partial(load_tile, kernel, block), block.launch
    if const_expr(kernel.problem.is_split):
        if const_expr(not launch.line.is_known):
            cute.arch.griddepcontrol_wait()
        count = each_part(launch, visit)
        if count == 0:
            cute.arch.sync_threads()
    else:
        visit_tiles(block.handout, launch, visit)


@cute.jit
def await_launch_of_first(kernel: cutlass.Constexpr, launch: Launch, q_pos: Int32, is_here: cutlass.Constexpr[bool]):
    """Wait for the end of the launch ahead in a block's first tile, if `load` did not, and if it `is_here`.

    That launch may write whatever is in memory, page tables too: nothing is read before.
    """
    if const_expr(is_here and kernel.problem.is_split and launch.line.is_known):
        if q_pos == 0:
            cute.arch.griddepcontrol_wait()


@cute.jit
def load_tile(kernel: cutlass.Constexpr, block: Block, tile: QueryTile, q_pos: Int32, kv_pos: Int32):
    """Load Q once and K, V block by block, in the order of `KeyBlocks.visits`; returns the next K/V position."""
    blocks = tile.visited_blocks()
    n_block, n_lo, n_hi = blocks.visits(kernel.first_keys_first)
    has_entries = kernel.problem.storage.has_cache_batch_idx  # which are looked up for the loads of a tile
    await_launch_of_first(kernel, block.launch, q_pos, has_entries)
    loads = make_tile_loads(kernel, block, tile, blocks)
    await_launch_of_first(kernel, block.launch, q_pos, not has_entries)
    if const_expr(kernel.problem.is_split):
        if q_pos == 0:
            if n_hi >= n_lo:
                loads.find(n_block)
            cute.arch.sync_threads()

    # The first K goes before Q: its stage is free while the consumers still read the last tile's Q.
    if n_hi >= n_lo:
        loads.k(kv_pos, n_block)
    loads.q(q_pos)
    if const_expr(kernel.problem.operands.transposed_before):
        cute.arch.griddepcontrol_wait()
    if n_hi >= n_lo:
        for i in cutlass.range(n_hi - n_lo, unroll=1):
            following = n_hi - 1 - i
            loads.k(kv_pos + 1, following)
            loads.v(kv_pos, n_block)
            n_block = following
            kv_pos += 1
        loads.v(kv_pos, n_block)
        kv_pos += 1
    return kv_pos
