"""Steps whose softmax does not update the row maxima, and the repair of a block whose scores exceed them by too much.

Rows with `fixed_max` take the maxima of a tile's first scores; masked blocks still update them, unless the traits say
`masked_by_fixed_max`. All other blocks use the present maxima without comparing: exponentials are rounded into P's
registers, while S stays in its own. Each thread's sum of its exponentials then tells whether a score exceeded its row's
maximum by too much. If so, the warp redoes the block's softmax from S with updated maxima, and rescales O and the row
sums.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from cuteflash.core.convert import rounded_words
from cuteflash.core.softmax import scale_rows
from cuteflash.kernels.sm90.bundles import Rings
from cuteflash.kernels.sm90.products import await_pv, product_both
from cuteflash.kernels.sm90.warpgroup import ROWS, Warpgroup, at_block, round_p, store_p_row, take_v_scale
from cuteflash.problem import E4M3_MAX
from cuteflash.traits.sm90 import WGMMA_M

# Limit of the sum of a thread's exponentials of one row and block. Rounding is relative, so larger P cost no accuracy,
# but the key that dominates a row should keep its P of 1, which is exact: up to 2^9 a row's rms error is that of
# moving maxima. Those of 8 bits saturate beyond 448.
LARGEST_SUM = 2.0**9


@cute.jit
def fixed_steps(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    rings: Rings,
    count: Int32,
    n_block: Int32,
    position: Int32,
    masked: cutlass.Constexpr[bool] = False,
):
    """`count` steps over blocks that every row sees whole, or `masked` ones, backwards from the one before `n_block`.

    Returns the next K/V position. With `repair_apart` the repair lies outside of the inner loop, which is then as short
    as one without repairs.
    """
    anchor = n_block + position  # the sum of a step's block and position, plus 1
    if const_expr(kernel.traits.repair_apart):
        while count > 0:
            while count > 0:  # steps to go; negative, with all bits flipped, after a block that needs a repair
                sums, outgrown = fixed_step(kernel, wg, rings, anchor - 1 - position, position, masked)
                if not outgrown:
                    wg.softmax.add(sums)
                position += 1
                count = cutlass.select_(outgrown, ~(count - 1), count - 1)
            if count < 0:
                repair(at_block(kernel, wg, anchor - position))
                count = ~count
    else:
        for _ in cutlass.range(count, unroll=1):
            sums, outgrown = fixed_step(kernel, wg, rings, anchor - 1 - position, position, masked)
            if outgrown:
                repair(at_block(kernel, wg, anchor - 1 - position))
            else:
                wg.softmax.add(sums)
            position += 1
    return position


def fixed_step(
    kernel, wg: Warpgroup, rings: Rings, n_block: Int32, position: Int32, masked: bool
) -> tuple[cute.Tensor, Boolean]:
    """One step; returns its row sums, and whether the warp has to repair the block, in which case they are invalid."""
    wg = at_block(kernel, wg, n_block)
    product_both(kernel, wg, rings, position)
    if masked:
        wg.scores.prepare(kernel.problem.scores, n_block * kernel.traits.tile_n, wg.bounds)
    else:
        wg.scores.prepare(kernel.problem.scores, Int32(0), None)
    sums = fixed_softmax(kernel, wg, rings, position)
    take_v_scale(wg, n_block)
    return sums, is_outgrown(wg, sums)


def fixed_softmax(kernel, wg: Warpgroup, rings: Rings, position: Int32) -> cute.Tensor:
    """P of the scores, once the PV product at `position` has left P's registers and V; returns P's row sums.

    The order in which rows are exponentiated, added up and rounded is the one ptxas schedules best. Rows that are
    rounded before the wait lie in other registers than P's, which the product still reads.
    """
    sums = cute.make_rmem_tensor_like(wg.softmax.row_sum)
    ahead = [list(rounded_row(kernel, wg, row, sums)) for row in range(kernel.traits.exp_rows_before_wait)]
    if ahead:
        rings.v.wait(position)  # V landed before: a branch, past which ptxas does not move the exponentials
    await_pv(wg, rings, position)
    for row in range(ROWS):
        if row < len(ahead):
            # Not a move, which ptxas would leave out and round into P's registers right away.
            store_p_row(wg, row, [word ^ wg.zero for word in ahead[row]])
        else:
            store_p_row(wg, row, rounded_row(kernel, wg, row, sums))
    return sums


def rounded_row(kernel, wg: Warpgroup, row: int, sums: cute.Tensor) -> Iterator[Uint32]:
    """A row's exponentials, rounded to P's registers."""
    return rounded_words(exponentials(wg, row, sums), kernel.p_dtype)


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
        outgrown = sums[row] > (E4M3_MAX if wg.tOrP.element_type.width == 8 else LARGEST_SUM)
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
