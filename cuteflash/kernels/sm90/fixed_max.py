"""Steps whose softmax does not update the row maxima, and the repair of a block whose scores exceed them by too much.

Rows with `fixed_max` take the maxima of a tile's first scores; masked blocks still update them. All other blocks use
the present maxima without comparing: exponentials are rounded into P's registers, while S stays in its own. Each
thread's sum of its exponentials then tells whether a score exceeded its row's maximum by too much. If so, the warp
redoes the block's softmax from S with updated maxima, and rescales O and the row sums.
"""

from __future__ import annotations

import functools
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.core.convert import rounded_words
from cuteflash.core.softmax import scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm90.bundles import Rings
from cuteflash.kernels.sm90.products import await_pv, product_both
from cuteflash.kernels.sm90.warpgroup import ROWS, Warpgroup, at_block, round_p, store_p_row, take_v_scale
from cuteflash.traits.sm90 import WGMMA_M

# Limit of the sum of a thread's exponentials of one row and block. Rounding is relative, so larger P cost no accuracy,
# but the key that dominates a row should keep its P of 1, which is exact: up to 2^9 a row's rms error is that of
# moving maxima. Those of 8 bits would saturate beyond 448.
LARGEST_SUM = 2.0**9
LARGEST_E4M3 = 448.0


@cute.jit
def fixed_steps(kernel: cutlass.Constexpr, wg: Warpgroup, rings: Rings, count: Int32, n_block: Int32, position: Int32):
    """`count` steps over blocks that every row sees whole, backwards from the one before `n_block`.

    Returns the next K/V position. With `repair_apart` the repair lies outside of the inner loop, which is then as short
    as one without repairs.
    """
    anchor = n_block + position  # the sum of a step's block and position, plus 1
    if const_expr(kernel.traits.repair_apart):
        while count > 0:
            while count > 0:  # steps to go; negative, with all bits flipped, after a block that needs a repair
                sums, outgrown = fixed_step(kernel, wg, rings, anchor - 1 - position, position)
                if not outgrown:
                    wg.softmax.add(sums)
                position += 1
                count = cutlass.select_(outgrown, ~(count - 1), count - 1)
            if count < 0:
                repair(at_block(kernel, wg, anchor - position))
                count = ~count
    else:
        for _ in cutlass.range(count, unroll=1):
            sums, outgrown = fixed_step(kernel, wg, rings, anchor - 1 - position, position)
            if outgrown:
                repair(at_block(kernel, wg, anchor - 1 - position))
            else:
                wg.softmax.add(sums)
            position += 1
    return position


def leave_out(wg: Warpgroup, part: QueryTile) -> None:
    """Give rows after the last one of `part` an infinite maximum: their exponentials are 0 and ask for no repair.

    The scores of rows whose Q is zero are all equal, so that a thread's exponentials of a block sum to
    `2**p_offset * tile_n / 4`, which may be above the limit for 8 bits. What comes of these rows is not stored.
    """
    rows = part.rows()
    for row in range(ROWS):
        peak = wg.softmax.row_max[row]
        wg.softmax.row_max[row] = cutlass.select_(wg.scores.row(row) < rows, peak, Float32.inf)


def fixed_step(kernel, wg: Warpgroup, rings: Rings, n_block: Int32, position: Int32) -> tuple[cute.Tensor, Boolean]:
    """One step; returns its row sums, and whether the warp has to repair the block, in which case they are invalid."""
    wg = at_block(kernel, wg, n_block)
    product_both(kernel, wg, rings, position)
    wg.scores.prepare(kernel.problem.scores, Int32(0), None)
    sums = fixed_softmax(kernel, wg, rings, position)
    take_v_scale(wg, n_block)
    return sums, is_outgrown(wg, sums)


def fixed_softmax(kernel, wg: Warpgroup, rings: Rings, position: Int32) -> cute.Tensor:
    """P of the scores, once the PV product at `position` has left P's registers and V; returns P's row sums.

    The order in which rows are exponentiated, added up and rounded is the one ptxas schedules best.
    """
    sums = cute.make_rmem_tensor_like(wg.softmax.row_sum)
    ahead = [exponentials(wg, row, sums) for row in range(kernel.traits.exp_rows_before_wait)]
    if ahead:
        rings.v.wait(position)  # V landed before: a branch, past which ptxas does not move the exponentials
    await_pv(wg, rings, position)
    for row in range(ROWS):
        values = ahead[row] if row < len(ahead) else exponentials(wg, row, sums)
        store_p_row(wg, row, rounded_words(values, kernel.p_dtype))
    return sums


def exponentials(wg: Warpgroup, row: int, sums: cute.Tensor) -> list[Float32]:
    """A row's exponentials beside its scores, which stay; `sums` gets their sum."""
    values = list(wg.softmax.exponentials(wg.scores.values, row))
    sums[row] = functools.reduce(operator.add, values)
    return values


def is_outgrown(wg: Warpgroup, sums: cute.Tensor) -> Boolean:
    """Whether a row of this warp has scores too far above its maximum. NaN does not count: it stays in its row."""
    packed = wg.scores.packed_heads
    found = Boolean(False)
    for row in range(ROWS):
        outgrown = sums[row] > (LARGEST_E4M3 if wg.tOrP.element_type.width == 8 else LARGEST_SUM)
        if WGMMA_M % packed != 0:  # the last rows belong to no token and were never loaded
            outgrown = outgrown & (wg.scores.row(row) < WGMMA_M // packed * packed)
        found = found | outgrown
    return cute.arch.vote_any_sync(found)


@cute.jit
def repair(wg: Warpgroup):
    """Redo the block's softmax from its scores with updated maxima. No product may be in flight."""
    wg.softmax.take_peaks(wg.scores.values, False)
    scale_rows(wg.out, wg.softmax.row_scale)
    for row in cutlass.range_constexpr(ROWS):
        wg.softmax.exponentiate(wg.scores.values, row)
    round_p(wg)
