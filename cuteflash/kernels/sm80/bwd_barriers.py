"""The barriers of the sm80 backward's main kernel."""

from __future__ import annotations

import enum

import cutlass.cute as cute

from cuteflash.traits.sm80 import WARP


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use if a block has warps that do not compute; 0 is `__syncthreads`."""

    MMA = 1  # all warps that compute
    TURN = 2  # these, and both that keep the turns, if any: dS is written, and it is this block's turn to add
    ADDED = 3  # those that compute, and the one that passes on turns: the block has added


def threads_of(kernel, barrier: NamedBarrier) -> int:
    """How many threads come to a barrier."""
    more = {NamedBarrier.MMA: 0, NamedBarrier.TURN: 2, NamedBarrier.ADDED: 1}[barrier] if kernel.turns_apart else 0
    return kernel.traits.num_threads + more * WARP


def sync_warps(kernel, barrier: NamedBarrier = NamedBarrier.MMA) -> None:
    """Wait for all warps that compute, with TURN for this block's turn, too."""
    if kernel.turn_threads:
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads_of(kernel, barrier))
    else:
        cute.arch.sync_threads()


def say_added(kernel) -> None:
    """This warp has added to a tile of dQ."""
    number = threads_of(kernel, NamedBarrier.ADDED)
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.ADDED, number_of_threads=number)
