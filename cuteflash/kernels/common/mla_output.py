"""O of a whole tile of latent attention from registers to memory, in both families."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cuteflash.core.convert import round_pair
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import LN_2
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_combine import QUAD, chunk_of, copy_chunk

OCTET = 8  # 16-bit elements of a store


def end_of_row(total: Float32, maximum: Float32) -> tuple[Float32, Float32]:
    """(what a row of O is multiplied with, its log-sum-exp) by the sum of its exponentials; 0 and -inf without a key.

    `maximum` is what the exponents of 2 were shifted by.
    """
    empty = total == 0.0
    lse = (maximum + cute.math.log2(total, fastmath=True)) * LN_2
    return (
        cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total)),
        cutlass.select_(empty, -Float32.inf, lse),
    )


@cute.jit
def write_rows(gO: cute.Tensor, scores: ScoreTile, out: cute.Tensor, columns: cute.Tensor, tile: QueryTile):
    """Write this thread's rows of O, rounded.

    Four lanes that have pairs of the same 32 columns trade them, so that each stores 8 neighbours.

    Args:
        gO: (rows, 512, batch).
        scores: for the rows of this thread's elements.
        out: its elements of O as (rows, columns), pairs of neighbouring groups of 8.
        columns: likewise, the coordinates of its elements in the tile.
    """
    dtype = gO.element_type
    rows = tile.rows()
    place = cute.arch.lane_idx() % QUAD  # among the lanes of a row
    for r in cutlass.range_constexpr(cute.size(out.shape[0])):
        row = scores.row(r)
        line = gO[tile.first_row + row, None, tile.batch]
        for c in cutlass.range_constexpr(0, cute.size(out.shape[1]), OCTET):
            pairs = [round_pair(out[r, c + i], out[r, c + i + 1], dtype) for i in range(0, OCTET, 2)]
            octet = cute.make_rmem_tensor(OCTET, dtype)
            words = cute.recast_tensor(octet, Uint32)
            for i, word in enumerate(transposed_in_quads(pairs, place)):
                words[i] = word
            if row < rows:
                start = columns[0, c][1] + place * (OCTET - 2)  # the thread's first pair is the place-th of its group
                copy_chunk(octet, chunk_of(line, start, OCTET))


def transposed_in_quads(words: list[Uint32], place: Int32) -> list[Uint32]:
    """Of four neighbouring lanes with four words each, lane `place` gets word `place` of each lane, in their order."""
    words = list(words)
    for bit in (1, 2):
        upper = place & bit != 0
        for low in (i for i in range(QUAD) if not i & bit):
            high = low | bit
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, words[low], words[high]), offset=bit)
            words[low], words[high] = (
                cutlass.select_(upper, other, words[low]),
                cutlass.select_(upper, words[high], other),
            )
    return words
