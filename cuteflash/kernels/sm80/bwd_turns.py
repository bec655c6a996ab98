"""Turns: the blocks of a deterministic backward add to a tile of dQ in a fixed order."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.core.turns import turn_of
from cuteflash.kernels.common import turns
from cuteflash.kernels.sm80.bwd_bundles import KeyWork, QuerySources


def turn_pointer(loads: QuerySources, head: Int32, m_block: Int32) -> cute.Pointer:
    """Where the number of blocks stands that have added to a query tile of the `head`-th query head."""
    return loads.workspace.tile(m_block, loads.first_head + head, loads.sequence).turns.iterator


@cute.jit
def look_at_turn(loads: QuerySources, head: Int32, m_block: Int32):
    """How many blocks have added to a tile, as thread 0 sees it; 0 for the others. The load is not waited for."""
    seen = Int32(0)
    if loads.thread == 0:
        seen = turns.seen_turn(turn_pointer(loads, head, m_block), sem="relaxed")
    return seen


@cute.jit
def await_turn(loads: QuerySources, work: KeyWork, place: tuple, seen: Int32):
    """Let thread 0 wait for this block's turn at the tile of a step, and then pass on that of the step before.

    `seen` is what `look_at_turn` saw. A barrier has to stand between the additions of the step before and this, and
    another between this and those of this step. One fence serves both turns; half a step after the additions, it waits
    for none of them.
    """
    if loads.thread == 0:
        head, m_block, position = place
        tile = work.tile
        turn = turn_of(tile.mask, tile.n_block, m_block, tile.tile_m, tile.tile_n)
        pointer = turn_pointer(loads, head, m_block)
        while seen < turn:
            seen = turns.seen_turn(pointer, sem="relaxed")
        cute.arch.fence_acq_rel_gpu()
        if position > 0:
            before = turn_pointer(loads, *work.before(head, m_block))
            cute.arch.atomic_add(before, Int32(1), sem="relaxed", scope="gpu")


@cute.jit
def pass_turn(loads: QuerySources, head: Int32, m_block: Int32):
    """Let the next block add to a tile; a barrier has to stand between this block's additions and this."""
    if loads.thread == 0:
        turns.pass_turn(turn_pointer(loads, head, m_block))
