"""What the warps do that take dQ from shared memory, one for each part: add it to a sum, store it, or pass it on."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import Handover
from cuteflash.core.tile import QueryBlocks
from cuteflash.kernels.common import turns
from cuteflash.kernels.sm90.bwd_bundles import Block, Sum, Visit
from cuteflash.kernels.sm90.bwd_load import query_rows
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90

NOTHING = -1  # instead of the number of a tile


@dataclasses.dataclass(frozen=True)
class Part:
    """What one warp takes of dQ: a part of each tile, or every other whole one.

    Attributes:
        stage: the stage of sdQ that it is in.
    """

    traits: BwdTraitsSm90
    stage: int

    @property
    def index(self) -> int:
        """Its number among the parts of a tile."""
        return 0 if self.traits.is_dq_whole else self.stage

    @property
    def stride(self) -> int:
        """Steps from one that the warp takes something of to the next."""
        return self.traits.mma_warpgroups if self.traits.is_dq_whole else 1

    @property
    def nbytes(self) -> int:
        """Bytes of it in fp32."""
        rows, cols = self.traits.dq_part
        return rows * cols * 4

    def turn(self, block: Block, number: Int32) -> cute.Pointer:
        """The word that counts blocks at the part of a tile."""
        return block.workspace.turn(number, self.index)

    def sum(self, block: Block, number: Int32) -> cute.Pointer:
        """The fp32 sum in memory of the part of a tile."""
        rows, cols = self.traits.dq_part
        return block.workspace.sum(number) + self.index * rows * cols

    def stores(self, kernel, block: Block, visit: Visit, head: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """What TMA stores of it, (value, 2 parts), and where to in a query head, (value, rows, columns)."""
        rows = query_rows(kernel, block.tma.gdQ, visit.tile, head)
        gdQ = cute.local_tile(rows, self.traits.dq_part, (None, None))
        return atoms.tma_partition(block.tma.store_dq, block.tiles.sdQ_rounded, gdQ)

    def of_tile(self, target: cute.Tensor, m_block: Int32) -> cute.Tensor:
        """Where the part of a query tile is stored, of the targets that `stores` returns."""
        traits, rows = self.traits, self.traits.dq_part[0]
        row = m_block * (traits.tile_m // rows) + (self.index if traits.dq == "rows" else 0)
        return target[None, row, 0 if traits.dq == "rows" else self.index]

    def first(self, blocks: QueryBlocks, position: Int32) -> tuple[Int32, Int32, Int32]:
        """Of a head whose first step has a position: the first tile to take, how many are left from it on, and how
        often the stage has been filled before."""
        if not self.traits.is_dq_whole:
            return blocks.first, blocks.count, position
        is_other = position % self.stride != self.stage
        m_block = cutlass.select_(is_other, blocks.following(blocks.first), blocks.first)
        skipped = Int32(cutlass.select_(is_other, 1, 0))
        return m_block, blocks.count - skipped, (position + skipped) // self.stride

    def following(self, blocks: QueryBlocks, m_block: Int32) -> Int32:
        """The next tile to take."""
        for _ in range(self.stride):
            m_block = blocks.following(m_block)
        return m_block


@cute.jit
def take_dq(kernel: cutlass.Constexpr, block: Block, stage: cutlass.Constexpr[int], visit: Visit):
    """Take what consumers hand over in a stage of sdQ, step by step; a whole warp calls it."""
    part = Part(kernel.traits, stage)
    if const_expr(kernel.traits.last_rounds):
        complete_stage(kernel, block, part, visit)
    elif const_expr(not kernel.traits.lone_tiles):
        if cute.arch.lane_idx() == 0:
            add_stage(kernel, block, part, visit)
    elif block.launch.stores_dq(visit.tile):
        if const_expr(kernel.passes_dq_on):
            pass_stage_on(kernel, block, part, visit)
        else:
            store_stage(kernel, block, part, visit)
    elif cute.arch.lane_idx() == 0:
        add_stage(kernel, block, part, visit)


@cute.jit
def store_stage(kernel: cutlass.Constexpr, block: Block, part: cutlass.Constexpr[Part], visit: Visit):
    """Store a stage of sdQ, rounded, step by step; a whole warp calls it."""
    blocks, stage, stride = visit.blocks, part.stage, part.stride
    position = visit.start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = visit.tile.head * block.launch.heads_per_kv + i
        source, target = part.stores(kernel, block, visit, head)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            if const_expr(block.launch.held_dq):
                held = block.held_stage(i, m_block)
                _, after = visit.tile.turn_at(m_block)
                if after == 0 and held % stride == stage:
                    place = part.of_tile(target, m_block)
                    store_part(block, block.rings.dq_of(held), visit.item, source[None, 2 * held], place)
            elif position % stride == stage % stride:
                place = part.of_tile(target, m_block)
                store_part(block, block.rings.dq[stage], position // stride, source[None, 2 * stage], place)
            m_block = blocks.following(m_block)
            position += 1


@cute.jit
def pass_stage_on(kernel: cutlass.Constexpr, block: Block, part: cutlass.Constexpr[Part], visit: Visit):
    """Bring the sum of dQ so far to a stage of sdQ, and take what a step made of it; a whole warp calls it."""
    blocks, stage, handover = visit.blocks, part.stage, block.rings.dq[part.stage]
    held, position = block.tiles.sdQ[None, stage].iterator, visit.start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = visit.tile.head * block.launch.heads_per_kv + i
        number = block.workspace.first_number(head, visit.tile.sequence, visit.tile.first_q)
        source, target = part.stores(kernel, block, visit, head)
        m_block = blocks.first
        for _ in cutlass.range(blocks.count, unroll=1):
            before, after = visit.tile.turn_at(m_block)
            total = part.sum(block, number + m_block)
            if before == 0:
                with cute.arch.elect_one():
                    handover.release()
            else:
                cute.arch.cp_async_bulk_wait_group(0)  # this thread has stored what it loads
                with cute.arch.elect_one():
                    handover.release_with(held, total, part.nbytes)
            handover.wait(position)
            if after == 0:
                cute.copy(block.tma.store_dq, source[None, 2 * stage], part.of_tile(target, m_block))
            else:
                with cute.arch.elect_one():
                    atoms.bulk_store(total, held, part.nbytes)
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
def add_stage(kernel: cutlass.Constexpr, block: Block, part: cutlass.Constexpr[Part], visit: Visit):
    """Add a stage of sdQ to a sum in memory, step by step; one thread calls it."""
    position = visit.start
    for i in cutlass.range(block.launch.heads_per_kv, unroll=1):
        head = visit.tile.head * block.launch.heads_per_kv + i
        number = block.workspace.first_number(head, visit.tile.sequence, visit.tile.first_q)
        add_head(kernel, block, part, visit, position, number)
        position += visit.blocks.count


@cute.jit
def add_head(
    kernel: cutlass.Constexpr,
    block: Block,
    part: cutlass.Constexpr[Part],
    visit: Visit,
    position: Int32,
    first_number: Int32,
):
    """Add a stage of sdQ to the tiles of one query head, whose first one has that number in the workspace.

    How far the next tile is, is asked for while this one's addition is on its way.
    """
    blocks, handover = visit.blocks, block.rings.dq[part.stage]
    m_block, left, use = part.first(blocks, position)
    seen = Int32(0)
    if left > 0:
        seen = turns.seen_turn(part.turn(block, first_number + m_block))
    while left > 0:
        number = first_number + m_block
        turn = part.turn(block, number)
        before, _ = visit.tile.turn_at(m_block)
        is_first = add_part(kernel, block, part, number, use, (seen, before))
        use, left, m_block = use + 1, left - part.stride, part.following(blocks, m_block)
        if left > 0:
            seen = turns.seen_turn(part.turn(block, first_number + m_block))
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        handover.release()
        if const_expr(kernel.in_turn):
            cute.arch.cp_async_bulk_wait_group(0)
            turns.pass_turn(turn)
        elif is_first:
            cute.arch.cp_async_bulk_wait_group(0)
            turns.say_added(turn)


@cute.jit
def add_part(
    kernel: cutlass.Constexpr, block: Block, part: cutlass.Constexpr[Part], number: Int32, use: Int32, turn_at: tuple
):
    """Add what a stage of sdQ holds the `use`-th time that it is filled to the sum of a tile; one thread calls it.

    The first block that comes to the tile stores instead; returns whether this one does.

    Args:
        turn_at: how many have been seen at the tile, and how many add before this block if they take turns.
    """
    turn, handover, (seen, before) = part.turn(block, number), block.rings.dq[part.stage], turn_at
    is_first = before == 0
    if const_expr(kernel.in_turn):
        turns.await_turn(turn, seen, before)
        cute.arch.fence_proxy("async.global")
        handover.wait(use)
    else:
        handover.wait(use)
        is_first = turns.come_first(turn, seen)
    source, target = block.tiles.sdQ[None, part.stage].iterator, part.sum(block, number)
    if is_first:
        atoms.bulk_store(target, source, part.nbytes)
    else:
        atoms.bulk_add(target, source, part.nbytes)
    cute.arch.cp_async_bulk_commit_group()
    return is_first


@cute.jit
def complete_stage(kernel: cutlass.Constexpr, block: Block, part: cutlass.Constexpr[Part], visit: Visit):
    """Add a stage of sdQ to a sum in memory, or store what completes it, step by step; a whole warp calls it."""
    position, owed = visit.start, Int32(NOTHING)
    head = visit.tile.head * block.launch.heads_per_kv
    for _ in cutlass.range(block.launch.heads_per_kv, unroll=1):
        owed = complete_head(kernel, block, part, visit, position, head, owed)
        position += visit.blocks.count
        head += 1
    settle(kernel, block, part, owed)


@cute.jit
def complete_head(
    kernel: cutlass.Constexpr,
    block: Block,
    part: cutlass.Constexpr[Part],
    visit: Visit,
    position: Int32,
    head: Int32,
    owed: Int32,
):
    """As `add_head`, for the tiles of a query head, but with the sum brought back to the last block that comes to one.

    Whether a block is the last one is known when it gives a stage of sdQ back, so that the sum comes with it. Of blocks
    that meet at a tile none is the last one: the kernel after this one rounds it. In turn, the last one is known, and
    waits for the others.

    Args:
        owed: the number of the tile whose addition has not been counted yet, or `NOTHING`; so is the result. It is
            counted once the stage has been given back: waiting for its end would hold consumers up.
    """
    blocks, stage, handover = visit.blocks, part.stage, block.rings.dq[part.stage]
    source, target = part.stores(kernel, block, visit, head)
    first_number = block.workspace.first_number(head, visit.tile.sequence, visit.tile.first_q)
    m_block, left, use = part.first(blocks, position)
    seen = Int32(0)
    if left > 0:
        seen = seen_by_warp(part.turn(block, first_number + m_block))
    while left > 0:
        number = first_number + m_block
        turn = part.turn(block, number)
        before, after = visit.tile.turn_at(m_block)
        others = before + after
        if const_expr(kernel.in_turn):
            is_last = after == 0
            if is_last:
                settle(kernel, block, part, owed)  # others may wait for it
                owed = Int32(NOTHING)
                if cute.arch.lane_idx() == 0:
                    turns.await_turn(turn, seen, before)
        else:
            is_last = seen >= others * turns.ADDED
        if cute.arch.lane_idx() == 0:
            give_back(block, part, number, is_last, others)
        settle(kernel, block, part, owed)
        owed = Int32(NOTHING)
        if is_last:
            handover.wait(use)
            cute.copy(block.tma.store_dq, source[None, 2 * stage], part.of_tile(target, m_block))
            cute.arch.cp_async_bulk_commit_group()
            if cute.arch.lane_idx() == 0:
                turns.say_rounded(turn)
        else:
            owed = number
            if cute.arch.lane_idx() == 0:
                add_part(kernel, block, part, number, use, (seen, before))
        use, left, m_block = use + 1, left - part.stride, part.following(blocks, m_block)
        if left > 0:
            seen = seen_by_warp(part.turn(block, first_number + m_block))
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    return owed


@cute.jit
def give_back(block: Block, part: cutlass.Constexpr[Part], number: Int32, is_last: Boolean, others: Int32):
    """Give a stage of sdQ back to the consumers, to the last block at a tile with what `others` have added."""
    handover, sums, stage = block.rings.dq[part.stage], block.tiles.sums, part.stage
    if is_last:
        if others > 0:
            sums[stage] = Int32(Sum.WHOLE)
            cute.arch.fence_proxy("async.global")
            handover.release_with(block.tiles.sdQ[None, stage].iterator, part.sum(block, number), part.nbytes)
        else:
            sums[stage] = Int32(Sum.NONE)
            handover.release()
    else:
        sums[stage] = Int32(Sum.PARTIAL)
        handover.release()


@cute.jit
def settle(kernel: cutlass.Constexpr, block: Block, part: cutlass.Constexpr[Part], owed: Int32):
    """Count the addition to a tile, if one is owed, once it can be seen; a whole warp calls it."""
    if owed != NOTHING:
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0)
            turn = part.turn(block, owed)
            if const_expr(kernel.in_turn):
                turns.pass_turn(turn)
            else:
                turns.say_added(turn)


def seen_by_warp(turn: cute.Pointer) -> Int32:
    """See `turns.seen_turn`; all threads of a warp see the same."""
    return cute.arch.make_warp_uniform(turns.seen_turn(turn))
