"""Split keys of the latent-attention decode: a block's part of a tile goes to memory, and a kernel merges all parts.

The last block to come would be busy for long with the parts of one sequence that all blocks share: 512 columns of 64
rows, fp32, of each. A kernel of its own has all multiprocessors merge rows. It begins where the blocks of the first
one end (programmatic dependent launch), and merges in the order of keys, whatever the order in which blocks end.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.memory import SmemAllocator

from cuteflash.core.convert import round_pair
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import LN_2, LOG2_E, exp2
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import QueryTile
from cuteflash.mla_problem import LATENT_DIM_V, MERGING_WARPS

PAIR, QUAD = 2, 4  # neighbouring elements of O in a thread, and fp32 elements of a store and of a load
GROUP = 8  # columns of which four lanes of a product have a pair each
LOADS = 16  # of a quad, that a thread has in flight
WARP = 32
WARP_COLUMNS = WARP * QUAD
QUADS = LATENT_DIM_V // WARP_COLUMNS  # of a row, that a lane has


@dataclasses.dataclass(frozen=True)
class LatentParts:
    """The partial results of a launch, in the slots of `cuteflash.core.split_slots` for each query tile.

    Attributes:
        values: (slots, 64, 512) fp32: O of a slot, normalized; of every 16 columns in the order of `columns_at`.
        lse: (slots, 64) fp32: its log-sum-exps.
        seats: (batch, query tiles, 2) Int32: those with the first and with the last keys of a tile.
    """

    values: cute.Tensor
    lse: cute.Tensor
    seats: cute.Tensor

    @cute.jit
    def note(self, tile: QueryTile, thread: Int32):
        """Say which seats share the keys of a tile; the block with its first keys does."""
        if thread == 0 and tile.share.owner == tile.share.seat:
            self.seats[tile.sequence, tile.m_block, 0] = tile.share.owner
            self.seats[tile.sequence, tile.m_block, 1] = tile.share.last_owner

    @cute.jit
    def write(self, scores: ScoreTile, out: cute.Tensor, columns: cute.Tensor, lse: cute.Tensor, tile: QueryTile):
        """Write a block's part of a tile.

        Args:
            scores: for the rows of this thread's elements.
            out: its elements of O, normalized, as (rows, columns).
            columns: likewise, the coordinates of its elements in the tile: pairs of every other group of four, of
                which four lanes have all. What is next to each other in a thread is so in memory.
            lse: of its rows.
        """
        slot = slot_of(tile.share.seat, Int32(tile.share.owner == tile.share.seat))
        rows = tile.rows()
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = scores.row(r)
            if row < rows:
                line = self.values[slot, row, None]
                for c in cutlass.range_constexpr(0, cute.size(out.shape[1]), QUAD):
                    quad = cute.make_rmem_tensor(QUAD, Float32)
                    for i in cutlass.range_constexpr(QUAD):
                        quad[i] = out[r, c + i]
                    first = columns[0, c][1]
                    copy_chunk(quad, chunk_of(line, first + first % GROUP, QUAD))
                if scores.first_key == 0:
                    self.lse[slot, row] = lse[r]


@cute.jit
def combine(
    parts: LatentParts,
    gO: cute.Tensor,
    mLSE: cute.Tensor,
    rows_of_block: Int32,
    groups: Int32,
    tile_m: cutlass.Constexpr[int],
):
    """Merge the parts of some rows of a sequence, if it has several; a lane takes four columns of every 128.

    Args:
        parts: all partial results.
        gO: O as (rows, 512, batch).
        mLSE: (batch, 1, rows).
        rows_of_block: how many rows a block takes, a divisor of those of a query tile.
        groups: 1 if each warp merges whole rows. As many as a block has warps if these share 128 columns of a row:
            each takes some of its parts, and what they find is merged in shared memory; for many parts of few rows.
        tile_m: rows of a query tile.
    """
    sequence, number, columns = cute.arch.block_idx()
    first_row = number * rows_of_block
    m_block = first_row // tile_m
    smem = SmemAllocator()
    sums = smem.allocate_tensor(Float32, cute.make_layout((QUAD, WARP, MERGING_WARPS)), 16)
    statistics = smem.allocate_tensor(Float32, cute.make_layout((2, MERGING_WARPS)), 16)
    threads = WARP * MERGING_WARPS
    stages = cute.make_layout((QUAD, LOADS, threads), stride=(1, QUAD * threads, QUAD))
    stage = smem.allocate_tensor(Float32, stages, 16)[None, None, cute.arch.thread_idx()[0]]
    owner, last = parts.seats[sequence, m_block, 0], parts.seats[sequence, m_block, 1]
    if last > owner:
        seats = owner, last - owner + 1
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        end = cutlass.min(first_row + rows_of_block, gO.shape[0])
        if groups == 1:
            for row in cutlass.range(first_row + warp, end, MERGING_WARPS, unroll=1):
                acc = cute.make_rmem_tensor((QUAD, QUADS), Float32)
                place = Int32(0), Int32(1), lane * QUAD
                peak, weight = merged_row(parts, seats, row % tile_m, place, stage, acc)
                write_row(acc, peak, weight, gO[row, None, sequence], mLSE[sequence, 0, None], row, lane * QUAD)
        else:
            column = columns * WARP_COLUMNS + lane * QUAD
            for row in cutlass.range(first_row, end, unroll=1):
                acc = cute.make_rmem_tensor((QUAD, 1), Float32)
                peak, weight = merged_row(parts, seats, row % tile_m, (warp, groups, column), stage, acc)
                copy_chunk(acc[None, 0], sums[None, lane, warp])
                if lane == 0:
                    statistics[0, warp], statistics[1, warp] = peak, weight
                cute.arch.sync_threads()
                if warp == 0:
                    peak, weight = merge_groups(sums[None, lane, None], statistics, acc)
                    write_row(acc, peak, weight, gO[row, None, sequence], mLSE[sequence, 0, None], row, column)
                cute.arch.sync_threads()


@cute.jit
def write_row(
    acc: cute.Tensor, peak: Float32, weight: Float32, out: cute.Tensor, lse: cute.Tensor, row: Int32, first: Int32
):
    """Write this lane's columns of a row of O, and the log-sum-exp with column 0.

    Args:
        acc: (4, n), four columns of every 128 from place `first` on, multiplied with the weights and added up.
        peak: see `merged_row`; likewise `weight`.
        out: (512,), the row of O.
        lse: (rows,).
    """
    inverse = cutlass.select_(weight == 0.0, Float32(0.0), 1.0 / weight)
    for quad in cutlass.range_constexpr(cute.size(acc.shape[1])):
        for pair, start in enumerate(columns_at(first + quad * WARP_COLUMNS)):
            rounded = cute.make_rmem_tensor(PAIR, out.element_type)
            values = (acc[PAIR * pair + i, quad] * inverse for i in range(PAIR))
            cute.recast_tensor(rounded, Uint32)[0] = round_pair(*values, out.element_type)
            copy_chunk(rounded, chunk_of(out, start, PAIR))
    if first == 0:
        found = peak + cute.math.log2(weight, fastmath=True) * LN_2
        lse[row] = cutlass.select_(weight == 0.0, -Float32.inf, found)


def merge_groups(sums: cute.Tensor, statistics: cute.Tensor, acc: cute.Tensor) -> tuple[Float32, Float32]:
    """As `merged_row`, of what groups found: (four columns, groups), and (peak or weight, groups)."""
    acc.fill(0.0)
    peak, weight = statistics[0, 0], Float32(0.0)
    for group in range(1, MERGING_WARPS):
        peak = cute.arch.fmax(peak, statistics[0, group])
    shift = cutlass.select_(peak == -Float32.inf, Float32(0.0), peak)
    for group in range(MERGING_WARPS):
        factor = exp2((statistics[0, group] - shift) * LOG2_E)
        weight = weight + statistics[1, group] * factor
        for e in range(QUAD):
            acc[e, 0] = acc[e, 0] + sums[e, group] * factor
    return peak, weight


@cute.jit
def merged_row(
    parts: LatentParts,
    seats: tuple[Int32, Int32],
    row: Int32,
    place: tuple[Int32, Int32, Int32],
    stage: cute.Tensor,
    acc: cute.Tensor,
):
    """(the largest log-sum-exp, the sum of weights, the exponentials relative to that)

    Args:
        seats: the first one of the tile, and how many there are.
        row: of the tile.
        place: the group, the number of groups, the first column; a group takes some parts of every so many.
        stage: (4, LOADS) of this thread in shared memory: loads into registers the compiler would do one by one.
        acc: (4, n) gets four columns of O of every 128, multiplied with the weights and added up.
    """
    owner, count = seats
    group, groups, column = place
    lane = cute.arch.lane_idx()
    quads = cute.size(acc.shape[1])
    together = LOADS // quads  # parts
    acc.fill(0.0)
    peak, weight = -Float32.inf, Float32(0.0)
    for first in cutlass.range(group * together, count, groups * together, unroll=1):
        for i in cutlass.range_constexpr(together):
            part = first + i
            if part < count:
                line = parts.values[slot_of(owner + part, Int32(part == 0)), row, None]
                load = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
                for quad in cutlass.range_constexpr(quads):
                    source = chunk_of(line, column + quad * WARP_COLUMNS, QUAD)
                    cute.copy(load, source, stage[None, i * quads + quad])
        cute.arch.cp_async_commit_group()
        part, lse = first + lane, -Float32.inf
        if lane < together and part < count:
            lse = parts.lse[slot_of(owner + part, Int32(part == 0)), row]
        new = cute.arch.fmax(peak, cute.arch.warp_reduction_max(lse))
        shift = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
        scale = exp2((peak - shift) * LOG2_E)
        factor = exp2((lse - shift) * LOG2_E)
        peak = new
        weight = weight * scale + cute.arch.warp_reduction_sum(factor)
        for quad in cutlass.range_constexpr(quads):
            for e in cutlass.range_constexpr(QUAD):
                acc[e, quad] = acc[e, quad] * scale
        cute.arch.cp_async_wait_group(0)
        for i in cutlass.range_constexpr(together):
            of_part = cute.arch.shuffle_sync(factor, i)
            for quad in cutlass.range_constexpr(quads):
                values = cute.make_rmem_tensor(QUAD, Float32)
                copy_chunk(stage[None, i * quads + quad], values)  # of a part that does not exist, anything
                for e in cutlass.range_constexpr(QUAD):
                    product = of_part * values[e]
                    acc[e, quad] += cutlass.select_(of_part == 0.0, Float32(0.0), product)
    return peak, weight


def columns_at(place: Int32) -> tuple[Int32, Int32]:
    """The columns of O whose pairs lie at `place`, a multiple of 4, of a row of partial results, as lanes have them."""
    first = place - place % (2 * GROUP) // PAIR
    return first, first + GROUP


def chunk_of(line: cute.Tensor, column: Int32, size: int) -> cute.Tensor:
    """`size` neighbouring elements of a contiguous line, from `column` on, a multiple of `size`."""
    start = (line.iterator + column).align(size * line.element_type.width // 8)
    return cute.make_tensor(start, cute.make_layout(size))


def copy_chunk(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copy some elements with one load or store."""
    bits = cute.size(source) * source.element_type.width
    cute.copy(cute.make_copy_atom(CopyUniversalOp(), source.element_type, num_bits_per_copy=bits), source, target)
