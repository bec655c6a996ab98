"""The main loop of the sm80 backward: five products a query block, for the keys of one tile.

S^T = K Q^T             P = exp2(S * scale - LSE), rounded
dP^T = V dO^T           dS = P (dP - delta), rounded, to shared memory
dV += P^T dO            P^T and dS^T from registers if warps divide the keys only, else through shared memory
dK += dS^T Q
dQ = dS K               added to the sum in memory
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import ScoreTile
from cuteflash.core.views import transposed
from cuteflash.kernels.sm80.bwd_bundles import BwdTiles, Gradients, HalfGradients, KeyWork, QuerySources
from cuteflash.kernels.sm80.bwd_load import column_statistics, load_queries, load_step
from cuteflash.kernels.sm80.bwd_products import (
    accumulate_product,
    accumulator,
    add_dq,
    make_operand,
    probabilities,
    product,
    store_scores,
)
from cuteflash.kernels.sm80.bwd_split import split_step
from cuteflash.kernels.sm80.bwd_turns import await_turn, look_at_turn, pass_turn
from cuteflash.kernels.sm80.fwd_mma import wait_loads


def make_gradients(kernel, tiles: BwdTiles, work: KeyWork, thread: Int32) -> Gradients:
    """Partition the block's tiles for this thread."""
    traits = kernel.traits
    mma_s, mma_dkv, mma_dq = kernel.tiled_mma_s(), kernel.tiled_mma_dkv(), kernel.tiled_mma_dq()

    acc_S, acc_dP = (accumulator(mma_s, thread, traits.tile_n, traits.tile_m) for _ in range(2))
    shape = traits.tile_n, traits.tile_m
    scores = ScoreTile.of(mma_s, thread, acc_S, shape, work.launch.inner_scale, 1)
    sK, sV = (sX[None, None, 0] for sX in (tiles.sK, tiles.sV))
    return Gradients(
        thread=thread,
        mma_s=mma_s,
        mma_dkv=mma_dkv,
        mma_dq=mma_dq,
        k=make_operand(mma_s, thread, sK, is_a=True),
        q=make_operand(mma_s, thread, tiles.sQ, is_a=False),
        v=make_operand(mma_s, thread, sV, is_a=True),
        do=make_operand(mma_s, thread, tiles.sdO, is_a=False),
        p=None if traits.p_in_regs else make_operand(mma_dkv, thread, tiles.sP, is_a=True),
        do_t=make_operand(mma_dkv, thread, transposed(tiles.sdO), is_a=False, transpose=True),
        ds=None if traits.p_in_regs else make_operand(mma_dkv, thread, tiles.sdS, is_a=True),
        q_t=make_operand(mma_dkv, thread, transposed(tiles.sQ), is_a=False, transpose=True),
        ds_t=make_operand(mma_dq, thread, transposed(tiles.sdS), is_a=True, transpose=True),
        k_t=make_operand(mma_dq, thread, transposed(sK), is_a=False, transpose=True),
        acc_S=acc_S,
        acc_dP=acc_dP,
        acc_dK=accumulator(mma_dkv, thread, traits.tile_n, traits.head_dim),
        acc_dV=accumulator(mma_dkv, thread, traits.tile_n, traits.head_dim_v),
        acc_dQ=accumulator(mma_dq, thread, traits.tile_m, traits.head_dim),
        scores=scores,
        bounds=cute.make_rmem_tensor((cute.size(scores.values.shape[0]), 2), Int32),
    )


@cute.jit
def accumulate(kernel: cutlass.Constexpr, g: Gradients | HalfGradients, loads: QuerySources, work: KeyWork):
    """Sum up dK and dV over the query blocks of all query heads, and add to dQ; K and V are issued, not committed."""
    for r in cutlass.range_constexpr(cute.size(g.bounds.shape[0])):
        g.bounds[r, 0], g.bounds[r, 1] = work.tile.q_bounds(g.scores.row(r))
    if const_expr(kernel.traits.stages > 1):
        load_queries(kernel, loads, Int32(0), work.first(), 0)
    cute.arch.cp_async_commit_group()
    keep_keys(kernel, g)
    one = split_step if kernel.traits.split else step
    position = Int32(0)
    for head in cutlass.range(work.launch.heads_per_kv, unroll=1):
        for lo, hi, masked in work.segments(kernel.problem.scores.mask):
            for index in cutlass.range(hi - lo, unroll=1):
                m_block = hi - 1 - index if const_expr(work.is_descending) else lo + index
                one(kernel, g, loads, work, (head, m_block, position), masked)
                position += 1
    if const_expr(kernel.problem.is_deterministic):
        cute.arch.sync_threads()  # every thread has added
        pass_turn(loads, *work.before(work.launch.heads_per_kv, work.first()))


@cute.jit
def keep_keys(kernel: cutlass.Constexpr, g: Gradients | HalfGradients):
    """Fetch those of K and V that stay in registers."""
    traits = kernel.traits
    if const_expr(traits.k_in_regs or traits.v_in_regs):
        wait_loads(0)
        if const_expr(traits.split):
            kept = ((g.keys, traits.k_in_regs),)
        else:
            kept = ((g.k, traits.k_in_regs), (g.v, traits.v_in_regs))
        for operand, is_kept in kept:
            if const_expr(is_kept):
                cute.copy(operand.copy, operand.source, operand.copy.retile(operand.fragment))


@cute.jit
def step(
    kernel: cutlass.Constexpr,
    g: Gradients,
    loads: QuerySources,
    work: KeyWork,
    place: tuple,
    masked: cutlass.Constexpr[bool],
):
    """One query block; `place` is its (query head, block, number in the loop)."""
    traits, tiles = kernel.traits, loads.tiles
    head, m_block, _ = place
    stage = load_step(kernel, loads, work, place)
    seen = look_at_turn(loads, head, m_block) if kernel.problem.is_deterministic else None
    kept_k, kept_v = (None if kept else 0 for kept in (traits.k_in_regs, traits.v_in_regs))

    product(kernel, g.mma_s, g.acc_S, (g.k, kept_k), (g.q, stage))
    slopes = probabilities(kernel, g, tiles.sLSE[None, stage], work, m_block, masked)
    rP = rounded_fragment(g.acc_S, kernel.dtype)
    if const_expr(not traits.p_in_regs):
        store_scores(kernel, g.mma_s, g.thread, rP, tiles.sP)
    product(kernel, g.mma_s, g.acc_dP, (g.v, kept_v), (g.do, stage))
    differentiate(kernel, g, slopes, tiles.sDelta[None, stage])
    rdS = rounded_fragment(g.acc_dP, kernel.dtype)
    store_scores(kernel, g.mma_s, g.thread, rdS, tiles.sdS)

    if const_expr(traits.p_in_regs):
        accumulate_product(kernel, g.mma_dkv, g.acc_dV, (rP, None), (g.do_t, stage))
        accumulate_product(kernel, g.mma_dkv, g.acc_dK, (rdS, None), (g.q_t, stage))
        if const_expr(kernel.problem.is_deterministic):
            await_turn(loads, work, head, m_block, seen)
        cute.arch.sync_threads()  # dS is written
    else:
        if const_expr(kernel.problem.is_deterministic):
            await_turn(loads, work, head, m_block, seen)
        cute.arch.sync_threads()  # P and dS are written
        accumulate_product(kernel, g.mma_dkv, g.acc_dV, (g.p, 0), (g.do_t, stage))
        accumulate_product(kernel, g.mma_dkv, g.acc_dK, (g.ds, 0), (g.q_t, stage))
    product(kernel, g.mma_dq, g.acc_dQ, (g.ds_t, 0), (g.k_t, 0))
    add_dq(kernel, g, loads, m_block, head)


@cute.jit
def differentiate(kernel: cutlass.Constexpr, g: Gradients, slopes: cute.Tensor | None, sDelta: cute.Tensor):
    """dP becomes dS = P (dP - delta), times the derivative of the softcap, in place."""
    delta = column_statistics(sDelta, g.scores)
    for i in cutlass.range_constexpr(cute.size(g.acc_dP)):
        # A fragment's linear order: two neighbouring columns, two rows, rows of warps, column groups.
        column = i % 2 + i // (2 * cute.size(g.scores.values.shape[0])) * 2
        weight = g.acc_S[i]
        if const_expr(slopes is not None):
            weight = weight * slopes[i]
        g.acc_dP[i] = weight * (g.acc_dP[i] - delta[column])
