"""Which tile comes next: dealt in advance, or, of packed sequences, handed out by a warp of the producer.

Tiles of packed sequences differ in what they cost, some numbers of their order belong to no tile, and it takes a search
to find the sequence of one. So one warp draws numbers on demand and searches, some tiles ahead, and passes on what it
finds through a ring in shared memory; all other roles read it there. Forward and backward share all of it: a tile is
seven words, of which the launch makes a `QueryTile` or a `KeyTile`.

No block waits for ever, even if a tile waits for others that come before it in the order (`KeyTile.turn_at`).
Numbers are drawn in ascending order, and a block works on its tiles in that order, too. So of all tiles that are not
done, consider the first one of the order: all before it are done, those of its own block among them. The warps of that
block have taken those, so the ring has room for this one, and nothing that the tile could wait for is left. A block
that has drawn it runs, and if none has, a block is left that draws: all of theirs are done.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.lengths import Sequence
from cuteflash.core.schedule import each_tile
from cuteflash.core.split import each_part
from cuteflash.core.tile import KeyTile, QueryTile
from cuteflash.traits.base import SmemRegion
from cuteflash.traits.sm90 import HANDED_BYTES, HANDED_TILES

WORDS = 7  # of a tile: its number in its sequence, head, batch entry, and those of its sequence
SEVERAL_ROWS, MANY_ROWS = 256, 1024  # visited by a tile that takes longer, or much longer, than finding one
NO_TILE = -1  # the number that says that no tile follows


class AnyLaunch(Protocol):
    """What this file asks of `cuteflash.core.launch.Launch` and of `cuteflash.core.bwd_launch.BwdLaunch`.

    It names neither, so that a forward kernel is compiled anew only if something changes that it consists of.
    """

    order: Any
    line: Any
    tile_n: cutlass.Constexpr[int]

    def tile(self, index: Int32) -> QueryTile | KeyTile:
        """The tile with number `index` of the order."""
        ...

    def tile_of(self, block: Int32, head: Int32, batch: Int32, sequence: Sequence) -> QueryTile | KeyTile:
        """The tile with these numbers."""
        ...

    def sequence(self, batch: Int32) -> Sequence:
        """The sequence of a batch entry."""
        ...

    def rows_visited(self, tile: Any) -> Int32:
        """What a tile costs, in rows of K or of Q."""
        ...


@dataclasses.dataclass(frozen=True)
class Handout:
    """The ring of handed-out tiles; as in `TmaRing`, tile `p` lives in stage `p % HANDED_TILES`.

    Attributes:
        full, empty: mbarriers, one a stage: the tile is there, and every reading warp has read it.
        words: (WORDS, HANDED_TILES) Int32, in `HANDED_BYTES` a stage.
        most_ahead: tiles that may wait while the block works on one; of `HANDED_TILES` at least one less if the warp
            that hands out reads the words of the tile in work.
    """

    full: cute.Pointer
    empty: cute.Pointer
    words: cute.Tensor
    most_ahead: cutlass.Constexpr[int]

    @staticmethod
    def create(base: cute.Pointer, regions: tuple[SmemRegion, SmemRegion], most_ahead: int) -> Handout:
        """A ring in a block's shared memory at `base`, whose mbarriers, initialised by `init`, and words lie there."""
        barriers = cute.recast_ptr(base + regions[0].start, dtype=cutlass.Int64)
        words = cute.recast_ptr(base + regions[1].start, dtype=Int32)
        layout = cute.make_layout((WORDS, HANDED_TILES), stride=(1, HANDED_BYTES // 4))
        return Handout(barriers, barriers + HANDED_TILES, cute.make_tensor(words, layout), most_ahead)

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
        words = self._words(stage)
        cute.arch.sync_warp()  # every lane has read
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + stage)
        return words

    def handed(self, position: Int32) -> tuple[Int32, ...]:
        """The words of a tile whose stage holds it still, for the warp that handed it out."""
        cute.arch.sync_warp()  # the lane that wrote them, and those that read
        return self._words(position % HANDED_TILES)

    def _words(self, stage: Int32) -> tuple[Int32, ...]:
        return tuple(cute.arch.make_warp_uniform(self.words[i, stage]) for i in range(WORDS))


@cute.jit
def hand_out(
    handout: Handout,
    launch: AnyLaunch,
    follow: cutlass.Constexpr,
    done: Any,
    await_steps: cutlass.Constexpr = None,
):
    """Draw tiles and hand out those that exist, then the end; a whole warp calls it.

    Drawing and finding a tile takes a microsecond or two, as the work on a short one does: short tiles are found as far
    ahead as the ring allows. But a tile that waits here while other blocks have nothing left to do prolongs the launch:
    the next tile after a long one is not drawn before the block begins with that one. If blocks take turns, others wait
    for a tile that waits here, and more and more blocks for those, unless its sequence has no other: the next tile is
    drawn once the block is done with the steps of the one before it, so that it is found, and its loads begin, while
    that one's results are stored.

    `follow(done, position)` returns once the block works on tile `position`, or has nothing left to do before it;
    nothing is waited for if it is negative. `done` is what it returned last, at first the one that is given.
    `await_steps(position)`, which orders need that draw first, returns once the steps of a tile are done.
    """
    order = launch.order
    position, near = Int32(0), Int32(0)
    index = order.first()
    draws_ahead = Boolean(False)
    while order.holds(index):
        following = Int32(0)
        if draws_ahead:
            following = order.draw()  # on its way while the tile is looked for
        block, head, near = order.tile(index, near)
        sequence = launch.sequence(near)
        tile = launch.tile_of(block, head, near, sequence)
        ahead = tiles_ahead(launch.rows_visited(tile), handout.most_ahead)
        takes_turns = Boolean(False)
        if const_expr(order.draws_first):
            takes_turns = sequence.seqlen_k > launch.tile_n
            ahead = cutlass.select_(takes_turns, Int32(1), ahead)
        if tile.exists():
            handout.put(position, (block, head, near, *sequence))
            position += 1
            done = follow(done, position - ahead)
            if const_expr(order.draws_first):
                if takes_turns:
                    await_steps(position - 1)
        if not draws_ahead:
            following = order.draw()
        if const_expr(not order.draws_first):
            draws_ahead = ahead == handout.most_ahead
        index = order.drawn(following)
    handout.put(position, (Int32(NO_TILE),))
    order.close(index)
    follow(done, position)


@cute.jit
def tiles_ahead(rows: Int32, most: cutlass.Constexpr[int]):
    """How many tiles may wait for the block, behind one that visits so many rows."""
    ahead = Int32(most)
    if rows >= MANY_ROWS:
        ahead = Int32(1)
    elif rows >= SEVERAL_ROWS:
        ahead = Int32(2)
    return ahead


@cute.jit
def await_taken(handout: Handout, done: Int32, position: Int32):
    """`follow` for a warp that has nothing else to do."""
    if position >= 0:
        handout.wait_taken(position)
    return done


def tile_of_words(launch: AnyLaunch, words: tuple[Int32, ...]) -> QueryTile | KeyTile:
    """The tile that was handed out as `words`."""
    block, head, batch, *spans = words
    return launch.tile_of(block, head, batch, Sequence(*spans))


@cute.jit
def each_handed_tile(handout: Handout, launch: AnyLaunch, visit: cutlass.Constexpr):
    """Visit the tiles that are handed out to this block, as `visit_tiles` does."""
    q_pos, kv_pos = Int32(0), Int32(0)
    words = handout.take(q_pos)
    while words[0] != NO_TILE:
        kv_pos = visit(tile_of_words(launch, words), q_pos, kv_pos)
        q_pos += 1
        words = handout.take(q_pos)


@cute.jit
def visit_index(launch: AnyLaunch, visit: cutlass.Constexpr, index: Int32, q_pos: Int32, kv_pos: Int32):
    """Visit the tile with number `index` of the order."""
    return visit(launch.tile(index), q_pos, kv_pos)


@cute.jit
def visit_tiles(handout: Handout | None, launch: AnyLaunch, visit: cutlass.Constexpr):
    """Visit this block's tiles.

    `visit(tile, q_pos, kv_pos)` is called with a tile and the positions of its Q and of its first K and V in their
    rings; it returns the next K/V position. In a backward K and V come once a tile, and Q step by step.
    """
    if const_expr(launch.line is not None):
        each_part(launch, visit)
    elif const_expr(handout is None):
        each_tile(launch.order, functools.partial(visit_index, launch, visit))
    else:
        each_handed_tile(handout, launch, visit)
