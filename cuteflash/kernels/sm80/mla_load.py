"""Loads of the sm80 family's latent-attention decodes: Q of a tile and the keys of its steps, by cp.async.

Rows past the last query or key become zeros: what memory holds there may be NaN, whose product with a weight of 0 would
be NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms import row_copies
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.mla_bundles import MlaBlock


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
