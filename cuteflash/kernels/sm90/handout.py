"""Which tile comes next: dealt in advance, or, of packed sequences, handed out by a warp of its own.

Tiles of packed sequences differ in what they cost, some numbers of their order belong to no tile, and it takes a search
to find the sequence of one. So the second warp of the producer draws numbers on demand and searches, some tiles ahead,
and passes on what it finds through a ring in shared memory; all other roles read it there.
"""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.launch import Launch
from cuteflash.core.lengths import Sequence
from cuteflash.core.schedule import each_tile
from cuteflash.traits.sm90 import HANDED_BYTES, HANDED_TILES

WORDS = 7  # of a tile: query tile, head, batch entry, and those of its sequence
SEVERAL_KEYS, LONG_KEYS = 256, 1024  # of a sequence whose tiles take longer, or much longer, than finding one
NO_TILE = -1  # the query tile that says that no tile follows


@dataclasses.dataclass(frozen=True)
class Handout:
    """The ring of handed-out tiles; as in `TmaRing`, tile `p` lives in stage `p % HANDED_TILES`.

    Attributes:
        full, empty: mbarriers, one a stage: the tile is there, and every reading warp has read it.
        words: (WORDS, HANDED_TILES) Int32, in `HANDED_BYTES` a stage.
    """

    full: cute.Pointer
    empty: cute.Pointer
    words: cute.Tensor

    @staticmethod
    def create(barriers: cute.Pointer, words: cute.Pointer) -> Handout:
        """A ring over `2 * HANDED_TILES` mbarriers at `barriers`, initialised by `init`."""
        layout = cute.make_layout((WORDS, HANDED_TILES), stride=(1, HANDED_BYTES // 4))
        tensor = cute.make_tensor(words, layout)
        return Handout(barriers, barriers + HANDED_TILES, tensor)

    def init(self, readers: int) -> None:
        """Initialise the mbarriers for so many reading warps; one thread of the block calls it, a fence follows."""
        for stage in range(HANDED_TILES):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, readers)

    def put(self, position: Int32, words: tuple[Int32, ...]) -> None:
        """Hand out a tile, or the end, once the stage is free; a whole warp calls it."""
        stage, phase = position % HANDED_TILES, position // HANDED_TILES % 2
        wait_phase(self.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            for i, word in enumerate(words):
                self.words[i, stage] = word
            cute.arch.mbarrier_arrive(self.full + stage)

    def wait_taken(self, position: Int32) -> None:
        """Wait until every reading warp has taken a tile."""
        wait_phase(self.empty + position % HANDED_TILES, position // HANDED_TILES % 2)

    def take(self, position: Int32) -> tuple[Int32, ...]:
        """The words of a tile, the same in every lane, and its stage is free again; a whole warp calls it."""
        stage, phase = position % HANDED_TILES, position // HANDED_TILES % 2
        wait_phase(self.full + stage, phase)
        words = tuple(cute.arch.make_warp_uniform(self.words[i, stage]) for i in range(WORDS))
        cute.arch.sync_warp()  # every lane has read
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + stage)
        return words


@cute.jit
def hand_out(handout: Handout, launch: Launch):
    """Draw tiles and hand out those that exist, then the end; a whole warp calls it.

    Drawing and finding a tile takes a few microseconds, as the work on a short one does: tiles of short sequences are
    found as far ahead as the ring allows. But a tile that waits here while other blocks have nothing left to do
    prolongs the launch: the next tile after one of a long sequence is not drawn before the block begins with that one.
    """
    order = launch.order
    position, index = Int32(0), cute.arch.block_idx()[0]
    draws_ahead = Boolean(False)
    while index < order.size():
        following = Int32(0)
        if draws_ahead:
            following = order.draw()  # on its way while the tile is looked for
        m_block, head, batch = order.tile(index)
        sequence = launch.lengths.sequence(batch)
        ahead = tiles_ahead(sequence.seqlen_k)
        if launch.tile_of(m_block, head, batch, sequence).exists():
            handout.put(position, (m_block, head, batch, *sequence))
            position += 1
            if position >= ahead:
                handout.wait_taken(position - ahead)
        if not draws_ahead:
            following = order.draw()
        draws_ahead = ahead == HANDED_TILES
        index = cute.arch.make_warp_uniform(following)
    handout.put(position, (Int32(NO_TILE),))
    order.close(index)


@cute.jit
def tiles_ahead(seqlen_k: Int32):
    """How many tiles may wait for the block, behind one of a sequence of so many keys."""
    ahead = Int32(HANDED_TILES)
    if seqlen_k >= LONG_KEYS:
        ahead = Int32(1)
    elif seqlen_k >= SEVERAL_KEYS:
        ahead = Int32(2)
    return ahead


@cute.jit
def each_handed_tile(handout: Handout, launch: Launch, visit: cutlass.Constexpr):
    """Visit the tiles that are handed out to this block, as `visit_tiles` does."""
    q_pos, kv_pos = Int32(0), Int32(0)
    words = handout.take(q_pos)
    while words[0] != NO_TILE:
        m_block, head, batch, *spans = words
        tile = launch.tile_of(m_block, head, batch, Sequence(*spans))
        kv_pos = visit(tile, q_pos, kv_pos)
        q_pos += 1
        words = handout.take(q_pos)


@cute.jit
def visit_index(launch: Launch, visit: cutlass.Constexpr, index: Int32, q_pos: Int32, kv_pos: Int32):
    """Visit the tile with number `index` of the order."""
    return visit(launch.tile(index), q_pos, kv_pos)


@cute.jit
def visit_tiles(handout: Handout | None, launch: Launch, visit: cutlass.Constexpr):
    """Visit this block's tiles.

    `visit(tile, q_pos, kv_pos)` is called with a tile and the positions of its Q and of its first K and V in their
    rings; it returns the next K/V position.
    """
    if const_expr(handout is None):
        each_tile(launch.order, functools.partial(visit_index, launch, visit))
    else:
        each_handed_tile(handout, launch, visit)
