"""Split keys of the latent-attention decode: parts of a tile go to memory, and the blocks that have them merge them.

As in `partials.py`, where blocks meet. Of a tile with two parts the second one alone goes to memory: the block with the
first keys, for which the tile is the last one, keeps its part in registers and adds the other one to it (`join`).

The launch has to be a cooperative one, all of whose blocks run at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.atoms.l2 import store_kept
from cuteflash.core.convert import round_pair
from cuteflash.core.scores import ScoreTile, computed_here
from cuteflash.core.softmax import LOG2_E, exp2
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import KeyShare, QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.common.partials import Partials, own_slot
from cuteflash.kernels.common.weighted_sum import inverse_of, merged_lse
from cuteflash.mla_problem import LATENT_DIM_V, MlaTensors

PAIR, QUAD = 2, 4  # neighbouring elements of O in a thread, and fp32 elements of a store and of a load
GROUP = 8  # columns of which four lanes of a product have a pair each
WARP = 32
LOADS = 32  # of four elements, that a thread has in flight when it merges
JOINED = 16  # of what a thread has of the other part of a tile, when it adds that to its own

# A thread's number, how many warps it is one of, and their barrier.
Threads = tuple[Int32, cutlass.Constexpr[int], cutlass.Constexpr[Callable[[], None]]]
# What lies next to each other in memory of a thread's elements of a row of O: their numbers, and the first one's place.
Chunk = tuple[tuple[int, ...], Int32]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a thread has of a block's part of a tile.

    Attributes:
        scores: for the rows of its elements.
        out: its elements of O, normalized, as (rows, columns).
        chunks: where those of a row belong in a row of partial results.
        lse: of its rows.
    """

    scores: ScoreTile
    out: cute.Tensor
    chunks: cutlass.Constexpr[list[Chunk]]
    lse: cute.Tensor


@dataclasses.dataclass(frozen=True)
class LatentParts(Partials):
    """The partial results of a launch, in the order of `columns_at`.

    `gO` is O as (rows, 512, batch), and `mLSE` (batch, 1, rows).
    """

    @classmethod
    def of_launch(cls, tensors: MlaTensors, gO: cute.Tensor, mLSE: cute.Tensor, tile_m: int) -> LatentParts:
        """Those of a launch with tiles of `tile_m` rows."""
        return cls(
            values=tensors.partials,
            arrivals=tensors.arrivals,
            gO=gO,
            mLSE=mLSE,
            sinks=None,
            head_dim_v=LATENT_DIM_V,
            rows=tile_m,
            columns=LATENT_DIM_V,
            loads=LOADS,
        )

    chunk: ClassVar[int] = QUAD  # neighbouring elements of a row that are a thread's, see `chunks_of`

    def row(self, slot: Int32, row: Int32) -> cute.Tensor:
        """A row of a slot's O, (512,)."""
        return cute.make_tensor(self.at(slot, row, Int32(0)), cute.make_layout(LATENT_DIM_V))

    @cute.jit
    def finish(
        self,
        part: Part,
        tile: QueryTile,
        threads: Threads,
        write_whole: cutlass.Constexpr[Callable[[], None]],
    ):
        """Bring a block's part of a tile together with the others. All threads with some of the part call it.

        Args:
            part: what this thread has of it.
            tile: which tile it is.
            threads: those that call it.
            write_whole: writes O and the log-sum-exps of `part` as those of all keys.
        """
        thread, _, sync = threads
        share = tile.share
        if share.is_whole() | joins(share):
            if joins(share):
                self.join(part, tile, (thread, sync))
            write_whole()
        else:  # O is not needed any more when parts are merged
            self.write_chunks(part, tile)
            if (share.seat == share.last_owner) & ~merges_last(share):
                self.announce(tile, thread, sync)
            else:
                self.merge_with_others(tile, threads)

    @cute.jit
    def write_chunks(
        self,
        part: Part,
        tile: QueryTile,
    ):
        """Write a block's part of a tile."""
        slot, rows = own_slot(tile.share), tile.rows()
        for r in cutlass.range_constexpr(cute.size(part.lse)):
            row = part.scores.row(r)
            if row < rows:
                line = self.row(slot, row)
                for numbers, start in part.chunks:
                    chunk = cute.make_rmem_tensor(len(numbers), Float32)
                    for i, number in enumerate(numbers):
                        chunk[i] = part.out[r, number]
                    store_kept(chunk, chunk_of(line, start, len(numbers)))
                if part.scores.first_key == 0:
                    self.values[self.lse_at(slot, row)] = part.lse[r]

    @cute.jit
    def merge_with_others(self, tile: QueryTile, threads: Threads):
        """Merge some lines of a tile's parts once all have come, as `merge`; `threads` as of `finish`."""
        thread, warps, sync = threads
        came = self.arrive(tile, thread, sync)
        place, bases = self.place(tile), self.bases(tile)
        if self.all_came(tile, thread, came, sync):
            self.merge(tile, thread, warps, place, bases)

    def place(self, tile: QueryTile) -> tuple[Int32, Int32]:
        """As in `Partials`."""
        share = tile.share
        return share.seat - share.owner, share.last_owner - share.owner + Int32(merges_last(share))

    @cute.jit
    def announce(self, tile: QueryTile, thread: Int32, sync: cutlass.Constexpr[Callable[[], None]]):
        """As `arrive` for a block with the last part that merges nothing: it has more tiles, or another one joins."""
        sync()
        if thread == 0:
            cute.arch.atomic_add(self.arrivals.iterator + tile.share.owner, Int32(1), sem="release", scope="gpu")

    @cute.jit
    def await_other(self, owner: Int32):
        """Wait for the second part of a tile with two of them, and clear its counter; one thread calls it."""
        counter = self.arrivals.iterator + owner
        came = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while came == 0:
            came = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        self.arrivals[owner] = Int32(0)

    @cute.jit
    def join(
        self,
        part: Part,
        tile: QueryTile,
        threads: tuple[Int32, cutlass.Constexpr[Callable[[], None]]],
    ):
        """Add the second part of a tile with two of them to the first one, which this block has; see `finish`."""
        thread, sync = threads
        scores, out, chunks, lse = part.scores, part.out, part.chunks, part.lse
        owner = tile.share.owner
        if thread == 0:
            self.await_other(owner)
        sync()
        slot, count = slot_of(owner + 1, 0), cute.size(lse)
        together = max(JOINED // len(chunks), 1)
        for first in cutlass.range_constexpr(0, count, together):
            rows = range(first, min(first + together, count))  # those past the tile's last one are not used
            others = [self.values[self.lse_at(slot, scores.row(r))] for r in rows]
            loaded = [[load_chunk(self.row(slot, scores.row(r)), *chunk) for chunk in chunks] for r in rows]
            for r, other, values in zip(rows, others, loaded, strict=True):
                own_factor, factor, lse_of_both = weighed(lse[r], other)
                lse[r] = lse_of_both
                for (numbers, _), chunk in zip(chunks, values, strict=True):
                    for i, number in enumerate(numbers):
                        out[r, number] = out[r, number] * own_factor + chunk[i] * factor

    def out_here(self, tile: QueryTile) -> None:
        """`write_chunk` finds O by itself."""

    def write_chunk(
        self, tile: QueryTile, row: Int32, chunk: Int32, acc: cute.Tensor, out: cute.Tensor | None = None
    ) -> None:
        """Round four columns of a row and store them."""
        line = self.gO[tile.first_row + row, None, tile.batch]
        for pair, start in enumerate(columns_at(chunk * QUAD, self.chunk)):
            rounded = cute.make_rmem_tensor(PAIR, line.element_type)
            values = (acc[PAIR * pair + i] for i in range(PAIR))
            cute.recast_tensor(rounded, Uint32)[0] = round_pair(*values, line.element_type)
            copy_chunk(rounded, chunk_of(line, start, PAIR))


def joins(share: KeyShare) -> Boolean:
    """Whether the block with this part of a tile adds the other one to it."""
    return (share.seat == share.owner) & (share.last_owner == share.owner + 1)


def merges_last(share: KeyShare) -> Boolean:
    """Whether the block with the last of three or more parts has no further tile, and merges with the others.

    As `KeyShare.ends_with_share`, but without a division, as latent lines have no divisor in place of a share.
    """
    end_of_share = (computed_here(share.last_owner) - share.first_seat + 1) * share.share
    return (share.begin + share.width >= end_of_share) & (share.last_owner > share.owner + 1)


def weighed(lse: Float32, other: Float32) -> tuple[Float32, Float32, Float32]:
    """What a row of each of two parts is multiplied with, and the log-sum-exp of both, by those of the parts."""
    peak = cute.arch.fmax(lse, other)
    shift = cutlass.select_(peak == -Float32.inf, Float32(0.0), peak)
    weight, other_weight = (exp2((x - shift) * LOG2_E) for x in (lse, other))
    total = weight + other_weight
    inverse = inverse_of(total)
    return weight * inverse, other_weight * inverse, merged_lse(peak, total)


def chunks_of(columns: cute.Tensor, size: int) -> list[Chunk]:
    """The chunks of a thread whose elements have these coordinates in the tile, as (rows, columns).

    They are pairs of neighbouring groups, of which four lanes have all: what is next to each other in a thread is so in
    memory, `size` elements at a time.
    """
    found = []
    for c in range(0, cute.size(columns.shape[1]), size):
        first = columns[0, c][1]
        found.append((tuple(range(c, c + size)), first + (size // PAIR - 1) * (first % GROUP)))
    return found


def columns_at(place: Int32, size: int) -> tuple[Int32, Int32]:
    """The columns of O whose pairs lie at `place`, a multiple of 4, of a row of partial results in chunks of `size`."""
    inside = place % (GROUP // PAIR * size)
    lane, number = inside // size, inside % size
    first = place - inside + number // PAIR * GROUP + PAIR * lane
    return first, first + GROUP


def load_chunk(line: cute.Tensor, numbers: tuple[int, ...], start: Int32) -> cute.Tensor:
    """A chunk of a row of partial results."""
    chunk = cute.make_rmem_tensor(len(numbers), Float32)
    copy_chunk(chunk_of(line, start, len(numbers)), chunk)
    return chunk


def chunk_of(line: cute.Tensor, column: Int32, size: int) -> cute.Tensor:
    """`size` neighbouring elements of a contiguous line, from `column` on, a multiple of `size`."""
    start = aligned(line.iterator + column, size * line.element_type.width // 8)
    return cute.make_tensor(start, cute.make_layout(size))


def copy_chunk(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copy some elements with one load or store."""
    bits = cute.size(source) * source.element_type.width
    cute.copy(cute.make_copy_atom(CopyUniversalOp(), source.element_type, num_bits_per_copy=bits), source, target)
