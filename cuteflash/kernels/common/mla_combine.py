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
from cuteflash.core.views import aligned
from cuteflash.mla_problem import BLOCKS_OF_ROW, LATENT_DIM_V, ROWS_OF_BLOCK

PAIR, QUAD = 2, 4  # neighbouring elements of O in a thread, and fp32 elements of a store and of a load
GROUP = 8  # columns of which four lanes of a product have a pair each
LOADS = 16  # of four elements, that a thread has in flight
WARP = 32
WARP_COLUMNS = WARP * QUAD
WARPS = LATENT_DIM_V // WARP_COLUMNS  # of a block
THREADS = WARPS * WARP
TEAM_COLUMNS = LATENT_DIM_V // BLOCKS_OF_ROW
TEAM = TEAM_COLUMNS // QUAD  # threads that have some columns of a part, of a block that merges these columns only
TEAMS = THREADS // TEAM


@dataclasses.dataclass(frozen=True)
class LatentParts:
    """The partial results of a launch, in the slots of `cuteflash.core.split_slots` for each query tile.

    Attributes:
        values: (slots, tile_m, 512) fp32: O of a slot, normalized; of every 16 columns in the order of `columns_at`.
        lse: (slots, tile_m) fp32: its log-sum-exps.
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
    def lse_of(self, owner: Int32, part: Int32, end: Int32, row: Int32):
        """The log-sum-exp of a row of a part from seat `owner` on; -inf of parts from `end` on."""
        found = -Float32.inf
        if part < end:
            found = self.lse[slot_of(owner + part, Int32(part == 0)), row]
        return found


@dataclasses.dataclass(frozen=True)
class Workplace:
    """Shared memory of a block that merges.

    Attributes:
        stage: (4, LOADS, threads) fp32: what threads load. Loads into registers the compiler would do one by one.
        factors: (TEAMS * LOADS,) fp32: what parts are multiplied with.
        sums: (4, 8, TEAMS) fp32: what teams have found.
        statistics: (warps,) fp32: what warps have found.
    """

    stage: cute.Tensor
    factors: cute.Tensor
    sums: cute.Tensor
    statistics: cute.Tensor

    @classmethod
    def allocate(cls) -> Workplace:
        """Now, in this block."""
        smem = SmemAllocator()
        stages = cute.make_layout((QUAD, LOADS, THREADS), stride=(1, QUAD * THREADS, QUAD))
        layouts = stages, *map(cute.make_layout, (TEAMS * LOADS, (QUAD, TEAM, TEAMS), WARPS))
        return cls(*(smem.allocate_tensor(Float32, layout, 16) for layout in layouts))


@cute.jit
def combine(
    parts: LatentParts,
    gO: cute.Tensor,
    mLSE: cute.Tensor,
    rows_of_block: Int32,
    blocks_of_row: Int32,
    tile_m: cutlass.Constexpr[int],
):
    """Merge the parts of some rows of a sequence, if it has several; a thread takes columns by fours.

    Args:
        parts: all partial results.
        gO: O as (rows, 512, batch).
        mLSE: (batch, 1, rows).
        rows_of_block: how many rows a block takes, 1 or ROWS_OF_BLOCK.
        blocks_of_row: 1 if a block merges whole rows; 16 if it merges 32 columns of one, for many parts.
        tile_m: rows of a query tile.
    """
    sequence, number, columns = cute.arch.block_idx()
    first_row = number * rows_of_block
    m_block, row_of_tile = first_row // tile_m, first_row % tile_m
    place = Workplace.allocate()
    owner, last = parts.seats[sequence, m_block, 0], parts.seats[sequence, m_block, 1]
    if last > owner:
        seats = owner, last - owner + 1
        out, lse = gO[None, None, sequence], mLSE[sequence, 0, None]
        if blocks_of_row == 1:
            if rows_of_block == 1:
                merge_rows(parts, seats, row_of_tile, place, out, lse, first_row, 1)
            else:
                merge_rows(parts, seats, row_of_tile, place, out, lse, first_row, ROWS_OF_BLOCK)
        else:
            column = columns * TEAM_COLUMNS
            merge_columns(parts, seats, row_of_tile, column, place, out[first_row, None], lse, first_row)


@cute.jit
def merge_rows(
    parts: LatentParts,
    seats: tuple[Int32, Int32],
    row_of_tile: Int32,
    place: Workplace,
    out: cute.Tensor,
    lse: cute.Tensor,
    row: Int32,
    count_rows: cutlass.Constexpr[int],
):
    """Merge some rows at the same time, of which each warp takes 128 columns; a block calls it.

    The loads that a thread has in flight are shared between the rows, and so are 16 lanes: each has the log-sum-exp of
    the part and row that a load is of.

    Args:
        seats: the first one of the tile, and how many there are.
        row_of_tile: the first row in its tile.
        out: (rows, 512), of O.
        lse: (rows,).
        row: the first row; those past the last one are left out.
        count_rows: how many rows.
    """
    owner, count = seats
    together = LOADS // count_rows  # parts of a row
    thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
    of_lane = lane % LOADS // together
    stage = place.stage[None, None, thread]
    acc = cute.make_rmem_tensor((QUAD, count_rows), Float32)
    acc.fill(0.0)
    exist = out.shape[0] - row
    parts_of_lane = cutlass.select_(of_lane < exist, count, Int32(0))
    peak, weight = -Float32.inf, Float32(0.0)  # of this lane's row
    for first in cutlass.range(0, count, together, unroll=1):
        for i in cutlass.range_constexpr(LOADS):
            part, r = first + i % together, i // together
            if (part < count) & (r < exist):
                line = parts.values[slot_of(owner + part, Int32(part == 0)), row_of_tile + r, None]
                load_chunk(chunk_of(line, thread * QUAD, QUAD), stage[None, i])
        end_of_copies()
        found = parts.lse_of(owner, first + lane % together, parts_of_lane, row_of_tile + of_lane)
        new = cute.arch.fmax(peak, cute.arch.warp_reduction_max(found, threads_in_group=together))
        shift = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
        scale, factor = exp2((peak - shift) * LOG2_E), exp2((found - shift) * LOG2_E)
        peak = new
        weight = weight * scale + cute.arch.warp_reduction_sum(factor, threads_in_group=together)
        for r in cutlass.range_constexpr(count_rows):
            scale_all(acc[None, r], cute.arch.shuffle_sync(scale, r * together))
        cute.arch.cp_async_wait_group(0)
        for i in cutlass.range_constexpr(LOADS):
            add_chunk(acc[None, i // together], cute.arch.shuffle_sync(factor, i), stage[None, i])
    for r in cutlass.range_constexpr(count_rows):
        of_row = (cute.arch.shuffle_sync(x, r * together) for x in (peak, weight))
        statistics = tuple(of_row)
        if r < exist:
            write_row(acc[None, r], *statistics, out[row + r, None], lse, row + r, thread * QUAD)


@cute.jit
def merge_columns(
    parts: LatentParts,
    seats: tuple[Int32, Int32],
    row_of_tile: Int32,
    first_column: Int32,
    place: Workplace,
    out: cute.Tensor,
    lse: cute.Tensor,
    row: Int32,
):
    """Merge 32 columns of a row, places of partial results from `first_column` on; a block calls it.

    Teams of 8 threads have all of these columns of different parts. Arguments as of `merge_rows`, but for one row, of
    which `out` is that of O.
    """
    owner, count = seats
    thread = cute.arch.thread_idx()[0]
    team, column = thread // TEAM, first_column + thread % TEAM * QUAD
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    stage = place.stage[None, None, thread]
    acc = cute.make_rmem_tensor(QUAD, Float32)
    acc.fill(0.0)
    peak, weight = -Float32.inf, Float32(0.0)  # the weight of this thread
    together = TEAMS * LOADS
    for first in cutlass.range(0, count, together, unroll=1):
        for i in cutlass.range_constexpr(LOADS):
            part = first + team + i * TEAMS
            if part < count:
                line = parts.values[slot_of(owner + part, Int32(part == 0)), row_of_tile, None]
                load_chunk(chunk_of(line, column, QUAD), stage[None, i])
        end_of_copies()
        found = cute.make_rmem_tensor(together // THREADS, Float32)
        new = peak
        for i in cutlass.range_constexpr(together // THREADS):
            found[i] = parts.lse_of(owner, first + thread + i * THREADS, count, row_of_tile)
            new = cute.arch.fmax(new, found[i])
        place.statistics[warp] = cute.arch.warp_reduction_max(new)
        cute.arch.sync_threads()
        for other in cutlass.range_constexpr(WARPS):
            new = cute.arch.fmax(new, place.statistics[other])
        shift = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
        scale = exp2((peak - shift) * LOG2_E)
        peak, weight = new, weight * scale
        for i in cutlass.range_constexpr(together // THREADS):
            factor = exp2((found[i] - shift) * LOG2_E)
            place.factors[thread + i * THREADS] = factor
            weight += factor
        scale_all(acc, scale)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(LOADS):
            add_chunk(acc, place.factors[team + i * TEAMS], stage[None, i])
        cute.arch.sync_threads()
    copy_chunk(acc, place.sums[None, thread % TEAM, team])
    place.statistics[warp] = cute.arch.warp_reduction_sum(weight)
    cute.arch.sync_threads()
    if thread < TEAM:
        acc.fill(0.0)
        weight = Float32(0.0)
        for other in cutlass.range_constexpr(WARPS):
            weight += place.statistics[other]
        for other in cutlass.range_constexpr(TEAMS):
            for e in cutlass.range_constexpr(QUAD):
                acc[e] += place.sums[e, thread, other]
        write_row(acc, peak, weight, out, lse, row, column)


@cute.jit
def write_row(
    acc: cute.Tensor, peak: Float32, weight: Float32, out: cute.Tensor, lse: cute.Tensor, row: Int32, first: Int32
):
    """Write this lane's columns of a row of O, and the log-sum-exp with column 0.

    Args:
        acc: (4,), of the places from `first` on, multiplied with the weights and added up.
        peak: the largest log-sum-exp.
        weight: the sum of weights, the exponentials relative to that.
        out: (512,), the row of O.
        lse: (rows,).
    """
    inverse = cutlass.select_(weight == 0.0, Float32(0.0), 1.0 / weight)
    for pair, start in enumerate(columns_at(first)):
        rounded = cute.make_rmem_tensor(PAIR, out.element_type)
        values = (acc[PAIR * pair + i] * inverse for i in range(PAIR))
        cute.recast_tensor(rounded, Uint32)[0] = round_pair(*values, out.element_type)
        copy_chunk(rounded, chunk_of(out, start, PAIR))
    if first == 0:
        found = peak + cute.math.log2(weight, fastmath=True) * LN_2
        lse[row] = cutlass.select_(weight == 0.0, -Float32.inf, found)


def end_of_copies() -> None:
    """Commit a thread's copies, and keep what waits for other loads behind them: the compiler would mix the two."""
    cute.arch.cp_async_commit_group()
    cute.arch.sync_warp()


def scale_all(acc: cute.Tensor, scale: Float32) -> None:
    """Multiply a register tensor."""
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * scale


def load_chunk(source: cute.Tensor, target: cute.Tensor) -> None:
    """Begin to copy four elements to shared memory; belongs to the thread's next group of copies."""
    cute.copy(cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128), source, target)


def add_chunk(acc: cute.Tensor, factor: Float32, chunk: cute.Tensor) -> None:
    """Add four elements of shared memory times `factor`; if that is 0, they may be anything: of no part."""
    values = cute.make_rmem_tensor(QUAD, Float32)
    copy_chunk(chunk, values)
    for e in range(QUAD):
        product = factor * values[e]
        acc[e] = acc[e] + cutlass.select_(factor == 0.0, Float32(0.0), product)


def columns_at(place: Int32) -> tuple[Int32, Int32]:
    """The columns of O whose pairs lie at `place`, a multiple of 4, of a row of partial results, as lanes have them."""
    first = place - place % (2 * GROUP) // PAIR
    return first, first + GROUP


def chunk_of(line: cute.Tensor, column: Int32, size: int) -> cute.Tensor:
    """`size` neighbouring elements of a contiguous line, from `column` on, a multiple of `size`."""
    start = aligned(line.iterator + column, size * line.element_type.width // 8)
    return cute.make_tensor(start, cute.make_layout(size))


def copy_chunk(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copy some elements with one load or store."""
    bits = cute.size(source) * source.element_type.width
    cute.copy(cute.make_copy_atom(CopyUniversalOp(), source.element_type, num_bits_per_copy=bits), source, target)
