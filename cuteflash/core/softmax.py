"""The online softmax on accumulator fragments, and the score arithmetic around it.

Each thread holds whole columns of some rows; four neighbouring lanes (a quad) hold one row of S together. The row
maximum is reduced over the quad every step, the row sum stays per thread and is reduced once at the end.
Exponentials are base 2: `softmax_scale * log2(e)` is folded into one fused multiply-add before each of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Self

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
MAX_CHAINS = 4


def exp2(x: Float32) -> Float32:
    """2**x by `ex2.approx.ftz`."""
    return cute.math.exp2(x, fastmath=True)


def quad_max(value: Float32) -> Float32:
    """The largest of the values of four neighbouring lanes."""
    for lanes in (1, 2):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=lanes))
    return value


def quad_sum(value: Float32) -> Float32:
    """The sum of the values of four neighbouring lanes."""
    for lanes in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=lanes)
    return value


def row_peak(scores: cute.Tensor, row: int) -> Float32:
    """The largest score of a row in this thread, by independent chains that hide each other's latency."""
    cols = cute.size(scores.shape[1])
    peaks = [scores[row, c] for c in range(MAX_CHAINS)]
    for c in range(MAX_CHAINS, cols):
        peaks[c % MAX_CHAINS] = cute.arch.fmax(peaks[c % MAX_CHAINS], scores[row, c])
    while len(peaks) > 1:
        peaks = [cute.arch.fmax(a, b) for a, b in zip(peaks[::2], peaks[1::2], strict=True)]
    return peaks[0]


@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """Running row maxima and sums of one thread's rows.

    Attributes:
        row_max, row_sum: fp32 register tensors, one element a row of this thread.
        scale_log2: softmax_scale * log2(e), what a score is multiplied with before exp2.
        check_inf: whether a row may hold nothing but -inf so far (masked kernels).
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    check_inf: cutlass.Constexpr[bool]

    @classmethod
    def create(cls, num_rows: int, scale_log2: Float32, check_inf: bool) -> Self:
        """A softmax that has seen nothing yet, for `num_rows` rows a thread."""
        row_max = cute.make_rmem_tensor(num_rows, Float32)
        row_sum = cute.make_rmem_tensor(num_rows, Float32)
        return cls(row_max, row_sum, scale_log2, check_inf)

    @cute.jit
    def step(self, scores: cute.Tensor, row_scale: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Turn `scores` (rows, columns) into exponentials, in place; `row_scale` gets what O shrinks by."""
        self.take_peaks(scores, row_scale, is_first)
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            self.exponentiate(scores, r)

    @cute.jit
    def take_peaks(self, scores: cute.Tensor, row_scale: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Move the row maxima to those of `scores` (rows, columns); `row_scale` gets what sums and O shrink by.

        On the first block nothing was accumulated: the maxima are set, the sums are 0 and `row_scale` is 1.
        """
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            peak = quad_max(row_peak(scores, r))
            if const_expr(is_first):
                row_scale[r] = Float32(1.0)
                self.row_sum[r] = Float32(0.0)
                self.row_max[r] = peak
            else:
                old = self.row_max[r]
                self.row_max[r] = cute.arch.fmax(old, peak)
                row_scale[r] = exp2(old * self.scale_log2 - self.shift(r))
                self.row_sum[r] = self.row_sum[r] * row_scale[r]

    def finite_max(self, row: int) -> Float32:
        """A row's maximum, or 0 where no key was visible yet: exp2(-inf - -inf) would be NaN."""
        peak = self.row_max[row]
        return cutlass.select_(peak == -Float32.inf, Float32(0.0), peak) if self.check_inf else peak

    def shift(self, row: int) -> Float32:
        """What is subtracted from a row's scaled scores."""
        return self.finite_max(row) * self.scale_log2

    def exponentials(self, scores: cute.Tensor, row: int) -> Iterator[Float32]:
        """The exponentials of one row of `scores` under the present maximum, one by one."""
        shift = self.shift(row)
        for c in range(cute.size(scores.shape[1])):
            yield exp2(scores[row, c] * self.scale_log2 - shift)

    def exponentiate(self, scores: cute.Tensor, row: int) -> None:
        """Exponentials of one row of `scores`, in place, added to its sum."""
        total = self.row_sum[row]
        for c, p in enumerate(self.exponentials(scores, row)):
            scores[row, c] = p
            total = total + p
        self.row_sum[row] = total

    def add(self, sums: cute.Tensor) -> None:
        """Add exponentials that were summed up apart to the row sums."""
        for r in range(cute.size(sums)):
            self.row_sum[r] = self.row_sum[r] + sums[r]

    @cute.jit
    def finish(self, row_scale: cute.Tensor, lse: cute.Tensor):
        """`row_scale` gets 1 / row sum, `lse` the natural-log log-sum-exp; rows without a key get 0 and -inf."""
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = quad_sum(self.row_sum[r])
            empty = total == 0.0
            row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log2_sum = self.row_max[r] * self.scale_log2 + cute.math.log2(total, fastmath=True)
            lse[r] = -Float32.inf if empty else log2_sum * LN_2


@dataclasses.dataclass(frozen=True)
class PlainSoftmax(OnlineSoftmax):
    """The same as a textbook has it: scores are scaled first, exponentials natural, row sums reduced every step.

    It shows what `OnlineSoftmax` saves. `row_max` is of scaled scores.
    """

    @cute.jit
    def take_peaks(self, scores: cute.Tensor, row_scale: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Scale `scores`, then as `OnlineSoftmax.take_peaks`."""
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * (self.scale_log2 * LN_2)
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            old = -Float32.inf if const_expr(is_first) else self.row_max[r]
            self.row_max[r] = cute.arch.fmax(old, quad_max(row_peak(scores, r)))
            row_scale[r] = exp2((old - self.finite_max(r)) * LOG2_E)
            self.row_sum[r] = self.row_sum[r] * row_scale[r]

    def exponentials(self, scores: cute.Tensor, row: int) -> Iterator[Float32]:
        """The exponentials of one row of scaled `scores` under the present maximum, one by one."""
        shift = self.finite_max(row)
        for c in range(cute.size(scores.shape[1])):
            yield exp2((scores[row, c] - shift) * LOG2_E)

    def exponentiate(self, scores: cute.Tensor, row: int) -> None:
        """Exponentials of one row of scaled `scores`, in place, added to its sum over the quad."""
        before = self.row_sum[row]
        self.row_sum[row] = Float32(0.0)
        super().exponentiate(scores, row)
        self.row_sum[row] = before + quad_sum(self.row_sum[row])

    @cute.jit
    def finish(self, row_scale: cute.Tensor, lse: cute.Tensor):
        """As `OnlineSoftmax.finish`; the sums are those of whole rows already."""
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = self.row_sum[r]
            empty = total == 0.0
            row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log_sum = self.row_max[r] + cute.math.log2(total, fastmath=True) * LN_2
            lse[r] = -Float32.inf if empty else log_sum


@cute.jit
def scale_rows(acc: cute.Tensor, row_scale: cute.Tensor):
    """Multiply each row of `acc` (rows, columns) with its factor, in place."""
    for r in cutlass.range_constexpr(cute.size(row_scale)):
        for c in cutlass.range_constexpr(cute.size(acc.shape[1])):
            acc[r, c] = acc[r, c] * row_scale[r]


@cute.jit
def apply_softcap(scores: cute.Tensor, inner_scale: Float32):
    """`scores` become tanh(scores * inner_scale); the caller's softmax scale then holds the cap itself."""
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = cute.math.tanh(scores[i] * inner_scale, fastmath=True)


@cute.jit
def mask_scores(
    scores: cute.Tensor, columns: cute.Tensor, first_key: Int32, bounds: cute.Tensor, left_edge: cutlass.Constexpr[bool]
):
    """Set to -inf what a row does not see.

    Args:
        scores: (rows, columns) of this thread.
        columns: (rows, columns) static column indices of thread 0 inside the tile.
        first_key: key of this thread's first column: tile origin plus the thread's own offset.
        bounds: (rows, 2) Int32, each row's visible keys [lo, hi).
        left_edge: whether `lo` may be above 0.
    """
    for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
        hi = bounds[r, 1] - first_key
        lo = bounds[r, 0] - first_key
        for c in cutlass.range_constexpr(cute.size(scores.shape[1])):
            col = columns[r, c][1]
            hidden = col >= hi
            if const_expr(left_edge):
                hidden = hidden or col < lo
            scores[r, c] = -Float32.inf if hidden else scores[r, c]
