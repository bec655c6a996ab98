"""The end of a tile whose keys are split: each block's part goes to memory, where they are merged.

A part is O of its keys, normalized, and their log-sum-exp, fp32. If a tile has few rows, the last block to come merges
them, and nobody waits (`come`). Of many rows the blocks for which this is the last tile wait for each other, and merge
some rows each (`arrive`, `all_came`); the launch has to be a cooperative one, all of whose blocks run at the same time.
Slots are those of `cuteflash.core.split_slots`, and how parts are added up is in `part_sums.py`. L2 is asked to keep
parts, which otherwise go to memory while other blocks, or the next launch, read their keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.arguments import FwdTensors, SplitTensors
from cuteflash.atoms.l2 import store_kept
from cuteflash.core.gqa import query_view
from cuteflash.core.scores import ScoreTile
from cuteflash.core.sinks import Sinks
from cuteflash.core.split import arrivals_of
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import KeyShare, QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.common.part_sums import PartSums

PAIR = 2  # fp32 elements of a store
MEETING_ROWS = 12  # of a tile, from which on its blocks meet; between the numbers that were timed


@dataclasses.dataclass(frozen=True)
class Partials(PartSums):
    """The partial results of a launch, which its blocks write and merge."""

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
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = scores.row(r)
            if row < rows:
                for c in cutlass.range_constexpr(0, cute.size(out.shape[1]), PAIR):
                    pair = cute.make_rmem_tensor(PAIR, Float32)
                    for i in cutlass.range_constexpr(PAIR):
                        pair[i] = out[r, c + i]
                    target = aligned(self.at(slot, row, columns[0, c][1]), PAIR * Float32.width // 8)
                    store_kept(pair, cute.make_tensor(target, cute.make_layout(PAIR)))
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
            mates = share.last_owner - share.owner
            word[0] = Int32(count_on(counter, mates) == mates)
        sync()
        return word[0] != 0

    def place(self, tile: QueryTile) -> tuple[Int32, Int32]:
        """(which of the blocks that merge a tile together this is, how many there are at most).

        All with a part but the last one, if that has further tiles; for the others this is the last tile.
        """
        share = tile.share
        return share.seat - share.owner, share.last_owner - share.owner + Int32(share.ends_with_share())

    @cute.jit
    def arrive(self, tile: QueryTile, thread: Int32, sync: cutlass.Constexpr[Callable[[], None]]):
        """Say that this block's part of a tile has come; all threads that wrote it call this, `sync` is their barrier.

        Returns how many have come, for thread 0. What a block needs once all are there it computes behind this.
        """
        sync()
        came = Int32(0)
        if thread == 0:
            came = count_on(self.arrivals.iterator + tile.share.owner, self.last_count(tile)) + 1
        return came

    @cute.jit
    def all_came(self, tile: QueryTile, thread: Int32, came: Int32, sync: cutlass.Constexpr[Callable[[], None]]):
        """Whether this block merges rows of a tile; then all parts have come. `came` is what `arrive` returned.

        Nobody waits for a block that waits before it has written its part. Blocks that have seen all parts count on,
        too, and the last one of them brings the counter back to 0. Not by an atomic operation with an answer, which a
        block would wait for before it ends.
        """
        counter, merges = self.arrivals.iterator + tile.share.owner, self.place(tile)[0] < self.merging(tile)
        if (thread == 0) & merges:
            while came < self.parts_of(tile):
                came = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            self.see_parts()
            count_unseen(counter, self.last_count(tile))
        sync()
        return merges

    def merging(self, tile: QueryTile) -> Int32:
        """How many blocks merge a tile's lines."""
        return cutlass.min(self.place(tile)[1], self.lines(tile))

    def last_count(self, tile: QueryTile) -> Int32:
        """What a tile's counter is before it becomes 0 again."""
        return self.parts_of(tile) + self.merging(tile) - 1

    def see_parts(self) -> None:
        """What a thread does that has seen all parts come, before the others read them: nothing."""

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
        merges, number, mates, came = Boolean(False), Int32(0), Int32(1), Int32(0)
        if meets:
            number, mates = self.place(tile)
            came = self.arrive(tile, thread, sync)
        bases = self.bases(tile)
        if meets:
            merges = self.all_came(tile, thread, came, sync)
        else:
            merges = self.come(tile, thread, word, sync)
        if merges:
            self.merge(tile, thread, warps, (number, mates), bases)


def own_slot(share: KeyShare) -> Int32:
    """The slot of a block's own part of a tile."""
    return slot_of(share.seat, Int32(share.owner == share.seat))


def count_on(counter: cute.Pointer, last: Int32) -> Int32:
    """What a counter was, before one was added to it, or, if it was `last`, it became 0.

    What the block wrote before can be seen by those that count on, and what they wrote by this thread.
    """
    return cute.arch.inline_ptx(
        "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[counter, last],
    )


def count_unseen(counter: cute.Pointer, last: Int32) -> None:
    """As `count_on`, but without an answer, and saying nothing of what was written."""
    cute.arch.inline_ptx("red.relaxed.gpu.global.inc.u32 [{$r0}], {$r1};", read_only_args=[counter, last])
