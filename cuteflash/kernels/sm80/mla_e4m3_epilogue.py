"""The end of a tile of the latent-attention decode from an e4m3 cache: O and log-sum-exp, to memory or to be merged.

A thread has four neighbouring columns of every 16 of its warp's: the even ones of them in one group of 8 of the
product, the odd ones in the next.
"""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cuteflash.core.convert import round_pair
from cuteflash.core.finish import write_lse
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import PAIR, QUAD, Chunk, LatentParts, Part, chunk_of, copy_chunk
from cuteflash.kernels.sm80.mla_bundles import MlaBlock
from cuteflash.kernels.sm80.mla_decode_epilogue import normalize
from cuteflash.kernels.sm80.mla_e4m3_bundles import E4m3Fragments
from cuteflash.traits.sm80 import MMA_K


@dataclasses.dataclass(frozen=True)
class NeighbourParts(LatentParts):
    """The partial results of a launch, in the order of O's columns."""

    def write_chunk(
        self, tile: QueryTile, row: Int32, chunk: Int32, acc: cute.Tensor, out: cute.Tensor | None = None
    ) -> None:
        """Round four columns of a row and store them."""
        write_quad(self.gO[tile.first_row + row, None, tile.batch], chunk * QUAD, acc)


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
        block.parts.finish(Part(f.out, values, quads_of(kernel, f), lse), tile, threads, whole)


def quads_of(kernel, f: E4m3Fragments) -> list[Chunk]:
    """The numbers of a thread's neighbouring columns in a row of its elements, and where the first of them belongs."""
    columns = kernel.traits.warp_columns
    first = f.warp * columns + f.lane % QUAD * QUAD
    return [
        (tuple(QUAD * group + i % 2 * PAIR + i // 2 for i in range(QUAD)), first + group * MMA_K)
        for group in range(columns // MMA_K)
    ]


def write_quad(line: cute.Tensor, column: Int32, quad: cute.Tensor) -> None:
    """Round four neighbouring elements, and store them in a row of O from `column` on."""
    rounded = cute.make_rmem_tensor(QUAD, line.element_type)
    words = cute.recast_tensor(rounded, Uint32)
    for i in range(QUAD // PAIR):
        words[i] = round_pair(quad[PAIR * i], quad[PAIR * i + 1], line.element_type)
    copy_chunk(rounded, chunk_of(line, column, QUAD))


@cute.jit
def write_whole(kernel: cutlass.Constexpr, block: MlaBlock, f: E4m3Fragments, tile: QueryTile, lse: cute.Tensor):
    """Write O from registers, rounded, and the log-sum-exp."""
    write_lse(lse, f.out, tile, block.mLSE)
    quads, rows = quads_of(kernel, f), tile.rows()
    for r in cutlass.range_constexpr(cute.size(lse)):
        row = f.out.row(r)
        if row < rows:
            line = block.gO[tile.first_row + row, None, tile.batch]
            for numbers, column in quads:
                quad = cute.make_rmem_tensor(QUAD, Float32)
                for i, number in enumerate(numbers):
                    quad[i] = f.out.values[r, number]
                write_quad(line, column, quad)
