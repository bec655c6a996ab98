"""The consumers of the dQ pass: 64 queries a warpgroup, whose scores, P and dS stay in registers."""

from __future__ import annotations

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.convert import round_pair, rounded_fragment
from cuteflash.core.launch import Launch
from cuteflash.core.scores import ScoreTile, stay_a_branch
from cuteflash.core.softmax import exp2
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import acc_as_operand_a, transposed
from cuteflash.kernels.common.workspace import WorkspaceTensors
from cuteflash.kernels.sm90.bwd_scores import cap_slope
from cuteflash.kernels.sm90.load import query_rows
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

ROWS = 2  # queries of S that one thread holds elements of


class NamedBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    EPILOGUE = 1  # + warpgroup: dQ is in shared memory
    TURN = 3  # + warpgroup: this warpgroup may issue its products (ping-pong)


@dataclasses.dataclass(frozen=True)
class Tma:
    """TMA descriptors and the coordinate tensors they are sliced with: (rows, columns, heads, batch)."""

    load_q: cute.CopyAtom
    load_do: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_dq: cute.CopyAtom
    gQ: cute.Tensor
    gdO: cute.Tensor
    gK: cute.Tensor
    gV: cute.Tensor
    gdQ: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shared-memory tensors; dQ is staged in the place of Q."""

    sQ: cute.Tensor  # (64, head_dim, warpgroups)
    sdO: cute.Tensor  # (64, head_dim_v, warpgroups)
    sK: cute.Tensor  # (dq_tile_n, head_dim, k_stage)
    sV: cute.Tensor  # (dq_tile_n, head_dim_v, v_stage)


@dataclasses.dataclass(frozen=True)
class Rings:
    """TMA rings; Q and dO have one tile each."""

    q: TmaRing
    do: TmaRing
    k: TmaRing
    v: TmaRing


@dataclasses.dataclass(frozen=True)
class Block:
    """The values that all warps of a block use."""

    tma: Tma
    tiles: Tiles
    rings: Rings
    launch: Launch
    workspace: WorkspaceTensors
    softmax_scale: Float32


@dataclasses.dataclass(frozen=True)
class QueryWarpgroup:
    """One consumer warpgroup and its 64 queries: operands, accumulators and row statistics."""

    index: Int32
    thread: Int32
    mma_s: cute.TiledMma
    mma_dq: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tPrdO: cute.Tensor
    tPrV: cute.Tensor
    tQrdS: cute.Tensor
    tQrK: cute.Tensor
    acc_S: cute.Tensor
    acc_dP: cute.Tensor
    acc_dQ: cute.Tensor
    scores: ScoreTile
    bounds: cute.Tensor  # (rows, 2)
    lse: cute.Tensor  # (rows,) times log2(e)
    delta: cute.Tensor  # (rows,)


def make_query_warpgroup(kernel, tiles: Tiles, launch: Launch) -> QueryWarpgroup:
    """Partition the block's tiles for this thread's warpgroup."""
    rows = kernel.rows
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
    mma_s, mma_dq = kernel.tiled_mma_s(), kernel.tiled_mma_dq()
    thr_s, thr_dq = mma_s.get_slice(thread), mma_dq.get_slice(thread)
    shape = WGMMA_M, rows.dq_tile_n
    acc_S, acc_dP = (cute.make_rmem_tensor(thr_s.partition_shape_C(shape), Float32) for _ in range(2))
    return QueryWarpgroup(
        index=index,
        thread=thread,
        mma_s=mma_s,
        mma_dq=mma_dq,
        tSrQ=mma_s.make_fragment_A(thr_s.partition_A(tiles.sQ))[None, None, None, index],
        tSrK=mma_s.make_fragment_B(thr_s.partition_B(tiles.sK)),
        tPrdO=mma_s.make_fragment_A(thr_s.partition_A(tiles.sdO))[None, None, None, index],
        tPrV=mma_s.make_fragment_B(thr_s.partition_B(tiles.sV)),
        tQrdS=cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), kernel.dtype),
        tQrK=mma_dq.make_fragment_B(thr_dq.partition_B(transposed(tiles.sK))),
        acc_S=acc_S,
        acc_dP=acc_dP,
        acc_dQ=cute.make_rmem_tensor(thr_dq.partition_shape_C((WGMMA_M, rows.head_dim)), Float32),
        scores=ScoreTile.of(mma_s, thread, acc_S, shape, launch.inner_scale, 1),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
        lse=cute.make_rmem_tensor((ROWS,), Float32),
        delta=cute.make_rmem_tensor((ROWS,), Float32),
    )


@cute.jit
def consume(
    kernel: cutlass.Constexpr,
    block: Block,
    tile: QueryTile,
):
    """dQ of a query tile."""
    tiles, rings, launch, workspace = block.tiles, block.rings, block.launch, block.workspace
    wg = make_query_warpgroup(kernel, tiles, launch)
    own = tile.part(wg.index, WGMMA_M)
    wg.scores.set_bounds(wg.bounds, own)
    wg.acc_dQ.fill(0.0)
    for r in cutlass.range_constexpr(ROWS):
        token = own.first_token + wg.scores.row(r)
        wg.lse[r], wg.delta[r] = Float32.inf, Float32(0.0)
        if token < tile.mask.seqlen_q:
            row = workspace.row(token, tile.sequence)
            wg.lse[r], wg.delta[r] = (fresh(x, row, tile.head) for x in (workspace.lse_log2, workspace.delta))
    blocks = tile.visited_blocks()
    full_lo, full_hi = own.full_blocks()
    if const_expr(kernel.rows.pingpong):
        if wg.index == CONSUMERS - 1:
            pass_turn(kernel, wg)
    if blocks.hi > blocks.lo:
        rings.q.wait(0)
        for position in cutlass.range(blocks.hi - blocks.lo, unroll=1):
            n_block = blocks.hi - 1 - position
            step(kernel, wg, rings, launch, n_block, position, n_block < full_lo or n_block >= full_hi)
    write_dq(kernel, wg, block.tma, tiles, tile, block.softmax_scale)


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    wg: QueryWarpgroup,
    rings: Rings,
    launch: Launch,
    n_block: Int32,
    position: Int32,
    is_cut: cutlass.Boolean,
):
    """One key block; `is_cut` if some row does not see all of it."""
    scores = kernel.problem.scores
    k_stage = rings.k.stage(position)
    rings.k.wait(position)
    take_turn(kernel, wg)
    atoms.gemm(wg.mma_s, wg.acc_S, wg.tSrQ, wg.tSrK[None, None, None, k_stage], accumulate=False)
    if position == 0:
        rings.do.wait(0)
    rings.v.wait(position)
    atoms.gemm(wg.mma_s, wg.acc_dP, wg.tPrdO, wg.tPrV[None, None, None, rings.v.stage(position)], accumulate=False)
    pass_turn(kernel, wg)
    warpgroup.wait_group(1)  # S | dP
    if const_expr(scores.softcap):
        wg.scores.apply_softcap()
    if is_cut:
        stay_a_branch()
        wg.scores.hide(n_block * kernel.rows.dq_tile_n, wg.bounds, scores.has_left_edge)
    for i in cutlass.range_constexpr(cute.size(wg.acc_S)):
        p = exp2(wg.acc_S[i] * launch.scale_log2 - wg.lse[i // 2 % ROWS])
        wg.acc_S[i] = p * cap_slope(wg.acc_S[i]) if const_expr(scores.softcap) else p
    warpgroup.wait_group(0)
    rings.v.release(position)
    pairs = cute.recast_tensor(wg.tQrdS, Uint32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        # A fragment's linear order: two neighbouring columns, two rows, column groups.
        low, high = (wg.acc_S[e] * (wg.acc_dP[e] - wg.delta[i % ROWS]) for e in (2 * i, 2 * i + 1))
        pairs[i] = round_pair(low, high, kernel.dtype)
    atoms.gemm(wg.mma_dq, wg.acc_dQ, wg.tQrdS, wg.tQrK[None, None, None, k_stage], accumulate=True)
    warpgroup.wait_group(0)
    rings.k.release(position)


@cute.jit
def write_dq(
    kernel: cutlass.Constexpr,
    wg: QueryWarpgroup,
    tma: Tma,
    tiles: Tiles,
    tile: QueryTile,
    softmax_scale: Float32,
):
    """Stage this warpgroup's dQ in the place of its Q and store it with TMA, which clips rows and columns outside."""
    for i in cutlass.range_constexpr(cute.size(wg.acc_dQ)):
        wg.acc_dQ[i] = wg.acc_dQ[i] * softmax_scale
    copy = atoms.store_copy(kernel.dtype, wg.mma_dq).get_slice(wg.thread)
    # Only this warpgroup reads these rows of Q, and its products have finished; other warps of it may be behind.
    barrier = NamedBarrier.EPILOGUE + wg.index
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    rounded = rounded_fragment(wg.acc_dQ, kernel.dtype)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(tiles.sQ[None, None, wg.index]))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(wg.thread // 32) == 0:
        boxes = cute.local_tile(query_rows(kernel, tma.gdQ, tile), kernel.box("q"), (None, 0))
        tQsQ, tQgQ = atoms.tma_partition(tma.store_dq, tiles.sQ, boxes)
        cute.copy(tma.store_dq, tQsQ[None, wg.index], tQgQ[None, tile.m_block * CONSUMERS + wg.index])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def fresh(mX: cute.Tensor, row: Int32, head: Int32) -> Float32:
    """A row statistic, as it is in L2: L1 may have an older one, as this launch does not wait for the one before it."""
    return cute.arch.load(mX.iterator + cute.crd2idx((row, head), mX.layout), Float32, sem="relaxed", scope="gpu")


def take_turn(kernel, wg: QueryWarpgroup) -> None:
    """Wait until it is this warpgroup's turn to issue products."""
    if kernel.rows.pingpong:
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + wg.index, number_of_threads=2 * WARPGROUP)


def pass_turn(kernel, wg: QueryWarpgroup) -> None:
    """Let the other warpgroup issue its products."""
    if kernel.rows.pingpong:
        following = (wg.index + 1) % CONSUMERS
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)
