"""The end of a tile whose keys are split: each block's part goes to memory, where they are merged.

A part is O of its keys, normalized, and their log-sum-exp, fp32. If a tile has few rows, the last block to come merges
them, and nobody waits (`come`). Of many rows the blocks for which this is the last tile wait for each other, and merge
some rows each (`meet`); the launch has to be a cooperative one, all of whose blocks run at the same time. Slots are
those of `cuteflash.core.split_slots`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.arguments import FwdTensors, SplitTensors
from cuteflash.core.gqa import output_row, query_view, row_token
from cuteflash.core.scores import ScoreTile
from cuteflash.core.sinks import Sinks
from cuteflash.core.softmax import LOG2_E, exp2
from cuteflash.core.split import arrivals_of
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import KeyShare, QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.common.weighted_sum import (
    QUAD,
    WARP,
    add_parts,
    after,
    inverse_of,
    lane_distances,
    merged_lse,
)

PAIR = 2  # fp32 elements of a store
FEW_LINES, MANY_LINES = 2, 4  # of a warp that are merged one by one, at most; that are merged together
MEETING_ROWS = 12  # of a tile, from which on its blocks meet; between the numbers that were timed


@dataclasses.dataclass(frozen=True)
class Partials:
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

    @classmethod
    def of(cls, kernel, tensors: FwdTensors, split: SplitTensors, sinks: Sinks | None) -> Partials | None:
        """Those of a kernel; None if it does not split. `tensors` as `batched` returns them."""
        if not kernel.problem.is_split:
            return None
        operands, traits = kernel.problem.operands, kernel.traits
        return cls(
            values=split.partials,
            arrivals=arrivals_of(split, kernel.problem),
            gO=query_view(tensors.o, operands.packed_heads),
            mLSE=tensors.lse,
            sinks=sinks,
            head_dim_v=operands.head_dim_v,
            rows=traits.tile_m,
            columns=traits.head_dim_v,
            loads=traits.merge_loads,
        )

    def at(self, slot: Int32, row: Int32, column: Int32) -> cute.Pointer:
        """Where an element of a slot's O lies."""
        return self.values.iterator + ((slot * self.rows + row) * self.columns + column)

    def lse_at(self, slot: Int32, row: Int32) -> Int32:
        """The index of a row's log-sum-exp in `values`."""
        slots = 2 * self.arrivals.shape[0]
        return slots * self.rows * self.columns + slot * self.rows + row

    @cute.jit
    def write(self, scores: ScoreTile, out: cute.Tensor, columns: cute.Tensor, lse: cute.Tensor, tile: QueryTile):
        """Write a block's part of a tile.

        Args:
            scores: for the rows of this thread's elements.
            out: its elements of O, normalized, as (rows, columns).
            columns: likewise, the coordinates of its elements in the tile.
            lse: of its rows.
        """
        slot, rows = own_slot(tile.share), tile.rows()
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=PAIR * Float32.width)
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = scores.row(r)
            if row < rows:
                for c in cutlass.range_constexpr(0, cute.size(out.shape[1]), PAIR):
                    pair = cute.make_rmem_tensor(PAIR, Float32)
                    for i in cutlass.range_constexpr(PAIR):
                        pair[i] = out[r, c + i]
                    target = aligned(self.at(slot, row, columns[0, c][1]), PAIR * Float32.width // 8)
                    cute.copy(atom, pair, cute.make_tensor(target, cute.make_layout(PAIR)))
                if scores.first_key == 0:
                    self.values[self.lse_at(slot, row)] = lse[r]

    @cute.jit
    def come(self, tile: QueryTile, thread: Int32, word: cute.Tensor, sync: cutlass.Constexpr[Callable[[], None]]):
        """Whether this block's part of a tile is the last one to come; all threads that wrote it call this.

        Args:
            word: (1,) Int32 in shared memory.
            sync: barrier of these threads.
        """
        sync()
        if thread == 0:
            share = tile.share
            counter = self.arrivals.iterator + share.owner
            before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            is_last = before == share.last_owner - share.owner
            word[0] = Int32(is_last)
            if is_last:
                self.arrivals[share.owner] = Int32(0)
        sync()
        return word[0] != 0

    def place(self, tile: QueryTile) -> tuple[Int32, Int32]:
        """(which of the blocks that merge a tile together this is, how many there are at most).

        All with a part but the last one, which may have further tiles; for the others this is the last tile.
        """
        return tile.share.seat - tile.share.owner, tile.share.last_owner - tile.share.owner

    @cute.jit
    def meet(self, tile: QueryTile, thread: Int32, sync: cutlass.Constexpr[Callable[[], None]]):
        """Whether this block merges rows of a tile; then all parts have come. All threads that wrote its part call it.

        Nobody waits for a block that waits before it has written its part. `sync` is a barrier of these threads.
        """
        number, mates = self.place(tile)
        merging = cutlass.min(mates, self.lines(tile))
        sync()
        if thread == 0:
            counter = self.arrivals.iterator + tile.share.owner
            came = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu") + 1
            if number < merging:
                while came <= mates:
                    came = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        sync()
        return number < merging

    @cute.jit
    def leave(self, tile: QueryTile, thread: Int32):
        """After `meet`, once for each block that merges: the last one of them clears the counter, which all have seen.

        Not before the merge, which would wait for the answer.
        """
        if thread == 0:
            mates = self.place(tile)[1]
            counter = self.arrivals.iterator + tile.share.owner
            before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            if before == mates + cutlass.min(mates, self.lines(tile)):
                self.arrivals[tile.share.owner] = Int32(0)

    @cute.jit
    def merge_if_due(
        self,
        tile: QueryTile,
        thread: Int32,
        warps: cutlass.Constexpr[int],
        word: cute.Tensor,
        sync: cutlass.Constexpr[Callable[[], None]],
        is_scheduled: cutlass.Constexpr[bool],
    ):
        """Merge the parts of a tile, or some of its rows, if that falls to this block; arguments as of `come`.

        Blocks of launches that are scheduled do not meet: metadata of other lengths may name blocks that never come.
        """
        meets = tile.rows() >= MEETING_ROWS
        if const_expr(is_scheduled):
            meets = Boolean(False)
        merges, number, mates = Boolean(False), Int32(0), Int32(1)
        if meets:
            number, mates = self.place(tile)
            merges = self.meet(tile, thread, sync)
        else:
            merges = self.come(tile, thread, word, sync)
        if merges:
            self.merge(tile, thread, warps, (number, mates))
            if meets:
                self.leave(tile, thread)

    @cute.jit
    def merge(
        self,
        tile: QueryTile,
        thread: Int32,
        warps: cutlass.Constexpr[int],
        place: tuple[Int32, Int32],
    ):
        """Merge all parts of a tile, and write O and the log-sum-exp; `warps` warps of each block of `place` call it.

        A warp takes a line, which is a row or 128 columns of one: its lanes four columns each, of narrow rows groups of
        lanes the same columns of other parts. What takes time is to wait for memory, so that each lane has many loads
        in flight: of all parts of one line, half of a warp's if there are no more, or, if there are many lines, of
        some parts of several.
        """
        number, mates = place
        first = number + mates * cute.arch.make_warp_uniform(thread // WARP)
        lines, step = self.lines(tile), mates * warps
        most, some = (max(n // self.lane_groups, 1) for n in (WARP, self.loads // MANY_LINES))
        if lines > step * FEW_LINES:
            for line in cutlass.range(first, lines, step * MANY_LINES, unroll=1):
                self.merge_lines(tile, (line, step), MANY_LINES, some)
        elif self.parts_of(tile) <= WARP // 2:
            for line in cutlass.range(first, lines, step, unroll=1):
                self.merge_lines(tile, (line, step), 1, min(self.loads, most // 2), WARP // 2)
        else:
            for line in cutlass.range(first, lines, step, unroll=1):
                self.merge_lines(tile, (line, step), 1, min(self.loads, most))

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
        many: cutlass.Constexpr[int],
        at_once: cutlass.Constexpr[int],
        most: cutlass.Constexpr[int] = WARP,
    ):
        """Merge `many` lines, the first one and the step between them being `place`, by one warp.

        Parts are weighed a warp's lanes together, and each group of lanes adds its own in their order: how many are
        loaded at a time, and so who merges, changes no bit of the result. A line that does not exist is the last one
        that does.

        Args:
            at_once: parts that a lane loads at once, of each line.
            most: parts of the tile, at most; a warp's lanes if they come in turns.
        """
        owner, count = tile.share.owner, self.parts_of(tile)
        lane, groups, of_row = cute.arch.lane_idx(), self.lane_groups, self.lines_of_row
        group, lane_column = lane // (WARP // groups), QUAD * (lane % (WARP // groups))
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
            lses = [self.load_lse(owner, parts, row) for row in rows]
            if const_expr(at_once * groups >= most):  # one wait for both
                all_parts = [self.load_parts(owner, parts, group, place, at_once) for place in places]
                lses = [after(lse, found, self.arrivals.shape[0]) for lse, found in zip(lses, all_parts, strict=True)]
            factors = cute.make_rmem_tensor(many, Float32)
            for i in cutlass.range_constexpr(many):
                new = cute.arch.fmax(peak[i], cute.arch.warp_reduction_max(lses[i]))
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
                    found = [self.load_parts(owner, parts, skipped, place, at_once) for place in places]
                    for i in cutlass.range_constexpr(many):
                        add_parts(acc[None, i], factors[i], skipped, groups, found[i])
        for i in cutlass.range_constexpr(many):
            for distance in lane_distances(groups):
                for e in cutlass.range_constexpr(QUAD):
                    acc[e, i] = acc[e, i] + cute.arch.shuffle_sync_bfly(acc[e, i], offset=distance)
            if first_line + i * step <= last:
                column = columns[i] + QUAD * lane  # beyond the row's end in all groups but the first
                self.write_line(tile, rows[i], column, acc[None, i], (peak[i], weight[i]))

    def load_lse(self, owner: Int32, parts: tuple[Int32, Int32], row: Int32) -> Float32:
        """The log-sum-exp of a row in this lane's part, or -inf.

        Args:
            owner: the seat with the tile's first part.
            parts: the first part, and how many of a warp's lanes have one.
        """
        lane, (first, count) = cute.arch.lane_idx(), parts
        lse = self.values[self.lse_at(part_slot(owner, first + cutlass.min(lane, count - 1)), row)]
        return cutlass.select_(lane < count, lse, -Float32.inf)

    def load_parts(
        self, owner: Int32, parts: tuple[Int32, Int32], skipped: Int32, place: tuple[Int32, Int32], at_once: int
    ) -> cute.Tensor:
        """Four columns of a row, from `place` on, in each of `at_once` parts: `skipped` after the first, and so on.

        From one to the next it is as many as there are groups of lanes. The last one of `parts`, which `load_lse`
        describes, stands for those that do not exist.
        """
        (first, count), (row, column) = parts, place
        values = cute.make_rmem_tensor((QUAD, at_once), Float32)
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=QUAD * Float32.width)
        for i in range(at_once):
            part = cutlass.min(skipped + i * self.lane_groups, count - 1)
            slot = part_slot(owner, first + part, may_be_first=i == 0)
            source = aligned(self.at(slot, row, column), QUAD * Float32.width // 8)
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(QUAD)), values[None, i])
        return values

    @cute.jit
    def write_line(self, tile: QueryTile, row: Int32, column: Int32, acc: cute.Tensor, sums: tuple[Float32, Float32]):
        """Write four columns of a row, and by one lane its log-sum-exp; `sums` are its peak and sum of weights."""
        peak, weight = sums
        inverse = inverse_of(weight)
        for e in cutlass.range_constexpr(QUAD):
            acc[e] = acc[e] * inverse
        if column < self.head_dim_v:
            self.write_chunk(tile, row, column // QUAD, acc)
        if const_expr(self.mLSE is not None):
            if column == 0:
                token, head = row_token(row, tile.packed_heads)
                head += tile.head * tile.packed_heads
                self.mLSE[tile.batch, head, tile.first_row + token] = merged_lse(peak, weight)

    def write_chunk(self, tile: QueryTile, row: Int32, chunk: Int32, acc: cute.Tensor) -> None:
        """Round four columns of a row and store them."""
        dtype = self.gO.element_type
        rounded = cute.make_rmem_tensor(QUAD, dtype)
        rounded.store(acc.load().to(dtype))
        line = output_row(self.gO, tile, row)
        start = aligned(cute.zipped_divide(line, (QUAD,))[None, chunk].iterator, QUAD * dtype.width // 8)
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=QUAD * dtype.width)
        cute.copy(atom, rounded, cute.make_tensor(start, cute.make_layout(QUAD)))


def own_slot(share: KeyShare) -> Int32:
    """The slot of a block's own part of a tile."""
    return slot_of(share.seat, Int32(share.owner == share.seat))


def part_slot(owner: Int32, part: Int32, may_be_first: bool = True) -> Int32:
    """The slot of a part of a tile, of two at least, whose first part is that of the seat `owner`."""
    return slot_of(owner + part, Int32(part == 0) if may_be_first else Int32(0))
