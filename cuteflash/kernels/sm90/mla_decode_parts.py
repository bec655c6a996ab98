"""Parts of split keys of the latent-attention decode, as they lie in memory: 16 bits.

All blocks write and read parts of 64 x 512 elements at about the same time, which takes as long as L2 needs for their
bytes. So O of a part is fp16, each row's half times a power of two which brings its largest element to [2^14, 2^15):
what rounding adds to O is an eighth of what rounding it to bf16 does, or as much as rounding it to fp16.

L2 is asked to keep parts: otherwise they would go to memory while their launch, or the next one, reads its keys. A line
of them has one reader, which has L2 forget it afterwards, but for tiles of more than 32 parts: their lines are so few
that it would take longer than it saves.

Of a tile with two parts the second one comes to where Q was, by bulk copies while its block is still busy with the
first one. How more are merged: `mla_decode_merge.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from cuteflash.atoms import l2
from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.convert import round_pair
from cuteflash.core.fit_half import TOP, bits_of, exponent_of, power_of_two
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.common.mla_parts import (
    PAIR,
    Chunk,
    LatentParts,
    Part,
    chunk_of,
    copy_chunk,
    weighed,
)
from cuteflash.kernels.common.octets import OCTET
from cuteflash.kernels.common.partials import own_slot
from cuteflash.mla_problem import LATENT_DIM_V
from cuteflash.traits.mla_sm90 import CONSUMERS, ELEMENT_BYTES, PART_STATISTICS, STAT_BYTES
from cuteflash.traits.sm90 import WARPGROUP

ROW_BYTES = LATENT_DIM_V * ELEMENT_BYTES
HALF = LATENT_DIM_V // CONSUMERS  # columns of a warpgroup, which have one factor
LSE, FACTORS = 0, 1  # of a row's statistics: its log-sum-exp, and the factors of its halves
STATISTICS_BYTES = PART_STATISTICS * STAT_BYTES


@dataclasses.dataclass(frozen=True)
class HalfParts(LatentParts):
    """The partial results of a launch, and where a block of it puts those that it merges.

    `values` begins with O of all slots, fp16, and ends with the statistics of all slots, (slots, rows, 4).

    Attributes:
        stage: shared memory, from Q to P.
        beside: shared memory for the statistics of a part.
        arrived: mbarrier of one arrival, whose first phase completes when all that a block merges is there.
    """

    chunk: ClassVar[int] = OCTET

    stage: cute.Pointer | None = None
    beside: cute.Pointer | None = None
    arrived: cute.Pointer | None = None

    def at(self, slot: Int32, row: Int32, column: Int32) -> cute.Pointer:
        """Where an element of a slot's O lies."""
        return cute.recast_ptr(self.values.iterator, dtype=Float16) + ((slot * self.rows + row) * self.columns + column)

    def statistics_at(self, slot: Int32, row: Int32) -> cute.Pointer:
        """Where a row's statistics lie."""
        slots = 2 * self.arrivals.shape[0]
        words_of_o = slots * self.rows * (self.columns * ELEMENT_BYTES // STAT_BYTES)
        return self.values.iterator + (words_of_o + (slot * self.rows + row) * PART_STATISTICS)

    @cute.jit
    def write_chunks(self, part: Part, tile: QueryTile):
        """As in `LatentParts`; a thread's chunks are columns of one half."""
        slot, rows, half = own_slot(tile.share), tile.rows(), part.chunks[0][1] // HALF
        for r in cutlass.range_constexpr(cute.size(part.lse)):
            row = part.scores.row(r)
            exponent = exponent_of(bits_of(peak_of_row(part, r)))
            factor = power_of_two(TOP - exponent)
            if row < rows:
                line = self.row(slot, row)
                for chunk in part.chunks:
                    l2.store_kept(fitted_chunk(part, r, chunk, factor), chunk_of(line, chunk[1], OCTET))
                if part.scores.first_key == 0:
                    statistics = statistics_of(self.statistics_at(slot, row))
                    statistics[LSE] = part.lse[r]
                    statistics[FACTORS + half] = power_of_two(exponent - TOP)

    @cute.jit
    def join(
        self,
        part: Part,
        tile: QueryTile,
        threads: tuple[Int32, cutlass.Constexpr[Callable[[], None]]],
    ):
        """As in `LatentParts`."""
        wait_phase(self.arrived, Int32(0))
        slot, lines = slot_of(tile.share.owner + 1, 0), tile.rows() * (ROW_BYTES // l2.LINE)
        for line in cutlass.range(threads[0], lines, CONSUMERS * WARPGROUP, unroll=1):
            self.forget(slot, line)
        half = part.chunks[0][1] // HALF
        for r in cutlass.range_constexpr(cute.size(part.lse)):
            row = part.scores.row(r)
            statistics = statistics_of(self.beside + row * STATISTICS_BYTES)
            own_factor, factor, part.lse[r] = weighed(part.lse[r], statistics[LSE])
            factor *= statistics[FACTORS + half]
            line = halves_of(self.stage + row * ROW_BYTES, LATENT_DIM_V)
            for numbers, start in part.chunks:
                chunk = cute.make_rmem_tensor(OCTET, Float16)
                copy_chunk(chunk_of(line, start, OCTET), chunk)
                for i, number in enumerate(numbers):
                    part.out[r, number] = part.out[r, number] * own_factor + chunk[i].to(Float32) * factor

    def see_parts(self) -> None:
        """What other blocks have stored is copied by this one: the thread's fence lies between the two."""
        cute.arch.fence_proxy("async.global")

    def forget(self, slot: Int32, line: Int32) -> None:
        """Have L2 forget a line of a slot's O, of 128 bytes, which has been read."""
        l2.forget(self.at(slot, Int32(0), line * (l2.LINE // ELEMENT_BYTES)))

    @cute.jit
    def fetch_other(self, owner: Int32, rows: Int32):
        """Wait for the second part of a tile of `rows` rows, and bring it; one warp calls it."""
        slot = slot_of(owner + 1, 0)
        with cute.arch.elect_one():
            self.await_other(owner)
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.global")  # between its stores and the copies
        self.expect(rows * (STATISTICS_BYTES + ROW_BYTES))
        with cute.arch.elect_one():
            atoms.bulk_load(self.beside, self.statistics_at(slot, Int32(0)), rows * STATISTICS_BYTES, self.arrived)
            atoms.bulk_load(self.stage, self.at(slot, Int32(0), Int32(0)), rows * ROW_BYTES, self.arrived)

    def expect(self, nbytes: Int32) -> None:
        """Announce so many bytes; one warp calls it."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.arrived, nbytes)
        cute.arch.sync_warp()


@cute.jit
def peak_of_row(part: Part, r: cutlass.Constexpr[int]):
    """The largest magnitude of a row in the four lanes that have it, but for NaN; V is K, so that none is infinite."""
    peak = Float32(0.0)
    for numbers, _ in part.chunks:
        for number in numbers:
            peak = cute.arch.fmax(peak, cute.math.absf(part.out[r, number]))
    for distance in cutlass.range_constexpr(1, 3):
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=distance))
    return peak


def fitted_chunk(part: Part, r: int, chunk: Chunk, factor: Float32) -> cute.Tensor:
    """A chunk of a row times a factor, as fp16."""
    numbers, _ = chunk
    fitted = cute.make_rmem_tensor(OCTET, Float16)
    words = cute.recast_tensor(fitted, Uint32)
    for i in range(0, OCTET, PAIR):
        low, high = (part.out[r, number] * factor for number in numbers[i : i + PAIR])
        words[i // PAIR] = round_pair(low, high, Float16)
    return fitted


def statistics_of(place: cute.Pointer) -> cute.Tensor:
    """A row's statistics, which lie at a multiple of their bytes: else they would be read byte by byte."""
    return cute.make_tensor(
        aligned(cute.recast_ptr(place, dtype=Float32), STATISTICS_BYTES), cute.make_layout(PART_STATISTICS)
    )


def halves_of(place: cute.Pointer, size: int) -> cute.Tensor:
    """`size` elements of O in shared memory."""
    return cute.make_tensor(cute.recast_ptr(place, dtype=Float16), cute.make_layout(size))
