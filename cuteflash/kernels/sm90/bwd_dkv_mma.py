"""The consumers of the dK, dV pass: one warpgroup for S and dV, one for dP and dK, of the same 64 keys.

Both run the same steps: the first product of the next query block is issued before the second one of this block, beside
whose pointwise part it runs.
"""

from __future__ import annotations

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import StageRing, TmaRing
from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.convert import round_fragment, rounded_fragment
from cuteflash.core.scores import ScoreTile
from cuteflash.core.softmax import exp2
from cuteflash.core.tile import KeyTile
from cuteflash.core.views import acc_as_operand_a, aligned, transposed
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm90.bwd_bundles import Tma, Visit
from cuteflash.kernels.sm90.bwd_load import key_partition, key_rows
from cuteflash.kernels.sm90.bwd_scores import cap_slope, column_statistics, prepare_scores
from cuteflash.kernels.sm90.bwd_warpgroup import ROWS
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

WARPS = WARPGROUP // 32


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    EPILOGUE = 1  # + warpgroup: its gradient is in shared memory


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors; dK and dV are staged in the place of K and V."""

    sK: cute.Tensor  # (64, head_dim, 1)
    sV: cute.Tensor  # (64, head_dim_v, 1)
    sQ: cute.Tensor  # (tile_m, head_dim, q_stage)
    sdO: cute.Tensor  # (tile_m, head_dim_v, do_stage)
    sLSE: cute.Tensor  # (tile_m, q_stage) fp32, times log2(e)
    sDelta: cute.Tensor  # (tile_m, do_stage) fp32
    sWeights: cute.Tensor  # (pairs, 128 threads, p_stage) of P or, under a softcap, P times its slope


@dataclasses.dataclass(frozen=True)
class Rings:
    """TMA rings (K and V have one tile each), and the ring of P tiles between the warpgroups."""

    k: TmaRing
    v: TmaRing
    q: TmaRing
    do: TmaRing
    p: StageRing


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: BwdLaunch
    workspace: WorkspaceTensors


@dataclasses.dataclass(frozen=True)
class Side:
    """One consumer warpgroup: the products of S and dV, or of dP and dK.

    Attributes:
        tSrA, tSrB: operands of the scores' product, S^T = K Q^T or dP^T = V dO^T.
        tGrA, tGrB: of the gradient's, dV += P^T dO or dK += dS^T Q; the first is registers.
        acc, gradient: accumulators.
        scores: `acc` as (keys, queries).
        weights: fp32, what dP is multiplied with if it is not P.
        first, second: rings of what the two products read.
        statistics: (tile_m, stages) of the row statistic that belongs to the first ring.
    """

    thread: Int32
    mma_s: cute.TiledMma
    mma_gradient: cute.TiledMma
    tSrA: cute.Tensor
    tSrB: cute.Tensor
    tGrA: cute.Tensor
    tGrB: cute.Tensor
    acc: cute.Tensor
    gradient: cute.Tensor
    scores: ScoreTile
    weights: cute.Tensor | None
    first: TmaRing
    second: TmaRing
    statistics: cute.Tensor


def make_side(kernel, block: Block, of_p: bool) -> Side:
    """Partition the block's tiles for this thread's warpgroup."""
    traits, tiles, rings = kernel.traits, block.tiles, block.rings
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    cols = traits.head_dim_v if of_p else traits.head_dim
    mma_s, mma_gradient = kernel.tiled_mma_s(), kernel.tiled_mma_gradient(cols)
    thr_s, thr_gradient = mma_s.get_slice(thread), mma_gradient.get_slice(thread)
    acc = cute.make_rmem_tensor(thr_s.partition_shape_C((WGMMA_M, traits.tile_m)), Float32)
    keys, queries, others = (tiles.sK, tiles.sQ, tiles.sdO) if of_p else (tiles.sV, tiles.sdO, tiles.sQ)
    return Side(
        thread=thread,
        mma_s=mma_s,
        mma_gradient=mma_gradient,
        tSrA=mma_s.make_fragment_A(thr_s.partition_A(keys))[None, None, None, 0],
        tSrB=mma_s.make_fragment_B(thr_s.partition_B(queries)),
        tGrA=cute.make_rmem_tensor_like(acc_as_operand_a(acc), kernel.dtype),
        tGrB=mma_gradient.make_fragment_B(thr_gradient.partition_B(transposed(others))),
        acc=acc,
        gradient=cute.make_rmem_tensor(thr_gradient.partition_shape_C((WGMMA_M, cols)), Float32),
        scores=ScoreTile.of(mma_s, thread, acc, (WGMMA_M, traits.tile_m), block.launch.inner_scale, 1),
        weights=cute.make_rmem_tensor_like(acc) if of_p and kernel.problem.scores.softcap else None,
        first=rings.q if of_p else rings.do,
        second=rings.do if of_p else rings.q,
        statistics=tiles.sLSE if of_p else tiles.sDelta,
    )


@cute.jit
def consume(kernel: cutlass.Constexpr, block: Block, visit: Visit, of_p: cutlass.Constexpr[bool]):
    """dV of a key tile, or dK."""
    blocks = visit.blocks
    side = make_side(kernel, block, of_p)
    side.gradient.fill(0.0)
    if blocks.hi > blocks.lo:
        keys = block.rings.k if const_expr(of_p) else block.rings.v
        keys.wait(0)
        m_block = blocks.first
        step(kernel, side, block, visit, m_block, Int32(0), of_p, True)
        count = block.launch.heads_per_kv * blocks.count
        for position in cutlass.range(1, count, unroll=1):
            m_block = blocks.following(m_block)
            step(kernel, side, block, visit, m_block, position, of_p, False)
        side.second.wait(count - 1)
        issue_gradient(side, count - 1)
        warpgroup.wait_group(0)
    write_gradient(kernel, side, block, visit.tile, of_p)


def issue_gradient(side: Side, position: Int32) -> None:
    """Issue the gradient's product of a step."""
    b = side.tGrB[None, None, None, side.second.stage(position)]
    atoms.gemm(side.mma_gradient, side.gradient, side.tGrA, b, accumulate=True)


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    side: Side,
    block: Block,
    visit: Visit,
    m_block: Int32,
    position: Int32,
    of_p: cutlass.Constexpr[bool],
    is_first: cutlass.Constexpr[bool],
):
    """The scores of one query block beside the gradient's product of the one before."""
    acc, launch = side.acc, block.launch
    stage = side.first.stage(position)
    side.first.wait(position)
    statistics = column_statistics(side.statistics[None, stage], side.thread)  # before products keep the port busy
    atoms.gemm(side.mma_s, acc, side.tSrA, side.tSrB[None, None, None, stage], accumulate=False)
    if const_expr(not is_first):
        side.second.wait(position - 1)
        issue_gradient(side, position - 1)
    warpgroup.wait_group(0 if is_first else 1)  # scores | gradient
    if const_expr(of_p):
        prepare_scores(kernel, side.scores, visit, Int32(0), m_block)
        for i in cutlass.range_constexpr(cute.size(acc)):
            p = exp2(acc[i] * launch.scale_log2 - statistics[i % 2, i // (2 * ROWS)])
            if const_expr(kernel.problem.scores.softcap):
                side.weights[i] = p * cap_slope(acc[i])
            acc[i] = p
    else:
        weights = take_weights(kernel, side, block, position)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = weights[i].to(Float32) * (acc[i] - statistics[i % 2, i // (2 * ROWS)])
    if const_expr(not is_first):
        warpgroup.wait_group(0)
        side.second.release(position - 1)
    side.first.release_loaded(position)  # the statistics; the products have finished
    round_fragment(acc_as_operand_a(acc), side.tGrA)
    if const_expr(of_p):
        give_weights(kernel, side, block, position)


@cute.jit
def give_weights(kernel: cutlass.Constexpr, side: Side, block: Block, position: Int32):
    """To the other warpgroup what it multiplies dP with: P, or under a softcap P times the slope of the cap."""
    ring = block.rings.p
    stage = ring.stage(position)
    ring.wait_free(position)
    weights = side.tGrA
    if const_expr(kernel.problem.scores.softcap):
        weights = rounded_fragment(side.weights, kernel.dtype)
    cute.autovec_copy(cute.recast_tensor(weights, Uint32), thread_weights(side, block, stage))
    ring.publish(position)


@cute.jit
def take_weights(kernel: cutlass.Constexpr, side: Side, block: Block, position: Int32):
    """The weights of the other warpgroup, in the order of this one's accumulator."""
    ring = block.rings.p
    stage = ring.stage(position)
    ring.wait(position)
    weights = cute.make_rmem_tensor_like(side.tGrA, kernel.dtype)
    cute.autovec_copy(thread_weights(side, block, stage), cute.recast_tensor(weights, Uint32))
    cute.arch.sync_warp()
    ring.release(position)
    return weights


def thread_weights(side: Side, block: Block, stage: Int32) -> cute.Tensor:
    """This thread's pairs of weights in shared memory."""
    mine = block.tiles.sWeights[None, side.thread, stage]
    chunk = mine.shape[0][0]
    return cute.make_tensor(aligned(mine.iterator, 4 * chunk), mine.layout)


@cute.jit
def write_gradient(kernel: cutlass.Constexpr, side: Side, block: Block, tile: KeyTile, of_p: cutlass.Constexpr[bool]):
    """Stage dV in the place of V, or dK in that of K, and store it with TMA, which clips rows and columns outside.

    The other warpgroup reads that place: it has to have finished.
    """
    tma, tiles = block.tma, block.tiles
    gradient = side.gradient
    if const_expr(not of_p):
        for i in cutlass.range_constexpr(cute.size(gradient)):
            gradient[i] = gradient[i] * block.launch.softmax_scale
    sX = tiles.sV if const_expr(of_p) else tiles.sK
    gX = tma.gdV if const_expr(of_p) else tma.gdK
    atom = tma.store_dv if const_expr(of_p) else tma.store_dk
    box = (kernel.traits.tile_n, kernel.traits.head_dim_v if const_expr(of_p) else kernel.traits.head_dim)
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=CONSUMERS * WARPGROUP)
    copy = atoms.store_copy(kernel.dtype, side.mma_gradient).get_slice(side.thread)
    cute.copy(copy, copy.retile(rounded_fragment(gradient, kernel.dtype)), copy.partition_D(sX[None, None, 0]))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + 1 + int(of_p), number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(side.thread // 32) == 0:
        tXsX, tXgX = key_partition(atom, key_rows(kernel, gX, tile), sX, Int32(0), tile.n_block, box)
        cute.copy(atom, tXsX, tXgX)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
