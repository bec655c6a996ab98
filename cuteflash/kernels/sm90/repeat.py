"""Which of a block's tiles have to be done again, because their softmax left the range of its numbers.

Rows with `fixed_max` take the exponentials of all but a tile's first scores against the first ones' maxima. That is
exact as long as nothing overflows, which the sums and O itself tell at the tile's end. Tiles where it did are noted,
and when a block has finished its tiles it does those again, with maxima that move. Their first output is overwritten.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms.barriers import NamedBarrier
from cuteflash.core.schedule import TileOrder
from cuteflash.traits.sm90 import REPEAT_WORDS, WARPGROUP

WARP = 32
WORD = 32  # bits


@dataclasses.dataclass(frozen=True)
class Repeats:
    """A block's notes in shared memory: a bit a wave, waves far apart sharing one, and a last word for any at all.

    Attributes:
        words: (REPEAT_WORDS + 1) Int32.
        threads: how many wait for each other before the notes are read.
    """

    words: cute.Tensor
    threads: cutlass.Constexpr[int]

    @cute.jit
    def clear(self):
        """Note nothing; all threads of the block call it, a block barrier follows."""
        thread = cute.arch.thread_idx()[0]
        if thread <= REPEAT_WORDS:
            self.words[thread] = Int32(0)

    @cute.jit
    def note(self, wave: Int32):
        """The block's tile of `wave` has to be done again."""
        cute.arch.atomic_or(self.words.iterator + self._word(wave), Int32(1) << wave % WORD)
        cute.arch.atomic_or(self.words.iterator + REPEAT_WORDS, Int32(1))

    def complete(self) -> None:
        """Wait until all consumers have finished their tiles; the producer warp and they call it."""
        cute.arch.barrier(barrier_id=NamedBarrier.REPEAT, number_of_threads=self.threads)

    def any(self) -> Boolean:
        """Whether any tile has to be done again."""
        return cute.arch.make_warp_uniform(self.words[REPEAT_WORDS]) != 0

    def wanted(self, wave: Int32) -> Boolean:
        """Whether the block's tile of `wave`, or one that shares its bit, has to be done again."""
        return (cute.arch.make_warp_uniform(self.words[self._word(wave)]) >> wave % WORD) % 2 != 0

    def _word(self, wave: Int32) -> Int32:
        return wave // WORD % REPEAT_WORDS


@cute.jit
def each_tile(
    kernel: cutlass.Constexpr,
    order: TileOrder,
    repeats: Repeats | None,
    visit: cutlass.Constexpr,
    q_pos: Int32,
    kv_pos: Int32,
    again: cutlass.Constexpr[bool],
):
    """Visit this block's tiles or, with `again`, those to be done again.

    `visit(index, wave, q_pos, kv_pos)` is called with a tile's number in the order, its wave and the positions of its Q
    and its first K and V; it returns the next K/V position.

    Returns:
        The next Q and K/V positions.
    """
    wave = Int32(0)
    index = order.index(wave, kernel.longest_first)
    while index < order.size():
        if const_expr(again):
            if repeats.wanted(wave):
                kv_pos = visit(index, wave, q_pos, kv_pos)
                q_pos += 1
        else:
            kv_pos = visit(index, wave, q_pos, kv_pos)
            q_pos += 1
        wave += 1
        index = order.index(wave, kernel.longest_first)
    return q_pos, kv_pos


def repeat_threads(mma_warpgroups: int) -> int:
    """Threads of all consumers and of the producer warp."""
    return mma_warpgroups * WARPGROUP + WARP
