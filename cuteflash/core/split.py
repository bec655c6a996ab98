"""Split keys: the key blocks of all query tiles laid end to end, and dealt to the blocks in equal shares.

    tiles     |-- tile 0 --|-- tile 1 --|-- tile 2 --|-- 3 --|     one unit a key block
    shares    |---- 0 ----|---- 1 ----|---- 2 ----|--- 3 ---|      one share a block of the launch

A tile inside one share is computed as ever. Of a tile that borders of shares cut, each of its blocks computes the keys
of its share, and writes O and the log-sum-exp of these keys to memory; the last one of them to come merges all parts
(`cuteflash.kernels.common.partials`). A block has at most two such tiles: one that began before its share, and one that
ends after it. So two slots a block hold all partial results, whatever the lengths, and one counter a block counts the
parts of the tile that begins in its share and ends in another (`cuteflash.core.split_slots`).

All tiles of a sequence get as many units, those of the tile that visits the most: a mask may leave some of the others
without work. The last units of a tile may be no key blocks, but count the time that it takes beside them; a border
among those cuts nothing: the share before it has all of the tile's keys, and the one after it begins with the next
tile. Arithmetic on shares runs on Python ints and on traced values alike.

Heads go in step: there are as many equal lines as the launch has lanes, line i with heads i, i + lanes and so on, and
as many blocks for each. Neighbouring blocks have the same share of neighbouring lines, so that they read the rows of a
token's heads, which are neighbours in memory, at the same time. Blocks are counted line by line; such a number is a
seat, and a tile's parts have consecutive seats.

Where a block's share begins depends on the lengths of all sequences, which each block reads. Launches with the same
lengths, those of the layers of one step, may be given these places instead (`Start`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.arguments import SplitTensors
from cuteflash.core.lengths import Sequence
from cuteflash.core.scores import computed_here
from cuteflash.core.split_slots import LEAST_KEYS, START_WORDS, metadata_blocks
from cuteflash.core.tile import KeyShare, QueryTile
from cuteflash.core.views import aligned
from cuteflash.problem import FwdProblem

Index = Any  # a Python int or a traced cutlass.Int32
WARP = 32
TOGETHER = 4  # lengths that a lane loads at once


def share_size(
    total: Index, shares: Index, widest: Index, most_parts: Index, least: Index, by: tuple[Any, Any] | None = None
) -> Index:
    """Units of a share.

    Args:
        total: units of all tiles.
        shares: how many there are, at most.
        widest: the most units of a tile.
        most_parts: parts of a tile at most, 2 or more. A tile of w units touches `(w - 2) // share + 2` shares at most.
        least: units of a share at least.
        by: what to divide by in place of `shares` and of `most_parts - 1`.
    """
    by_shares, by_parts = by or (shares, most_parts - 1)
    share = cutlass.max((total + shares - 1) // by_shares, least)
    return cutlass.max(share, cutlass.max(widest - 2, 0) // by_parts + 1)


def share_of_tile(
    at: Index,
    end: Index,
    first: Index,
    width: Index,
    share: Index,
    number: Index,
    first_seat: Index = 0,
    cost: Index = 0,
) -> KeyShare:
    """The part of a tile of `width` units, whose unit `first` lies `at`, that share `number` has, which ends at `end`.

    `first_seat` is that of the line's first share; the last `cost` of the units are no key blocks.
    """
    begin = at - first
    last = cutlass.min(width, end - begin)
    ends = (first_seat + unit // share for unit in (begin, begin + width - cost - 1))
    return KeyShare(first, last, first_seat + number, *ends)


class Window(NamedTuple):
    """32 sequences of a line, one for each lane of a warp.

    Attributes:
        first: the first one.
        begin: its first unit.
        ends: where the units of this lane's sequence end.
    """

    first: Int32
    begin: Int32
    ends: Int32


@dataclasses.dataclass(frozen=True)
class Line:
    """The tiles of a launch's lines, laid end to end: sequence by sequence, head by head.

    What comes before a block's first load delays all that follows, and a division takes as long as a tenth of it.
    So the host prepares divisors.

    Attributes:
        sequences: of the batch, and one with the rows after them if queries are packed.
        heads: of one line, as the tiles see them.
        lanes: how many lines there are.
        shares: of a line, the blocks of a launch for each lane.
        most_parts: see `share_size`.
        by_lanes, by_shares, by_parts: what to divide by in place of `lanes`, of `shares` and of `most_parts - 1`.
        differs: whether lengths differ from sequence to sequence, and only the device knows them.
        starts: as `starts_of` has them.
    """

    sequences: Int32
    heads: Int32
    lanes: Int32
    shares: Int32
    most_parts: Int32
    by_lanes: Any
    by_shares: Any
    by_parts: Any
    differs: cutlass.Constexpr[bool]
    starts: cute.Tensor | None = None

    @classmethod
    def of(
        cls,
        sequences: Int32,
        heads: Int32,
        lanes: Int32,
        shares: Int32,
        most_parts: Int32,
        differs: bool,
        starts: cute.Tensor | None = None,
    ) -> Line:
        """That of a launch, with divisors; made before it."""
        by = (cute.fast_divmod_create_divisor_v2(divisor) for divisor in (lanes, shares, most_parts - 1))
        return cls(sequences, heads, lanes, shares, most_parts, *by, differs=differs, starts=starts)

    def tiles(self, launch, sequence: Sequence) -> tuple[Int32, Int32]:
        """(query tiles of a head, units of each) of a sequence."""
        m_blocks = (sequence.seqlen_q + launch.tile_tokens - 1) // launch.tile_tokens
        return m_blocks, launch.mask_of(sequence).most_blocks(launch.tile_tokens, launch.tile_n)

    def has(self, tile: QueryTile) -> Boolean:
        """Whether the launch has a tile; starts of other lengths may lead to one that does not exist."""
        return tile.exists() & (tile.head >= 0) & (tile.head < self.heads * self.lanes)

    def share(self, launch: Any, total: Int32, widest: Int32) -> Int32:
        """Units of a share, see `share_size`."""
        least = Int32(cutlass.max(LEAST_KEYS // launch.tile_n, 1))
        return share_size(total, self.shares, widest, self.most_parts, least, (self.by_shares, self.by_parts))

    def units(self, launch: Any, index: Int32) -> tuple[Int32, Int32]:
        """(units of a line's tiles, units of one) of sequence `index`; 0 if there is none.

        Without branches, so that the lengths of several sequences are loaded together.
        """
        m_blocks, width = self.tiles(launch, launch.sequence(cutlass.min(index, self.sequences - 1)))
        exists = index < self.sequences
        total = m_blocks * width * self.heads
        return cutlass.select_(exists, total, Int32(0)), cutlass.select_(exists, width, Int32(0))

    @cute.jit
    def size(self, launch: Any):
        """(units of a line, the most of a tile, the first `Window`); a whole warp calls it."""
        window = Window(Int32(0), Int32(0), Int32(0))
        if const_expr(self.differs):
            units, widest = self.units(launch, cute.arch.lane_idx())
            window = Window(Int32(0), Int32(0), up_to_lane(units))
            total = cute.arch.shuffle_sync(window.ends, WARP - 1)
            first = Int32(WARP)
            if first < self.sequences:
                further = Int32(0)
                while first < self.sequences:
                    for step in cutlass.range_constexpr(TOGETHER):
                        units, width = self.units(launch, first + step * WARP + cute.arch.lane_idx())
                        further += units
                        widest = cutlass.max(widest, width)
                    first += TOGETHER * WARP
                total += cute.arch.warp_reduction_sum(further)
            widest = cute.arch.make_warp_uniform(cute.arch.warp_reduction_max(widest))
            total = cute.arch.make_warp_uniform(total)
        else:
            total, widest = self.units(launch, Int32(0))
            total *= self.sequences
        return total, widest, window

    def window(self, launch: Any, first: Int32, begin: Int32) -> Window:
        """The sequences from `first` on, whose first unit is `begin`; a whole warp calls it."""
        units, _ = self.units(launch, first + cute.arch.lane_idx())
        return Window(first, begin, begin + up_to_lane(units))

    @cute.jit
    def find(self, launch: Any, at: Int32, window: Window):
        """(the sequence that unit `at` belongs to, its first unit, a `Window` with it); a whole warp calls it.

        It is looked for from the first one of `window` on.
        """
        if const_expr(self.differs):
            passed = passed_by(window.ends, at)
            while self.goes_on(passed, window.first):
                window = self.window(launch, window.first + WARP, cute.arch.shuffle_sync(window.ends, WARP - 1))
                passed = passed_by(window.ends, at)
            before = cute.arch.shuffle_sync(window.ends, cutlass.max(passed - 1, 0))
            begin = cutlass.select_(passed > 0, before, window.begin)
            sequence = cute.arch.make_warp_uniform(window.first + passed)
            begin = cute.arch.make_warp_uniform(begin)
            if const_expr(self.starts is not None):
                sequence = cutlass.min(sequence, self.sequences - 1)
        else:
            units, _ = self.units(launch, Int32(0))
            sequence = at // units
            begin = sequence * units
        return sequence, begin, window

    def goes_on(self, passed: Int32, first: Int32) -> Boolean:
        """Whether `find` has to look at the sequences after the 32 from `first` on, all of which end before.

        Starts may be those of other lengths, by whose units the last sequence ends too soon.
        """
        if self.starts is None:
            return passed == WARP
        return (passed == WARP) & (first < self.sequences)


@cute.jit
def up_to_lane(count: Int32):
    """The sum of the counts of all lanes up to this one; a whole warp calls it."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(count, 1 << step, mask_and_clamp=0)
        if cute.arch.lane_idx() >= 1 << step:
            count += other
    return count


def starts_of(split: SplitTensors, problem: FwdProblem) -> cute.Tensor | None:
    """The `Start` of each block of a launch that is scheduled, (blocks * START_WORDS,); None of others."""
    if not problem.is_scheduled:
        return None
    blocks = metadata_blocks(split.arrivals.shape[0])
    return cute.make_tensor(split.arrivals.iterator, cute.make_layout((blocks * START_WORDS,)))


def arrivals_of(split: SplitTensors, problem: FwdProblem) -> cute.Tensor:
    """The counters of a launch, (blocks,)."""
    if not problem.is_scheduled:
        return split.arrivals
    blocks = metadata_blocks(split.arrivals.shape[0])
    return cute.make_tensor(split.arrivals.iterator + blocks * START_WORDS, cute.make_layout((blocks,)))


def passed_by(ends: Int32, at: Int32) -> Int32:
    """How many of the sequences, whose lanes hold the ends of their units, come before unit `at`."""
    return cute.arch.popc(cute.arch.vote_ballot_sync(ends <= at))


class Start(NamedTuple):
    """Where a block's share begins: the sequence, its first unit, units of a share, and units of the line."""

    sequence: Int32
    begin: Int32
    share: Int32
    total: Int32


@cute.jit
def start_of(launch: Any, block: Int32):
    """The `Start` of a block, from the lengths of the sequences; a whole warp calls it."""
    line = launch.line
    total, widest, window = line.size(launch)
    share = line.share(launch, total, widest)
    at = block // line.by_lanes * share
    sequence, begin = Int32(0), Int32(0)
    if at < total:
        sequence, begin, window = line.find(launch, at, window)
    return Start(sequence, begin, share, total)


def given_start(starts: cute.Tensor, block: Int32) -> Start:
    """The `Start` of a block that was computed before the launch."""
    words = cute.make_rmem_tensor(START_WORDS, Int32)
    atom = cute.make_copy_atom(CopyUniversalOp(), Int32, num_bits_per_copy=START_WORDS * Int32.width)
    source = aligned(starts.iterator + block * START_WORDS, START_WORDS * Int32.width // 8)
    cute.copy(atom, cute.make_tensor(source, cute.make_layout(START_WORDS)), words)
    return Start(*(cute.arch.make_warp_uniform(words[i]) for i in range(START_WORDS)))


@cute.jit
def each_part(launch: Any, visit: cutlass.Constexpr):
    """Visit this block's parts of tiles, `visit` being as `each_tile` has it but for the tile in place of its number.

    A whole warp calls it.
    """
    line, block = launch.line, cute.arch.block_idx()[0]
    number = block // line.by_lanes
    if const_expr(line.starts is None):
        total, widest, window = line.size(launch)
        share = line.share(launch, total, widest)
        sequence, begin = Int32(0), Int32(0)
    else:
        sequence, begin, share, total = given_start(line.starts, block)
        window = Window(sequence, begin, Int32(0))
    at = number * share
    end = cutlass.min(at + share, total)
    q_pos, kv_pos = Int32(0), Int32(0)
    while at < end:
        if const_expr(line.starts is None):
            sequence, begin, window = line.find(launch, at, window)
        lane = computed_here(block) % line.by_lanes  # kept across a tile it would take a register
        found, part = tile_at(launch, lane, (sequence, begin), at)
        tile = dataclasses.replace(found, share=share_of_tile(at, end, *part, share, number, lane * line.shares))
        if const_expr(line.starts is None):
            kv_pos = visit(tile, q_pos, kv_pos)
            q_pos += 1
        elif line.has(found):
            kv_pos = visit(tile, q_pos, kv_pos)
            q_pos += 1
        at += tile.share.last - tile.share.first
        if const_expr(line.starts is not None):
            if at < end:
                sequence, begin, window = line.find(launch, at, line.window(launch, sequence, begin))


@cute.jit
def tile_at(launch: Any, lane: Int32, place: tuple[Int32, Int32], at: Int32):
    """The tile that unit `at` of a line belongs to, and (which of its units that is, how many it has).

    `place` is (a sequence, its first unit).
    """
    number, begin = place
    sequence = launch.sequence(number)
    m_blocks, width = launch.line.tiles(launch, sequence)
    first, tile, head = at - begin, Int32(0), Int32(0)
    if first >= width:  # not the first tile of the sequence, which is found without a division
        tile, first = first // width, first % width
        head, tile = tile // m_blocks, tile % m_blocks
    return launch.tile_of(tile, head * launch.line.lanes + lane, number, sequence), (first, width)
