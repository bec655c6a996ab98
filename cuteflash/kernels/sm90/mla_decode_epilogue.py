"""The end of a tile of the latent-attention decode: sums, O and log-sum-exp, to memory or to be merged."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.atoms.barriers import arrive
from cuteflash.core.finish import write_lse
from cuteflash.core.scores import computed_here
from cuteflash.core.softmax import quad_sum, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_view
from cuteflash.kernels.common.mla_output import end_of_row, write_rows
from cuteflash.kernels.common.mla_parts import WARP, Part, chunks_of
from cuteflash.kernels.sm90.mla_decode_bundles import LAST_SLAB, MlaBarrier, MlaBlock
from cuteflash.kernels.sm90.mla_decode_half import ROWS, Half
from cuteflash.traits.mla_sm90 import CONSUMERS, LATENT_DIM_V, WGMMA_M
from cuteflash.traits.sm90 import WARPGROUP

sync_both = functools.partial(cute.arch.barrier, barrier_id=MlaBarrier.BOTH, number_of_threads=CONSUMERS * WARPGROUP)


@cute.jit
def finish(block: MlaBlock, half: Half, tile: QueryTile):
    """Write O and the log-sum-exp of a tile, or of a block's share of its keys, together with those of other blocks.

    `half` is either warpgroup's: only what this thread holds in registers is used of it.

    The last slab of Q is released, as nobody reads P in its place any more.
    """
    arrive(block.rings.q_empty + LAST_SLAB)
    thread = computed_here(cute.arch.thread_idx()[0] - WARPGROUP)  # kept across a tile, what follows took registers
    who = thread // WARPGROUP
    lse = cute.make_rmem_tensor(ROWS, Float32)
    normalize(block, half, who, lse)
    columns = cute.make_identity_tensor((WGMMA_M, LATENT_DIM_V))
    columns = cute.local_tile(columns, (WGMMA_M, LATENT_DIM_V // CONSUMERS), (0, who))
    columns = rows_view(half.mma_own.get_slice(thread % WARPGROUP).partition_C(columns))
    if const_expr(block.parts is None):
        write_whole(block, half, who, columns, tile, lse)
    else:
        threads = thread, CONSUMERS * WARPGROUP // WARP, sync_both
        whole = functools.partial(write_whole, block, half, who, columns, tile, lse)
        part = Part(half.scores, half.out, chunks_of(columns, block.parts.chunk), lse)
        block.parts.finish(part, tile, threads, whole)


@cute.jit
def normalize(block: MlaBlock, half: Half, who: Int32, lse: cute.Tensor):
    """Divide O by the sums of both warpgroups; `lse` gets the log-sum-exp, of a row without a key -inf (and O is 0)."""
    sums = block.tiles.sums
    for r in cutlass.range_constexpr(ROWS):
        half.row_sum[r] = quad_sum(half.row_sum[r])
        if half.scores.first_key == 0:
            sums[half.scores.row(r), who] = half.row_sum[r]
    sync_both()
    scale = cute.make_rmem_tensor(ROWS, Float32)
    for r in cutlass.range_constexpr(ROWS):
        row = half.scores.row(r)
        total = sums[row, 0] + sums[row, 1]  # in one order: both warpgroups, and both runs, get the same
        scale[r], lse[r] = end_of_row(total, half.row_max[r])
    scale_rows(half.out, scale)


@cute.jit
def write_whole(block: MlaBlock, half: Half, who: Int32, columns: cute.Tensor, tile: QueryTile, lse: cute.Tensor):
    """Write this warpgroup's half of O from its registers, rounded, and the log-sum-exp.

    There is no room to stage it but Q's, which the next tile's rows take meanwhile.
    """
    if who == 0:
        write_lse(lse, half.scores, tile, block.mLSE)
    write_rows(block.gO, half.scores, half.out, columns, tile)
