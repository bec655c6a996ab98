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
import functools
import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.arguments import SplitTensors
from cuteflash.core.lengths import Sequence
from cuteflash.core.mask import blocks_of
from cuteflash.core.scores import computed_here
from cuteflash.core.split_slots import LEAST_KEYS, START_WORDS, metadata_blocks
from cuteflash.core.tile import KeyShare, QueryTile
from cuteflash.core.views import aligned
from cuteflash.problem import FwdProblem

Index = Any  # a Python int or a traced cutlass.Int32
WARP = 32
PER_LANE = 4  # neighbouring sequences of a lane, whose lengths are loaded together
WINDOW = PER_LANE * WARP


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

    `share` is what a share has, or what to divide by in its place. `first_seat` is that of the line's first share; the
    last `cost` of the units are no key blocks.
    """
    begin = at - first
    last = cutlass.min(width, end - begin)
    return KeyShare(first, last, number, first_seat, begin, width, cost, share)


class Window(NamedTuple):
    """128 sequences of a line, four neighbours for each lane of a warp.

    Attributes:
        first: the first one.
        begin: its first unit.
        ends: where the units of each of this lane's sequences end.
    """

    first: Int32
    begin: Int32
    ends: tuple[Int32, ...]


@dataclasses.dataclass(frozen=True)
class Alike:
    """The tiles of a line whose sequences all have one length, which the host knows.

    Attributes:
        m_blocks, width: query tiles of a head, and units of each.
        total: units of the line.
        share: units of a share.
        by_m_blocks, by_width, by_share: what to divide by in place of these.
        by_heads: what to divide by in place of the heads of the line.
    """

    m_blocks: Int32
    width: Int32
    total: Int32
    share: Int32
    by_m_blocks: Any
    by_width: Any
    by_share: Any
    by_heads: Any


@dataclasses.dataclass(frozen=True)
class Line:
    """The tiles of a launch's lines, laid end to end: sequence by sequence, head by head.

    What comes before a block's first load delays all that follows, and a division takes as long as a tenth of it.
    So the host prepares divisors, and computes what is the same for all blocks if it knows the lengths.

    Attributes:
        sequences: of the batch, and one with the rows after them if queries are packed.
        heads: of one line, as the tiles see them.
        lanes: how many lines there are.
        shares: of a line, the blocks of a launch for each lane.
        most_parts: see `share_size`.
        by_lanes, by_shares, by_parts: what to divide by in place of `lanes`, of `shares` and of `most_parts - 1`.
        alike: what the host knows of the tiles; None if lengths differ, and only the device knows them.
        starts: as `starts_of` has them.
        by_heads_per_kv: what to divide a head by for the KV head that it reads; None if it is that one's number.
    """

    sequences: Int32
    heads: Int32
    lanes: Int32
    shares: Int32
    most_parts: Int32
    by_lanes: Any
    by_shares: Any
    by_parts: Any
    alike: Alike | None = None
    starts: cute.Tensor | None = None
    by_heads_per_kv: Any = None

    @classmethod
    def of(
        cls,
        sequences: Int32,
        heads: Int32,
        lanes: Int32,
        shares: Int32,
        most_parts: Int32,
        starts: cute.Tensor | None = None,
        heads_per_kv: Int32 | None = None,
    ) -> Line:
        """That of a launch, with divisors; made before it."""
        by = (cute.fast_divmod_create_divisor_v2(divisor) for divisor in (lanes, shares, most_parts - 1))
        by_heads = None if heads_per_kv is None else cute.fast_divmod_create_divisor_v2(heads_per_kv)
        return cls(sequences, heads, lanes, shares, most_parts, *by, starts=starts, by_heads_per_kv=by_heads)

    def of_one_length(self, launch: Any) -> Line:
        """The line of a launch whose sequences are all like its first one; made before it."""
        m_blocks, width = self.tiles(launch, launch.sequence(Int32(0)))
        total = m_blocks * width * self.heads * self.sequences
        share = self.share(launch, total, width)
        by = (cute.fast_divmod_create_divisor_v2(divisor) for divisor in (m_blocks, width, share, self.heads))
        return dataclasses.replace(self, alike=Alike(m_blocks, width, total, share, *by))

    @property
    def is_known(self) -> bool:
        """Whether the host knows all lengths, so that a block finds its tiles without reading device memory."""
        return self.alike is not None

    def tiles(self, launch: Any, sequence: Sequence) -> tuple[Index, Index]:
        """(query tiles of a head, units of each) of a sequence."""
        m_blocks = blocks_of(sequence.seqlen_q, launch.tile_tokens)
        return m_blocks, launch.mask_of(sequence).most_blocks(launch.tile_tokens, launch.tile_n)

    def has(self, tile: QueryTile) -> Boolean | bool:
        """Whether the launch has a tile; starts of other lengths may lead to one that does not exist."""
        return self.starts is None or tile.exists() & (tile.head >= 0) & (tile.head < self.heads * self.lanes)

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

    def window(self, launch: Any, first: Int32, begin: Int32) -> tuple[Window, Int32, Int32]:
        """(the sequences from `first` on, whose first unit is `begin`, units of this lane's ones, the most of a tile).

        A whole warp calls it.
        """
        own = first + PER_LANE * cute.arch.lane_idx()
        found = [self.units(launch, own + i) for i in range(PER_LANE)]
        sums = list(itertools.accumulate(units for units, _ in found))
        begin_of_lane = begin + up_to_lane(sums[-1]) - sums[-1]
        window = Window(first, begin, tuple(begin_of_lane + units for units in sums))
        return window, sums[-1], functools.reduce(cutlass.max, (width for _, width in found))

    @cute.jit
    def size(self, launch: Any):
        """(units of a line, the most of a tile, the first `Window`); a whole warp calls it."""
        window, total, widest = self.window(launch, Int32(0), Int32(0))
        first = Int32(WINDOW)
        while first < self.sequences:
            _, units, width = self.window(launch, first, Int32(0))
            total += units
            widest = cutlass.max(widest, width)
            first += WINDOW
        total, widest = (cute.arch.warp_redux_sync(x, kind) for x, kind in ((total, "add"), (widest, "max")))
        return total, widest, window

    @cute.jit
    def find(self, launch: Any, at: Int32, window: Window):
        """(the sequence that unit `at` belongs to, its first unit); a whole warp calls it.

        It is looked for from the first one of `window` on.
        """
        passed, begin = passed_by(window, at)
        while self.goes_on(passed, window.first):
            window, _, _ = self.window(launch, window.first + WINDOW, begin)
            passed, begin = passed_by(window, at)
        return self.there(window.first + passed), begin

    def goes_on(self, passed: Int32, first: Int32) -> Boolean:
        """Whether `find` has to look at the sequences after the 128 from `first` on, all of which end before.

        Starts may be those of other lengths, by whose units the last sequence ends too soon.
        """
        if self.starts is None:
            return passed == WINDOW
        return (passed == WINDOW) & (first < self.sequences)

    def there(self, sequence: Int32) -> Int32:
        """A sequence that was found; one that exists, should starts of other lengths lead past the last one."""
        return sequence if self.starts is None else cutlass.min(sequence, self.sequences - 1)

    @cute.jit
    def following(self, launch: Any, at: Int32, sequence: Int32, begin: Int32):
        """(the sequence that unit `at` belongs to, its first unit), after a tile of a sequence that ends there.

        A whole warp calls it.
        """
        end = begin + self.units(launch, sequence)[0]
        if at >= end:
            sequence, begin = self.there(sequence + 1), end
            if const_expr(launch.lengths.cu_q is not None):  # without queries a sequence has no units
                window, _, _ = self.window(launch, sequence, begin)
                sequence, begin = self.find(launch, at, window)
        return sequence, begin


def up_to_lane(count: Int32) -> Int32:
    """The sum of the counts of all lanes up to this one; a whole warp calls it."""
    for step in range(5):
        other = cute.arch.shuffle_sync_up(count, 1 << step, mask_and_clamp=0)
        count = count + cutlass.select_(cute.arch.lane_idx() >= 1 << step, other, Int32(0))
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


def passed_by(window: Window, at: Int32) -> tuple[Int32, Int32]:
    """(how many sequences of a window end before unit `at`, where the last of them does); a whole warp calls it."""
    passed, begin = Int32(0), window.begin
    for end in window.ends:
        passed += cutlass.select_(end <= at, Int32(1), Int32(0))
        begin = cutlass.select_(end <= at, end, begin)
    return cute.arch.warp_redux_sync(passed, "add"), cute.arch.warp_redux_sync(begin, "max")


class Start(NamedTuple):
    """Where a block's share begins: the sequence, its first unit, units of a share, and units of the line."""

    sequence: Int32
    begin: Int32
    share: Int32
    total: Int32


@cute.jit
def start_of(launch: Any, block: Int32, cost: Index = 0):
    """The `Start` of a block, from the lengths of the sequences; a whole warp calls it.

    The last `cost` units of a tile are no key blocks: a share that begins among them begins with the next sequence.
    """
    line = launch.line
    sequence, begin = Int32(0), Int32(0)
    total, widest, window = begin, begin, Window(begin, begin, (begin,) * PER_LANE)
    if line.sequences == 1:  # without sums of lanes, which take half as long as a look at memory
        total, widest = line.units(launch, sequence)
    else:
        total, widest, window = line.size(launch)
    share = line.share(launch, total, widest)
    at = block // line.by_lanes * share + cost
    if (at < total) & (line.sequences > 1):
        sequence, begin = line.find(launch, at, window)
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

    A whole warp calls it; returns how many there are.
    """
    line, block = launch.line, cute.arch.block_idx()[0]
    sequence, begin, q_pos, kv_pos = (Int32(0) for _ in range(4))
    if const_expr(line.starts is not None):
        sequence, begin, share, total = given_start(line.starts, block)
        by_share = share
    elif const_expr(line.is_known):
        share, total, by_share = line.alike.share, line.alike.total, line.alike.by_share
    else:
        sequence, begin, share, total = start_of(launch, block)
        by_share = share
    at = block // line.by_lanes * share
    end = cutlass.min(at + share, total)
    while at < end:
        number, lane = divmod(computed_here(block), line.by_lanes)  # kept across a tile they would take registers
        found, part = tile_at(launch, lane, (sequence, begin), at)
        tile = dataclasses.replace(found, share=share_of_tile(at, end, *part, by_share, number, lane * line.shares))
        if line.has(found):
            kv_pos = visit(tile, q_pos, kv_pos)
            q_pos += 1
        at += tile.share.last - tile.share.first
        if const_expr(not line.is_known):
            if at < end:
                sequence, begin = line.following(launch, at, sequence, begin)
    return q_pos


@cute.jit
def tile_at(launch: Any, lane: Int32, place: tuple[Int32, Int32], at: Int32):
    """The tile that unit `at` of a line belongs to, and (which of its units that is, how many it has).

    `place` is (the sequence, its first unit), which the host's knowledge of lengths makes needless.
    """
    line, (number, begin) = launch.line, place
    if const_expr(line.is_known):
        width = line.alike.width
        tile, first = divmod(at, line.alike.by_width)
        head, tile = divmod(tile, line.alike.by_m_blocks)
        number, head = divmod(head, line.alike.by_heads)
        sequence = launch.sequence(number)
    else:
        sequence = launch.sequence(number)
        m_blocks, width = line.tiles(launch, sequence)
        first, tile, head = at - begin, Int32(0), Int32(0)
        if first >= width:  # not the first tile of the sequence, which is found without a division
            tile, first = first // width, first % width
            head, tile = tile // m_blocks, tile % m_blocks
    return launch.tile_of(tile, head * line.lanes + lane, number, sequence), (first, width)
