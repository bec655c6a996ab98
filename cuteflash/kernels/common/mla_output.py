"""O of a whole tile of latent attention from registers to memory, in both families."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import LN_2
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.octets import LANES, OCTET, octet_of_lane, store_octet
from cuteflash.kernels.common.weighted_sum import quick_inverse_of


def end_of_row(total: Float32, maximum: Float32) -> tuple[Float32, Float32]:
    """(what a row of O is multiplied with, its log-sum-exp) by the sum of its exponentials; 0 and -inf without a key.

    `maximum` is what the exponents of 2 were shifted by.
    """
    lse = (maximum + cute.math.log2(total, fastmath=True)) * LN_2
    return quick_inverse_of(total), cutlass.select_(total == 0.0, -Float32.inf, lse)


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
    place = cute.arch.lane_idx() % LANES  # among the lanes of a row
    for r in cutlass.range_constexpr(cute.size(out.shape[0])):
        row = scores.row(r)
        line = gO[tile.first_row + row, None, tile.batch]
        for c in cutlass.range_constexpr(0, cute.size(out.shape[1]), OCTET):
            octet = octet_of_lane([out[r, c + i] for i in range(OCTET)], place, dtype)
            if row < rows:
                start = columns[0, c][1] + place * (OCTET - 2)  # the thread's first pair is the place-th of its group
                store_octet(octet, line, start)
