"""Turns at a tile of dQ: one thread of a block stores or adds for it, and says so to those that come after it.

In a deterministic backward blocks add in a fixed order (`cuteflash.core.turns`), each after the one before it.
Otherwise they add in any order, and only the first one matters: it stores what the others add to.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32

STORED = 1 << 30  # more than the blocks that come to a tile


def seen_turn(turn: cute.Pointer, sem: str = "acquire") -> Int32:
    """How many have added to a tile so far; what they added can be seen, unless `sem` is relaxed."""
    return cute.arch.load(turn, Int32, sem=sem, scope="gpu")


@cute.jit
def await_turn(turn: cute.Pointer, seen: Int32, expected: Int32):
    """Wait until so many have added, of which `seen` have been seen; then bulk copies of this thread may add, too."""
    while seen < expected:
        seen = seen_turn(turn)
    cute.arch.fence_proxy("async.global")


def pass_turn(turn: cute.Pointer) -> None:
    """One more has added, and what it added can be seen by this thread."""
    cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")


@cute.jit
def come_first(turn: cute.Pointer, seen: Int32):
    """Whether this block has to store, as the first one; if it has to add, what the first one stored is there.

    Called with data in hand: whoever is first stores without waiting for anybody, so that nobody waits for ever.
    """
    is_first = Boolean(False)
    if seen < STORED:
        seen = cute.arch.atomic_add(turn, Int32(1), sem="acquire", scope="gpu")
        is_first = seen == 0
        if not is_first:
            await_turn(turn, seen, Int32(STORED))
    cute.arch.fence_proxy("async.global")
    return is_first


def say_stored(turn: cute.Pointer) -> None:
    """What the first one stores can be seen by this thread."""
    cute.arch.atomic_add(turn, Int32(STORED), sem="release", scope="gpu")
