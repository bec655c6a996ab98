"""The end of a tile of few rows: what the warps found is merged in shared memory and written, in full or as a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cuteflash.core.finish import finish_rows, write_lse
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import LN_2, OnlineSoftmax, exp2, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.weighted_sum import QUAD
from cuteflash.kernels.sm90.bundles import NamedBarrier
from cuteflash.kernels.sm90.few_bundles import FewBlock, FewWarp
from cuteflash.traits.few_sm90 import MMA_KEYS, PADDING, WARPS

WARP = 32
THREADS = WARP * WARPS
ROW_LANES = (4, 8, 16)  # distances of lanes that hold other keys of the same rows


def over_rows_of_lanes(value: Float32, join: Callable[[Float32, Float32], Float32]) -> Float32:
    """The values of the eight lanes with the same rows of S, joined."""
    for lanes in ROW_LANES:
        value = join(value, cute.arch.shuffle_sync_bfly(value, offset=lanes))
    return value


@dataclasses.dataclass(frozen=True)
class ColumnSoftmax(OnlineSoftmax):
    """The softmax of scores whose rows lie in the columns of mma.sync's fragments: eight lanes hold one together.

    When a tile ends, `row_sum` are sums of whole rows.
    """

    @cute.jit
    def take_peaks(self, scores: cute.Tensor, is_first: cutlass.Constexpr[bool]):
        """As `OnlineSoftmax.take_peaks`; before the first block maxima are -inf."""
        for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
            peak = scores[r, 0]
            for c in cutlass.range_constexpr(1, cute.size(scores.shape[1])):
                peak = cute.arch.fmax(peak, scores[r, c])
            old = self.row_max[r]
            self.row_max[r] = cute.arch.fmax(old, over_rows_of_lanes(peak, cute.arch.fmax))
            self.row_scale[r] = exp2(old * self.scale_of(r) - self.shift(r))
            self.row_sum[r] = self.row_sum[r] * self.row_scale[r]

    def whole_sum(self, row: int) -> Float32:
        """A row's sum."""
        return self.row_sum[row]

    @cute.jit
    def finish(self, lse: cute.Tensor):
        """As `OnlineSoftmax.finish`."""
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            total = self.row_sum[r]
            empty = total == 0.0
            self.row_scale[r] = Float32(0.0) if empty else cute.arch.rcp_approx(total)
            log2_sum = self.row_max[r] * self.scale_of(r) + cute.math.log2(total, fastmath=True) - self.p_offset
            lse[r] = -Float32.inf if empty else log2_sum * LN_2


def sync() -> None:
    """Barrier of all consumers."""
    cute.arch.barrier(barrier_id=NamedBarrier.HANDED, number_of_threads=THREADS)


@dataclasses.dataclass(frozen=True)
class Found:
    """What the warps found of a tile, in shared memory, fp32.

    Attributes:
        out: (columns, rows, warps) of O.
        peaks: (rows, warps) maxima of scores times their scale, and
        sums: of exponentials relative to these.
    """

    out: cute.Tensor
    peaks: cute.Tensor
    sums: cute.Tensor

    @classmethod
    def of(cls, kernel, base: cute.Pointer) -> Found:
        """That of a block."""
        traits = kernel.traits
        rows, columns = traits.tile_m, traits.head_dim_v + PADDING
        start = cute.recast_ptr(base + traits.smem_plan["found"].start, dtype=Float32)
        out = cute.make_tensor(start, cute.make_layout((columns, rows, WARPS)))
        peaks, sums = (
            cute.make_tensor(start + (columns + i) * rows * WARPS, cute.make_layout((rows, WARPS))) for i in range(2)
        )
        return cls(out, peaks, sums)


@cute.jit
def hand_over(found: Found, own: FewWarp):
    """Write what a warp found."""
    softmax, scores, group = own.softmax, own.scores, own.lane // 4
    for r in cutlass.range_constexpr(cute.size(softmax.row_max)):
        row, total = scores.row(r), over_rows_of_lanes(softmax.row_sum[r], lambda a, b: a + b)
        if group == 0:
            found.peaks[row, own.index], found.sums[row, own.index] = softmax.row_max[r] * softmax.scale_of(r), total
        for m in cutlass.range_constexpr(cute.size(own.acc_O.shape[1])):
            line = found.out[None, row, own.index]
            for half in cutlass.range_constexpr(2):  # rows g and g + 8 of Oᵀ are neighbouring columns
                line[m * MMA_KEYS + 2 * group + half] = own.out[r, 2 * m + half]


@cute.jit
def take_rows(kernel: cutlass.Constexpr, found: Found, own: FewWarp, softmax: ColumnSoftmax, out: cute.Tensor):
    """Merge this warp's rows of all warps' findings: `out` (rows, four columns, groups of 128), maxima and sums."""
    out.fill(0.0)
    rows = cute.size(out.shape[0])
    for r in cutlass.range_constexpr(rows):
        row, warp = own.index * rows + r, own.lane % WARPS
        peak, total = found.peaks[row, warp], found.sums[row, warp]
        most = peak
        for lanes in (1, 2, 4):
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=lanes))
        factor = exp2(peak - cutlass.select_(most == -Float32.inf, Float32(0.0), most))
        total = total * factor
        for lanes in (1, 2, 4):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=lanes)
        softmax.row_max[r], softmax.row_sum[r] = most, total
        for i in cutlass.range_constexpr(cute.size(out.shape[2])):
            column = cutlass.min(own.lane * QUAD + i * WARP * QUAD, kernel.traits.head_dim_v - QUAD)
            for w in cutlass.range_constexpr(WARPS):
                of_warp = cute.arch.shuffle_sync(factor, w)
                line = found.out[None, row, w]
                for e in cutlass.range_constexpr(QUAD):
                    out[r, e, i] += line[column + e] * of_warp


@cute.jit
def finish_tile(kernel: cutlass.Constexpr, block: FewBlock, own: FewWarp, tile: QueryTile):
    """Merge what the warps found, write O and the log-sum-exp or a part of them, and merge a tile's parts if due."""
    traits = kernel.traits
    found = Found.of(kernel, block.tiles.base)
    sync()  # the last tile's findings have been read
    hand_over(found, own)
    sync()
    rows, groups = traits.tile_m // WARPS, -(-traits.head_dim_v // (QUAD * WARP))
    out = cute.make_rmem_tensor((rows, QUAD, groups), Float32)
    softmax = ColumnSoftmax.create(rows, Float32(1.0), True, traits.p_offset)
    take_rows(kernel, found, own, softmax, out)
    places = cute.make_identity_tensor((rows, 1))
    scores = dataclasses.replace(
        own.scores,
        coords=places,
        first_row=own.index * rows,
        first_key=own.lane,
        is_transposed=False,
    )
    lse = finish_rows(softmax, scores, tile, block.scales.of_v(tile), block.launch.sinks)
    for i in cutlass.range_constexpr(groups):
        scale_rows(out[None, None, i], softmax.row_scale)
    if tile.share.is_whole():
        write_lse(lse, scores, tile, block.mLSE)
        write_rows(kernel, block, scores, out, tile)
    else:
        write_part(kernel, block, scores, out, lse, tile)
        thread, is_scheduled = own.index * WARP + own.lane, kernel.problem.is_scheduled
        block.partials.merge_if_due(tile, thread, WARPS, block.arrival, sync, is_scheduled)


@cute.jit
def write_rows(kernel: cutlass.Constexpr, block: FewBlock, scores: ScoreTile, out: cute.Tensor, tile: QueryTile):
    """Write this warp's rows of O; `out` as of `take_rows`."""
    for r in cutlass.range_constexpr(cute.size(out.shape[0])):
        row = scores.row(r)
        for i in cutlass.range_constexpr(cute.size(out.shape[2])):
            column = scores.first_key * QUAD + i * WARP * QUAD
            if row < tile.rows() and column < kernel.problem.operands.head_dim_v:
                block.partials.write_chunk(tile, row, column // QUAD, out[r, None, i])


@cute.jit
def write_part(
    kernel: cutlass.Constexpr, block: FewBlock, scores: ScoreTile, out: cute.Tensor, lse: cute.Tensor, tile: QueryTile
):
    """Write this warp's rows of a block's part of a tile."""
    for i in cutlass.range_constexpr(cute.size(out.shape[2])):
        column = scores.first_key * QUAD + i * WARP * QUAD
        if column < kernel.traits.head_dim_v:
            columns = cute.domain_offset((0, column), cute.make_identity_tensor((1, QUAD)))
            of_group = dataclasses.replace(scores, first_key=column)
            block.partials.write(of_group, out[None, None, i], columns, lse, tile)
