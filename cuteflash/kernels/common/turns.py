"""Turns at a tile of dQ (`cuteflash.core.turns`): one thread of a block waits for its turn, adds, and passes it on."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def seen_turn(turn: cute.Pointer) -> Int32:
    """How many parts have been added to a tile so far."""
    return cute.arch.load(turn, Int32, sem="relaxed", scope="gpu")


@cute.jit
def await_turn(turn: cute.Pointer, expected: Int32):
    """Wait until `expected` parts have been added."""
    seen = seen_turn(turn)
    while seen < expected:
        seen = seen_turn(turn)
    cute.arch.fence_acq_rel_gpu()


def pass_turn(turn: cute.Pointer) -> None:
    """One part more has been added, and can be seen by this thread."""
    cute.arch.atomic_add(turn, Int32(1), sem="release", scope="gpu")
