"""Which (query tile, head, batch entry) a block works on, and in which order."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

# K and V of the heads that run at the same time should stay in the L2 cache (A100 40 MB, H100 50 MB);
# about half of it leaves room for Q, O and the heads that are about to end.
L2_BUDGET_BYTES = 24 << 20


class Schedule(Protocol):
    """An order of all tiles of a launch; `each_tile` walks it in a persistent kernel."""

    def size(self) -> Int32:
        """Number of tiles."""
        ...

    def index(self, wave: Int32) -> Int32:
        """This block's tile of a wave, as many tiles as there are blocks; `size()` or more is none."""
        ...

    def tile(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(query tile, head, batch entry) of a tile."""
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
    """

    m_blocks: Int32
    heads: Int32
    batch: Int32
    group: Int32
    longest_first: cutlass.Constexpr[bool]

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

        With `longest_first` every other wave runs backwards: the block with the longest tile of one wave gets the
        shortest of the next, which balances the blocks as well as handing out tiles on demand would.
        """
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if const_expr(self.longest_first):
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
