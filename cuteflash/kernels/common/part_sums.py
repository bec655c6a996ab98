"""How the parts of a tile whose keys are split are added up, row by row, by the blocks that are asked to."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.gqa import output_rows, row_coord, row_token
from cuteflash.core.scores import computed_here
from cuteflash.core.sinks import Sinks
from cuteflash.core.softmax import LOG2_E, exp2
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.common.weighted_sum import (
    QUAD,
    WARP,
    add_parts,
    address_here,
    after,
    float_of,
    lane_distances,
    largest_of_warp,
    load_words,
    merged_lse,
    quick_inverse_of,
)

FEW_LINES, MANY_LINES = 2, 4  # of a warp that are merged one by one, at most; that are merged together
FP32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Bases:
    """Where what is merged of a tile lies: addresses that blocks compute while they wait for each other.

    Attributes:
        lane: of the warp; from it all else of a lane is computed, so that nothing is kept while keys are visited.
        begin: of the first part that this lane adds;
        others: likewise, if it were not the tile's first part.
        lse: of the log-sum-exps of the tile's first part, if it were not that.
        out: the tile's rows of O, (rows, head_dim_v).
    """

    lane: Int32
    begin: Int64
    others: Int64
    lse: Int64
    out: cute.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class PartSums:
    """The partial results of a launch.

    Attributes:
        values: (2 blocks * tile_m * (head_dim_v + 1),) fp32: O of all slots, then the log-sum-exps of all.
        arrivals: (blocks,), parts that have come of the tile that begins in a seat's share.
        gO: O as `query_view` has it.
        mLSE: (b, h_q, s_q); None if it is not asked for.
        sinks: those that join the sums of a tile, if there are sinks.
        head_dim_v: of the problem.
        rows, columns: of a slot, `tile_m` and the padded `head_dim_v`.
        loads: that a thread has in flight when it merges.
    """

    values: cute.Tensor
    arrivals: cute.Tensor
    gO: cute.Tensor
    mLSE: cute.Tensor | None
    sinks: Sinks | None
    head_dim_v: cutlass.Constexpr[int]
    rows: cutlass.Constexpr[int]
    columns: cutlass.Constexpr[int]
    loads: cutlass.Constexpr[int]

    def at(self, slot: Int32, row: Int32, column: Int32) -> cute.Pointer:
        """Where an element of a slot's O lies."""
        return self.values.iterator + ((slot * self.rows + row) * self.columns + column)

    def lse_at(self, slot: Int32, row: Int32) -> Int32:
        """The index of a row's log-sum-exp in `values`."""
        slots = 2 * self.arrivals.shape[0]
        return slots * self.rows * self.columns + slot * self.rows + row

    @cute.jit
    def merge(
        self,
        tile: QueryTile,
        thread: Int32,
        warps: cutlass.Constexpr[int],
        place: tuple[Int32, Int32],
        bases: Bases,
    ):
        """Merge all parts of a tile, and write O and the log-sum-exp; `warps` warps of each block of `place` call it.

        A warp takes a line, which is a row or 128 columns of one: its lanes four columns each, of narrow rows groups of
        lanes the same columns of other parts. What takes time is to wait for memory, so that each lane has many loads
        in flight: of all parts of one line, half of a warp's if there are no more, or, if there are many lines, of
        some parts of several.
        """
        number, mates = place
        line = number + mates * cute.arch.make_warp_uniform(thread // WARP)
        lines, step = self.lines(tile), mates * warps
        most, some = (max(n // self.lane_groups, 1) for n in (WARP, self.loads // MANY_LINES))
        if lines > step * FEW_LINES:
            while line < lines:
                self.merge_lines(tile, (line, step), bases, MANY_LINES, some)
                line += step * MANY_LINES
        elif self.parts_of(tile) <= WARP // 2:
            while line < lines:
                self.merge_lines(tile, (line, step), bases, 1, min(self.loads, most // 2), WARP // 2)
                line += step
        else:
            while line < lines:
                self.merge_lines(tile, (line, step), bases, 1, min(self.loads, most))
                line += step

    @property
    def lines_of_row(self) -> int:
        """Lines of a row, see `merge`."""
        return -(-self.head_dim_v // (QUAD * WARP))

    def lines(self, tile: QueryTile) -> Int32:
        """Lines of a tile."""
        return tile.rows() * self.lines_of_row

    @property
    def lane_groups(self) -> int:
        """Groups of a warp's lanes that have all columns of a line, each of other parts."""
        return max(QUAD * WARP // (1 << (self.columns - 1).bit_length()), 1)

    def parts_of(self, tile: QueryTile) -> Int32:
        """How many parts a tile has."""
        return tile.share.last_owner - tile.share.owner + 1

    @cute.jit
    def merge_lines(
        self,
        tile: QueryTile,
        place: tuple[Int32, Int32],
        bases: Bases,
        many: cutlass.Constexpr[int],
        at_once: cutlass.Constexpr[int],
        most: cutlass.Constexpr[int] = WARP,
    ):
        """Merge `many` lines, the first one and the step between them being `place`, by one warp.

        Parts are weighed a warp's lanes together, and each group of lanes adds its own in their order: how many are
        loaded at a time, and so who merges, changes no bit of the result. A line that does not exist is the last one
        that does.

        Args:
            bases: see `bases`.
            at_once: parts that a lane loads at once, of each line.
            most: parts of the tile, at most; a warp's lanes if they come in turns.
        """
        count = self.parts_of(tile)
        lane, groups, of_row = bases.lane, self.lane_groups, self.lines_of_row
        group, lane_column = self.group_of(lane), QUAD * (lane % (WARP // groups))
        first_line, step = place
        last = self.lines(tile) - 1
        lines = [cutlass.min(first_line + i * step, last) for i in range(many)]
        rows, columns = [line // of_row for line in lines], [line % of_row * (QUAD * WARP) for line in lines]
        places = [(row, cutlass.min(column + lane_column, self.columns - QUAD)) for row, column in zip(rows, columns)]
        acc = cute.make_rmem_tensor((QUAD, many), Float32)
        peak, weight = (cute.make_rmem_tensor(many, Float32) for _ in range(2))
        acc.fill(0.0)
        peak.fill(-Float32.inf)
        weight.fill(0.0)
        if const_expr(self.sinks is not None):
            for i in cutlass.range_constexpr(many):
                peak[i] = self.sinks.of_all_keys(tile, row_token(rows[i], tile.packed_heads)[1])
                weight[i] = cutlass.select_(peak[i] == -Float32.inf, Float32(0.0), Float32(1.0))
        for first in cutlass.range(0, count, WARP, unroll=1):
            parts = first, cutlass.min(count - first, WARP)
            lses = [self.load_lse(bases, parts, row) for row in rows]
            if const_expr(at_once * groups >= most):  # one wait for both
                all_parts = [self.load_parts(bases, parts, Int32(0), place, at_once) for place in places]
                lses = [after(lse, found, self.arrivals.shape[0]) for lse, found in zip(lses, all_parts, strict=True)]
            factors = cute.make_rmem_tensor(many, Float32)
            for i in cutlass.range_constexpr(many):
                new = cute.arch.fmax(peak[i], largest_of_warp(lses[i]))
                shift = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
                scale = exp2((peak[i] - shift) * LOG2_E)
                factors[i] = exp2((lses[i] - shift) * LOG2_E)
                peak[i] = new
                weight[i] = weight[i] * scale + cute.arch.warp_reduction_sum(factors[i])
                for e in cutlass.range_constexpr(QUAD):
                    acc[e, i] = acc[e, i] * scale
                if const_expr(at_once * groups >= most):
                    add_parts(acc[None, i], factors[i], group, groups, all_parts[i])
            if const_expr(at_once * groups < most):
                for number in cutlass.range(0, parts[1], at_once * groups, unroll=1):
                    skipped = number + group  # apart from the loop's number, which is a warp's
                    found = [self.load_parts(bases, parts, number, place, at_once) for place in places]
                    for i in cutlass.range_constexpr(many):
                        add_parts(acc[None, i], factors[i], skipped, groups, found[i])
        for i in cutlass.range_constexpr(many):
            for distance in lane_distances(groups):
                for e in cutlass.range_constexpr(QUAD):
                    acc[e, i] = acc[e, i] + cute.arch.shuffle_sync_bfly(acc[e, i], offset=distance)
            if first_line + i * step <= last:
                column = columns[i] + QUAD * lane  # beyond the row's end in all groups but the first
                self.write_line(tile, bases, (rows[i], column), acc[None, i], (peak[i], weight[i]))

    def load_lse(self, bases: Bases, parts: tuple[Int32, Int32], row: Int32) -> Float32:
        """The log-sum-exp of a row in this lane's part, or -inf.

        Args:
            bases: see `bases`.
            parts: the first part, and how many of a warp's lanes have one.
        """
        lane, (first, count) = bases.lane, parts
        part = first + cutlass.min(lane, count - 1)
        index = slot_of(part, Int32(part == 0)) * self.rows + row
        (word,) = load_words(bases.lse + Int64(index * FP32_BYTES), 0, 1)
        return cutlass.select_(lane < count, float_of(word), -Float32.inf)

    def group_of(self, lane: Int32) -> Int32:
        """Which of the groups of lanes this one is in."""
        return lane // (WARP // self.lane_groups)

    def bases(self, tile: QueryTile) -> Bases:
        """Where what is merged of a tile lies, computed where this is called."""
        owner, lane, origin = tile.share.owner, computed_here(cute.arch.lane_idx()), Int32(0)
        slots = [part_slot(owner, self.group_of(lane), may_be_first) for may_be_first in (True, False)]
        begin, others = (address_here(self.at(slot, origin, origin)) for slot in slots)
        lse = address_here(self.values.iterator + self.lse_at(slot_of(owner, 0), origin))
        return Bases(lane, begin, others, lse, self.out_here(tile))

    def out_here(self, tile: QueryTile) -> cute.Tensor | None:
        """A tile's rows of O, (rows, head_dim_v), whose address is computed where this is called."""
        rows = output_rows(self.gO, tile)
        start, dtype = address_here(rows.iterator), rows.element_type
        pointer = cute.make_ptr(dtype, start, AddressSpace.gmem, assumed_align=dtype.width // 8)
        return cute.make_tensor(pointer, rows.layout)

    def load_parts(
        self,
        bases: Bases,
        parts: tuple[Int32, Int32],
        number: Int32,
        place: tuple[Int32, Int32],
        at_once: int,
    ) -> cute.Tensor:
        """Four columns of a row, from `place` on, in each of `at_once` parts, between which those of other lanes lie.

        What is there of a part that does not exist is anything.

        Args:
            bases: see `bases`.
            parts: as of `load_lse`.
            number: of the first group of lanes' first part, after the first of these.
        """
        (first, count), (row, column), groups = parts, place, self.lane_groups
        values = cute.make_rmem_tensor((QUAD, at_once), Float32)
        words, part_bytes = cute.recast_tensor(values, Uint32), 2 * self.rows * self.columns * FP32_BYTES
        offset = Int64((first + number) * part_bytes + (row * self.columns + column) * FP32_BYTES)
        begin = cutlass.select_(first + number == 0, bases.begin, bases.others)
        left = count - number - self.group_of(bases.lane)
        for i in range(at_once):
            start = (bases.others if i else begin) + offset
            for e, word in enumerate(load_words(start, i * groups * part_bytes, QUAD, left, i * groups)):
                words[e, i] = word
        return values

    @cute.jit
    def write_line(
        self,
        tile: QueryTile,
        bases: Bases,
        place: tuple[Int32, Int32],
        acc: cute.Tensor,
        sums: tuple[Float32, Float32],
    ):
        """Write four columns from `place` on, and by one lane the row's log-sum-exp; `sums` are its peak and weight."""
        (row, column), (peak, weight) = place, sums
        inverse = quick_inverse_of(weight)
        for e in cutlass.range_constexpr(QUAD):
            acc[e] = acc[e] * inverse
        if column < self.head_dim_v:
            self.write_chunk(tile, row, column // QUAD, acc, bases.out)
        if const_expr(self.mLSE is not None):
            if column == 0:
                token, head = row_token(row, tile.packed_heads)
                head += tile.head * tile.packed_heads
                self.mLSE[tile.batch, head, tile.first_row + token] = merged_lse(peak, weight)

    def write_chunk(
        self, tile: QueryTile, row: Int32, chunk: Int32, acc: cute.Tensor, out: cute.Tensor | None = None
    ) -> None:
        """Round four columns of a row and store them; `out` as of `Bases`."""
        dtype = self.gO.element_type
        rounded = cute.make_rmem_tensor(QUAD, dtype)
        rounded.store(acc.load().to(dtype))
        rows = output_rows(self.gO, tile) if out is None else out
        line = rows[row_coord(row, tile.packed_heads), None]
        start = aligned(cute.zipped_divide(line, (QUAD,))[None, chunk].iterator, QUAD * dtype.width // 8)
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=QUAD * dtype.width)
        cute.copy(atom, rounded, cute.make_tensor(start, cute.make_layout(QUAD)))


def part_slot(owner: Int32, part: Int32, may_be_first: bool = True) -> Int32:
    """The slot of a part of a tile, of two at least, whose first part is that of the seat `owner`."""
    return slot_of(owner + part, Int32(part == 0) if may_be_first else Int32(0))
