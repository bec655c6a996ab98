"""Loads of the sm80 latent-attention decode: Q of a tile and the keys of its steps, by cp.async.

Rows past the last query or key become zeros: what memory holds there may be NaN, whose product with a weight of 0 would
be NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cuteflash.atoms import row_copies
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.mla_decode_bundles import MlaBlock
from cuteflash.mla_problem import LATENT_DIM


@cute.jit
def load_rows(copy: cute.TiledCopy, gX: cute.Tensor, sX: cute.Tensor, first: Int32, rows: Int32):
    """Issue the copies of a tile's rows; gX (rows, 576) from row `first` tiles on, of which `rows` exist."""
    thread = cute.arch.thread_idx()[0]
    tile_rows = cute.size(sX.shape[0])
    mine = copy.get_slice(thread)
    source = mine.partition_S(cute.local_tile(gX, (tile_rows, LATENT_DIM), (first, 0)))
    coords = mine.partition_S(cute.make_identity_tensor((tile_rows, LATENT_DIM)))
    passes, slabs = source.shape[1], source.shape[2]
    inside = cute.make_rmem_tensor(cute.make_layout((1, passes, slabs), stride=(0, 1, 0)), Boolean)
    for i in cutlass.range_constexpr(cute.size(passes)):
        inside[0, i, 0] = coords[0, i, 0][0] < rows
    row_copies.load(copy, source, mine.partition_D(sX), inside)


@cute.jit
def load_keys(
    kernel: cutlass.Constexpr, block: MlaBlock, tile: QueryTile, page: Int32, place: tuple[Int32, Int32], stage: Int32
):
    """Issue the copies of a step's keys, which lie at `place`."""
    inside, entry = place
    rows = kernel.traits.tile_n
    exist = tile.mask.seqlen_k - page * rows
    load_rows(kernel.load_copy(rows), block.gK[None, None, entry], block.tiles.sK[None, None, stage], inside, exist)


@cute.jit
def load_q(kernel: cutlass.Constexpr, block: MlaBlock, tile: QueryTile):
    """Issue the copies of a tile's rows of Q."""
    copy = kernel.load_copy(kernel.traits.tile_m)
    if cute.arch.thread_idx()[0] < copy.size:
        load_rows(copy, block.gQ[None, None, tile.batch], block.tiles.sQ, tile.m_block, tile.rows())
