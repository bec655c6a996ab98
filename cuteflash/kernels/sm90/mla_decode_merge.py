"""How blocks merge the parts of a latent-attention decode's tile that they are asked to merge together.

Parts are merged at the end of a block's last tile, when Q, pages and P are not needed any more. Up to 32 of them come
into shared memory, by bulk copies that are all on their way at once: loads into registers would be few at a time, and
each turn of them would wait for memory anew. Of more parts each block merges so little that the copies would take
longer than loads.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32

from cuteflash.atoms import l2
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.scores import computed_here
from cuteflash.core.softmax import LOG2_E, exp2
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import QUAD, WARP, Threads, chunk_of, copy_chunk
from cuteflash.kernels.common.octets import LANES, OCTET, octet_of_lane, store_octet
from cuteflash.kernels.common.part_sums import part_slot
from cuteflash.kernels.common.weighted_sum import (
    add_parts,
    add_unless_zero,
    address_here,
    inverse_of,
    load_words,
    merged_lse,
)
from cuteflash.kernels.sm90.mla_decode_parts import FACTORS, LSE, STATISTICS_BYTES, HalfParts, halves_of, statistics_of
from cuteflash.mla_problem import LATENT_DIM_V
from cuteflash.traits.mla_sm90 import CONSUMERS, ELEMENT_BYTES

LINE = QUAD * WARP  # columns that a warp merges at once
LINE_BYTES = LINE * ELEMENT_BYTES
LINES_OF_ROW = LATENT_DIM_V // LINE
L2_LINES = LINE_BYTES // l2.LINE  # of a line
INVERSE = FACTORS + CONSUMERS  # behind a row's other statistics, in shared memory: the factor of the merged row
LANES_OF_LINE = LINE // OCTET
LINES_AT_ONCE = WARP // LANES_OF_LINE  # of a warp
PARTS_AT_ONCE = 4  # that a lane reads before it adds them


@dataclasses.dataclass(frozen=True)
class MergedParts(HalfParts):
    """The partial results of a launch, whose blocks merge them.

    Of m blocks that merge a tile each has an m-th of its lines of 128 columns. Of each of p parts, m or more, those are
    in a row in memory, and are so in shared memory, behind the statistics of their rows: p * ceil(256 / m) lines, of
    three parts that two blocks merge the most, 96 KB.
    """

    @cute.jit
    def merge_with_others(self, tile: QueryTile, threads: Threads):
        """As in `LatentParts`; each of the blocks has some lines. Where they lie is computed while blocks wait."""
        came = self.arrive(tile, threads[0], threads[2])
        number, count, lines = self.place(tile)[0], self.parts_of(tile), self.lines(tile)
        lines = tuple(computed_here(n * lines // self.merging(tile)) for n in (number, number + 1))
        if count <= WARP:
            self.merge_staged(tile, threads, lines, count, came)
        else:
            self.merge_from_memory(tile, threads, lines, count, came)

    @cute.jit
    def merge_staged(
        self,
        tile: QueryTile,
        threads: Threads,
        lines: tuple[Int32, Int32],
        count: Int32,
        came: Int32,
    ):
        """Merge some lines of up to 32 parts, through shared memory, once all have come.

        First a warp weighs the parts of some rows, whose factors become their weights; then it adds the parts of lines.
        """
        thread, warps, _ = threads
        warp = cute.arch.make_warp_uniform(thread // WARP)
        staged = Staged.of(self.stage, *lines)
        copies = self.prepare(staged, tile.share.owner, count, (warp, warps))
        if self.all_came(tile, threads[0], came, threads[2]):
            copies.start(staged, self.arrived)
            self.merge_there(tile, threads, staged, count)

    @cute.jit
    def merge_there(self, tile: QueryTile, threads: Threads, staged: Staged, count: Int32):
        """Merge the lines of `count` parts that are on their way to shared memory."""
        thread, warps, sync = threads
        warp, owner = cute.arch.make_warp_uniform(thread // WARP), tile.share.owner
        lines = staged.first_line, staged.end_line
        wait_phase(self.arrived, Int32(0))
        for part in cutlass.range(warp, count, warps, unroll=1):
            slot, (begin, end) = part_slot(owner, part), (n * L2_LINES for n in lines)
            for line in cutlass.range(begin + cute.arch.lane_idx(), end, WARP, unroll=1):
                self.forget(slot, line)
        lanes = lanes_of_row(count)
        step = WARP // lanes
        for row in cutlass.range(staged.first_row + warp * step, staged.end_row, warps * step, unroll=1):
            self.weigh(staged, tile, row, count, lanes)
        sync()
        step = warps * LINES_AT_ONCE
        for line in cutlass.range(staged.first_line + warp * LINES_AT_ONCE, staged.end_line, step, unroll=1):
            self.add_lines(staged, tile, line, count)

    @cute.jit
    def prepare(self, staged: Staged, owner: Int32, count: Int32, warps: tuple[Int32, cutlass.Constexpr[int]]):
        """The copies that bring this block's lines of up to 32 parts, and their rows' statistics; all warps call it.

        Each lane has those of one part, as the copies of a warp's lanes are issued one after the other.
        """
        cute.arch.fence_view_async_shared()  # between what was here and the copies
        warp, step = warps
        if warp == 0:
            self.expect(count * staged.part_bytes)
        part = warp + step * computed_here(cute.arch.lane_idx())
        slot = part_slot(owner, part)
        return Copies(
            computed_here(count - part),
            computed_here(part * staged.part_bytes),
            address_here(self.statistics_at(slot, staged.first_row)),
            address_here(self.at(slot, Int32(0), staged.first_line * LINE)),
        )

    @cute.jit
    def weigh(self, staged: Staged, tile: QueryTile, first: Int32, count: Int32, lanes: Int32):
        """Make the factors of the parts of some rows their weights, and write the rows' log-sum-exps; for one warp.

        `lanes` lanes have a row, each a part of it; a row that does not exist is the last one that does.
        """
        lane = cute.arch.lane_idx()
        own, part = first + lane // lanes, lane % lanes
        row = cutlass.min(own, staged.end_row - 1)
        statistics = staged.statistics(cutlass.min(part, count - 1), row)
        there = (part < count) & (own < staged.end_row)
        lse = cutlass.select_(part < count, statistics[LSE], -Float32.inf)
        peak = lse
        for distance in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(peak, offset=1 << distance)
            peak = cutlass.select_(lanes > 1 << distance, cute.arch.fmax(peak, other), peak)
        shift = cutlass.select_(peak == -Float32.inf, Float32(0.0), peak)
        weight = exp2((lse - shift) * LOG2_E)
        total = weight
        for distance in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(total, offset=1 << distance)
            total = cutlass.select_(lanes > 1 << distance, total + other, total)
        if there:
            for half in cutlass.range_constexpr(CONSUMERS):
                statistics[FACTORS + half] = statistics[FACTORS + half] * weight
            if part == 0:
                statistics[INVERSE] = inverse_of(total)
                if row * LINES_OF_ROW >= staged.first_line:
                    self.write_lse(tile, row, peak, total)

    @cute.jit
    def add_lines(self, staged: Staged, tile: QueryTile, first: Int32, count: Int32):
        """Add the parts of two lines, and write O; for one warp, of which each half has a line, 8 columns a lane.

        A line that does not exist is the last one that does. Parts are added in their order, whoever merges them.
        """
        lane = cute.arch.lane_idx()
        own, column = first + lane // LANES_OF_LINE, OCTET * (lane % LANES_OF_LINE)
        line = cutlass.min(own, staged.end_line - 1)
        row = line // LINES_OF_ROW
        acc = cute.make_rmem_tensor(OCTET, Float32)
        acc.fill(0.0)
        for begin in cutlass.range(0, count, PARTS_AT_ONCE, unroll=1):
            found = [staged.weighed(begin + i, count, line, column) for i in range(PARTS_AT_ONCE)]
            for i in cutlass.range_constexpr(PARTS_AT_ONCE):
                weight, chunk = found[i]
                for c in cutlass.range_constexpr(0, OCTET, QUAD):
                    add_unless_zero(quad_of(acc, c), weight, quad_of(chunk, c))
        inverse = staged.statistics(Int32(0), row)[INVERSE]
        octet = octet_of_lane([acc[i] * inverse for i in range(OCTET)], lane % LANES, self.gO.element_type)
        if own < staged.end_line:
            out = self.gO[tile.first_row + row, None, tile.batch]
            store_octet(octet, out, line % LINES_OF_ROW * LINE + column)

    @cute.jit
    def merge_from_memory(
        self,
        tile: QueryTile,
        threads: Threads,
        lines: tuple[Int32, Int32],
        count: Int32,
        came: Int32,
    ):
        """Merge some lines of more than 32 parts, which are 8 lines at most: copies of so few bytes would take longer.

        As many warps as there can be share a line: each takes every so many 32 of its parts, all of them at once, and
        the first one of them adds what they have.
        """
        thread, warps, _ = threads
        lane, warp = computed_here(cute.arch.lane_idx()), cute.arch.make_warp_uniform(thread // WARP)
        owner, (first, end) = tile.share.owner, lines
        sharing = warps_of_line(end - first, warps)
        line, group = cutlass.min(first + warp // sharing, end - 1), warp % sharing
        row, column = line // LINES_OF_ROW, line % LINES_OF_ROW * LINE + QUAD * lane
        slots = [part_slot(owner, group * WARP, may_be_first) for may_be_first in (True, False)]
        starts = tuple(address_here(self.at(slot, row, column)) for slot in slots)
        if self.all_came(tile, threads[0], came, threads[2]):
            self.merge_loaded(tile, threads, (first, end), (line, group, sharing), starts, count)

    @cute.jit
    def merge_loaded(
        self,
        tile: QueryTile,
        threads: Threads,
        lines: tuple[Int32, Int32],
        place: tuple[Int32, Int32, Int32],
        starts: tuple[Int64, Int64],
        count: Int32,
    ):
        """Merge a line of more than 32 parts, together with other warps.

        Args:
            place: the line, which ones of its parts are this warp's, and how many warps share it.
            starts: where this lane's columns of the warp's first part lie, and where if it were not the tile's first.
        """
        thread, warps, sync = threads
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // WARP)
        owner, (first, end), (line, group, sharing) = tile.share.owner, lines, place
        row, half = line // LINES_OF_ROW, half_of(line)
        loaded = cute.make_rmem_tensor((QUAD, WARP), Float16)
        self.load_columns(loaded, starts, count - group * WARP)
        peak, total = -Float32.inf, Float32(0.0)
        for part in cutlass.range(lane, count, WARP, unroll=1):
            peak = cute.arch.fmax(peak, self.statistics_of_part(owner, part, row)[LSE])
        peak = cute.arch.warp_reduction_max(peak)
        shift = cutlass.select_(peak == -Float32.inf, Float32(0.0), peak)
        for part in cutlass.range(lane, count, WARP, unroll=1):
            total += exp2((self.statistics_of_part(owner, part, row)[LSE] - shift) * LOG2_E)
        total = cute.arch.warp_reduction_sum(total)
        acc = cute.make_rmem_tensor(QUAD, Float32)
        acc.fill(0.0)
        for begin in cutlass.range(group * WARP, count, sharing * WARP, unroll=1):
            statistics = self.statistics_of_part(owner, cutlass.min(begin + lane, count - 1), row)
            weight = exp2((statistics[LSE] - shift) * LOG2_E) * statistics[FACTORS + half]
            weight = cutlass.select_(begin + lane < count, weight, Float32(0.0))
            values = cute.make_rmem_tensor((QUAD, WARP), Float32)
            values.store(loaded.load().to(Float32))
            following = begin + sharing * WARP
            start = starts[1] + Int64((following - group * WARP) * self.part_bytes)
            self.load_columns(loaded, (start, start), count - following)
            add_parts(acc, weight, Int32(0), 1, values)
        if sharing > 1:
            layout = cute.make_layout((LINE, warps), stride=(1, LINE))
            sums = cute.make_tensor(cute.recast_ptr(self.stage, dtype=Float32), layout)
            copy_chunk(acc, chunk_of(sums[None, warp], QUAD * lane, QUAD))
            sync()
            for other in cutlass.range(1, sharing, unroll=1):
                if group == 0:
                    added = cute.make_rmem_tensor(QUAD, Float32)
                    copy_chunk(chunk_of(sums[None, warp + other], QUAD * lane, QUAD), added)
                    for e in cutlass.range_constexpr(QUAD):
                        acc[e] = acc[e] + added[e]
        if (group == 0) & (first + warp // sharing < end):
            self.write_columns(tile, line, acc, inverse_of(total))
            if (lane == 0) & (line % LINES_OF_ROW == 0):
                self.write_lse(tile, row, peak, total)

    def statistics_of_part(self, owner: Int32, part: Int32, row: Int32) -> cute.Tensor:
        """The statistics of a row of a part, in memory."""
        return statistics_of(self.statistics_at(part_slot(owner, part), row))

    @property
    def part_bytes(self) -> int:
        """What lies between the same elements of neighbouring parts of a tile, but for its first one."""
        return 2 * self.rows * self.columns * ELEMENT_BYTES

    def load_columns(self, loaded: cute.Tensor, starts: tuple[Int64, Int64], left: Int32) -> None:
        """Four columns of a row, of up to 32 parts, of which `left` are left; of others 0.

        `starts` are as of `merge_loaded`.
        """
        words = cute.recast_tensor(loaded, Uint32)
        first, others = starts
        for i in range(WARP):
            pair = load_words(others if i else first, i * self.part_bytes, QUAD // 2, left, i)
            for e, word in enumerate(pair):
                words[e, i] = word

    def write_columns(self, tile: QueryTile, line: Int32, acc: cute.Tensor, inverse: Float32) -> None:
        """Write a warp's columns of a line, times `inverse`."""
        for e in range(QUAD):
            acc[e] = acc[e] * inverse
        self.write_chunk(tile, line // LINES_OF_ROW, line % LINES_OF_ROW * WARP + cute.arch.lane_idx(), acc)

    def write_lse(self, tile: QueryTile, row: Int32, peak: Float32, total: Float32) -> None:
        """Write a row's log-sum-exp."""
        self.mLSE[tile.batch, 0, tile.first_row + row] = merged_lse(peak, total)


@dataclasses.dataclass(frozen=True)
class Copies:
    """What a lane asks for of a part, if there is one.

    Attributes:
        left: parts that are left; none if that is not positive.
        target: bytes of shared memory before the part.
        statistics, lines: addresses of its rows' statistics and of its lines.
    """

    left: Int32
    target: Int32
    statistics: Int64
    lines: Int64

    @cute.jit
    def start(self, staged: Staged, arrived: cute.Pointer):
        """Ask for the part's lines, and for the statistics of their rows."""
        if self.left > 0:
            target = staged.start + self.target
            atoms.bulk_load(target, self.statistics, staged.rows_bytes, arrived)
            atoms.bulk_load(target + staged.rows_bytes, self.lines, staged.part_bytes - staged.rows_bytes, arrived)


@dataclasses.dataclass(frozen=True)
class Staged:
    """Shared memory with some lines of all parts of a tile, each part's behind the statistics of their rows.

    Attributes:
        start: of the first part.
        first_line, end_line: which lines of the tile these are.
        first_row, end_row: the rows of these.
        rows_bytes, part_bytes: of a part's statistics, and of all that is there of a part.
    """

    start: cute.Pointer
    first_line: Int32
    end_line: Int32
    first_row: Int32
    end_row: Int32
    rows_bytes: Int32
    part_bytes: Int32

    @classmethod
    def of(cls, start: cute.Pointer, first_line: Int32, end_line: Int32) -> Staged:
        """That of some lines."""
        rows = first_line // LINES_OF_ROW, (end_line - 1) // LINES_OF_ROW + 1
        rows_bytes = (rows[1] - rows[0]) * STATISTICS_BYTES
        return cls(start, first_line, end_line, *rows, rows_bytes, rows_bytes + (end_line - first_line) * LINE_BYTES)

    def part(self, part: Int32) -> cute.Pointer:
        """Where a part begins."""
        return self.start + part * self.part_bytes

    def statistics(self, part: Int32, row: Int32) -> cute.Tensor:
        """The statistics of a row of a part."""
        return statistics_of(self.part(part) + (row - self.first_row) * STATISTICS_BYTES)

    def weighed(self, part: Int32, count: Int32, line: Int32, column: Int32) -> tuple[Float32, cute.Tensor]:
        """(the weight, 8 columns as fp32) of a line of a part; of one that does not exist the weight is 0."""
        there = cutlass.min(part, count - 1)
        weight = self.statistics(there, line // LINES_OF_ROW)[FACTORS + half_of(line)]
        found = cute.make_rmem_tensor(OCTET, Float16)
        start = self.part(there) + (self.rows_bytes + (line - self.first_line) * LINE_BYTES)
        copy_chunk(chunk_of(halves_of(start, LINE), column, OCTET), found)
        values = cute.make_rmem_tensor(OCTET, Float32)
        values.store(found.load().to(Float32))
        return cutlass.select_(part < count, weight, Float32(0.0)), values


def quad_of(octet: cute.Tensor, first: int) -> cute.Tensor:
    """Four of eight elements in registers."""
    return cute.make_tensor(octet.iterator + first, cute.make_layout(QUAD))


def lanes_of_row(count: Int32) -> Int32:
    """How many lanes of a warp weigh a row of up to 32 parts: a power of two."""
    lanes = Int32(WARP)
    for fewer in (16, 8, 4):
        lanes = cutlass.select_(count <= fewer, Int32(fewer), lanes)
    return lanes


def warps_of_line(lines: Int32, warps: int) -> Int32:
    """How many warps share each of up to `warps` lines: a power of two."""
    sharing = Int32(1)
    for more in (2, 4, 8):
        sharing = cutlass.select_(lines * more <= warps, Int32(more), sharing)
    return sharing


def half_of(line: Int32) -> Int32:
    """Whose columns a line has: those of the left or of the right half of its row."""
    return line % LINES_OF_ROW // (LINES_OF_ROW // CONSUMERS)
