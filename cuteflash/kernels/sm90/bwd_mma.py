"""The consumers of the backward: five products and the softmax's derivative, for 64 keys a warpgroup.

Scores are held transposed, keys as rows, so that P^T and dS^T are operands of dV and dK as they lie in registers. One
step, with the products of a step back that it overlaps:

    issue S^T = K Q^T, dP^T = V dO^T         wait for S^T; dV and dK of the last step have finished, too
    P = exp2(S - LSE)                        beside dP^T
    issue dQ of the last step, dV += P^T dO
    dS = P (dP - delta)                      beside dQ and dV
    issue dK += dS^T Q                       dS to shared memory; dQ of the last step to shared memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import arrive, wait_phase
from cuteflash.core.convert import round_fragment, rounded_fragment
from cuteflash.core.softmax import exp2
from cuteflash.core.tile import KeyTile, QueryBlocks
from cuteflash.core.views import acc_as_operand_a, transposed
from cuteflash.kernels.sm90.bwd_bundles import Block, NamedBarrier, Rings, Tiles
from cuteflash.kernels.sm90.bwd_load import key_partition, key_rows
from cuteflash.kernels.sm90.bwd_scores import column_statistics, differentiate, prepare_scores, probabilities
from cuteflash.kernels.sm90.bwd_warpgroup import ROWS, KeyWarpgroup, fetch, make_key_warpgroup
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M


@cute.jit
def consume(kernel: cutlass.Constexpr, block: Block, tile: KeyTile, blocks: QueryBlocks):
    """dK and dV of a key tile, and its share of dQ."""
    wg = make_key_warpgroup(kernel, block)
    p = wg.products
    for r in cutlass.range_constexpr(ROWS):
        wg.bounds[r, 0], wg.bounds[r, 1] = tile.q_bounds(wg.index * WGMMA_M + wg.scores.row(r))
    if const_expr(kernel.traits.pingpong):
        if wg.index == kernel.traits.mma_warpgroups - 1:
            pass_turn(kernel, wg)
    if blocks.hi > blocks.lo:
        block.rings.k.wait(0)
        if const_expr(kernel.traits.k_in_regs):
            fetch(wg, kernel.copy_k(), block.tiles.sK, p.tSrK)
        if const_expr(kernel.traits.overlap):
            steps_overlapped(kernel, wg, block, blocks)
        else:
            steps(kernel, wg, block, blocks)
    else:
        p.acc_dV.fill(0.0)
        p.acc_dK.fill(0.0)
    write_gradients(kernel, wg, block, tile)


@cute.jit
def steps(kernel: cutlass.Constexpr, wg: KeyWarpgroup, block: Block, blocks: QueryBlocks):
    """All steps of a key tile that has one at least."""
    m_block = blocks.first
    step(kernel, wg, block, blocks, m_block, Int32(0), True)
    # One loop with one body: ptxas makes products wait that are in flight where two paths meet.
    for position in cutlass.range(1, block.launch.heads_per_kv * blocks.count, unroll=1):
        m_block = blocks.following(m_block)
        step(kernel, wg, block, blocks, m_block, position, False)
    last = block.launch.heads_per_kv * blocks.count - 1
    wait_ds(block.rings, last)
    issue_dq(kernel, wg, last)
    warpgroup.wait_group(0)
    hand_over_dq(kernel, wg, block, last)


@cute.jit
def steps_overlapped(kernel: cutlass.Constexpr, wg: KeyWarpgroup, block: Block, blocks: QueryBlocks):
    """As `steps`: what needs P and dS of a step runs beside the scores of the next one."""
    p, rings = wg.products, block.rings
    m_block = blocks.first
    step_overlapped(kernel, wg, block, blocks, m_block, Int32(0), True)
    p.acc_dV.fill(0.0)
    p.acc_dK.fill(0.0)
    for position in cutlass.range(1, block.launch.heads_per_kv * blocks.count, unroll=1):
        m_block = blocks.following(m_block)
        step_overlapped(kernel, wg, block, blocks, m_block, position, False)
    last = block.launch.heads_per_kv * blocks.count - 1
    issue_gradients(wg, rings, last)
    if last > 0:
        hand_over_dq(kernel, wg, block, last - 1)
    wait_ds(rings, last)
    issue_dq(kernel, wg, last)
    warpgroup.wait_group(0)
    hand_over_dq(kernel, wg, block, last)


def issue_gradients(wg: KeyWarpgroup, rings: Rings, position: Int32) -> None:
    """Issue dV += P^T dO and dK += dS^T Q of a step."""
    p = wg.products
    atoms.gemm(p.mma_dv, p.acc_dV, p.tVrP, p.tVrdO[None, None, None, rings.do.stage(position)], accumulate=True)
    atoms.gemm(p.mma_dk, p.acc_dK, p.tKrdS, p.tKrQ[None, None, None, rings.q.stage(position)], accumulate=True)


@cute.jit
def step_overlapped(
    kernel: cutlass.Constexpr,
    wg: KeyWarpgroup,
    block: Block,
    blocks: QueryBlocks,
    m_block: Int32,
    position: Int32,
    is_first: cutlass.Constexpr[bool],
):
    """Scores of one query block beside the gradients of the one before."""
    p, rings, tiles = wg.products, block.rings, block.tiles
    q_stage, do_stage = rings.q.stage(position), rings.do.stage(position)
    rings.q.wait(position)
    atoms.gemm(p.mma_s, p.acc_S, p.tSrK, p.tSrQ[None, None, None, q_stage], accumulate=False)
    if const_expr(is_first):
        rings.v.wait(0)
        if const_expr(kernel.traits.v_in_regs):
            fetch(wg, kernel.copy_v(), tiles.sV, p.tPrV)
    rings.do.wait(position)
    atoms.gemm(p.mma_dp, p.acc_dP, p.tPrV, p.tPrdO[None, None, None, do_stage], accumulate=False)
    if const_expr(not is_first):
        issue_gradients(wg, rings, position - 1)
        if position > 1:
            hand_over_dq(kernel, wg, block, position - 2)
        wait_ds(rings, position - 1)
        issue_dq(kernel, wg, position - 1)
    lse = column_statistics(tiles.sLSE[None, q_stage], wg.thread)
    warpgroup.wait_group(1 if is_first else 4)  # S | dP, dV, dK, dQ
    prepare_scores(kernel, wg.scores, wg.bounds, blocks, m_block)
    for i in cutlass.range_constexpr(cute.size(p.acc_S)):
        p.acc_S[i] = exp2(p.acc_S[i] * block.launch.scale_log2 - lse[i % 2, i // (2 * ROWS)])
    delta = column_statistics(tiles.sDelta[None, do_stage], wg.thread)
    warpgroup.wait_group(0 if is_first else 3)  # dP | dV, dK, dQ
    for i in cutlass.range_constexpr(cute.size(p.acc_S)):
        p.acc_dP[i] = p.acc_S[i] * (p.acc_dP[i] - delta[i % 2, i // (2 * ROWS)])
    if const_expr(not is_first):
        warpgroup.wait_group(0)
        rings.q.release(position - 1)
        rings.do.release(position - 1)
    round_fragment(acc_as_operand_a(p.acc_S), p.tVrP)
    round_fragment(acc_as_operand_a(p.acc_dP), p.tKrdS)
    store_ds(kernel, wg, tiles, position)
    cute.arch.fence_view_async_shared()
    arrive(rings.ds)


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    wg: KeyWarpgroup,
    block: Block,
    blocks: QueryBlocks,
    m_block: Int32,
    position: Int32,
    is_first: cutlass.Constexpr[bool],
):
    """One query block. The groups of products in flight, in the order in which they finish, stand at each wait."""
    p, rings, tiles = wg.products, block.rings, block.tiles
    q_stage, do_stage = rings.q.stage(position), rings.do.stage(position)
    rings.q.wait(position)
    take_turn(kernel, wg)
    atoms.gemm(p.mma_s, p.acc_S, p.tSrK, p.tSrQ[None, None, None, q_stage], accumulate=False)
    if const_expr(is_first):
        rings.v.wait(0)
        if const_expr(kernel.traits.v_in_regs):
            fetch(wg, kernel.copy_v(), tiles.sV, p.tPrV)
    rings.do.wait(position)
    atoms.gemm(p.mma_dp, p.acc_dP, p.tPrV, p.tPrdO[None, None, None, do_stage], accumulate=False)
    lse = column_statistics(tiles.sLSE[None, q_stage], wg.thread)
    warpgroup.wait_group(1)  # S | dP
    prepare_scores(kernel, wg.scores, wg.bounds, blocks, m_block)
    probabilities(kernel, wg, lse, block.launch)
    atoms.gemm(p.mma_dv, p.acc_dV, p.tVrP, p.tVrdO[None, None, None, do_stage], accumulate=not is_first)
    pass_turn(kernel, wg)
    delta = column_statistics(tiles.sDelta[None, do_stage], wg.thread)
    warpgroup.wait_group(1)  # dP | dV
    differentiate(kernel, wg, delta)
    if const_expr(not is_first):
        wait_ds(rings, position - 1)
        issue_dq(kernel, wg, position - 1)
    atoms.gemm(p.mma_dk, p.acc_dK, p.tKrdS, p.tKrQ[None, None, None, q_stage], accumulate=not is_first)
    store_ds(kernel, wg, tiles, position)
    cute.arch.fence_view_async_shared()
    warpgroup.wait_group(1)  # dV, dQ | dK
    rings.do.release(position)
    arrive(rings.ds)
    if const_expr(not is_first):
        hand_over_dq(kernel, wg, block, position - 1)
    warpgroup.wait_group(0)  # not in the next step: what is in flight where a loop closes takes registers twice
    rings.q.release(position)


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
def store_ds(kernel: cutlass.Constexpr, wg: KeyWarpgroup, tiles: Tiles, position: Int32):
    """dS to shared memory, where rows are queries."""
    sdS = transposed(tiles.sdS[None, None, ds_stage(kernel, position)])
    mine = cute.local_tile(sdS, (WGMMA_M, kernel.traits.tile_m), (wg.index, 0))
    copy = kernel.copy_ds().get_slice(wg.thread)
    cute.copy(
        copy,
        copy.retile(cute.make_tensor(wg.products.tKrdS.iterator, wg.products.acc_S.layout)),
        copy.partition_D(mine),
    )


def ds_stage(kernel, position: Int32) -> Int32:
    """The stage of a step's dS."""
    return position & 1


def wait_ds(rings: Rings, position: Int32) -> None:
    """Wait until all consumers have written dS of a step."""
    wait_phase(rings.ds, position & 1)


@cute.jit
def issue_dq(kernel: cutlass.Constexpr, wg: KeyWarpgroup, position: Int32):
    """Issue what this warpgroup computes of a step's dQ, as one group also if that is nothing."""
    p, traits = wg.products, kernel.traits
    a, b = p.tQrdS[None, None, None, position % traits.ds_stage], p.tQrK
    if const_expr(traits.dq == "transposed"):
        a, b = b, a
    if const_expr(traits.dq != "turns"):
        atoms.gemm(p.mma_dq, p.acc_dQ, a, b, accumulate=False)
    elif position % traits.mma_warpgroups == wg.index:
        atoms.gemm(p.mma_dq, p.acc_dQ, a, b, accumulate=False)
    else:
        warpgroup.commit_group()


@cute.jit
def hand_over_dq(kernel: cutlass.Constexpr, wg: KeyWarpgroup, block: Block, position: Int32):
    """Give what this warpgroup computed of a step's dQ to the warp that adds it to memory."""
    traits = kernel.traits
    if const_expr(traits.dq != "turns"):
        store_dq(kernel, wg, block, position)
    elif position % traits.mma_warpgroups == wg.index:
        store_dq(kernel, wg, block, position // traits.mma_warpgroups)


@cute.jit
def store_dq(kernel: cutlass.Constexpr, wg: KeyWarpgroup, block: Block, position: Int32):
    """Each thread's fragment by 16-byte chunks, neighbouring threads side by side."""
    handover = block.rings.dq_of(wg.index)
    handover.acquire(position)
    sdQ = block.tiles.sdQ[None, wg.index]
    acc = wg.products.acc_dQ
    chunks = cute.size(acc) // 4
    start = (sdQ.iterator + wg.thread * 4).align(16)
    target = cute.make_tensor(start, cute.make_layout((4, chunks), stride=(1, 4 * WARPGROUP)))
    cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout((4, chunks))), target)
    handover.publish()


@cute.jit
def write_gradients(kernel: cutlass.Constexpr, wg: KeyWarpgroup, block: Block, tile: KeyTile):
    """Stage dK and dV in the place of K and V, and store them with TMA, which clips rows and columns outside."""
    traits, tiles, tma, p = kernel.traits, block.tiles, block.tma, wg.products
    threads = traits.mma_warpgroups * WARPGROUP
    for i in cutlass.range_constexpr(cute.size(p.acc_dK)):
        p.acc_dK[i] = p.acc_dK[i] * block.launch.softmax_scale
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    staged = (
        (p.acc_dV, kernel.copy_dv(), tma.store_dv, tma.gdV, tiles.sV, (traits.tile_n, traits.head_dim_v)),
        (p.acc_dK, kernel.copy_dk(), tma.store_dk, tma.gdK, tiles.sK, (traits.tile_n, traits.head_dim)),
    )
    for acc, copy, _, _, sX, box in staged:
        mine = copy.get_slice(wg.thread)
        own = cute.local_tile(sX[None, None, 0], (WGMMA_M, box[1]), (wg.index, 0))
        cute.copy(mine, mine.retile(rounded_fragment(acc, kernel.dtype)), mine.partition_D(own))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    if wg.index == 0:
        if cute.arch.make_warp_uniform(wg.thread // 32) == 0:
            for _, _, atom, gX, sX, box in staged:
                tXsX, tXgX = key_partition(atom, key_rows(kernel, gX, tile), sX, tile.n_block, box)
                cute.copy(atom, tXsX, tXgX)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
