"""The online softmax on accumulator fragments.

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
from cutlass import Float32, const_expr

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
MAX_CHAINS = 4
SINK_RULES = 100.0  # powers of two by which a sink exceeds a row's maximum, from which on it is the row's whole sum


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
        row_scale: likewise, the factor by which O has to be multiplied after a step.
        scale_log2: softmax_scale * log2(e), the factor of a score before exp2.
        may_be_empty: whether all scores of a row so far may be -inf.
        p_offset: exponentials, and with them the row sums, are multiplied with 2 to this power.
        block_scale: a factor of the present block's scores that is in `row_max`, but not in them; None is 1.
        row_scales: `scale_log2` of each row, if rows have factors of their own; None if they do not.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    row_scale: cute.Tensor
    scale_log2: Float32
    may_be_empty: cutlass.Constexpr[bool]
    p_offset: cutlass.Constexpr[float] = 0.0
    block_scale: Float32 | None = None
    row_scales: cute.Tensor | None = None

    @classmethod
    def create(cls, num_rows: int, scale_log2: Float32, may_be_empty: bool, p_offset: float = 0.0) -> Self:
        """A softmax before its first block, for `num_rows` rows a thread."""
        row_max, row_sum, row_scale = (cute.make_rmem_tensor(num_rows, Float32) for _ in range(3))
        return cls(row_max, row_sum, row_scale, scale_log2, may_be_empty, p_offset)

    def reset(self) -> None:
        """Start over, before the first block of a tile."""
        self.row_max.fill(-Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def step(self, scores: cute.Tensor):
        """Turn `scores` (rows, columns) into exponentials, in place; `row_scale` becomes the factor for O."""
        self.take_peaks(scores, False)
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            self.exponentiate(scores, r)

    @cute.jit
    def take_peaks(self, scores: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Move the row maxima to those of `scores` (rows, columns); `row_scale` becomes the factor for sums and O.

        On the first block nothing was accumulated: the maxima are set, the sums are 0 and `row_scale` is 1.
        """
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            peak = quad_max(row_peak(scores, r))
            if const_expr(self.block_scale is not None):
                peak = peak * self.block_scale
            if const_expr(is_first):
                self.row_scale[r] = Float32(1.0)
                self.row_sum[r] = Float32(0.0)
                self.row_max[r] = peak
            else:
                old = self.row_max[r]
                self.row_max[r] = cute.arch.fmax(old, peak)
                self.row_scale[r] = exp2(old * self.scale_of(r) - self.shift(r))
                self.row_sum[r] = self.row_sum[r] * self.row_scale[r]

    def scale_of(self, row: int) -> Float32:
        """The factor of a row's scores before exp2."""
        return self.scale_log2 if self.row_scales is None else self.row_scales[row]

    def finite_max(self, row: int) -> Float32:
        """A row's maximum, or 0 if no key was visible yet: exp2(-inf - -inf) would be NaN."""
        peak = self.row_max[row]
        return cutlass.select_(peak == -Float32.inf, Float32(0.0), peak) if self.may_be_empty else peak

    def shift(self, row: int) -> Float32:
        """The number to subtract from a row's scaled scores."""
        return self.finite_max(row) * self.scale_of(row)

    def exponentials(self, scores: cute.Tensor, row: int) -> Iterator[Float32]:
        """The exponentials of one row of `scores` under the present maximum, one by one."""
        shift = self.shift(row)
        if self.p_offset:
            shift = shift - self.p_offset
        scale = self.scale_of(row)
        if self.block_scale is not None:
            scale = scale * self.block_scale
        for c in range(cute.size(scores.shape[1])):
            yield exp2(scores[row, c] * scale - shift)

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
    def finish_with_sinks(self, lse: cute.Tensor, sinks: cute.Tensor):
        """As `finish`, with a logit for each row that joins its sum; rows without a key get 0 and their sink.

        The sink is taken relative to the row's maximum, as the exponentials were. If it exceeds that by so much that
        its power of two might overflow, all keys together have no weight that fp32 holds beside it.
        """
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = self.whole_sum(r)
            shift = self.shift(r)
            if const_expr(self.p_offset):
                shift = shift - self.p_offset
            excess = sinks[r] * LOG2_E - shift
            log2_sum = cute.math.log2(total + exp2(excess), fastmath=True)
            empty = total == 0.0
            self.row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total + exp2(excess))
            log2_sum = excess if excess > SINK_RULES else log2_sum
            lse[r] = sinks[r] if empty else (shift + log2_sum) * LN_2

    def whole_sum(self, row: int) -> Float32:
        """A row's sum over the quad."""
        return quad_sum(self.row_sum[row])

    @cute.jit
    def finish(self, lse: cute.Tensor):
        """`row_scale` becomes 1 / row sum, `lse` the natural-log log-sum-exp; rows without a key get 0 and -inf."""
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = quad_sum(self.row_sum[r])
            empty = total == 0.0
            self.row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log2_sum = self.row_max[r] * self.scale_of(r) + cute.math.log2(total, fastmath=True)
            if const_expr(self.p_offset):
                log2_sum = log2_sum - self.p_offset
            lse[r] = -Float32.inf if empty else log2_sum * LN_2


@dataclasses.dataclass(frozen=True)
class PlainSoftmax(OnlineSoftmax):
    """The textbook form: scores are scaled first, exponentials are natural, row sums are reduced every step.

    It shows the gain of `OnlineSoftmax`. `row_max` is of scaled scores.
    """

    def shift(self, row: int) -> Float32:
        """The number to subtract from a row's scores times log2(e)."""
        return self.finite_max(row) * LOG2_E

    def whole_sum(self, row: int) -> Float32:
        """A row's sum, which every lane of the quad has."""
        return self.row_sum[row]

    @cute.jit
    def take_peaks(self, scores: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """Scale `scores`, then as `OnlineSoftmax.take_peaks`."""
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * (self.scale_log2 * LN_2)
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            old = -Float32.inf if const_expr(is_first) else self.row_max[r]
            self.row_max[r] = cute.arch.fmax(old, quad_max(row_peak(scores, r)))
            self.row_scale[r] = exp2((old - self.finite_max(r)) * LOG2_E)
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r]

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
    def finish(self, lse: cute.Tensor):
        """As `OnlineSoftmax.finish`; the sums are those of whole rows already."""
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = self.row_sum[r]
            empty = total == 0.0
            self.row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log_sum = self.row_max[r] + cute.math.log2(total, fastmath=True) * LN_2
            lse[r] = -Float32.inf if empty else log_sum


@cute.jit
def scale_rows(acc: cute.Tensor, row_scale: cute.Tensor):
    """Multiply each row of `acc` (rows, columns) with its factor, in place."""
    for r in cutlass.range_constexpr(cute.size(row_scale)):
        for c in cutlass.range_constexpr(cute.size(acc.shape[1])):
            acc[r, c] = acc[r, c] * row_scale[r]
