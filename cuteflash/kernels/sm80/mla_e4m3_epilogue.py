"""The end of a tile of the latent-attention decode from an e4m3 cache: O and log-sum-exp, to memory or to be merged.

A thread has four neighbouring columns of every 16 of its warp's: the even ones of them in one group of 8 of the
product, the odd ones in the next.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cuteflash.core.convert import round_pair
from cuteflash.core.finish import write_lse
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import PAIR, QUAD, Chunk, Part, chunk_of, copy_chunk
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_decode_epilogue import normalize
from cuteflash.kernels.sm80.mla_e4m3_bundles import E4m3Fragments
from cuteflash.traits.sm80 import MMA_K

PAIRS_APART = 4  # places between neighbouring pairs of columns of partial results


@cute.jit
def finish(kernel: cutlass.Constexpr, block: MlaBlock, f: E4m3Fragments, tile: QueryTile):
    """Write O and the log-sum-exp of a tile, or of a block's share of its keys, together with those of others."""
    lse = cute.make_rmem_tensor(cute.size(f.out.values.shape[0]), Float32)
    normalize(kernel, block, f, lse)
    values, descale = f.out.values, block.descale[tile.batch]
    for r in cutlass.range_constexpr(cute.size(values.shape[0])):
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            values[r, c] = values[r, c] * descale
    if const_expr(block.parts is None):
        write_whole(kernel, block, f, tile, lse)
    else:
        threads = f.thread, kernel.traits.num_warps, cute.arch.sync_threads
        whole = functools.partial(write_whole, kernel, block, f, tile, lse)
        block.parts.finish(Part(f.out, values, pairs_of(kernel, f), lse), tile, threads, whole)


def pairs_of(kernel, f: E4m3Fragments) -> list[Chunk]:
    """The chunks of a thread, pairs at their places in a row of partial results."""
    columns, t = kernel.traits.warp_columns, f.lane % QUAD
    first = f.warp * columns + t % 2 * (2 * QUAD) + t // 2 * PAIR
    return [
        ((2 * PAIR * group + i, 2 * PAIR * group + PAIR + i), first + group * MMA_K + i * PAIRS_APART)
        for group in range(columns // MMA_K)
        for i in range(QUAD // PAIR)
    ]


def quad_of(f: E4m3Fragments, r: int, group: int) -> cute.Tensor:
    """The four neighbouring columns of a row that the thread has of the `group`-th 16 of its warp."""
    quad = cute.make_rmem_tensor(QUAD, Float32)
    for i in range(QUAD):
        quad[i] = f.out.values[r, 2 * PAIR * group + i % 2 * PAIR + i // 2]
    return quad


@cute.jit
def write_whole(kernel: cutlass.Constexpr, block: MlaBlock, f: E4m3Fragments, tile: QueryTile, lse: cute.Tensor):
    """Write O from registers, rounded, and the log-sum-exp."""
    write_lse(lse, f.out, tile, block.mLSE)
    columns = kernel.traits.warp_columns
    first, rows, dtype = f.warp * columns + f.lane % QUAD * QUAD, tile.rows(), block.gO.element_type
    for r in cutlass.range_constexpr(cute.size(lse)):
        row = f.out.row(r)
        if row < rows:
            line = block.gO[tile.first_row + row, None, tile.batch]
            for group in cutlass.range_constexpr(columns // MMA_K):
                quad, rounded = quad_of(f, r, group), cute.make_rmem_tensor(QUAD, dtype)
                words = cute.recast_tensor(rounded, Uint32)
                for i in cutlass.range_constexpr(QUAD // PAIR):
                    words[i] = round_pair(quad[PAIR * i], quad[PAIR * i + 1], dtype)
                copy_chunk(rounded, chunk_of(line, first + group * MMA_K, QUAD))
