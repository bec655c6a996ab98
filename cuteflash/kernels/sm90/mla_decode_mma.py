"""The consumers' main loop of the latent-attention decode: two warpgroups that trade P and the rows' maxima.

Pages go in pairs, the first one's scores being the first warpgroup's, the second one's the second's:

    warpgroup 0                                   warpgroup 1
    S = Q K0ᵀ, issued ──────────────────────────► S = Q K1ᵀ, issued behind it
    softmax, P0 ────────────────────────────────► O right += P0 V0, issued behind it
    O left += P0 V0                               softmax of S beside that product
    O left += P1 V1 ◄──────────────────────────── P1
                                                  O right += P1 V1

Both apply maxima in the order of pages, so that each page is let go of as soon as its own P has been used, and the
next one is on its way into its place while the other page is worked on.
"""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from cuteflash.atoms.barriers import arrive, wait_phase
from cuteflash.core.latent import each_latent_tile
from cuteflash.core.scores import computed_here
from cuteflash.core.tile import QueryTile
from cuteflash.core.views import aligned
from cuteflash.kernels.sm90.mla_decode_bundles import (
    BOTH_PAGES,
    HALF_PARTS,
    LAST_SLAB,
    ROPE,
    SLABS_BUT_LAST,
    MlaBarrier,
    MlaBlock,
    MlaRings,
    parity,
)
from cuteflash.kernels.sm90.mla_decode_epilogue import finish
from cuteflash.kernels.sm90.mla_decode_half import (
    NO_MAXIMUM,
    ROWS,
    Half,
    await_values,
    issue_other,
    issue_own,
    issue_scores,
    make_halves,
    publish,
    scale_out,
    soften,
    take_last_slab,
    take_maxima,
)
from cuteflash.traits.mla_sm90 import CONSUMERS, ELEMENT_BYTES, LATENT_DIM, SLAB, SLABS_V
from cuteflash.traits.sm90 import WARPGROUP

BOTH_THREADS = CONSUMERS * WARPGROUP
LOAD_BYTES = 16  # of a thread's store of zeros


@cute.jit
def consume(kernel: cutlass.Constexpr, block: MlaBlock):
    """Attend and write every tile of this block, as one of the warpgroups of the consumers."""
    halves = make_halves(kernel, block.tiles)
    each_latent_tile(block.launch, functools.partial(consume_tile, kernel, block, halves))


@cute.jit
def consume_tile(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    halves: tuple[Half, Half],
    tile: QueryTile,
    q_pos: Int32,
    kv_pos: Int32,
):
    """Attend and write this warpgroup's half of a tile; returns the position of the next one's pages.

    Only the loops over pages are code of one warpgroup: what comes between tiles is fetched from memory once for both.
    """
    half = halves[0]
    who = cute.arch.make_warp_uniform(computed_here(cute.arch.thread_idx()[0]) // WARPGROUP) - 1
    blocks = tile.visited_blocks()
    half.acc_O.fill(0.0)
    half.row_sum.fill(0.0)
    half.row_max.fill(NO_MAXIMUM)
    for part in (SLABS_BUT_LAST, LAST_SLAB):
        wait_phase(block.rings.q_full + part, q_pos & 1)
    take_last_slab(kernel, half, block.tiles)
    if blocks.lo + who >= blocks.hi:  # no page of its own
        arrive(block.rings.q_empty + SLABS_BUT_LAST)
    if who == 0:
        attend_all(kernel, block, halves[0], tile, kv_pos)
    else:
        attend_all(kernel, block, halves[1], tile, kv_pos)
    finish(block, half, tile)
    pages = blocks.hi - blocks.lo  # every other one is the first of a pair, whose parity is the lowest bit
    return kv_pos ^ ((pages + 1) >> 1 & 1) ^ (pages & 2)


@cute.jit
def attend_all(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, tile: QueryTile, kv_pos: Int32):
    """A warpgroup's work on all pages of a tile."""
    blocks = tile.visited_blocks()
    page, end = blocks.lo, blocks.hi
    _, masked_from = tile.full_blocks()
    if const_expr(half.who == 0):
        while page < end:
            phases = parity(kv_pos, 0), parity(kv_pos, 1)
            attend_first(kernel, block, half, tile, (page, end, masked_from), phases)
            if page + 1 < end:
                take_second(kernel, block, half, phases)
            page += 2
            kv_pos = kv_pos ^ BOTH_PAGES
    else:
        while page + 1 < end:
            phases = parity(kv_pos, 0), parity(kv_pos, 1)
            attend_second(kernel, block, half, tile, (page + 1, end, masked_from), phases)
            page += 2
            kv_pos = kv_pos ^ BOTH_PAGES
        if page < end:
            take_first(kernel, block, half, (parity(kv_pos, 0), Int32(0)))
            await_values(half, block.rings, 0)


def release_scored(half: Half, rings: MlaRings) -> None:
    """Let go of what this warpgroup needs of its own page for the scores only."""
    for part in (ROPE, *(HALF_PARTS * (1 - half.who) + i for i in range(HALF_PARTS))):
        rings.release(half.who, part)


@cute.jit
def release_q(block: MlaBlock, page: Int32, end: Int32):
    """Release Q but for its last slab, if `page` was the last one of this warpgroup in a tile whose pages end so."""
    if page + CONSUMERS >= end:
        arrive(block.rings.q_empty + SLABS_BUT_LAST)


@cute.jit
def attend_first(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    half: Half,
    tile: QueryTile,
    pages: tuple[Int32, Int32, Int32],
    phases: tuple[Int32, Int32],
):
    """Warpgroup 0: the first page of a pair, scores, softmax and the product with its left columns.

    `pages` are this one, the end of the tile's, and the first one of which a row does not see all keys.
    """
    page, end, masked_from = pages
    factor = cute.make_rmem_tensor(ROWS, Float32)
    issue_scores(kernel, half, block.rings, phases[0])
    if page + 1 < end:
        cute.arch.barrier_arrive(barrier_id=MlaBarrier.TURN, number_of_threads=BOTH_THREADS)
    warpgroup.wait_group(0)
    release_scored(half, block.rings)
    release_q(block, page, end)
    if page >= masked_from:
        hide(kernel, block, half, tile, page)
    moved = soften(kernel, half, block, factor)
    publish(kernel, half, block.tiles)
    cute.arch.barrier_arrive(barrier_id=MlaBarrier.P_READY, number_of_threads=BOTH_THREADS)
    scale_out(half, factor, moved)
    issue_own(half)
    await_values(half, block.rings, 0)


@cute.jit
def take_second(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, phases: tuple[Int32, Int32]):
    """Warpgroup 0: the product with the left columns of the second page of a pair."""
    factor = cute.make_rmem_tensor(ROWS, Float32)
    cute.arch.barrier(barrier_id=MlaBarrier.P_READY + 1, number_of_threads=BOTH_THREADS)
    moved = take_maxima(half, block, factor)
    scale_out(half, factor, moved)
    issue_other(kernel, half, block.rings, phases[1])
    await_values(half, block.rings, 1)


@cute.jit
def take_first(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, phases: tuple[Int32, Int32]):
    """Warpgroup 1: issue the product with the right columns of the first page of a pair."""
    factor = cute.make_rmem_tensor(ROWS, Float32)
    cute.arch.barrier(barrier_id=MlaBarrier.P_READY, number_of_threads=BOTH_THREADS)
    moved = take_maxima(half, block, factor)
    scale_out(half, factor, moved)
    issue_other(kernel, half, block.rings, phases[0])


@cute.jit
def attend_second(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    half: Half,
    tile: QueryTile,
    pages: tuple[Int32, Int32, Int32],
    phases: tuple[Int32, Int32],
):
    """Warpgroup 1: both pages of a pair, scores and softmax of the second one beside the product of the first.

    `pages` are the second one, the end of the tile's, and the first one of which a row does not see all keys.
    """
    page, end, masked_from = pages
    factor = cute.make_rmem_tensor(ROWS, Float32)
    cute.arch.barrier(barrier_id=MlaBarrier.TURN, number_of_threads=BOTH_THREADS)
    issue_scores(kernel, half, block.rings, phases[1])
    take_first(kernel, block, half, phases)
    warpgroup.wait_group(HALF_PARTS)
    release_scored(half, block.rings)
    release_q(block, page, end)
    if page >= masked_from:
        hide(kernel, block, half, tile, page)
    moved = soften(kernel, half, block, factor)
    publish(kernel, half, block.tiles)
    await_values(half, block.rings, 0)  # the first page's product: O may be scaled
    cute.arch.barrier_arrive(barrier_id=MlaBarrier.P_READY + 1, number_of_threads=BOTH_THREADS)
    scale_out(half, factor, moved)
    issue_own(half)
    await_values(half, block.rings, 1)


@cute.jit
def hide(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, tile: QueryTile, page: Int32):
    """Hide the keys of the own page that a row does not see, if there are any.

    Rows past the last key may hold anything: those of V become 0, since 0 times NaN would be NaN. The page's half that
    has been released is read as V by the other warpgroup, which still holds it.
    """
    rows = kernel.traits.tile_n
    here = dataclasses.replace(tile, first_token=computed_here(tile.first_token))
    half.scores.set_bounds(half.bounds, here)
    half.scores.hide(page * rows, half.bounds, False)
    past = cutlass.max(tile.mask.seqlen_k - page * rows, 0)
    if past < rows:
        clear_rows(kernel, block, half, past)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=MlaBarrier.OWN + half.who, number_of_threads=WARPGROUP)


@cute.jit
def clear_rows(kernel: cutlass.Constexpr, block: MlaBlock, half: Half, first: Int32):
    """Set V's rows from `first` on to 0 in the own page: a slab for 16 threads, of which 8 store a row of it."""
    rows, row_bytes = kernel.traits.tile_n, SLAB * ELEMENT_BYTES
    lanes = row_bytes // LOAD_BYTES
    together = WARPGROUP // SLABS_V // lanes  # rows
    thread = half.thread
    page = block.tiles.pages + half.who * (rows * LATENT_DIM * ELEMENT_BYTES)
    start = page + thread // (together * lanes) * (rows * row_bytes) + thread % lanes * LOAD_BYTES
    for row in cutlass.range(first + thread // lanes % together, rows, together, unroll=1):
        target = cute.recast_ptr(aligned(start + row * row_bytes, LOAD_BYTES), dtype=Int64)
        cute.make_tensor(target, cute.make_layout(LOAD_BYTES // 8)).fill(0)
