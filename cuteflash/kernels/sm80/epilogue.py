"""After the main loop: divide by the row sums, write the log-sum-exp and O."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from cuteflash.core.gqa import row_token
from cuteflash.core.mask import IntervalMask
from cuteflash.core.softmax import scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.bundles import Fragments
from cuteflash.kernels.sm80.load import query_chunk


@cute.jit
def normalise(kernel: cutlass.Constexpr, f: Fragments, tile: QueryTile, mask: IntervalMask, mLSE: cute.Tensor | None):
    """Divide O by the row sums; write the log-sum-exp where it is asked for."""
    lse = cute.make_rmem_tensor_like(f.row_scale)
    f.softmax.finish(f.row_scale, lse)
    scale_rows(f.out, f.row_scale)
    if const_expr(mLSE is not None):
        packed = kernel.problem.operands.packed_heads
        rows = tile.rows(mask, packed)
        if f.first_column == 0:
            for r in cutlass.range_constexpr(cute.size(lse)):
                row = f.first_row + f.columns[r, 0][0]
                token, head = row_token(row, packed)
                if row < rows:
                    mLSE[tile.batch, tile.head * packed + head, tile.first_token + token] = lse[r]


@cute.jit
def write_output(
    kernel: cutlass.Constexpr, f: Fragments, gO: cute.Tensor, sO: cute.Tensor, tile: QueryTile, mask: IntervalMask
):
    """Stage O in shared memory and store it by whole 16-byte chunks; gO (rows, head_dim_v) as in `load_q`."""
    traits, packed, head_dim_v = kernel.traits, kernel.problem.operands.packed_heads, kernel.problem.operands.head_dim_v
    rounded = cute.make_rmem_tensor_like(f.acc_O, kernel.dtype)
    rounded.store(f.acc_O.load().to(kernel.dtype))
    stage = kernel.copy_o().get_slice(f.thread)
    cute.arch.sync_threads()  # O lies where other warps may still read Q, K and V
    cute.copy(stage, stage.retile(rounded), stage.partition_D(sO))
    cute.arch.sync_threads()

    copy = kernel.store_copy(traits.head_dim_v)
    mine = copy.get_slice(f.thread)
    tOsO = mine.partition_S(sO)
    coords = mine.partition_S(cute.make_identity_tensor((traits.tile_m, traits.head_dim_v)))
    tOrO = cute.make_rmem_tensor_like(tOsO)
    cute.copy(copy, tOsO, tOrO)
    rows = tile.rows(mask, packed)
    for i in cutlass.range_constexpr(cute.size(tOsO.shape[1])):
        row = coords[0, i, 0][0]
        if row < rows:
            for slab in cutlass.range_constexpr(cute.size(tOsO.shape[2])):
                column = coords[0, i, slab][1]
                if const_expr(head_dim_v == traits.head_dim_v):
                    cute.copy(copy, tOrO[None, i, slab], query_chunk(gO, tile, row, column, packed))
                elif column < head_dim_v:
                    cute.copy(copy, tOrO[None, i, slab], query_chunk(gO, tile, row, column, packed))
