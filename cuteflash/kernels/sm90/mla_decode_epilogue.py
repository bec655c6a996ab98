"""The end of a tile of the latent-attention decode: sums, O and log-sum-exp, to memory or to be merged."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import arrive
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.finish import write_lse
from cuteflash.core.softmax import LN_2, quad_sum, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_view
from cuteflash.kernels.sm90.mla_decode_bundles import MlaBarrier, MlaBlock
from cuteflash.kernels.sm90.mla_decode_half import ROWS, Half
from cuteflash.traits.mla_sm90 import CONSUMERS, LATENT_DIM_V, WGMMA_M
from cuteflash.traits.sm90 import WARPGROUP

sync_both = functools.partial(cute.arch.barrier, barrier_id=MlaBarrier.BOTH, number_of_threads=CONSUMERS * WARPGROUP)


@cute.jit
def finish(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, tile: QueryTile):
    """Write O and the log-sum-exp of a tile, or of a block's share of its keys, which are merged afterwards.

    Q is released, as nobody reads it and what lies over it any more.
    """
    lse = cute.make_rmem_tensor(ROWS, Float32)
    normalize(block, half, lse)
    if const_expr(block.parts is None):
        write_whole(kernel, block, half, tile, lse)
    else:
        if const_expr(half.who == 0):
            block.parts.note(tile, half.thread)
        if tile.share.is_whole():
            write_whole(kernel, block, half, tile, lse)
        else:
            arrive(block.rings.q_empty)
            write_part(block, half, tile, lse)


@cute.jit
def normalize(block: MlaBlock, half: Half, lse: cute.Tensor):
    """Divide O by the sums of both warpgroups; `lse` gets the log-sum-exp, of a row without a key -inf (and O is 0)."""
    sums = block.tiles.sums
    for r in cutlass.range_constexpr(ROWS):
        half.row_sum[r] = quad_sum(half.row_sum[r])
        if half.scores.first_key == 0:
            sums[half.scores.row(r), half.who] = half.row_sum[r]
    sync_both()
    scale = cute.make_rmem_tensor(ROWS, Float32)
    for r in cutlass.range_constexpr(ROWS):
        row = half.scores.row(r)
        total = sums[row, 0] + sums[row, 1]  # in one order: both warpgroups, and both runs, get the same
        empty = total == 0.0
        scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
        log2_sum = half.row_max[r] + cute.math.log2(total, fastmath=True)
        lse[r] = -Float32.inf if empty else log2_sum * LN_2
    scale_rows(half.out, scale)


@cute.jit
def write_whole(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, tile: QueryTile, lse: cute.Tensor):
    """Round this warpgroup's half of O, stage it over Q, and store it with TMA, which clips rows past the last one."""
    if const_expr(half.who == 0):
        write_lse(lse, half.scores, tile, block.mLSE)
    tma, sO = block.tma, block.tiles.sO[half.who]
    copy = kernel.copy_o().get_slice(half.thread)
    cute.copy(copy, copy.retile(rounded_fragment(half.acc_O, kernel.dtype)), copy.partition_D(sO))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=MlaBarrier.OWN + half.who, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(half.thread // 32) == 0:
        gO = cute.local_tile(tma.gO[None, None, tile.batch], (WGMMA_M, LATENT_DIM_V // CONSUMERS), (None, half.who))
        stages = cute.make_tensor(sO.iterator, cute.append(sO.layout, cute.make_layout(1)))
        tOsO, tOgO = atoms.tma_partition(tma.store_o, stages, gO)
        cute.copy(tma.store_o, tOsO[None, 0], tOgO[None, tile.m_block])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    arrive(block.rings.q_empty)


@cute.jit
def write_part(block: MlaBlock, half: Half, tile: QueryTile, lse: cute.Tensor):
    """Write this warpgroup's half of a block's part of a tile."""
    columns = cute.make_identity_tensor((WGMMA_M, LATENT_DIM_V))
    columns = cute.local_tile(columns, (WGMMA_M, LATENT_DIM_V // CONSUMERS), (0, half.who))
    columns = rows_view(half.mma_own.get_slice(half.thread).partition_C(columns))
    block.parts.write(half.scores, half.out, columns, lse, tile)
