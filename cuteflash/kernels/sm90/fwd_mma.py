"""The consumers: each warpgroup computes 64 rows of S, their softmax and their O."""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import NamedBarrier
from cuteflash.core.convert import round_fragment, rounded_fragment
from cuteflash.core.mask import IntervalMask
from cuteflash.core.softmax import OnlineSoftmax, apply_softcap, mask_scores, scale_rows
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import acc_as_operand_a, rows_view
from cuteflash.kernels.sm90.bundles import Problem90, Rings, Tiles, Tma
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_M

ROWS = 2  # rows of S and O that one thread holds elements of


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """One consumer warpgroup's operands, fragments and running softmax.

    Attributes:
        index: 0 for the first consumer warpgroup.
        thread: 0..127 inside the warpgroup.
        tSrQ, tSrK: operands of the QK product; tOrP, tOrV: operands of the PV product.
        acc_S, acc_O: accumulators; `scores`, `out` are the same as (rows, columns).
        inner_scale: what a score is multiplied with before tanh, under a softcap.
        row_scale: what O has to be multiplied with after a softmax step.
        bounds: (rows, 2) visible keys [lo, hi) of each row of this thread.
        columns: (rows, columns) coordinates of thread 0, static.
        first_row, first_column: this thread's first element in the warpgroup's tile.
    """

    index: Int32
    thread: Int32
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    scores: cute.Tensor
    out: cute.Tensor
    inner_scale: Float32
    softmax: OnlineSoftmax
    row_scale: cute.Tensor
    bounds: cute.Tensor
    columns: cute.Tensor
    first_row: Int32
    first_column: Int32


def make_warpgroup(kernel, tiles: Tiles, problem: Problem90) -> Warpgroup:
    """Partition the block's tiles for this thread's warpgroup."""
    traits = kernel.traits
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
    mma_qk, mma_pv = kernel.tiled_mma_qk(), kernel.tiled_mma_pv()
    thr_qk, thr_pv = mma_qk.get_slice(thread), mma_pv.get_slice(thread)
    acc_S = cute.make_rmem_tensor(thr_qk.partition_shape_C((WGMMA_M, traits.tile_n)), Float32)
    acc_O = cute.make_rmem_tensor(thr_pv.partition_shape_C((WGMMA_M, traits.head_dim_v)), Float32)
    if traits.q_in_regs:
        tSrQ = cute.make_rmem_tensor(thr_qk.partition_shape_A((WGMMA_M, traits.head_dim)), kernel.dtype)
    else:
        tSrQ = mma_qk.make_fragment_A(thr_qk.partition_A(tiles.sQ[None, None, index]))
    if traits.p_in_regs:
        tOrP = cute.make_rmem_tensor_like(acc_as_operand_a(acc_S), kernel.dtype)
    else:
        tOrP = mma_pv.make_fragment_A(thr_pv.partition_A(tiles.sP[None, None, index]))
    scores, out = rows_view(acc_S), rows_view(acc_O)
    identity = cute.make_identity_tensor((WGMMA_M, traits.tile_n))
    own = rows_view(thr_qk.partition_C(identity))
    return Warpgroup(
        index=index,
        thread=thread,
        mma_qk=mma_qk,
        mma_pv=mma_pv,
        tSrQ=tSrQ,
        tSrK=mma_qk.make_fragment_B(thr_qk.partition_B(tiles.sK)),
        tOrP=tOrP,
        tOrV=mma_pv.make_fragment_B(thr_pv.partition_B(tiles.sVt)),
        acc_S=acc_S,
        acc_O=acc_O,
        scores=scores,
        out=out,
        inner_scale=problem.scores.inner_scale,
        softmax=OnlineSoftmax.create(ROWS, problem.scores.scale_log2, kernel.problem.mask != "full"),
        row_scale=cute.make_rmem_tensor(ROWS, Float32),
        bounds=cute.make_rmem_tensor((ROWS, 2), Int32),
        columns=rows_view(mma_qk.get_slice(0).partition_C(identity)),
        first_row=own[0, 0][0],
        first_column=own[0, 0][1],
    )


@cute.jit
def consume_tiles(
    kernel: cutlass.Constexpr, tma: Tma, tiles: Tiles, rings: Rings, problem: Problem90, mLSE: cute.Tensor | None
):
    """Attend and write every tile of this block."""
    traits = kernel.traits
    order, mask = problem.order, problem.mask
    wg = make_warpgroup(kernel, tiles, problem)
    if const_expr(traits.pingpong):
        if wg.index == traits.mma_warpgroups - 1:
            pass_turn(kernel, wg)
    kv_pos = Int32(0)
    q_pos = Int32(0)
    wave = Int32(0)
    index = order.index(wave, kernel.longest_first)
    while index < order.size():
        m_block, head, batch = order.tile(index, kernel.longest_first)
        tile = QueryTile(m_block * kernel.tile_tokens, head, batch, kernel.tile_tokens)
        n_lo, n_hi = tile.n_blocks(mask, traits.tile_n)
        wg.acc_O.fill(0.0)
        wg.softmax.row_max.fill(-Float32.inf)
        wg.softmax.row_sum.fill(0.0)
        set_bounds(kernel, wg, tile, mask)
        rings.q.wait(q_pos)
        if const_expr(traits.q_in_regs):
            load_q(kernel, wg, tiles)
            rings.q.release(q_pos)
        if n_hi > n_lo:
            kv_pos = attend(kernel, wg, tiles, rings, tile, mask, kv_pos)
        if const_expr(not traits.share_q_o and not traits.q_in_regs):
            rings.q.release(q_pos)
        normalise(kernel, wg, tile, mask, mLSE)
        write_output(kernel, wg, tma, tiles, tile)
        if const_expr(traits.share_q_o):
            if wg.thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            rings.q.release(q_pos)
        q_pos += 1
        wave += 1
        index = order.index(wave, kernel.longest_first)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def attend(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    tiles: Tiles,
    rings: Rings,
    tile: QueryTile,
    mask: IntervalMask,
    kv_pos: Int32,
):
    """Accumulate O over the key blocks of one tile, last block first; returns the next K/V position.

    Blocks come in three runs: those the mask's right edge cuts, those seen whole, those its left edge cuts.
    """
    traits = kernel.traits
    n_lo, n_hi = tile.n_blocks(mask, traits.tile_n)
    full_lo, full_hi = tile.full_n_blocks(mask, traits.tile_n)
    step = functools.partial(step_overlapped if traits.overlap else step_in_order, kernel, wg, tiles, rings)
    n_block = n_hi - 1
    if const_expr(traits.overlap):
        first_scores(kernel, wg, tiles, rings, n_block, kv_pos)
    else:
        step(n_block, kv_pos, True)
        kv_pos += 1
    if const_expr(kernel.problem.mask != "full"):
        right = cutlass.max(cutlass.min(n_block - full_hi, n_block - n_lo), 0)
        for _ in cutlass.range(right, unroll=1):
            n_block -= 1
            step(n_block, kv_pos, True)
            kv_pos += 1
    whole = n_block - (full_lo if const_expr(mask.has_left_edge) else 0)
    for _ in cutlass.range(whole, unroll=1):
        n_block -= 1
        step(n_block, kv_pos, False)
        kv_pos += 1
    if const_expr(mask.has_left_edge):
        for _ in cutlass.range(n_block - n_lo, unroll=1):
            n_block -= 1
            step(n_block, kv_pos, True)
            kv_pos += 1
    if const_expr(traits.overlap):
        if const_expr(traits.rescale_in_product):
            scale_rows(wg.out, wg.row_scale)
        rings.v.wait(kv_pos)
        product_pv(wg, rings, kv_pos)
        warpgroup.wait_group(0)
        rings.v.release(kv_pos)
        kv_pos += 1
    return kv_pos


# Ping-pong: a warpgroup issues its products only in its turn, so that its softmax falls into another one's products.


def take_turn(kernel, wg: Warpgroup) -> None:
    """Wait until it is this warpgroup's turn to issue products."""
    if kernel.traits.pingpong:
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + wg.index, number_of_threads=2 * WARPGROUP)


def pass_turn(kernel, wg: Warpgroup) -> None:
    """Let the next warpgroup issue its products."""
    if kernel.traits.pingpong:
        following = (wg.index + 1) % kernel.traits.mma_warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN + following, number_of_threads=2 * WARPGROUP)


# The steps of the main loop.


def product_qk(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Issue S = Q K^T for the K tile at `position`."""
    atoms.gemm(wg.mma_qk, wg.acc_S, wg.tSrQ, wg.tSrK[None, None, None, rings.k.stage(position)], accumulate=False)


def product_pv(wg: Warpgroup, rings: Rings, position: Int32) -> None:
    """Issue O += P V for the V tile at `position`."""
    atoms.gemm(wg.mma_pv, wg.acc_O, wg.tOrP, wg.tOrV[None, None, None, rings.v.stage(position)], accumulate=True)


@cute.jit
def take_peaks(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    n_block: Int32,
    masked: cutlass.Constexpr[bool],
    is_first: cutlass.Constexpr[bool],
):
    """Softcap and mask the scores of one key block, then move the row maxima."""
    if const_expr(kernel.problem.has_softcap):
        apply_softcap(wg.scores, wg.inner_scale)
    if const_expr(masked):
        first_key = n_block * kernel.traits.tile_n + wg.first_column
        mask_scores(wg.scores, wg.columns, first_key, wg.bounds, kernel.problem.mask == "window")
    wg.softmax.take_peaks(wg.scores, wg.row_scale, is_first)


def exponentiate(kernel, wg: Warpgroup, rows: range, masked: bool) -> None:
    """Exponentials of some of this thread's rows, in place."""
    for row in rows:
        wg.softmax.exponentiate(wg.scores, row, 0 if masked else kernel.traits.poly_exp2)


def store_p(kernel, wg: Warpgroup, tiles: Tiles) -> None:
    """Round the exponentials to the element type and put them where the PV product reads them."""
    if kernel.traits.p_in_regs:
        round_fragment(acc_as_operand_a(wg.acc_S), wg.tOrP)
        return
    rounded = rounded_fragment(wg.acc_S, kernel.dtype)
    copy = atoms.store_copy(kernel.dtype, wg.mma_qk).get_slice(wg.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(tiles.sP[None, None, wg.index]))
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()  # a warp's product reads only the 16 rows of P that the warp itself wrote


@cute.jit
def first_scores(kernel: cutlass.Constexpr, wg: Warpgroup, tiles: Tiles, rings: Rings, n_block: Int32, position: Int32):
    """The tile's first S and P; their PV product is issued by the next step."""
    rings.k.wait(position)
    take_turn(kernel, wg)
    product_qk(wg, rings, position)
    pass_turn(kernel, wg)
    warpgroup.wait_group(0)
    rings.k.release(position)
    take_peaks(kernel, wg, n_block, True, True)
    exponentiate(kernel, wg, range(ROWS), True)
    store_p(kernel, wg, tiles)


@cute.jit
def step_overlapped(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    tiles: Tiles,
    rings: Rings,
    n_block: Int32,
    position: Int32,
    masked: cutlass.Constexpr[bool],
):
    """S of block `n_block` and the PV product of the block before it run together; then the softmax of `n_block`."""
    rings.k.wait(position + 1)
    take_turn(kernel, wg)
    product_qk(wg, rings, position + 1)
    if const_expr(kernel.traits.rescale_in_product):
        scale_rows(wg.out, wg.row_scale)
    rings.v.wait(position)
    product_pv(wg, rings, position)
    pass_turn(kernel, wg)
    warpgroup.wait_group(1)
    rings.k.release(position + 1)
    take_peaks(kernel, wg, n_block, masked, False)
    rows_before = kernel.traits.exp_rows_before_wait
    exponentiate(kernel, wg, range(rows_before), masked)
    if const_expr(rows_before > 0):
        rings.v.wait(position)  # has long landed: a branch, past which ptxas does not move the exponentials
    warpgroup.wait_group(0)
    rings.v.release(position)
    exponentiate(kernel, wg, range(rows_before, ROWS), masked)
    store_p(kernel, wg, tiles)
    if const_expr(not kernel.traits.rescale_in_product):
        scale_rows(wg.out, wg.row_scale)


@cute.jit
def step_in_order(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    tiles: Tiles,
    rings: Rings,
    n_block: Int32,
    position: Int32,
    masked: cutlass.Constexpr[bool],
):
    """S, softmax and PV product of one block, one after the other."""
    rings.k.wait(position)
    take_turn(kernel, wg)
    product_qk(wg, rings, position)
    pass_turn(kernel, wg)
    warpgroup.wait_group(0)
    rings.k.release(position)
    take_peaks(kernel, wg, n_block, masked, False)
    exponentiate(kernel, wg, range(ROWS), masked)
    store_p(kernel, wg, tiles)
    scale_rows(wg.out, wg.row_scale)
    rings.v.wait(position)
    product_pv(wg, rings, position)
    warpgroup.wait_group(0)
    rings.v.release(position)


# Before and after the main loop.


def row_token(kernel, row: Int32) -> tuple[Int32, Int32]:
    """(token of a warpgroup's rows, packed head) of `row`."""
    heads = kernel.problem.packed_heads
    return (row, Int32(0)) if heads == 1 else (row // heads, row % heads)


def load_q(kernel, wg: Warpgroup, tiles: Tiles) -> None:
    """Load this warpgroup's Q fragments, which stay in registers for the whole tile."""
    copy = atoms.load_copy_a(kernel.dtype, wg.mma_qk).get_slice(wg.thread)
    cute.copy(copy, copy.partition_S(tiles.sQ[None, None, wg.index]), copy.retile(wg.tSrQ))


@cute.jit
def set_bounds(kernel: cutlass.Constexpr, wg: Warpgroup, tile: QueryTile, mask: IntervalMask):
    """The visible keys of each row of this thread."""
    first = tile.first_token + wg.index * kernel.tokens_per_warpgroup
    for r in cutlass.range_constexpr(cute.size(wg.bounds.shape[0])):
        token, _ = row_token(kernel, wg.first_row + wg.columns[r, 0][0])
        wg.bounds[r, 0], wg.bounds[r, 1] = mask.kv_bounds(first + token)


@cute.jit
def normalise(kernel: cutlass.Constexpr, wg: Warpgroup, tile: QueryTile, mask: IntervalMask, mLSE: cute.Tensor | None):
    """Divide O by the row sums; write the log-sum-exp where it is asked for."""
    lse = cute.make_rmem_tensor_like(wg.row_scale)
    wg.softmax.finish(wg.row_scale, lse)
    scale_rows(wg.out, wg.row_scale)
    if const_expr(mLSE is not None):
        heads, tokens = kernel.problem.packed_heads, kernel.tokens_per_warpgroup
        first = tile.first_token + wg.index * tokens
        if wg.first_column == 0:
            for r in cutlass.range_constexpr(cute.size(lse)):
                row = wg.first_row + wg.columns[r, 0][0]
                token, packed = row_token(kernel, row)
                if row < heads * tokens and first + token < mask.seqlen_q:
                    mLSE[tile.batch, tile.head * heads + packed, first + token] = lse[r]


@cute.jit
def write_output(kernel: cutlass.Constexpr, wg: Warpgroup, tma: Tma, tiles: Tiles, tile: QueryTile):
    """Stage this warpgroup's O in shared memory and store it with TMA, which clips what lies outside."""
    barrier = NamedBarrier.EPILOGUE + wg.index
    warp = cute.arch.make_warp_uniform(wg.thread // 32)
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last tile's O has left shared memory
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    sO = tiles.sO[None, None, wg.index]
    rounded = rounded_fragment(wg.acc_O, kernel.dtype)
    copy = atoms.store_copy(kernel.dtype, wg.mma_pv).get_slice(wg.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(sO))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    if warp == 0:
        box = kernel.query_box(kernel.traits.head_dim_v)
        gO = cute.local_tile(tma.gO[None, None, tile.head, tile.batch], box, (None, 0))
        tOsO, tOgO = atoms.tma_partition(tma.store_o, tiles.sO_boxes, gO)
        block = tile.first_token // kernel.tokens_per_warpgroup + wg.index
        cute.copy(tma.store_o, tOsO[None, wg.index], tOgO[None, block])
        cute.arch.cp_async_bulk_commit_group()
