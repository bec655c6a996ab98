"""The tiles of a latent-attention decode: whose rows they hold, which keys a row sees, and where a page lies.

All query heads of a token read the same head of the cache, so that a row of a tile is (token, head), heads first. The
tiles of a sequence read the same pages, and go in step: each is a lane of `cuteflash.core.split`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.core.lengths import Index, Sequence
from cuteflash.core.mask import IntervalMask, blocks_of
from cuteflash.core.scores import computed_here
from cuteflash.core.softmax import LOG2_E
from cuteflash.core.split import Line, share_of_tile, start_of
from cuteflash.core.tile import QueryTile
from cuteflash.mla_problem import MlaProblem, MlaScalars, MlaTensors


@dataclasses.dataclass(frozen=True)
class LatentMask(IntervalMask):
    """A causal mask of rows that are (token, head), heads first. `seqlen_q` counts rows, not tokens.

    Attributes:
        heads: rows of a token, or what to divide by in their place.
        step: keys that a token sees less than the next one: 1, or 0 if all see all keys.
    """

    heads: Any = 1
    step: Index = 1

    def kv_bounds(self, query: Index) -> tuple[Index, Index]:
        """The keys `[lo, hi)` that row `query` sees; empty if `hi <= lo`."""
        later = cutlass.max(self.seqlen_q // self.heads - 1 - query // self.heads, 0)  # tokens; 0 of a row past the end
        return 0, self.seqlen_k - self.step * later

    def n_blocks(self, first: Index, last: Index, tile_n: int) -> tuple[Index, Index]:
        """The pages `[0, hi)` that some row of `first..last` (inclusive) sees; the first load waits for this."""
        return 0, blocks_of(cutlass.max(self.kv_bounds(last)[1], 0), tile_n)

    def most_blocks(self, tokens: int, tile_n: int) -> Index:
        """The pages of a tile, at least 1."""
        return cutlass.max(blocks_of(self.seqlen_k, tile_n), 1)


@dataclasses.dataclass(frozen=True)
class LatentPages:
    """Where the pages of `tile_n` rows lie that a sequence consists of; for Python ints and traced values.

    Attributes:
        table: (sequences, pages of each), numbers of entries of the cache; None if a sequence is an entry.
        per_entry: pages in an entry, as something to divide by; None without a table.
    """

    table: Any | None
    per_entry: Any | None

    @classmethod
    def of(cls, problem: MlaProblem, tensors: MlaTensors, tile_n: int) -> LatentPages:
        """The pages of a launch."""
        if not problem.is_paged:
            return cls(None, None)
        per_entry = cute.fast_divmod_create_divisor_v2(tensors.kv_cache.shape[1] // tile_n)
        return cls(tensors.page_table, per_entry)

    def place(self, sequence: Index, page: Index) -> tuple[Index, Index]:
        """(page in its entry, entry) of a page that the sequence has: no other is looked up."""
        if self.table is None:
            return page, sequence
        slot, inside = divmod(page, self.per_entry)
        return inside, self.table[sequence, slot]


class LatentLine(Line):
    """The sequences laid end to end; query tiles are lanes, so that a line has one tile of each.

    Its units are pages, and behind them what it costs beside these.
    """

    def tiles(self, launch: LatentLaunch, sequence: Sequence) -> tuple[int, Index]:
        """(query tiles of a line, units of each) of a sequence."""
        return 1, launch.mask_of(sequence).most_blocks(launch.tile_m, launch.tile_n) + launch.tile_cost


@dataclasses.dataclass(frozen=True)
class LatentLaunch:
    """What the blocks of one launch share.

    Attributes:
        lengths: (sequences,), keys of each.
        capacity: keys that a sequence can have.
        rows: of a sequence, tokens times heads.
        by_heads: what to divide by in place of the number of query heads.
        step: see `LatentMask`.
        scale_log2: exp2 is taken of `scale_log2 * q k`.
        m_blocks: query tiles of a sequence; neighbouring blocks compute the same keys of them.
        line: the sequences, whose keys blocks share; None if a tile has one block.
        tile_cost: what a tile costs beside its pages, in pages.
        tile_m, tile_n: of the kernel.
    """

    lengths: cute.Tensor
    capacity: Int32
    rows: Int32
    by_heads: Any
    step: Int32
    scale_log2: Float32
    m_blocks: Int32
    line: LatentLine | None
    tile_cost: Int32
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    @classmethod
    def of(cls, traits, problem: MlaProblem, tensors: MlaTensors, scalars: MlaScalars) -> LatentLaunch:
        """The launch of a kernel with `traits`."""
        batch, rows, _ = tensors.q.shape
        m_blocks = cute.ceil_div(rows, traits.tile_m)
        capacity = tensors.kv_cache.shape[1]
        if problem.is_paged:
            capacity = tensors.page_table.shape[1] * capacity
        line = None
        if problem.is_split:
            line = LatentLine.of(batch, Int32(1), m_blocks, scalars.shares, scalars.most_parts)
        return cls(
            lengths=tensors.cache_seqlens,
            capacity=capacity,
            rows=rows,
            by_heads=cute.fast_divmod_create_divisor_v2(tensors.lse.shape[1]),
            step=scalars.causal,
            scale_log2=scalars.softmax_scale * LOG2_E,
            m_blocks=m_blocks,
            line=line,
            tile_m=traits.tile_m,
            tile_n=traits.tile_n,
            tile_cost=scalars.tile_cost,
        )

    def sequence(self, index: Int32) -> Sequence:
        """The rows and the keys of a sequence."""
        keys = cutlass.max(cutlass.min(self.lengths[index], self.capacity), 0)
        return Sequence(0, self.rows, 0, keys)

    def mask_of(self, sequence: Sequence) -> LatentMask:
        """The keys that each row of a sequence sees."""
        return LatentMask(
            kind="causal",
            seqlen_q=sequence.seqlen_q,
            seqlen_k=sequence.seqlen_k,
            window_left=0,
            window_right=0,
            heads=self.by_heads,
            step=self.step,
        )

    def tile_of(self, m_block: Int32, head: Int32, number: Int32, sequence: Sequence) -> QueryTile:
        """Query tile `head` of a sequence, as lines count heads; all of its keys."""
        return QueryTile(
            m_block=head,
            head=Int32(0),
            sequence=number,
            batch=number,
            kv_batch=number,
            heads_per_kv=None,
            first_q=0,
            first_k=0,
            first_token=head * self.tile_m,
            mask=self.mask_of(sequence),
            tile_n=self.tile_n,
            tokens=self.tile_m,
            packed_heads=1,
        )


@cute.jit
def place_of(block: Any, tile: QueryTile, page: Int32, end: Int32):
    """Where a page of a tile lies, by the block's `LatentPages`; anything if the tile does not read it.

    It is looked up in the table, if there is one, while the page before it loads.
    """
    inside, entry = page, tile.sequence
    if const_expr(block.pages.table is not None):
        inside, entry = Int32(0), Int32(0)
        if page < end:
            inside, entry = block.pages.place(tile.sequence, page)
    return inside, entry


def entries_last(tensor: cute.Tensor) -> cute.Tensor:
    """A (n, rows, columns) tensor seen as (rows, columns, n)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 2, 0]))


def rows_of_lse(lse: cute.Tensor) -> cute.Tensor:
    """The log-sum-exps, (batch, heads, tokens), seen as (batch, 1, rows), a row being (token, head), heads first."""
    batch, heads, tokens = lse.shape
    layout = cute.make_layout((batch, 1, (heads, tokens)), stride=(lse.stride[0], 0, lse.stride[1:]))
    return cute.make_tensor(lse.iterator, layout)


@cute.jit
def each_latent_part(launch: LatentLaunch, visit: cutlass.Constexpr):
    """As `cuteflash.core.split.each_part`; the first tile alone is looked for, as a line has one of each sequence.

    That is one with pages in the share: if it has but what a tile costs beside them, all are in the share before.
    """
    line, block = launch.line, cute.arch.block_idx()[0]
    first, begin, share, total = start_of(launch, block, launch.tile_cost)
    number = block // line.by_lanes
    start = number * share
    end = cutlass.select_(start + launch.tile_cost < total, cutlass.min(start + share, total), Int32(0))
    sequence, kv_pos = first, Int32(0)
    while begin < end:
        lane = computed_here(block) % line.by_lanes  # kept across a tile it would take a register
        at = cutlass.max(begin, start)
        lengths = launch.sequence(sequence)
        found, width = launch.tile_of(Int32(0), lane, sequence, lengths), line.tiles(launch, lengths)[1]
        place = at, end, at - begin, width, share, number, lane * line.shares
        tile = dataclasses.replace(found, share=share_of_tile(*place, launch.tile_cost))
        kv_pos = visit(tile, sequence - first, kv_pos)
        begin, sequence = begin + width, sequence + 1


@cute.jit
def each_latent_tile(launch: LatentLaunch, visit: cutlass.Constexpr):
    """Visit this block's query tiles, or its parts of them; `visit` as `cuteflash.core.split.each_part` has it."""
    if const_expr(launch.line is not None):
        each_latent_part(launch, visit)
    else:
        q_pos, kv_pos = Int32(0), Int32(0)
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        first, step = block // launch.m_blocks, blocks // launch.m_blocks
        for number in cutlass.range(first, launch.lengths.shape[0], step, unroll=1):
            tile = launch.tile_of(Int32(0), block % launch.m_blocks, number, launch.sequence(number))
            kv_pos = visit(tile, q_pos, kv_pos)
            q_pos += 1
