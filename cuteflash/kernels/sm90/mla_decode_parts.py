"""What a block merges of split keys comes into shared memory, by bulk copies that are all on their way at once.

Parts are merged at the end of a block's last tile, when Q, pages and P are not needed any more. Loads into registers
would be few at a time, and each turn of them would wait for memory anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.split_slots import slot_of
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import QUAD, WARP, LatentParts, Part, chunk_of, copy_chunk, load_chunk, weighed
from cuteflash.kernels.common.partials import MANY_LINES, part_slot
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V
from cuteflash.traits.mla_sm90 import ELEMENT_BYTES, WGMMA_M

PART_BYTES = 4  # of an element
LINE = QUAD * WARP  # columns that a warp merges at once
LINES_OF_ROW = LATENT_DIM_V // LINE
STAGED = 3 * (WGMMA_M + 2 * WGMMA_M * LINE)  # elements in shared memory, at most: those of a tile with three parts
# Rows of another block's part that lie where Q was but for its last columns; the other ones begin where pages do.
ROWS_IN_Q = (WGMMA_M * LATENT_DIM_V * ELEMENT_BYTES // PART_BYTES - WGMMA_M) // LATENT_DIM_V
PAGES_START = WGMMA_M * LATENT_DIM * ELEMENT_BYTES // PART_BYTES
AT_ONCE = 4  # parts of a line that a thread reads before it adds them


@dataclasses.dataclass(frozen=True)
class StagedParts(LatentParts):
    """The partial results of a launch, and where a block of it puts those that it merges.

    Of m blocks that merge a tile each has an m-th of its lines of 128 columns. Of each of p parts, m + 1 or more, those
    are in a row in memory, and are so in shared memory: p * ceil(256 / m) lines, of three parts the most, 192 KB.

    Attributes:
        stage: shared memory, from Q to P.
        arrived: mbarrier of one arrival, whose first phase completes when all that a block merges is there.
        first_line, lines_each: what is there of the tile's lines, of each part.
    """

    stage: cute.Pointer
    arrived: cute.Pointer
    first_line: Int32
    lines_each: Int32

    @classmethod
    def of_block(cls, parts: LatentParts, stage: cute.Pointer, arrived: cute.Pointer) -> StagedParts:
        """Those of a block."""
        kept = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)}
        stage = cute.recast_ptr(stage, dtype=Float32)
        return cls(**kept, stage=stage, arrived=arrived, first_line=Int32(0), lines_each=Int32(0))

    @cute.jit
    def merge(self, tile: QueryTile, thread: Int32, warps: cutlass.Constexpr[int], place: tuple[Int32, Int32]):
        """As in `LatentParts`; the result is the same to the last bit.

        Blocks that merge more parts than a warp has lanes have a line a warp at most, and load that into registers.
        """
        number, mates = place
        lines, warp = self.lines(tile), cute.arch.make_warp_uniform(thread // WARP)
        if self.parts_of(tile) <= WARP:
            self.merge_staged(tile, thread, warps, place)
        else:
            kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(LatentParts)}
            in_memory, step = LatentParts(**kept), mates * warps
            for line in cutlass.range(number + mates * warp, lines, step, unroll=1):
                in_memory.merge_lines(tile, (line, step), 1, self.loads)

    @cute.jit
    def merge_staged(self, tile: QueryTile, thread: Int32, warps: cutlass.Constexpr[int], place: tuple[Int32, Int32]):
        """As `merge`, through shared memory."""
        number, mates = place
        lines, count = self.lines(tile), self.parts_of(tile)
        merging = cutlass.min(mates, lines)
        first = number * lines // merging
        end = (number + 1) * lines // merging
        here = dataclasses.replace(self, first_line=first, lines_each=end - first)
        if thread < WARP:
            here.fetch_lines(tile.share.owner, count)
        wait_phase(self.arrived, Int32(0))
        line = first + cute.arch.make_warp_uniform(thread // WARP)
        for one in cutlass.range(line, end, warps * MANY_LINES, unroll=1):
            here.merge_lines(tile, (one, warps), MANY_LINES, AT_ONCE)

    def last_line(self, tile: QueryTile) -> Int32:
        """The last of the tile's lines that are there."""
        return self.first_line + self.lines_each - 1

    @cute.jit
    def fetch_lines(self, owner: Int32, count: Int32):
        """Bring this block's lines of `count` parts, and their log-sum-exps; one warp calls it."""
        cute.arch.fence_proxy("async")  # between the parts' stores, and what was here, and the copies
        size = self.lines_each * LINE
        self.expect(count * (WGMMA_M + size))
        for part in cutlass.range(cute.arch.lane_idx(), count, WARP, unroll=1):
            slot, place = part_slot(owner, part), self.place_of(part)
            self.bring(place, self.values.iterator + self.lse_at(slot, Int32(0)), WGMMA_M)
            self.bring(place + WGMMA_M, self.at(slot, Int32(0), Int32(0)) + self.first_line * LINE, size)

    def place_of(self, part: Int32) -> Int32:
        """Where a part begins in shared memory: its log-sum-exps, then its lines."""
        return part * (WGMMA_M + self.lines_each * LINE)

    def load_lse(self, owner: Int32, parts: tuple[Int32, Int32], row: Int32) -> Float32:
        """As in `LatentParts`, from shared memory."""
        lane, (first, count) = cute.arch.lane_idx(), parts
        lse = self.staged[self.place_of(first + cutlass.min(lane, count - 1)) + row]
        return cutlass.select_(lane < count, lse, -Float32.inf)

    def load_parts(
        self, owner: Int32, parts: tuple[Int32, Int32], skipped: Int32, place: tuple[Int32, Int32], at_once: int
    ) -> cute.Tensor:
        """As in `LatentParts`, from shared memory."""
        (first, count), (row, column) = parts, place
        values = cute.make_rmem_tensor((QUAD, at_once), Float32)
        inside = WGMMA_M + (row * LINES_OF_ROW - self.first_line) * LINE + column
        for i in range(at_once):
            part = first + cutlass.min(skipped + i, count - 1)
            copy_chunk(chunk_of(self.staged, self.place_of(part) + inside, QUAD), values[None, i])
        return values

    @cute.jit
    def join(
        self,
        part: Part,
        tile: QueryTile,
        threads: tuple[Int32, cutlass.Constexpr[Callable[[], None]]],
    ):
        """As in `LatentParts`."""
        wait_phase(self.arrived, Int32(0))
        for r in cutlass.range_constexpr(cute.size(part.lse)):
            row = part.scores.row(r)
            own_factor, factor, part.lse[r] = weighed(part.lse[r], self.staged[row])
            for numbers, start in part.chunks:
                chunk = load_chunk(self.staged, numbers, place_of_row(row) + start)
                for i, number in enumerate(numbers):
                    part.out[r, number] = part.out[r, number] * own_factor + chunk[i] * factor

    @cute.jit
    def await_other(self, owner: Int32, rows: Int32):
        """Wait for the second part of a tile of `rows` rows, and bring their log-sum-exps; one warp calls it."""
        with cute.arch.elect_one():
            counter = self.arrivals.iterator + owner
            came = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            while came == 0:
                came = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            self.arrivals[owner] = Int32(0)
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async")  # between its stores and the copies
        self.expect(WGMMA_M + rows * LATENT_DIM_V)
        with cute.arch.elect_one():
            self.bring(Int32(0), self.values.iterator + self.lse_at(slot_of(owner + 1, 0), Int32(0)), WGMMA_M)

    @cute.jit
    def fetch_rows(self, owner: Int32, rows: Int32, first: cutlass.Constexpr[int], end: cutlass.Constexpr[int]):
        """Bring rows `[first, end)`, if there are so many, of the second part of a tile; one warp calls it."""
        count = cutlass.min(rows, end) - first
        if count > 0:
            source = self.at(slot_of(owner + 1, 0), Int32(first), Int32(0))
            with cute.arch.elect_one():
                self.bring(place_of_row(Int32(first)), source, count * LATENT_DIM_V)

    @property
    def staged(self) -> cute.Tensor:
        """What is in shared memory."""
        return cute.make_tensor(self.stage, cute.make_layout(STAGED))

    def expect(self, size: Int32) -> None:
        """Announce so many elements; one warp calls it."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.arrived, size * PART_BYTES)
        cute.arch.sync_warp()

    def bring(self, place: Int32, source: cute.Pointer, size: Int32 | int) -> None:
        """Bring `size` elements, a multiple of 4, from `source` to `place`."""
        atoms.bulk_load(self.stage + place, source, size * PART_BYTES, self.arrived)


def place_of_row(row: Int32) -> Int32:
    """Where a row of another block's part lies in shared memory; their log-sum-exps come first."""
    skipped = PAGES_START - (WGMMA_M + ROWS_IN_Q * LATENT_DIM_V)
    return WGMMA_M + row * LATENT_DIM_V + cutlass.select_(row < ROWS_IN_Q, Int32(0), Int32(skipped))
