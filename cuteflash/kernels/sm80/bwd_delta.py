"""Row statistics of lone tiles: delta = rowsum(dO * O) - dLSE, and LSE * log2(e), by the block that needs them.

Threads sum up the rows that they have copied: no barrier stands between the copies and the sums.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cuteflash.core.softmax import LOG2_E
from cuteflash.kernels.sm80.bwd_bundles import QuerySources
from cuteflash.traits.chunks import CHUNK, swizzle_width


def rows_of(kernel, thread: Int32) -> tuple[list[Int32], int]:
    """The rows of a tile of O that a thread copies, and how many neighbours copy a row together."""
    traits = kernel.traits
    lanes = swizzle_width(traits.head_dim_v) // CHUNK
    at_once = traits.num_threads // lanes
    return [thread // lanes + first for first in range(0, traits.tile_m, at_once)], lanes


@cute.jit
def load_statistics(kernel: cutlass.Constexpr, loads: QuerySources, place: tuple, stage: Int32 | int, thread: Int32):
    """Issue the copies of LSE and its gradient to the places of what becomes of them; `place` is (block, head)."""
    m_block, head = place
    first = m_block * kernel.traits.tile_m
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.ALWAYS), Float32, num_bits_per_copy=Float32.width
    )
    rows, lanes = rows_of(kernel, thread)
    if thread % lanes == 0:
        for row in rows:
            if row < loads.seqlen_q - first:
                for gX, sX in ((loads.lone.lse, loads.tiles.sLSE), (loads.lone.dlse, loads.tiles.sDelta)):
                    if const_expr(gX is not None):
                        source = cute.zipped_divide(gX[None, head], (1,))[None, first + row]
                        cute.copy(atom, source, cute.zipped_divide(sX[None, stage], (1,))[None, row])


@cute.jit
def sum_rows(kernel: cutlass.Constexpr, loads: QuerySources, m_block: Int32, stage: Int32 | int, thread: Int32):
    """Put the statistics of the rows whose copies this thread has waited for in place; a barrier has to come after it.

    Rows without a key and rows past the end get LSE +inf and delta 0, with which P is 0.
    """
    tiles = loads.tiles
    copy = kernel.store_copy(kernel.traits.head_dim_v)
    mine = copy.get_slice(thread)
    rO, rdO = (fetch(copy, mine.partition_S(sX[None, None, stage])) for sX in (tiles.sO, tiles.sdO))
    count = loads.seqlen_q - m_block * kernel.traits.tile_m
    rows, lanes = rows_of(kernel, thread)
    for i in cutlass.range_constexpr(len(rows)):
        delta = Float32(0.0)
        for slab in cutlass.range_constexpr(cute.size(rO.shape[2])):
            products = rO[None, i, slab].load().to(Float32) * rdO[None, i, slab].load().to(Float32)
            delta = delta + products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        delta = cute.arch.warp_reduction_sum(delta, threads_in_group=lanes)
        if thread % lanes == 0:
            lse = tiles.sLSE[rows[i], stage]
            if const_expr(loads.lone.dlse is not None):
                delta = delta - tiles.sDelta[rows[i], stage]
            hidden = rows[i] >= count or lse == -Float32.inf
            tiles.sDelta[rows[i], stage] = Float32(0.0) if hidden else delta
            tiles.sLSE[rows[i], stage] = Float32.inf if hidden else lse * LOG2_E


def fetch(copy: cute.TiledCopy, staged: cute.Tensor) -> cute.Tensor:
    """Shared memory in registers."""
    piece = cute.make_rmem_tensor_like(staged)
    cute.copy(copy, staged, piece)
    return piece
