"""The consumers of the backward: five products and the softmax's derivative, for 64 keys a warpgroup.

Scores are held transposed, keys as rows, so that P^T and dS^T are operands of dV and dK as they lie in registers. One
step, with the products that each part of it overlaps:

    fetch LSE, issue S^T = K Q^T, dP^T = V dO^T
    fetch delta, P = exp2(S - LSE)           beside dP^T; without `delta_early` delta comes last
    issue dV += P^T dO
    dS = P (dP - delta)                      beside dV
    issue dQ of the last step, dK += dS^T Q  a warpgroup of its own may compute dQ instead
    dS to shared memory; dQ of the last step to shared memory

LSE is fetched before the products are issued, whose operands keep the shared-memory port busy. The fence that
makes dS and dQ visible to products and bulk copies waits for the products in flight, so it comes when none are left.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import arrive
from cuteflash.core.convert import rounded_fragment
from cuteflash.core.views import transposed
from cuteflash.kernels.sm90.bwd_bundles import Block, NamedBarrier, Visit, readers_of_keys
from cuteflash.kernels.sm90.bwd_dq_product import issue_dq, publish_dq, stage_dq
from cuteflash.kernels.sm90.bwd_scores import column_statistics, differentiate, prepare_scores, probabilities
from cuteflash.kernels.sm90.bwd_warpgroup import KeyWarpgroup, fetch, of_stage
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M


@cute.jit
def consume(kernel: cutlass.Constexpr, block: Block, wg: KeyWarpgroup, visit: Visit):
    """dK and dV of a tile, and its share of dQ."""
    p, rings = wg.products, block.rings
    rings.k.wait(visit.wave)
    if visit.blocks.hi > visit.blocks.lo:
        if const_expr(kernel.traits.k_in_regs):
            fetch(wg, kernel.copy_k(), block.tiles.sK, rings.k.stage(visit.wave), p.tSrK)
        steps(kernel, block, wg, visit)
    else:
        rings.v.wait(visit.wave)
        p.acc_dV.fill(0.0)
        p.acc_dK.fill(0.0)
    give_gradients(kernel, block, wg, visit.wave)


@cute.jit
def steps(kernel: cutlass.Constexpr, block: Block, wg: KeyWarpgroup, visit: Visit):
    """All steps of a tile that has one at least."""
    blocks, end = visit.blocks, visit.start + block.launch.steps(visit.blocks)
    m_block = blocks.first
    step(kernel, block, wg, visit, m_block, visit.start, True)
    # One loop with one body: ptxas makes products wait that are in flight where two paths meet.
    for position in cutlass.range(visit.start + 1, end, unroll=1):
        previous, m_block = m_block, blocks.following(m_block)
        step(kernel, block, wg, visit, m_block, position, False, previous)
    if const_expr(wg.dq is not None):
        block.rings.ds.wait(end - 1)
        issue_dq(kernel, wg.dq, block, end - 1, block.rings.k.stage(visit.wave))
        warpgroup.wait_group(0)
        stage_dq(kernel, wg.dq, block, visit.tile, m_block, end - 1)
        cute.arch.fence_view_async_shared()
        publish_dq(kernel, wg.dq, block, end - 1)


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    block: Block,
    wg: KeyWarpgroup,
    visit: Visit,
    m_block: Int32,
    position: Int32,
    is_first: cutlass.Constexpr[bool],
    previous: Int32 | None = None,
):
    """One query block. The groups of products in flight, in the order in which they finish, stand at each wait."""
    p, rings, tiles, traits, dq = wg.products, block.rings, block.tiles, kernel.traits, wg.dq
    q_stage, do_stage, kv_stage = rings.q.stage(position), rings.do.stage(position), rings.k.stage(visit.wave)
    rings.q.wait(position)
    lse = column_statistics(tiles.sLSE[None, q_stage], wg.thread)
    take_turn(kernel, wg)
    k = of_stage(p.tSrK, traits.k_in_regs, kv_stage)
    atoms.gemm(p.mma_s, p.acc_S, k, p.tSrQ[None, None, None, q_stage], accumulate=False)
    if const_expr(is_first):
        rings.v.wait(visit.wave)
        if const_expr(traits.v_in_regs):
            fetch(wg, kernel.copy_v(), tiles.sV, kv_stage, p.tPrV)
    rings.do.wait(position)
    v = of_stage(p.tPrV, traits.v_in_regs, kv_stage)
    atoms.gemm(p.mma_dp, p.acc_dP, v, p.tPrdO[None, None, None, do_stage], accumulate=False)
    warpgroup.wait_group(1)  # S | dP
    if const_expr(traits.delta_early):
        delta = column_statistics(tiles.sDelta[None, do_stage], wg.thread)
    prepare_scores(kernel, wg.scores, visit, wg.index * WGMMA_M, m_block)
    probabilities(kernel, wg, lse, block.launch)
    atoms.gemm(p.mma_dv, p.acc_dV, p.tVrP, p.tVrdO[None, None, None, do_stage], accumulate=not is_first)
    pass_turn(kernel, wg)
    if const_expr(not traits.delta_early):
        delta = column_statistics(tiles.sDelta[None, do_stage], wg.thread)
    warpgroup.wait_group(1)  # dP | dV
    differentiate(kernel, wg, delta)
    if const_expr(dq is not None and not is_first):
        rings.ds.wait(position - 1)
        issue_dq(kernel, dq, block, position - 1, kv_stage)
    atoms.gemm(p.mma_dk, p.acc_dK, p.tKrdS, p.tKrQ[None, None, None, q_stage], accumulate=not is_first)
    if const_expr(dq is None):  # otherwise this warpgroup has read what the stage held
        rings.ds.wait_free(position)
    store_ds(kernel, block, wg, position)
    warpgroup.wait_group(1)  # dV, dQ | dK
    rings.do.release(position)
    if const_expr(dq is not None and not is_first):
        stage_dq(kernel, dq, block, visit.tile, previous, position - 1)
    warpgroup.wait_group(0)  # not in the next step: what is in flight where a loop closes takes registers twice
    rings.q.release(position)
    cute.arch.fence_view_async_shared()
    rings.ds.publish(position)
    if const_expr(dq is not None and not is_first):
        publish_dq(kernel, dq, block, position - 1)


# Ping-pong: a warpgroup issues a step's first products only in its turn, so that the pointwise part of one falls into
# the products of the other.


def take_turn(kernel, wg: KeyWarpgroup) -> None:
    """Wait until it is this warpgroup's turn to issue products."""
    if kernel.traits.pingpong:
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + wg.index, number_of_threads=2 * WARPGROUP)


def pass_turn(kernel, wg: KeyWarpgroup) -> None:
    """Let the next warpgroup issue its products."""
    if kernel.traits.pingpong:
        following = (wg.index + 1) % kernel.traits.mma_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)


@cute.jit
def store_ds(kernel: cutlass.Constexpr, block: Block, wg: KeyWarpgroup, position: Int32):
    """dS to shared memory, where rows are queries."""
    sdS = transposed(block.tiles.sdS[None, None, block.rings.ds.stage(position)])
    mine = cute.local_tile(sdS, (WGMMA_M, kernel.traits.tile_m), (wg.index, 0))
    copy = kernel.copy_ds().get_slice(wg.thread)
    cute.copy(
        copy,
        copy.retile(cute.make_tensor(wg.products.tKrdS.iterator, wg.products.acc_S.layout)),
        copy.partition_D(mine),
    )


@cute.jit
def give_gradients(kernel: cutlass.Constexpr, block: Block, wg: KeyWarpgroup, wave: Int32):
    """Put dK and dV in the place of K and V, for a warp that stores them."""
    p, stage = wg.products, block.rings.k.stage(wave)
    for i in cutlass.range_constexpr(cute.size(p.acc_dK)):
        p.acc_dK[i] = p.acc_dK[i] * block.launch.softmax_scale
    cute.arch.barrier(barrier_id=NamedBarrier.KEYS_READ, number_of_threads=readers_of_keys(kernel.traits))
    for acc, copy, sX in (
        (p.acc_dV, kernel.copy_dv(), block.tiles.sV),
        (p.acc_dK, kernel.copy_dk(), block.tiles.sK),
    ):
        mine = copy.get_slice(wg.thread)
        own = cute.local_tile(sX[None, None, stage], (WGMMA_M, cute.size(sX.shape[1])), (wg.index, 0))
        cute.copy(mine, mine.retile(rounded_fragment(acc, kernel.dtype)), mine.partition_D(own))
    cute.arch.fence_view_async_shared()
    arrive(block.rings.gradients_of(wave))
