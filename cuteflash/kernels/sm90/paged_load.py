"""Loads of K and V from a cache: by TMA, a box for each part of a block that one page holds, or row by row.

A block is `page_rows` rows at a time in one page, and fills a band of the swizzled tile with each. Boxes end with the
sequence as those of packed sequences do (`cuteflash.kernels.sm90.ragged`): the rows of all pages are counted on through
the cache, and a box of `n` rows that count is the end of a sequence of `n`. So no row past the last key reaches shared
memory, and a part without any brings zeros without a look at the table, which may hold anything there.

A band may have its columns together, so that one box holds all of them (`Storage.wide_boxes`). Otherwise these are in
slabs as wide as the swizzle, each with the rows of all bands, and a box is a band's rows of a slab. A box takes some
time whatever its size: from pages of 16 rows and 128 columns wide ones load 2 % faster, from 64 rows they do not. Head
dims whose slabs have 32 columns gain a quarter.

A page that holds no whole band is read row by row (`cuteflash.kernels.common.gather`), by several producer warps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import CopyRing, TmaRing
from cuteflash.atoms.row_copies import load_copy
from cuteflash.core.paged import Pages
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.gather import LANES, RowGather, entry_of, make_gather
from cuteflash.kernels.sm90.bundles import Block
from cuteflash.kernels.sm90.ragged import ragged_slabs, sequence_rows, sequence_slabs
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.sm90 import WARPGROUP

NO_BLOCK = 1 << 30  # beyond every key block
BOX_WARPS = 0, 2  # of the producer, that load K, and V, from pages by TMA


@dataclasses.dataclass(frozen=True)
class PagedSource:
    """Where K or V comes from: key blocks of one head and sequence, page by page, by TMA. A whole warp calls it.

    K and V are loaded by a warp each, which look up pages while they wait for a stage: those of some blocks at a time.

    Attributes:
        ring: which tile is in which stage.
        rows: the cache in the coordinates of its descriptor.
        parts: (part's rows, columns, part, stage) in shared memory; for wide boxes (part's rows, columns of a slab,
            slabs, part, stage).
        page_step: rows of the cache from one page to the next.
        entry: the sequence's cache entry.
        head_step: slabs of columns from one head to the next; None without `wide_boxes`.
        first_key, seqlen_k: its first key's row there, and the number of its keys.
        found: of a lane's part, the page and the row in it; and the first of the key blocks that lanes have parts of.
        part_rows, tile_rows: rows of a box, and of a key block.
    """

    atom: cute.CopyAtom
    ring: TmaRing
    rows: cute.Tensor
    parts: cute.Tensor
    page_step: Int32
    entry: Int32
    kv_head: Int32
    head_step: Int32 | None
    first_key: Int32
    seqlen_k: Int32
    pages: Pages
    found: cute.Tensor
    part_rows: cutlass.Constexpr[int]
    tile_rows: cutlass.Constexpr[int]

    @cute.jit
    def __call__(self, position: Int32, n_block: Int32):
        """Load a key block as tile `position` of the ring, once its stage is free."""
        parts = self.tile_rows // self.part_rows
        self.find(n_block)
        barrier = self.ring.acquire(position)
        stage = self.ring.stage(position)
        # Used only here: whoever waits for a stage waits for the table, too.
        first = self.found[0] * self.page_step + self.found[1]
        lane = (n_block - self.found[2]) * parts
        rows = self.seqlen_k - n_block * self.tile_rows
        for part in cutlass.range_constexpr(parts):
            there = cutlass.max(cutlass.min(rows - part * self.part_rows, self.part_rows), 0)
            start = cute.arch.shuffle_sync(first, lane + part)
            box = (None,) * (cute.rank(self.parts) - 2)
            self.load_part(start, there, self.parts[(*box, part, stage)], barrier)

    @cute.jit
    def find(self, n_block: Int32):
        """Look up a key block's pages, and with them those of the blocks before it, which follow: a part for each lane.

        A page that is not looked up has a number that the compiler does not know: the product with it would be made
        here, and wait for the table.
        """
        page, row, lowest = self.found[0], self.found[1], self.found[2]
        blocks = LANES * self.part_rows // self.tile_rows
        if (n_block < lowest) | (n_block >= lowest + blocks):
            lowest = n_block + 1 - blocks
            at = lowest * self.tile_rows + cute.arch.lane_idx() * self.part_rows
            page, row = n_block, Int32(0)
            if (at >= 0) & (at < self.seqlen_k):
                page, row = self.pages.place(self.entry, self.first_key + at)
        self.found[0], self.found[1], self.found[2] = page, row, lowest

    def load_part(self, first: Int32, there: Int32, sX: cute.Tensor, barrier: cute.Pointer) -> None:
        """Load the `there` rows of the cache from `first` on, and zeros after them."""
        if self.head_step is None:
            rows = sequence_rows(self.rows, 1, self.kv_head, first, there)
        else:
            rows = sequence_slabs(self.rows, self.kv_head * self.head_step, first, there)
        box = tuple(cute.size(sX, mode=[mode]) for mode in range(cute.rank(sX)))
        tXsX, tXgX = atoms.tma_partition(self.atom, sX, cute.local_tile(rows, box, (0,) * len(box)), modes=len(box))
        cute.copy(self.atom, tXgX, tXsX, tma_bar_ptr=barrier)


@dataclasses.dataclass(frozen=True)
class FoundRows:
    """Where a thread's rows of three key blocks lie: the next one, the one that was loaded last, and the one before.

    The next block is the one before, whose rows are looked up while those of the last one are loaded.

    Attributes:
        places: (page and row in it, a few times, key block), see `RowGather.find`.
        blocks: the numbers of the key blocks.
    """

    places: cute.Tensor
    blocks: cute.Tensor

    @staticmethod
    def nothing(gather: RowGather) -> FoundRows:
        """Before anything is looked up."""
        places = cute.make_rmem_tensor((2, gather.lookups, 3), Int32)
        blocks = cute.make_rmem_tensor(3, Int32)
        places.fill(0)
        blocks.fill(NO_BLOCK)
        return FoundRows(places, blocks)

    @cute.jit
    def find(self, gather: RowGather, n_block: Int32):
        """Look up the rows of a key block as the next one, if they are not."""
        if self.blocks[0] != n_block:
            self.places[None, None, 0].store(gather.find(n_block).load())
            self.blocks[0] = n_block

    @cute.jit
    def take(self, gather: RowGather, n_block: Int32):
        """Begin to load a key block; the one before is the next one then."""
        self.find(gather, n_block)
        for i in (2, 1):
            self.places[None, None, i].store(self.places[None, None, i - 1].load())
            self.blocks[i] = self.blocks[i - 1]
        if n_block > 0:
            self.find(gather, n_block - 1)

    def of(self, n_block: Int32) -> cute.Tensor:
        """Those of one of the two key blocks that were loaded last."""
        chosen = cute.make_rmem_tensor(self.places.layout.shape[:2], Int32)
        for i in range(cute.size(chosen)):
            last, before = (self.places[None, None, k][i] for k in (1, 2))
            chosen[i] = cutlass.select_(self.blocks[1] == n_block, last, before)
        return chosen


@dataclasses.dataclass(frozen=True)
class GatherSource:
    """Where K or V comes from: key blocks of one head and sequence, row by row.

    All loading warps call it; those from `first_warp` on copy.

    Attributes:
        found: where rows lie; V's are those of K, which is loaded first, if a thread copies the same ones. None if they
            are looked up for each load: most kernels that do not split keys have no registers for them.
        looks_up: whether it looks them up.
    """

    ring: CopyRing
    gather: RowGather
    found: FoundRows | None
    first_warp: cutlass.Constexpr[int]
    looks_up: cutlass.Constexpr[bool]

    @cute.jit
    def __call__(self, position: Int32, n_block: Int32):
        """Load a key block as tile `position` of the ring, once its stage is free."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) >= self.first_warp:
            if const_expr(self.found is None):
                found = self.gather.find(n_block)
            else:
                if const_expr(self.looks_up):
                    self.found.take(self.gather, n_block)
                found = self.found.of(n_block)
            self.ring.wait_free(position)
            self.gather.load(found, n_block, self.ring.stage(position))
            self.ring.publish(position)

    @cute.jit
    def find(self, n_block: Int32):
        """Look up where the rows of a key block lie."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) >= self.first_warp:
            if const_expr(self.looks_up):
                self.found.find(self.gather, n_block)


@dataclasses.dataclass(frozen=True)
class OneWarpSource:
    """A source that all loading warps call, for one of them to load."""

    source: Any
    warp: cutlass.Constexpr[int]

    @cute.jit
    def __call__(self, *place):
        """Call the source with its arguments."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.warp:
            self.source(*place)

    @cute.jit
    def find(self, n_block: Int32):
        """Look up where the rows of a key block lie."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.warp:
            self.source.find(n_block)


def make_paged_sources(kernel, block: Block, tile: QueryTile, queries: Any) -> tuple[Any, Any, Any]:
    """The sources of Q, K and V of a tile; `queries` is that of Q for one warp."""
    traits, tma, tiles, rings = kernel.traits, block.tma, block.tiles, block.rings
    columns_k, columns_v = kernel.loaded_columns
    operands = (
        (tma.load_k, rings.loaded_k, tma.gK, tiles.loaded_k, columns_k),
        (tma.load_v, rings.loaded_v, tma.gV, tiles.sV, columns_v),
    )
    if kernel.problem.storage.gathers:
        threads = kernel.copying_threads
        thread = cute.arch.thread_idx()[0] - threads.start

        gathers = []
        for _, _, gX, sX, cols in operands:
            copy = load_copy(kernel.dtype, len(threads), cols)
            gathers.append(make_gather(copy, thread, gX[None, None, tile.kv_head, None], sX, block.launch, tile))
        of_k, of_v = gathers
        found_k = found_v = FoundRows.nothing(of_k) if kernel.problem.is_split else None
        if kernel.problem.is_split and columns_k != columns_v:
            found_v = FoundRows.nothing(of_v)
        first_warp = threads.start // LANES
        return (
            OneWarpSource(queries, 0),
            GatherSource(rings.loaded_k, of_k, found_k, first_warp, looks_up=True),
            GatherSource(rings.loaded_v, of_v, found_v, first_warp, looks_up=columns_k != columns_v),
        )
    rows, entry, kv_head = kernel.problem.storage.page_rows, entry_of(block.launch, tile), tile.kv_head
    head_steps = block.launch.pages.head_steps or (None, None)
    sources = (
        PagedSource(
            atom=atom,
            ring=ring,
            rows=gX,
            parts=parts_of_tile(sX, rows, cols, is_wide=head_step is not None),
            page_step=step,
            entry=entry,
            kv_head=kv_head,
            head_step=head_step,
            first_key=tile.first_k,
            seqlen_k=tile.mask.seqlen_k,
            pages=block.launch.pages,
            found=nothing_found(),
            part_rows=rows,
            tile_rows=traits.tile_n,
        )
        for (atom, ring, gX, sX, cols), step, head_step in zip(
            operands, block.launch.pages.steps, head_steps, strict=True
        )
    )
    of_warps = zip((queries, *sources), (0, *BOX_WARPS), strict=True)
    q, k, v = (OneWarpSource(source, warp) for source, warp in of_warps)
    return q, k, v


def nothing_found() -> cute.Tensor:
    """`PagedSource.found` before anything is looked up."""
    found = cute.make_rmem_tensor(3, Int32)
    found[0], found[1], found[2] = Int32(0), Int32(0), Int32(NO_BLOCK)
    return found


def parts_of_tile(tiles: cute.Tensor, rows: int, cols: int, is_wide: bool) -> cute.Tensor:
    """The parts of a tile of K or V, (keys, columns, stage), as `PagedSource.parts`."""
    if not is_wide:
        return cute.local_tile(tiles, (rows, cols), (None, 0, None))
    divided = cute.flat_divide(tiles.layout, (rows, swizzle_width(cols)))  # (rows, slab, part, slabs, stage)
    return cute.make_tensor(tiles.iterator, cute.select(divided, mode=[0, 1, 3, 2, 4]))


def wide_tma_load(cache: cute.Tensor, tile: cute.ComposedLayout, rows: int) -> tuple:
    """(copy atom, coordinate tensor) of boxes of all columns of `rows` rows of a tile, (rows, columns, stages)."""
    cols = cute.size(tile, mode=[1])
    slab = swizzle_width(cols)
    return atoms.tma_load(ragged_slabs(cache, slab), atoms.slabs_of_tile(tile, rows, slab), (rows, slab, cols // slab))


def copying_threads(kernel, are_free: bool) -> range:
    """The threads that look up and copy rows of K and V, whole warps; none if TMA loads them.

    All of the producer if a tile is whole passes of theirs and `are_free`: no warp of it has anything else to do.
    """
    if not kernel.problem.storage.gathers:
        return range(0)
    rows = max(WARPGROUP * CHUNK // swizzle_width(cols) for cols in kernel.loaded_columns)
    is_whole = are_free and kernel.traits.tile_n % rows == 0
    return range(0 if is_whole else WARPGROUP // 2, WARPGROUP)


def loading_warps(kernel) -> tuple[int, ...]:
    """The warps of the producer that load."""
    storage = kernel.problem.storage
    if storage.k != "paged":
        return (0,)
    if not storage.gathers:
        return BOX_WARPS
    return (0, 1, 2, 3) if kernel.copying_threads.start == 0 else (0, 2, 3)
