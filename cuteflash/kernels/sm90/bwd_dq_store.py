"""What the warps do that take dQ from shared memory, one for each part: add it to a sum, store it, or pass it on."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import Handover
from cuteflash.core.turns import turn_of
from cuteflash.kernels.common import turns
from cuteflash.kernels.sm90.bwd_bundles import Block, Visit
from cuteflash.kernels.sm90.bwd_load import query_rows


@cute.jit
def take_dq(kernel: cutlass.Constexpr, block: Block, stage: cutlass.Constexpr[int], visit: Visit):
    """Take what consumers hand over in a stage of sdQ, step by step; a whole warp calls it."""
    if const_expr(not kernel.traits.lone_tiles):
        if cute.arch.lane_idx() == 0:
            add_stage(kernel, block, stage, visit)
    elif block.launch.stores_dq(visit.tile):
        if const_expr(kernel.passes_dq_on):
            pass_stage_on(kernel, block, stage, visit)
        else:
            store_stage(kernel, block, stage, visit)
    elif cute.arch.lane_idx() == 0:
        add_stage(kernel, block, stage, visit)


@cute.jit
def store_stage(kernel: cutlass.Constexpr, block: Block, stage: cutlass.Constexpr[int], visit: Visit):
    """Store a stage of sdQ, rounded, step by step; a whole warp calls it."""
    traits, tma, blocks = kernel.traits, block.tma, visit.blocks
    rows, cols = traits.dq_part
    stride = traits.mma_warpgroups if const_expr(traits.is_dq_whole) else 1  # steps from one to the next of this stage
    m_part, d_part = (stage, 0) if const_expr(traits.dq == "rows") else (0, (1 - traits.is_dq_whole) * stage)
    position = visit.start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = visit.tile.head * block.launch.heads_per_kv + i
        gdQ = cute.local_tile(query_rows(kernel, tma.gdQ, visit.tile, head), (rows, cols), (None, None))
        source, target = atoms.tma_partition(tma.store_dq, block.tiles.sdQ_rounded, gdQ)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            part = target[None, m_block * (traits.tile_m // rows) + m_part, d_part]
            if const_expr(block.launch.held_dq):
                held = block.held_stage(i, m_block)
                _, is_last = visit.tile.ends_of(m_block)
                if is_last and held % stride == stage:
                    store_part(block, block.rings.dq_of(held), visit.item, source[None, 2 * held], part)
            elif position % stride == stage % stride:
                store_part(block, block.rings.dq[stage], position // stride, source[None, 2 * stage], part)
            m_block = blocks.following(m_block)
            position += 1


@cute.jit
def pass_stage_on(kernel: cutlass.Constexpr, block: Block, stage: cutlass.Constexpr[int], visit: Visit):
    """Bring the sum of dQ so far to a stage of sdQ, and take what a step made of it; a whole warp calls it."""
    traits, tma, blocks, handover = kernel.traits, block.tma, visit.blocks, block.rings.dq[stage]
    rows, cols = traits.dq_part
    nbytes = rows * cols * 4
    m_part, d_part = (stage, 0) if const_expr(traits.dq == "rows") else (0, stage)
    held, position = block.tiles.sdQ[None, stage].iterator, visit.start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = visit.tile.head * block.launch.heads_per_kv + i
        number = block.workspace.first_number(head, visit.tile.sequence, visit.tile.first_q)
        gdQ = cute.local_tile(query_rows(kernel, tma.gdQ, visit.tile, head), (rows, cols), (None, None))
        source, target = atoms.tma_partition(tma.store_dq, block.tiles.sdQ_rounded, gdQ)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            is_first, is_last = visit.tile.ends_of(m_block)
            total = block.workspace.sum(number + m_block) + stage * rows * cols
            if is_first:
                with cute.arch.elect_one():
                    handover.release()
            else:
                cute.arch.cp_async_bulk_wait_group(0)  # this thread has stored what it loads
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(handover.empty, nbytes)
                    atoms.bulk_load(held, total, nbytes, handover.empty)
            handover.wait(position)
            if is_last:
                part = target[None, m_block * (traits.tile_m // rows) + m_part, d_part]
                cute.copy(tma.store_dq, source[None, 2 * stage], part)
            else:
                with cute.arch.elect_one():
                    atoms.bulk_store(total, held, nbytes)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            m_block = blocks.following(m_block)
            position += 1


def store_part(block: Block, handover: Handover, use: Int32, source: cute.Tensor, target: cute.Tensor) -> None:
    """Store what a stage of sdQ holds the `use`-th time that it is filled; TMA clips it."""
    handover.wait(use)
    cute.copy(block.tma.store_dq, source, target)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    with cute.arch.elect_one():
        handover.release()


@cute.jit
def add_stage(kernel: cutlass.Constexpr, block: Block, stage: cutlass.Constexpr[int], visit: Visit):
    """Add a stage of sdQ to a sum in memory, step by step; one thread calls it."""
    position = visit.start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = visit.tile.head * block.launch.heads_per_kv + i
        number = block.workspace.first_number(head, visit.tile.sequence, visit.tile.first_q)
        add_head(kernel, block, stage, visit, position, number)
        position += visit.blocks.count


@cute.jit
def add_head(
    kernel: cutlass.Constexpr,
    block: Block,
    stage: cutlass.Constexpr[int],
    visit: Visit,
    position: Int32,
    first_number: Int32,
):
    """Add a stage of sdQ to the tiles of one query head, whose first one has that number in the workspace.

    How far the next tile is, is asked for while this one's addition is on its way.
    """
    traits, blocks, handover = kernel.traits, visit.blocks, block.rings.dq[stage]
    rows, cols = traits.dq_part
    source, part = block.tiles.sdQ[None, stage].iterator, 0 if traits.is_dq_whole else stage
    m_block, left, use = blocks.first, blocks.count, position
    stride = traits.mma_warpgroups if const_expr(traits.is_dq_whole) else 1  # steps from one to the next of this stage
    if const_expr(traits.is_dq_whole):
        use = position // stride
        if position % stride != stage:
            m_block, left, use = blocks.following(m_block), left - 1, (position + 1) // stride
    seen = Int32(0)
    if left > 0:
        seen = turns.seen_turn(block.workspace.turn(first_number + m_block, part))
    while left > 0:
        number = first_number + m_block
        turn = block.workspace.turn(number, part)
        if const_expr(kernel.in_turn):
            expected = turn_of(visit.tile.mask, visit.tile.n_block, m_block, traits.tile_m, traits.tile_n)
            turns.await_turn(turn, seen, expected)
            is_first = expected == 0
            handover.wait(use)
        else:
            handover.wait(use)
            is_first = turns.come_first(turn, seen)
        target = block.workspace.sum(number) + part * rows * cols
        store_or_add(target, source, rows * cols * 4, is_first)
        use, left = use + 1, left - stride
        for _ in cutlass.range_constexpr(stride):
            m_block = blocks.following(m_block)
        if left > 0:
            seen = turns.seen_turn(block.workspace.turn(first_number + m_block, part))
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        handover.release()
        if const_expr(kernel.in_turn):
            cute.arch.cp_async_bulk_wait_group(0)
            turns.pass_turn(turn)
        elif is_first:
            cute.arch.cp_async_bulk_wait_group(0)
            turns.say_stored(turn)


@cute.jit
def store_or_add(target: cute.Pointer, source: cute.Pointer, nbytes: cutlass.Constexpr[int], is_first: Boolean):
    """Store fp32 of shared memory, or add it to what is there."""
    if is_first:
        atoms.bulk_store(target, source, nbytes)
    else:
        atoms.bulk_add(target, source, nbytes)
    cute.arch.cp_async_bulk_commit_group()
