"""Which (query tile, head, batch entry) a block works on, and in which order."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.core.lengths import Vector
from cuteflash.core.scores import computed_here
from cuteflash.core.tile_numbers import count_tiles, first_tile

# K and V of the heads that run at the same time should stay in the L2 cache (A100 40 MB, H100 50 MB);
# about half of it leaves room for Q, O and the heads that are about to end.
L2_BUDGET_BYTES = 24 << 20
TWO_PASSES = 2, 8  # query tiles of a sequence, from and to
WIDE_GROUP = 32  # heads: with 132 blocks at most four or five tiles of a sequence and head run at the same time
WARP = 32
PROBES = 3  # of a lane in each step of a search; they are loaded together


class Order(Protocol):
    """An order of all tiles of a launch."""

    def size(self) -> Int32:
        """Number of tiles."""
        ...

    def tile(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(query tile, head, batch entry) of a tile."""
        ...


class Schedule(Order, Protocol):
    """An order whose tiles are dealt to the blocks in advance; `each_tile` walks it in a persistent kernel."""

    def index(self, wave: Int32) -> Int32:
        """This block's tile of a wave, as many tiles as there are blocks; `size()` or more is none."""
        ...


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """The schedule of a dense batch: each head has the same number of query tiles.

    With `longest_first` (causal masks and windows) heads are taken in groups, and inside a group the last query tiles
    of every head come first. The last tiles to start are then short ones.

    Attributes:
        m_blocks: query tiles of one head.
        heads: heads of one batch entry as the tiles see them (KV heads if query heads are packed).
        batch: batch entries.
        group: heads in a group, at most `heads * batch`: with more, `group * m_blocks` could pass 32 bits.
        longest_first: without it a head's tiles are neighbours.
        zigzag: every other wave of persistent blocks runs backwards.
    """

    m_blocks: Int32
    heads: Int32
    batch: Int32
    group: Int32
    longest_first: cutlass.Constexpr[bool]
    zigzag: cutlass.Constexpr[bool] = False

    @staticmethod
    def head_group(seqlen_k: Int32, heads_per_kv: Int32, kv_row_bytes: int) -> Int32:
        """Heads whose K and V stay in L2 together, at least 1."""
        kv_heads = (L2_BUDGET_BYTES // kv_row_bytes) // cutlass.max(seqlen_k, 1)
        return cutlass.max(kv_heads, 1) * heads_per_kv

    @staticmethod
    def even_group(group: Int32, m_blocks: Int32, blocks: Int32) -> Int32:
        """`group` heads, rounded to a number whose tiles fill whole waves of `blocks` persistent blocks.

        A group that ended inside a wave would give some blocks its short tiles and others the long ones of the next.
        """
        unit = blocks // greatest_common_divisor(m_blocks, blocks)  # fewest heads that fill whole waves
        return cutlass.max(group // unit, 1) * unit

    def size(self) -> Int32:
        """Number of tiles."""
        return self.m_blocks * self.heads * self.batch

    @cute.jit
    def index(self, wave: Int32):
        """This block's tile of a wave, as many tiles as there are blocks; `size()` or more is none.

        With `zigzag` every other wave runs backwards: the block with the longest tile of one wave gets the shortest of
        the next, which balances the blocks as well as handing out tiles on demand would.
        """
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if const_expr(self.zigzag):
            if wave % 2 == 1:
                block = blocks - 1 - block
        return wave * blocks + block

    @cute.jit
    def tile(self, index: Int32):
        """(query tile, head, batch entry) of a tile."""
        if const_expr(self.longest_first):
            per_group = self.group * self.m_blocks
            first = (index // per_group) * self.group
            in_group = index % per_group
            width = cutlass.min(self.group, self.heads * self.batch - first)
            m_block = self.m_blocks - 1 - in_group // width
            head = first + in_group % width
        else:
            m_block = index % self.m_blocks
            head = index // self.m_blocks
        return m_block, head % self.heads, head // self.heads


@dataclasses.dataclass(frozen=True)
class RaggedOrder:
    """The order of packed sequences, whose heads differ in their numbers of query tiles.

    A head's tiles go by their numbers (`cuteflash.core.tile_numbers`), some of which belong to no tile: the host
    knows how many numbers there are, but not the lengths. The query tile of such a number begins after its sequence's
    end. Heads are taken in groups, and inside a group the same tile of every head is a neighbour. With `longest_first`
    (causal masks and windows) the last query tiles of a sequence come first.

    What a tile costs differs from sequence to sequence, so persistent blocks draw tiles on demand, from a counter in
    global memory that a launch finds at 0 and leaves at 0. With two `passes` all numbers come twice in each group:
    first for the upper half of each sequence's tiles, then for the lower half. Then a group ends with many short tiles,
    not with one sequence's, and the blocks end together.

    Attributes:
        cu_q: (batch + 1,), the first row of each sequence, then the end of the last one.
        counter: (1,), tiles that were drawn; None if there is a block for each.
        rows: of the packed queries, those after the last sequence's end included.
        heads: as the tiles see them (KV heads if query heads are packed).
        batch: sequences.
        group: heads in a group, at most `heads`.
        passes: 1, or 2 with `longest_first`.
        tile_tokens: queries of a tile.
        draws_first: a block draws its first tile, too. Then a block that has drawn a tile knows that blocks which run
            have drawn all before it; otherwise its first tile is the one with the block's number.
        alike: sequences own about as many tile numbers each, so that a number's sequence is first looked for where it
            would be if they all owned as many.
        spares_registers: the size is computed again for each tile, and a tile's head before its sequence is looked for:
            a warp with 24 registers that looks for tiles spills what it would keep instead.
    """

    cu_q: Vector
    counter: Vector | None
    rows: Int32
    heads: Int32
    batch: Int32
    group: Int32
    passes: Int32
    tile_tokens: cutlass.Constexpr[int]
    longest_first: cutlass.Constexpr[bool]
    draws_first: cutlass.Constexpr[bool] = False
    alike: cutlass.Constexpr[bool] = False
    spares_registers: cutlass.Constexpr[bool] = False

    @staticmethod
    def wide_group(group: Int32, heads_per_kv: Int32) -> Int32:
        """`group` heads, or as many as let a group end with enough short tiles for all blocks."""
        return cutlass.max(group, cute.ceil_div(WIDE_GROUP, heads_per_kv) * heads_per_kv)

    @staticmethod
    @cute.jit
    def best_passes(mean_rows: Int32, tile_tokens: cutlass.Constexpr[int]):
        """Two passes if sequences have a few tiles: of fewer, or of many, the second one gains nothing."""
        few = mean_rows >= TWO_PASSES[0] * tile_tokens and mean_rows <= TWO_PASSES[1] * tile_tokens
        return Int32(2) if few else Int32(1)

    def size(self) -> Int32:
        """Number of tiles, with those that do not exist."""
        return self.head_size() * self.heads * self.passes

    def holds(self, index: Int32) -> Boolean:
        """`index < size()`"""
        if self.spares_registers:
            return index < dataclasses.replace(self, rows=computed_here(self.rows)).size()
        return index < self.size()

    def head_size(self) -> Int32:
        """Number of tiles of one head, with those that do not exist."""
        return count_tiles(self.rows, self.batch, self.tile_tokens)

    @cute.jit
    def tile(self, index: Int32, hint: Int32 | None = None):
        """(query tile, head, sequence) of a tile; a whole warp calls it.

        It is found sooner if its sequence is `hint`, or one of the next.
        """
        size = self.head_size()
        per_group = self.group * size * self.passes
        first = (index // per_group) * self.group
        in_group = index % per_group
        width = cutlass.min(self.group, self.heads - first)
        number = in_group // width
        head = first + in_group - number * width if const_expr(self.spares_registers) else None
        if const_expr(self.longest_first):
            is_first_pass = number < size
            number = number % size
        if const_expr(hint is not None):
            sequence = self.sequence_near(number, hint)
        elif const_expr(self.alike):
            sequence = self.sequence_near(number, self.guess(number))
        else:
            sequence = self.sequence_of(number)
        begin = first_tile(self.cu_q[sequence], sequence, self.tile_tokens)
        m_block = number - begin
        if const_expr(self.longest_first):
            owned = self.sequence_end(sequence) - begin
            m_block = owned - 1 - m_block
            if self.passes == 2 and is_first_pass != (2 * m_block >= owned):
                m_block = owned  # the other pass has this tile
        if const_expr(head is None):
            head = first + in_group % width
        return m_block, head, sequence

    def sequence_of(self, number: Int32) -> Int32:
        """See `owner_of`."""
        return owner_of(number, self.cu_q, self.batch, self.tile_tokens)

    def guess(self, number: Int32) -> Int32:
        """The first of 32 sequences, in whose middle a tile number would be if all sequences owned as many."""
        share = Float32(self.batch + 1) / Float32(self.head_size())
        return cutlass.max(Int32(Float32(number) * share) - WARP // 2, 0)

    @cute.jit
    def sequence_near(self, number: Int32, hint: Int32):
        """As `sequence_of`, in one vote if the sequence is one of 31 from `hint` on."""
        probe = hint + cute.arch.lane_idx()
        begins_before = Boolean(False)
        if probe <= self.batch:
            begins_before = first_tile(self.cu_q[probe], probe, self.tile_tokens) <= number
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(begins_before))
        sequence = hint + passed - 1
        if passed == 0 or passed == WARP:  # it is before `hint`, or its end is not in sight
            sequence = self.sequence_of(number)
        return sequence

    @cute.jit
    def sequence_end(self, sequence: Int32):
        """The number after the last one that a sequence owns."""
        end = self.rows
        if sequence < self.batch:
            end = self.cu_q[sequence + 1]
        return first_tile(end, sequence + 1, self.tile_tokens)

    @cute.jit
    def first(self):
        """A block's first tile; a whole warp calls it."""
        index = cute.arch.block_idx()[0]
        if const_expr(self.draws_first):
            index = self.drawn(self.draw())
        return index

    @cute.jit
    def draw(self):
        """Draw a block's next tile; a whole warp calls it. `drawn` waits for the result and says which one it is."""
        count = Int32(0)
        if cute.arch.lane_idx() == 0:
            # What is added is 1, but ptxas must not know: it would make one addition of those of all lanes that are
            # here, and wait for the result at once.
            count = cute.arch.atomic_add(self.counter.iterator, 1 + cute.arch.thread_idx()[0] % WARP)
        return count

    def drawn(self, count: Int32) -> Int32:
        """The number of the tile that `draw` drew, `size()` or more if there is none."""
        index = cute.arch.make_warp_uniform(count)
        return index if self.draws_first else index + cute.arch.grid_dim()[0]

    @cute.jit
    def close(self, index: Int32):
        """The block has drawn `index`, which is none. If nobody draws after it, the counter is set back to 0."""
        if index == self.size() - 1 + cute.arch.grid_dim()[0]:
            self.counter[0] = Int32(0)


@cute.jit
def greatest_common_divisor(a: Int32, b: Int32):
    """Of two positive numbers, by Euclid's algorithm."""
    while b > 0:
        a, b = b, a % b
    return a


@cute.jit
def each_tile(order: Schedule, visit: cutlass.Constexpr):
    """Visit this block's tiles.

    `visit(index, q_pos, kv_pos)` is called with a tile's number in the order and the positions of its Q and of its
    first K and V in their rings; it returns the next K/V position.
    """
    wave, kv_pos = Int32(0), Int32(0)
    index = order.index(wave)
    while index < order.size():
        kv_pos = visit(index, wave, kv_pos)  # one tile a wave, so that its Q is the wave-th
        wave += 1
        index = order.index(wave)


@cute.jit
def owner_of(number: Int32, cu_seqlens: Vector, batch: Int32, tile_rows: cutlass.Constexpr[int]):
    """The packed sequence that owns a tile number, see `first_tile`; `batch` for the rows after the last one.

    A warp's lanes search together, each at `PROBES` places: a step leaves one part in 97.
    """
    lane = cute.arch.lane_idx()
    first, count = Int32(0), batch + 1
    while count > 1:
        part, end = (count + PROBES * WARP) // (PROBES * WARP + 1), first + count
        probes = tuple(first + (lane + 1 + i * WARP) * part for i in range(PROBES))
        # One past the end is loaded as the last one: without branches all loads are in flight together.
        begins = tuple(cu_seqlens[cutlass.min(probe, end - 1)] for probe in probes)
        passed = Int32(0)
        for probe, begin in zip(probes, begins):
            begins_before = (probe < end) & (first_tile(begin, probe, tile_rows) <= number)
            passed += cute.arch.popc(cute.arch.vote_ballot_sync(begins_before)) * part
        first += passed
        count = cutlass.min(part, count - passed)
    return first
