"""The output sink of the forward: rounded O, whole 16-byte chunks."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm80.bundles import Fragments
from cuteflash.kernels.sm80.cache_mma import stage_quads
from cuteflash.kernels.sm80.load import query_chunk


@cute.jit
def write_output(kernel: cutlass.Constexpr, f: Fragments, gO: cute.Tensor, sO: cute.Tensor, tile: QueryTile):
    """Stage O in shared memory and store it by whole 16-byte chunks; gO (rows, head_dim_v) as in `load_q`."""
    traits, head_dim_v = kernel.traits, kernel.problem.operands.head_dim_v
    cute.arch.sync_threads()  # O overlaps Q, K and V, which other warps may still read
    if const_expr(kernel.converts):
        stage_quads(f, sO)
    else:
        rounded = cute.make_rmem_tensor_like(f.acc_O, kernel.dtype)
        rounded.store(f.acc_O.load().to(kernel.dtype))
        stage = kernel.copy_o().get_slice(f.thread)
        cute.copy(stage, stage.retile(rounded), stage.partition_D(sO))
    cute.arch.sync_threads()

    copy = kernel.store_copy(traits.head_dim_v)
    mine = copy.get_slice(f.thread)
    tOsO = mine.partition_S(sO)
    coords = mine.partition_S(cute.make_identity_tensor((traits.tile_m, traits.head_dim_v)))
    tOrO = cute.make_rmem_tensor_like(tOsO)
    cute.copy(copy, tOsO, tOrO)
    rows = tile.rows()
    for i in cutlass.range_constexpr(cute.size(tOsO.shape[1])):
        row = coords[0, i, 0][0]
        if row < rows:
            for slab in cutlass.range_constexpr(cute.size(tOsO.shape[2])):
                column = coords[0, i, slab][1]
                if const_expr(head_dim_v == traits.head_dim_v):
                    cute.copy(copy, tOrO[None, i, slab], query_chunk(gO, tile, row, column))
                elif column < head_dim_v:
                    cute.copy(copy, tOrO[None, i, slab], query_chunk(gO, tile, row, column))
