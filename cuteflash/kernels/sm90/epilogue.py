"""The output sink of the forward: V's mean is added if it was taken out; O is rounded, staged, and stored with TMA.

O that is not staged leaves the registers in stores of 16 bytes.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.finish import finish_rows, write_lse
from cuteflash.core.gqa import output_row
from cuteflash.core.softmax import scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_view
from cuteflash.kernels.common.octets import LANES, OCTET, octet_of_lane, store_octet
from cuteflash.kernels.sm90.bundles import Block, NamedBarrier, Tiles, Tma
from cuteflash.kernels.sm90.load import query_rows
from cuteflash.kernels.sm90.warpgroup import ROWS, Warpgroup
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M


@cute.jit
def add_mean(kernel: cutlass.Constexpr, wg: Warpgroup, mean: cute.Tensor):
    """Add V's mean (head_dim_v,) to O. The weights of a row sum to 1, those of a row that sees no key to 0."""
    tile = cute.make_identity_tensor((WGMMA_M, kernel.traits.head_dim_v))
    columns, own = (rows_view(wg.mma_pv.get_slice(thread).partition_C(tile)) for thread in (0, wg.thread))
    first = own[0, 0][1]
    for c in cutlass.range_constexpr(cute.size(columns.shape[1])):
        column = columns[0, c][1]
        if const_expr(column < kernel.problem.operands.head_dim_v):  # the tile may be wider
            added = mean[first + column]
            for row in cutlass.range_constexpr(ROWS):
                sees_none = wg.softmax.row_max[row] == -Float32.inf
                wg.out[row, c] = wg.out[row, c] + (Float32(0.0) if sees_none else added)


@cute.jit
def finish_share(kernel: cutlass.Constexpr, wg: Warpgroup, block: Block, tile: QueryTile, v_scale: Float32 | None):
    """Write O and the log-sum-exp of a tile, or of a block's share of its keys, and merge the tile's parts if due."""
    lse = finish_rows(wg.softmax, wg.scores, tile, v_scale, block.launch.sinks)
    scale_rows(wg.out, wg.softmax.row_scale)
    if tile.share.is_whole():
        write_lse(lse, wg.scores, tile, block.mLSE)
        write_output(kernel, wg, block.tma, block.tiles, tile)
    else:
        barrier = NamedBarrier.EPILOGUE + wg.index
        sync = functools.partial(cute.arch.barrier, barrier_id=barrier, number_of_threads=WARPGROUP)
        identity = cute.make_identity_tensor((WGMMA_M, kernel.traits.head_dim_v))
        columns = rows_view(wg.mma_pv.get_slice(wg.thread).partition_C(identity))
        block.partials.write(wg.scores, wg.out, columns, lse, tile)
        is_scheduled = kernel.problem.is_scheduled
        block.partials.merge_if_due(tile, wg.thread, WARPGROUP // 32, block.arrival, sync, is_scheduled)


@cute.jit
def store_rows(kernel: cutlass.Constexpr, wg: Warpgroup, gO: cute.Tensor, tile: QueryTile):
    """Store this warpgroup's O, whose rows are those of `tile`, 16 bytes at a time."""
    rows, place = tile.rows(), wg.thread % LANES
    for r in cutlass.range_constexpr(cute.size(wg.out.shape[0])):
        row = wg.scores.row(r)
        line = output_row(gO, tile, row)
        for c in cutlass.range_constexpr(0, cute.size(wg.out.shape[1]), OCTET):
            octet = octet_of_lane([wg.out[r, c + i] for i in range(OCTET)], place, kernel.out_dtype)
            column = LANES * c + OCTET * place
            if row < rows and column < kernel.problem.operands.head_dim_v:
                store_octet(octet, line, column)


@cute.jit
def write_output(kernel: cutlass.Constexpr, wg: Warpgroup, tma: Tma, tiles: Tiles, tile: QueryTile):
    """Stage this warpgroup's O in shared memory and store it with TMA, which clips rows and columns outside."""
    barrier = NamedBarrier.EPILOGUE + wg.index
    warp = cute.arch.make_warp_uniform(wg.thread // 32)
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last tile's O has left shared memory
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    sO = tiles.sO[None, None, wg.index]
    rounded = rounded_fragment(wg.acc_O, kernel.out_dtype)
    copy = kernel.copy_o().get_slice(wg.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sO))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    if warp == 0:
        box = kernel.query_box(kernel.traits.head_dim_v)
        gO = cute.local_tile(query_rows(kernel, tma.gO, tile), box, (None, 0))
        tOsO, tOgO = atoms.tma_partition(tma.store_o, tiles.sO_boxes, gO)
        block = tile.first_token // kernel.tokens_per_warpgroup + wg.index
        cute.copy(tma.store_o, tOsO[None, wg.index], tOgO[None, block])
        cute.arch.cp_async_bulk_commit_group()
