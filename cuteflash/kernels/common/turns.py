"""Turns at a tile of dQ: one thread of a block stores or adds for it, and says so to those that come after it.

In a deterministic backward blocks add in a fixed order (`KeyTile.turn_at`), each after the one before it.
Otherwise they add in any order, and only the first one matters: it stores what the others add to. If the last one
rounds what all have added (`BwdTraits.last_rounds`), additions are counted, too.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32

# For each addition that is counted: more than the blocks that run and come to a tile at the same time. A word counts
# half a million, which is 67 million keys.
ADDED = 1 << 12
ROUNDED = -1  # instead of a count: dQ is stored as it is returned


def seen_turn(turn: cute.Pointer, sem: str = "acquire") -> Int32:
    """How many have added to a tile so far; what they added can be seen, unless `sem` is relaxed."""
    return cute.arch.load(turn, Int32, sem=sem, scope="gpu")


@cute.jit
def await_turn(turn: cute.Pointer, seen: Int32, expected: Int32):
    """Wait until so many have added, of which `seen` have been seen. Bulk copies need a fence after it."""
    while seen < expected:
        seen = seen_turn(turn)


def pass_turn(turn: cute.Pointer) -> None:
    """One more has added, and what it added can be seen by this thread."""
    cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")


@cute.jit
def come_first(turn: cute.Pointer, seen: Int32):
    """Whether this block has to store, as the first one; if it has to add, what the first one stored is there.

    Called with data in hand: whoever is first stores without waiting for anybody, so that nobody waits for ever.
    """
    is_first = Boolean(False)
    if seen < ADDED:
        seen = cute.arch.atomic_add(turn, Int32(1), sem="acquire", scope="gpu")
        is_first = seen == 0
        if not is_first:
            await_turn(turn, seen, Int32(ADDED))
    cute.arch.fence_proxy("async.global")
    return is_first


def say_added(turn: cute.Pointer) -> None:
    """What this block has stored, or added, can be seen by this thread."""
    cute.arch.atomic_add(turn, Int32(ADDED), sem="release", scope="gpu")


def say_rounded(turn: cute.Pointer) -> None:
    """Nothing is left to do at a tile."""
    cute.arch.store(turn, Int32(ROUNDED))
