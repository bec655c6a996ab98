"""Rows of K or V that lie in a cache's pages, loaded one by one: each warp looks its rows up, then copies them.

A lane looks up every 32nd of its warp's rows, so that a block's addresses cost a register or two and one wait, and
passes each on to the lanes that copy the row's chunks of 16 bytes.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cuteflash.atoms import row_copies
from cuteflash.core.launch import Launch
from cuteflash.core.paged import Pages
from cuteflash.core.tile import QueryTile
from cuteflash.traits.chunks import CHUNK

LANES = 32


@dataclasses.dataclass(frozen=True)
class RowGather:
    """One thread's share of the loads of one head's K or V.

    Attributes:
        copy: 16 bytes a thread, by cp.async or through registers; neighbouring lanes take neighbouring chunks.
        rows: (page size, columns, pages) in global memory, from this thread's chunk on.
        tXsX: (chunk, passes over rows, column slabs, stage) in shared memory.
        columns: (slabs,) whether the chunk lies inside the head dim; None if all do.
        first_row: this thread's row in the first pass.
        tile_rows, pass_rows: rows of a key block, and of one pass of all threads.
        chunks: lanes that copy a row's chunks of one slab.
        entry: the sequence's cache entry.
        first_key, seqlen_k: its first key's row there, and the number of its keys.
    """

    copy: cute.TiledCopy
    rows: cute.Tensor
    tXsX: cute.Tensor
    columns: cute.Tensor | None
    first_row: Int32
    tile_rows: cutlass.Constexpr[int]
    pass_rows: cutlass.Constexpr[int]
    chunks: cutlass.Constexpr[int]
    pages: Pages
    entry: Int32
    first_key: Int32
    seqlen_k: Int32

    @property
    def warp_rows(self) -> int:
        """Rows that a warp copies in a pass."""
        return LANES // self.chunks

    @property
    def passes(self) -> int:
        return self.tile_rows // self.pass_rows

    @property
    def lookups(self) -> int:
        """Rows that a lane looks up of a key block."""
        return -(-self.passes // self.chunks)

    @cute.jit
    def find(self, n_block: Int32) -> cute.Tensor:
        """Look up the rows of a key block: (page, row in the page), a few times, of a lane.

        What is looked up is not used here, so that whoever waits for a stage before `load` waits for both together. A
        row that is not there has a number that the compiler does not know: it would multiply here, to save it for 0.
        """
        lane, begin = cute.arch.lane_idx(), n_block * self.tile_rows
        end = cutlass.min(self.seqlen_k - begin, self.tile_rows)
        found = cute.make_rmem_tensor((2, self.lookups), Int32)
        warp_row = self.first_row - lane // self.chunks
        for i in cutlass.range_constexpr(cute.size(found.shape[1])):
            page, in_page = n_block, Int32(0)
            index = i * LANES + lane  # of this warp's rows
            row = index // self.warp_rows * self.pass_rows + warp_row + index % self.warp_rows
            if row < end:
                page, in_page = self.pages.place(self.entry, self.first_key + begin + row)
            found[0, i], found[1, i] = page, in_page
        return found

    def starts(self, found: cute.Tensor) -> list[Int32]:
        """Where the rows that `find` has found begin, in chunks from the cache's begin."""
        row_stride, _, page_stride = self.rows.stride
        return [
            Int32((Int64(found[0, i]) * page_stride + Int64(found[1, i]) * row_stride) // CHUNK)
            for i in range(cute.size(found.shape[1]))
        ]

    @cute.jit
    def load(self, found: cute.Tensor, n_block: Int32, stage: Int32 | int):
        """Issue the copies of a key block that `find` has found; zeros past the last key, whose rows are not read."""
        lane = cute.arch.lane_idx()
        rows = self.seqlen_k - n_block * self.tile_rows - self.first_row
        starts = self.starts(found)
        for i in cutlass.range_constexpr(self.passes):
            index = i * self.warp_rows
            chunk = cute.arch.shuffle_sync(starts[index // LANES], index % LANES + lane // self.chunks)
            start = self.rows.iterator + cute.assume(Int64(cutlass.Uint32(chunk)) * CHUNK, divby=CHUNK)
            exists = i * self.pass_rows < rows
            for slab in cutlass.range_constexpr(cute.size(self.tXsX.shape[2])):
                inside = cute.make_rmem_tensor((1,), Boolean)
                inside[0] = exists
                if const_expr(self.columns is not None):
                    inside[0] = exists and self.columns[slab]
                source = start + slab * self.chunks * CHUNK
                line = cute.make_tensor(source, cute.make_layout(((CHUNK, 1),), stride=((1, 0),)))
                row_copies.load(self.copy, line, self.tXsX[None, i, slab, stage], inside)


@cute.jit
def entry_of(launch: Launch, tile: QueryTile):
    """The cache entry of a tile's sequence; any if it has no keys."""
    entry = Int32(0)
    if tile.mask.seqlen_k > 0:
        entry = Int32(launch.pages.entry(tile.sequence))
    return entry


def make_gather(
    copy: cute.TiledCopy, thread: Int32, gX: cute.Tensor, sX: cute.Tensor, launch: Launch, tile: QueryTile
) -> RowGather:
    """One thread's share of the loads of a head.

    Args:
        copy: of `row_copies.load_copy`, by whole warps; `thread` is counted among them.
        gX: (page size, head dim, pages) of the head.
        sX: (tile_n, columns, stages).
    """
    tile_rows, cols = cute.size(sX.shape[0]), cute.size(sX.shape[1])
    pass_rows, width = (cute.size(mode) for mode in copy.tiler_mn)
    chunks, head_dim = width // CHUNK, gX.shape[1]
    mine = copy.get_slice(thread)
    column = thread % chunks * CHUNK
    columns = None
    if cols != head_dim:
        columns = cute.make_rmem_tensor((cols // width,), Boolean)
        for slab in range(cols // width):
            columns[slab] = slab * width + column < head_dim
    return RowGather(
        copy=copy,
        rows=cute.domain_offset((0, cute.assume(column, divby=CHUNK), 0), gX),
        tXsX=mine.partition_D(sX),
        columns=columns,
        first_row=thread // chunks,
        tile_rows=tile_rows,
        pass_rows=pass_rows,
        chunks=chunks,
        pages=launch.pages,
        entry=entry_of(launch, tile),
        first_key=tile.first_k,
        seqlen_k=tile.mask.seqlen_k,
    )
