"""The step of the sm80 backward whose warps divide the products: half of them P and dV, the others dS and dK.

    first half                       second half
    S^T = K Q^T                      dP^T = V dO^T
    P = exp2(S * scale - LSE) ──►    dS = P (dP - delta) ──► shared memory
    dV += P^T dO                     dK += dS^T Q
    dQ = dS K, all warps

Each warp holds twice as many rows of one accumulator instead of two, and so reads every fragment of Q and dO for twice
as many multiplications. The exponentials of one half run beside products of the other.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.convert import round_fragment, rounded_fragment
from cuteflash.core.scores import ScoreTile
from cuteflash.core.views import acc_as_operand_a, transposed
from cuteflash.kernels.sm80.bwd_bundles import BwdTiles, HalfGradients, KeyWork, Operand, QuerySources
from cuteflash.kernels.sm80.bwd_load import load_step, varying
from cuteflash.kernels.sm80.bwd_products import (
    accumulate_product,
    accumulator,
    add_dq,
    differentiate,
    keep,
    make_operand,
    probabilities,
    product,
    product_dq,
    store_scores,
)
from cuteflash.kernels.sm80.bwd_turns import await_turn, look_at_turn

P_READY = 1  # named barrier: the first half has written P


def pick(first: cute.Tensor, second: cute.Tensor, index: Int32) -> cute.Tensor:
    """`first` or, if `index` is 1, `second`: two tensors of shared memory with one layout."""
    start = cutlass.select_(index == 0, first.iterator.toint(), second.iterator.toint())
    alignment = min(first.iterator.alignment, second.iterator.alignment)
    pointer = cute.make_ptr(first.element_type, start, cute.AddressSpace.smem, assumed_align=alignment)
    return cute.make_tensor(pointer, first.layout)


def make_half_gradients(kernel, tiles: BwdTiles, work: KeyWork, thread: Int32) -> HalfGradients:
    """Partition the block's tiles for this thread."""
    traits = kernel.traits
    mma_s, mma_dkv, mma_dq = kernel.tiled_mma_s(), kernel.tiled_mma_dkv(), kernel.tiled_mma_dq()
    threads = traits.num_threads // 2
    half, member = cute.arch.make_warp_uniform(thread // threads), thread % threads
    acc_S = accumulator(mma_s, member, traits.tile_n, traits.tile_m)
    scores = ScoreTile.of(mma_s, member, acc_S, (traits.tile_n, traits.tile_m), work.launch.inner_scale, 1)
    return HalfGradients(
        thread=thread,
        member=member,
        half=half,
        mma_s=mma_s,
        mma_dkv=mma_dkv,
        mma_dq=mma_dq,
        keys=None,
        acc_S=acc_S,
        acc=accumulator(mma_dkv, member, traits.tile_n, traits.head_dim),
        acc_dQ=accumulator(mma_dq, thread, traits.tile_m, traits.head_dim),
        scores=scores,
        bounds=cute.make_rmem_tensor((cute.size(scores.values.shape[0]), 2), Int32),
    )


def first_operand(g: HalfGradients, tiles: BwdTiles, member: Int32) -> Operand:
    """K or V as operand of the first product."""
    return make_operand(g.mma_s, member, pick(tiles.sK, tiles.sV, g.half)[None, None, 0], is_a=True)


def keep_half_keys(kernel, g: HalfGradients, tiles: BwdTiles) -> HalfGradients:
    """Fetch K or V for the whole loop."""
    return dataclasses.replace(g, keys=keep(first_operand(g, tiles, g.member)))


@cute.jit
def split_step(
    kernel: cutlass.Constexpr,
    g: HalfGradients,
    loads: QuerySources,
    work: KeyWork,
    place: tuple,
    masked: cutlass.Constexpr[bool],
):
    """One query block; `place` is its (query head, block, number in the loop)."""
    traits, tiles = kernel.traits, loads.tiles
    head, m_block, position = place
    stage = load_step(kernel, loads, work, place)
    seen = look_at_turn(loads, head, m_block) if kernel.problem.is_deterministic else None
    thread, member = (varying(index, position) for index in (g.thread, g.member))
    queries, others = (
        pick(*pair, g.half)[None, None, stage] for pair in ((tiles.sQ, tiles.sdO), (tiles.sdO, tiles.sQ))
    )
    keys = first_operand(g, tiles, member) if g.keys is None else g.keys
    product(kernel, g.mma_s, g.acc_S, keys, make_operand(g.mma_s, member, queries, is_a=False))
    rounded = cute.make_rmem_tensor_like(g.acc_S, kernel.dtype)
    if g.half == 0:
        slopes = probabilities(kernel, g, tiles.sLSE[None, stage], work, m_block, masked)
        round_fragment(g.acc_S, rounded)
        exchange = exchange_view(kernel, g, tiles.sP)
        if const_expr(slopes is not None):
            for i in cutlass.range_constexpr(cute.size(slopes)):
                slopes[i] = slopes[i] * g.acc_S[i]
            copy_pieces(rounded_fragment(slopes, kernel.dtype), exchange)
        else:
            copy_pieces(rounded, exchange)
        cute.arch.barrier_arrive(barrier_id=P_READY, number_of_threads=traits.num_threads)
    else:
        cute.arch.barrier(barrier_id=P_READY, number_of_threads=traits.num_threads)
        copy_pieces(exchange_view(kernel, g, tiles.sP), rounded)
        differentiate(g, g.acc_S, (rounded, None), tiles.sDelta[None, stage])
        round_fragment(g.acc_S, rounded)
        store_scores(kernel, g.mma_s, member, rounded, tiles.sdS)
    others = make_operand(g.mma_dkv, member, transposed(others), is_a=False, transpose=True)
    accumulate_product(kernel, g.mma_dkv, g.acc, Operand(acc_as_operand_a(rounded)), others)
    if const_expr(kernel.problem.is_deterministic):
        await_turn(loads, work, head, m_block, seen)
    cute.arch.sync_threads()  # dS is written
    product_dq(kernel, g, tiles, thread)
    add_dq(kernel, g, loads, m_block, head)


def exchange_view(kernel, g: HalfGradients, sP: cute.Tensor) -> cute.Tensor:
    """(8, pieces) of shared memory for a fragment of P, neighbouring threads side by side."""
    threads, piece = kernel.traits.num_threads // 2, 8
    layout = cute.make_layout((piece, threads, cute.size(sP) // threads // piece), stride=(1, piece, piece * threads))
    return cute.make_tensor(sP.iterator, layout)[None, g.member, None]


def copy_pieces(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copy a fragment from or to its exchange view, 16 bytes at a time."""
    fragment, view = (source, target) if source.memspace == cute.AddressSpace.rmem else (target, source)
    flat = cute.make_tensor(fragment.iterator, cute.make_layout(view.shape))
    atom = cute.make_copy_atom(CopyUniversalOp(), fragment.element_type, num_bits_per_copy=128)
    for i in range(cute.size(view.shape[1])):
        pair = (flat[None, i], view[None, i])
        cute.copy(atom, *(pair if fragment is source else pair[::-1]))
