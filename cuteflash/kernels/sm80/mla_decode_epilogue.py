"""The end of a tile of the sm80 latent-attention decode: sums, O and log-sum-exp, to memory or to be merged."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cuteflash.core.finish import write_lse
from cuteflash.core.softmax import quad_sum, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import rows_view
from cuteflash.kernels.common.mla_output import end_of_row, write_rows
from cuteflash.kernels.common.mla_parts import QUAD, Part, chunks_of
from cuteflash.kernels.sm80.mla_bundles import MlaBlock, MlaFragments
from cuteflash.kernels.sm80.mla_softmax import ROWS
from cuteflash.mla_problem import LATENT_DIM_V


@cute.jit
def finish(kernel: cutlass.Constexpr, block: MlaBlock, f: MlaFragments, tile: QueryTile):
    """Write O and the log-sum-exp of a tile, or of a block's share of its keys, together with those of others."""
    lse = cute.make_rmem_tensor(cute.size(f.out.values.shape[0]), Float32)
    normalize(kernel, block, f, lse)
    columns = cute.make_identity_tensor((kernel.traits.tile_m, LATENT_DIM_V))
    columns = rows_view(f.mma_pv.get_slice(f.thread).partition_C(columns))
    if const_expr(block.parts is None):
        write_whole(block, f, columns, tile, lse)
    else:
        threads = f.thread, kernel.traits.num_warps, cute.arch.sync_threads
        whole = functools.partial(write_whole, block, f, columns, tile, lse)
        block.parts.finish(Part(f.out, f.out.values, chunks_of(columns, QUAD), lse), tile, threads, whole)


@cute.jit
def normalize(kernel: cutlass.Constexpr, block: MlaBlock, f: MlaFragments, lse: cute.Tensor):
    """Divide O by the rows' sums; `lse` gets the log-sum-exp, of a row without a key -inf (and O is 0)."""
    sums, maxima = block.tiles.by_warps, block.tiles.of_rows
    cute.arch.sync_threads()  # every warp has read the last step's factors
    for r in cutlass.range_constexpr(ROWS):
        total, row = quad_sum(f.row_sum[r]), f.scores.row(r)
        if f.thread % 4 == 0:
            sums[row, f.key_group] = total
        if f.scores.first_key == 0:
            maxima[row] = f.row_max[r]
    cute.arch.sync_threads()
    scale = cute.make_rmem_tensor_like(lse)
    for r in cutlass.range_constexpr(cute.size(lse)):
        row = f.out.row(r)
        total = sums[row, 0]
        for w in cutlass.range_constexpr(1, kernel.traits.key_groups):
            total = total + sums[row, w]
        scale[r], lse[r] = end_of_row(total, maxima[row])
    scale_rows(f.out.values, scale)


@cute.jit
def write_whole(block: MlaBlock, f: MlaFragments, columns: cute.Tensor, tile: QueryTile, lse: cute.Tensor):
    """Write O from registers, rounded, and the log-sum-exp."""
    write_lse(lse, f.out, tile, block.mLSE)
    write_rows(block.gO, f.out, f.out.values, columns, tile)
