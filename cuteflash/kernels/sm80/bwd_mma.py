"""The main loop of the sm80 backward: five products a query block, for the keys of one tile.

S^T = K Q^T             P = exp2(S * scale - LSE), rounded
dP^T = V dO^T           dS = P (dP - delta), rounded, to shared memory
dV += P^T dO            P^T and dS^T from registers if warps divide the keys only, else through shared memory
dK += dS^T Q
dQ = dS K               added to the sum in memory, or stored if no other block adds to it
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import ScoreTile, computed_here
from cuteflash.core.views import acc_as_operand_a, transposed
from cuteflash.kernels.sm80.bwd_barriers import NamedBarrier, say_added, sync_warps
from cuteflash.kernels.sm80.bwd_bundles import BwdTiles, Gradients, KeyWork, Operand, QuerySources
from cuteflash.kernels.sm80.bwd_load import load_queries, load_step, varying
from cuteflash.kernels.sm80.bwd_lone import store_dq
from cuteflash.kernels.sm80.bwd_products import (
    accumulate_product,
    accumulator,
    add_dq,
    differentiate,
    make_operand,
    probabilities,
    product,
    product_dq,
    set_bounds,
    store_scores,
)
from cuteflash.kernels.sm80.bwd_turns import await_turns, look_at_turns, pass_last_turns


def make_gradients(kernel, tiles: BwdTiles, work: KeyWork, thread: Int32) -> Gradients:
    """Partition the block's tiles for this thread."""
    traits = kernel.traits
    mma_s, mma_dkv, mma_dq = kernel.tiled_mma_s(), kernel.tiled_mma_dkv(), kernel.tiled_mma_dq()
    acc_S, acc_dP = (accumulator(mma_s, thread, traits.tile_n, traits.tile_m) for _ in range(2))
    shape = traits.tile_n, traits.tile_m
    scores = ScoreTile.of(mma_s, thread, acc_S, shape, work.launch.inner_scale, 1)
    return Gradients(
        thread=thread,
        mma_s=mma_s,
        mma_dkv=mma_dkv,
        mma_dq=mma_dq,
        acc_S=acc_S,
        acc_dP=acc_dP,
        acc_dK=accumulator(mma_dkv, thread, traits.tile_n, traits.head_dim),
        acc_dV=accumulator(mma_dkv, thread, traits.tile_n, traits.head_dim_v),
        acc_dQ=accumulator(mma_dq, thread, traits.tile_m, traits.head_dim),
        scores=scores,
        bounds=cute.make_rmem_tensor((cute.size(scores.values.shape[0]), 2), Int32),
    )


@cute.jit
def accumulate(kernel: cutlass.Constexpr, g: Gradients, loads: QuerySources, work: KeyWork):
    """Sum up dK and dV over the query blocks of all query heads, and add to dQ; K and V are issued, not committed."""
    set_bounds(g, work.tile)
    if const_expr(kernel.traits.stages > 1):
        load_queries(kernel, loads, Int32(0), work.first(), 0, loads.thread)
    cute.arch.cp_async_commit_group()
    position = Int32(0)
    for head in cutlass.range(work.launch.heads_per_kv, unroll=1):
        for lo, hi, masked in work.segments(kernel.problem.scores.mask):
            if const_expr(kernel.traits.fresh_loops):
                thread = computed_here(g.thread)
                g, loads = dataclasses.replace(g, thread=thread), dataclasses.replace(loads, thread=thread)
            for index in cutlass.range(hi - lo, unroll=1):
                m_block = hi - 1 - index if const_expr(work.is_descending) else lo + index
                step(kernel, g, loads, work, (head, m_block, position), masked)
                position += 1
    if const_expr(kernel.turns_between and loads.lone is None):
        sync_warps(kernel)  # every thread has added
        pass_last_turns(kernel, loads, work)


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
    traits, tiles, adds = kernel.traits, loads.tiles, loads.lone is None
    head, m_block, position = place
    stage = load_step(kernel, loads, work, place)
    seen = look_at_turns(kernel, loads, work, place) if kernel.turns_between and adds else None

    thread = varying(kernel, g.thread, position)
    k, v = (make_operand(g.mma_s, thread, sX[None, None, 0], is_a=True) for sX in (tiles.sK, tiles.sV))
    q, do = (make_operand(g.mma_s, thread, sX[None, None, stage], is_a=False) for sX in (tiles.sQ, tiles.sdO))
    product(kernel, g.mma_s, g.acc_S, k, q)
    rP, weights = probabilities(kernel, g, tiles.sLSE[None, stage], work, m_block, masked)
    # If nothing is stored before dP, its fragments are fetched and multiplied beside the exponentials. But with a
    # softcap too few registers are left for both P and the weights.
    early = kernel.problem.scores.softcap
    if const_expr(early and not traits.p_in_regs):
        store_scores(kernel, g.mma_s, thread, rP, tiles.sP)
    product(kernel, g.mma_s, g.acc_dP, v, do)
    if const_expr(not early and not traits.p_in_regs):
        store_scores(kernel, g.mma_s, thread, rP, tiles.sP)
    differentiate(g, weights, tiles.sDelta[None, stage])
    rdS = rounded_fragment(g.acc_dP, kernel.dtype)
    store_scores(kernel, g.mma_s, thread, rdS, tiles.sdS)

    if const_expr(kernel.turns_between and adds):
        await_turns(kernel, loads, work, place, seen)
    if const_expr(traits.p_in_regs):
        p, dS = Operand(acc_as_operand_a(rP)), Operand(acc_as_operand_a(rdS))
    else:
        sync_warps(kernel, NamedBarrier.TURN)  # P and dS are written
        p, dS = (make_operand(g.mma_dkv, thread, sX, is_a=True) for sX in (tiles.sP, tiles.sdS))
    do_t, q_t = (
        make_operand(g.mma_dkv, thread, transposed(sX[None, None, stage]), is_a=False, transpose=True)
        for sX in (tiles.sdO, tiles.sQ)
    )
    accumulate_product(kernel, g.mma_dkv, g.acc_dV, p, do_t)
    accumulate_product(kernel, g.mma_dkv, g.acc_dK, dS, q_t)
    if const_expr(traits.p_in_regs):
        sync_warps(kernel, NamedBarrier.TURN)  # dS is written
    product_dq(kernel, g, tiles, thread)
    if const_expr(not adds):
        store_dq(kernel, g, loads, work, (head, m_block, stage, thread))
    else:
        add_dq(kernel, g, loads, m_block, head)
    if const_expr(kernel.turns_apart):
        say_added(kernel)
