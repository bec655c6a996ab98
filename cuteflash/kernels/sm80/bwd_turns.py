"""Turns: the blocks of a deterministic backward add to a tile of dQ in a fixed order.

A fence at the scope of the GPU stands between the sight of a turn and the additions, and one between the additions and
the pass. It takes hundreds of clocks, in which the warps that compute should not wait. There are two ways:

- The first warp awaits and passes on the turns of up to `turn_steps` steps of a head together, a batch: lane i those of
  a batch's i-th step. A batch takes one fence, but the block that comes next runs a batch behind.
- `turn_warpgroup`: two more warps do nothing else. One awaits the turns and takes part in the barrier that a step needs
  anyway before dQ. The other one passes them on while the next step runs.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.kernels.common import turns
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm80.bwd_barriers import NamedBarrier, threads_of
from cuteflash.kernels.sm80.bwd_bundles import KeyWork, QuerySources


def own_turn(work: KeyWork, m_block: Int32) -> Int32:
    """How many blocks add to a query tile before this one."""
    before, _ = work.tile.turn_at(m_block)
    return before


def turn_pointer(workspace: WorkspaceTensors, work: KeyWork, head: Int32, m_block: Int32) -> cute.Pointer:
    """Where the number of blocks stands that have added to a query tile of the `head`-th query head of a KV head."""
    return workspace.tile(m_block, work.first_head + head, work.tile.sequence).turns.iterator


# The first warp awaits and passes on the turns.


def starts_batch(kernel, work: KeyWork, m_block: Int32) -> Boolean:
    """Whether a step is the first one of a batch: batches are counted anew for each head."""
    return (work.blocks.hi - 1 - m_block) % kernel.traits.turn_steps == 0


def batch_of(kernel, work: KeyWork, thread: Int32, first: Int32) -> tuple[Int32, Boolean]:
    """This thread's query block of the batch that starts at block `first`, and whether there is one."""
    if kernel.traits.turn_steps == 1:
        return first, thread < 1
    m_block = first - thread
    return m_block, (thread < kernel.traits.turn_steps) & (m_block >= work.blocks.lo)


@cute.jit
def look_at_turns(kernel: cutlass.Constexpr, loads: QuerySources, work: KeyWork, place: tuple):
    """How many blocks have added to this thread's tile of a batch, if one starts here. The load is not waited for."""
    seen = Int32(0)
    head, first, _ = place
    if starts_batch(kernel, work, first):
        m_block, has_tile = batch_of(kernel, work, loads.thread, first)
        if has_tile:
            seen = turns.seen_turn(turn_pointer(loads.workspace, work, head, m_block), sem="relaxed")
    return seen


@cute.jit
def await_turns(kernel: cutlass.Constexpr, loads: QuerySources, work: KeyWork, place: tuple, seen: Int32):
    """If a batch starts here, wait for this block's turn at its tiles, and then pass on those of the batch before.

    `seen` is what `look_at_turns` saw. A barrier has to stand between the additions of the step before and this, and
    another between this and those of this step. So one fence, of the threads that look at the turns, serves both ways:
    what others added comes before the additions of this block, since the fence stands between the sight of a turn and
    the second barrier; what this block added comes before its passes, since the fence stands between the first barrier
    and them. Half a step after the last additions, it waits for none of them.
    """
    head, first, position = place
    if (loads.thread < kernel.traits.turn_steps) & starts_batch(kernel, work, first):
        m_block, has_tile = batch_of(kernel, work, loads.thread, first)
        if has_tile:
            turn, pointer = own_turn(work, m_block), turn_pointer(loads.workspace, work, head, m_block)
            while seen < turn:
                seen = turns.seen_turn(pointer, sem="relaxed")
        cute.arch.fence_acq_rel_gpu()
        if position > 0:
            if const_expr(kernel.traits.turn_steps == 1):
                pass_batch(kernel, loads, work, *work.before(head, first))
            else:
                before, previous = head, first + kernel.traits.turn_steps
                if previous >= work.blocks.hi:
                    before, previous = head - 1, last_batch(kernel, work)
                pass_batch(kernel, loads, work, before, previous)


@cute.jit
def pass_last_turns(kernel: cutlass.Constexpr, loads: QuerySources, work: KeyWork):
    """Pass on the turns of the last batch; a barrier has to stand between this block's additions and this."""
    if loads.thread < kernel.traits.turn_steps:
        cute.arch.fence_acq_rel_gpu()
        pass_batch(kernel, loads, work, work.launch.heads_per_kv - 1, last_batch(kernel, work))


def last_batch(kernel, work: KeyWork) -> Int32:
    """The query block with which the last batch of a head starts."""
    return work.blocks.lo + (work.blocks.count - 1) % kernel.traits.turn_steps


@cute.jit
def pass_batch(kernel: cutlass.Constexpr, loads: QuerySources, work: KeyWork, head: Int32, first: Int32):
    """Pass on the turns of a batch, whose additions the threads' own fences cover."""
    m_block, has_tile = batch_of(kernel, work, loads.thread, first)
    if has_tile:
        pointer = turn_pointer(loads.workspace, work, head, m_block)
        cute.arch.atomic_add(pointer, Int32(1), sem="relaxed", scope="gpu")


# Two warps of their own do.


@cute.jit
def await_each_turn(kernel: cutlass.Constexpr, workspace: WorkspaceTensors, work: KeyWork, lane: Int32):
    """Wait for this block's turn at each tile, and join the barrier of the step that adds to it.

    What others added comes before the additions of this block: the load that sees their pass acquires, and the barrier
    stands between it and the additions. This warp is a step ahead at most: it looks at the turn of the next step when
    the barrier of this one is complete.
    """
    for head in cutlass.range(work.launch.heads_per_kv, unroll=1):
        for index in cutlass.range(work.blocks.count, unroll=1):
            m_block = work.blocks.hi - 1 - index
            if lane == 0:
                turn, pointer = own_turn(work, m_block), turn_pointer(workspace, work, head, m_block)
                seen = turns.seen_turn(pointer)
                while seen < turn:
                    seen = turns.seen_turn(pointer)
            cute.arch.sync_warp()
            cute.arch.barrier(barrier_id=NamedBarrier.TURN, number_of_threads=threads_of(kernel, NamedBarrier.TURN))


@cute.jit
def pass_each_turn(kernel: cutlass.Constexpr, workspace: WorkspaceTensors, work: KeyWork, lane: Int32):
    """Pass on the turn at each tile when all warps have added to it.

    What this block added comes before its pass: the barrier ADDED stands between the additions and the pass, which
    releases. The pass may take until the next step's additions. No warp comes to ADDED twice while this one has not
    yet: it arrives at TURN, without which no additions begin, only after the ADDED of the step before.
    """
    turn, added = (threads_of(kernel, barrier) for barrier in (NamedBarrier.TURN, NamedBarrier.ADDED))
    for head in cutlass.range(work.launch.heads_per_kv, unroll=1):
        for index in cutlass.range(work.blocks.count, unroll=1):
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN, number_of_threads=turn)
            if head + index > 0:
                pass_turn(workspace, work, lane, *work.before(head, work.blocks.hi - 1 - index))
            cute.arch.barrier(barrier_id=NamedBarrier.ADDED, number_of_threads=added)
    if work.blocks.count > 0:
        pass_turn(workspace, work, lane, work.launch.heads_per_kv - 1, work.blocks.lo)


@cute.jit
def pass_turn(workspace: WorkspaceTensors, work: KeyWork, lane: Int32, head: Int32, m_block: Int32):
    """Let the next block add to a tile."""
    if lane == 0:
        turns.pass_turn(turn_pointer(workspace, work, head, m_block))
