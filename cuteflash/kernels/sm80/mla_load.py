"""Loads of the sm80 family's latent-attention decodes: Q of a tile and the keys of its steps, by cp.async.

Rows past the last query or key become zeros: what memory holds there may be NaN, whose product with a weight of 0 would
be NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms import row_copies
from cuteflash.core.scores import computed_here
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.mla_bundles import MlaBlock

LINE_BYTES = 128  # of L2


@cute.jit
def load_rows(kernel: cutlass.Constexpr, gX: cute.Tensor, sX: cute.Tensor, first: Int32, rows: Int32):
    """Issue the copies of a tile's rows; gX (rows, columns) from row `first` tiles on, of which `rows` exist."""
    thread = cute.arch.thread_idx()[0]
    tile = cute.size(sX.shape[0]), cute.size(sX.shape[1])
    copy = kernel.load_copy(*tile)
    mine = copy.get_slice(thread)
    source = mine.partition_S(cute.local_tile(gX, tile, (first, 0)))
    coords = mine.partition_S(cute.make_identity_tensor(tile))
    passes, slabs = source.shape[1], source.shape[2]
    inside = cute.make_rmem_tensor(cute.make_layout((1, passes, slabs), stride=(0, 1, 0)), Boolean)
    for i in cutlass.range_constexpr(cute.size(passes)):
        inside[0, i, 0] = coords[0, i, 0][0] < rows
    if const_expr(copy.size == kernel.traits.num_threads):
        row_copies.load(copy, source, mine.partition_D(sX), inside)
    elif thread < copy.size:
        row_copies.load(copy, source, mine.partition_D(sX), inside)


@cute.jit
def load_keys(
    kernel: cutlass.Constexpr, block: MlaBlock, tile: QueryTile, page: Int32, place: tuple[Int32, Int32], stage: Int32
):
    """Issue the copies of a step's keys, which lie at `place`."""
    inside, entry = place
    exist = tile.mask.seqlen_k - page * kernel.traits.tile_n
    load_rows(kernel, block.gK[None, None, entry], block.tiles.sK[None, None, stage], inside, exist)


def load_q(kernel, block: MlaBlock, tile: QueryTile) -> None:
    """Issue the copies of a tile's rows of Q."""
    load_rows(kernel, block.gQ[None, None, tile.batch], block.tiles.sQ, tile.m_block, tile.rows())


@cute.jit
def entry_after(kernel: cutlass.Constexpr, block: MlaBlock, tile: QueryTile):
    """The entry of the cache with the first keys of this block's next tile, of kernels that fetch them early.

    It is -1 if the block has no other tile, or that has no keys.
    """
    found = Int32(-1)
    if const_expr(kernel.traits.early_launch and tile.share is not None):
        if tile.share.goes_on:
            following = tile.sequence + 1
            if block.launch.sequence(following).seqlen_k > 0:
                _, found = block.pages.place(following, Int32(0))
    return found


@cute.jit
def fetch_step(kernel: cutlass.Constexpr, block: MlaBlock, entry: Int32):
    """Bring the first step's keys of an entry into L2: memory has less to do while one tile ends and the next begins.

    Rows past the last key come along, if the entry has them.
    """
    traits = kernel.traits
    elements = LINE_BYTES * 8 // block.gK.element_type.width
    lines = -(-traits.columns // elements)  # of a row, the last one perhaps in part
    keys, thread = block.gK[None, None, entry], computed_here(cute.arch.thread_idx()[0])
    for first in cutlass.range_constexpr(0, traits.tile_n * lines, traits.num_threads):
        number = first + thread
        row = number // lines
        if (row < traits.tile_n) & (row < keys.shape[0]):
            start = cute.domain_offset((row, number % lines * elements), keys).iterator
            cute.arch.prefetch(start.llvm_ptr, cache_level="L2")
