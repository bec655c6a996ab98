"""The consumers' main loop: scores, softmax and output of 64 query rows, key block by key block."""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cuteflash.core.convert import rounded_fragment
from cuteflash.core.finish import normalize
from cuteflash.core.scores import computed_here
from cuteflash.core.softmax import scale_rows
from cuteflash.core.tile import KeyBlocks, QueryTile
from cuteflash.kernels.sm90.bundles import Block, Rings, Tiles
from cuteflash.kernels.sm90.epilogue import add_mean, finish_share, store_rows, write_output
from cuteflash.kernels.sm90.fit_q import fit_q, fit_q_registers, with_row_factors
from cuteflash.kernels.sm90.fixed_max import fixed_steps
from cuteflash.kernels.sm90.handout import visit_tiles
from cuteflash.kernels.sm90.key_parts import hand_over, take_part
from cuteflash.kernels.sm90.load import TileLoads, load_ahead, load_first, make_tile_loads
from cuteflash.kernels.sm90.products import await_pv, finish_pv, finish_qk, product_both
from cuteflash.kernels.sm90.warpgroup import (
    ROWS,
    Warpgroup,
    at_block,
    make_warpgroup,
    pass_turn,
    round_p,
    take_turn,
    take_v_scale,
    with_q,
    with_scales,
)


@cute.jit
def consume(kernel: cutlass.Constexpr, block: Block):
    """Attend and write every tile of this block."""
    wg = make_warpgroup(kernel, block.tiles, block.launch)
    if const_expr(kernel.traits.pingpong):
        if wg.index == kernel.traits.mma_warpgroups - 1:
            pass_turn(kernel, wg)
    all_there = kernel.problem.storage.q == "dense" or kernel.problem.is_split
    visit = consume_tile if const_expr(all_there) else consume_if_present
    visit_tiles(block.handout, block.launch, functools.partial(visit, kernel, block, wg))
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def consume_if_present(
    kernel: cutlass.Constexpr,
    block: Block,
    wg: Warpgroup,
    tile: QueryTile,
    q_pos: Int32,
    kv_pos: Int32,
):
    """`consume_tile` if the tile reaches this warpgroup's part of it. Of short packed sequences most tiles do not."""
    if tile.part(wg.index, kernel.tokens_per_warpgroup).exists():
        kv_pos = consume_tile(kernel, block, wg, tile, q_pos, kv_pos)
    else:
        kv_pos = pass_over(kernel, block.rings, wg, tile.visited_blocks(), q_pos, kv_pos)
    return kv_pos


@cute.jit
def pass_over(kernel: cutlass.Constexpr, rings: Rings, wg: Warpgroup, blocks: KeyBlocks, q_pos: Int32, kv_pos: Int32):
    """Compute nothing of a tile, but take and pass turns and release all loads; returns the next K/V position."""
    rings.q.wait(q_pos)
    rings.q.release(q_pos)
    for _ in cutlass.range(blocks.hi - blocks.lo, unroll=1):
        take_turn(kernel, wg)
        pass_turn(kernel, wg)
        for ring in (rings.k, rings.v):
            ring.wait(kv_pos)
            ring.release(kv_pos)
        kv_pos += 1
    return kv_pos


@cute.jit
def consume_tile(
    kernel: cutlass.Constexpr,
    block: Block,
    wg: Warpgroup,
    tile: QueryTile,
    q_pos: Int32,
    kv_pos: Int32,
):
    """Attend and write this warpgroup's part of a tile; returns the next K/V position."""
    traits, tiles, rings = kernel.traits, block.tiles, block.rings
    blocks = tile.visited_blocks()
    own = tile.part(wg.index, kernel.tokens_per_warpgroup)
    wg.acc_O.fill(0.0)
    wg.softmax.reset()
    wg.scores.set_bounds(wg.bounds, own)
    loads = None
    if const_expr(not traits.warp_specialized):
        loads = make_tile_loads(kernel, block, tile, blocks)
        load_first(kernel, loads, q_pos, kv_pos)
    v_scale = None
    if const_expr(block.scales is not None):
        wg = with_scales(kernel, wg, block.scales, block.launch, own)
        v_scale = block.scales.of_v(tile)
    rings.q.wait(q_pos)
    if const_expr(kernel.fits_q and not traits.q_in_regs):
        place = rings.q.stage(q_pos) * traits.mma_warpgroups + wg.index
        wg = with_row_factors(kernel, wg, fit_q(kernel, wg, tiles.base, place))
    wg = with_q(kernel, wg, tiles, rings.q.stage(q_pos))
    if const_expr(kernel.fits_q and traits.q_in_regs):
        wg = with_row_factors(kernel, wg, fit_q_registers(wg))
    if const_expr(traits.q_in_regs):
        rings.q.release_loaded(q_pos)
    if blocks.hi > blocks.lo:
        kv_pos = attend(kernel, wg, tiles, rings, loads, tile, blocks, kv_pos)
    if const_expr(not traits.share_q_o and not traits.q_in_regs):
        rings.q.release(q_pos)
    if const_expr(traits.key_warpgroups == 1):
        finish_tile(kernel, wg, block, tile, v_scale)
    elif wg.part == 0:
        take_part(kernel, wg, tiles)
        finish_tile(kernel, wg, block, tile, v_scale)
    else:
        hand_over(kernel, wg, tiles)
    if const_expr(traits.share_q_o):
        if wg.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        rings.q.release(q_pos)
    return kv_pos


@cute.jit
def finish_tile(kernel: cutlass.Constexpr, wg: Warpgroup, block: Block, tile: QueryTile, v_scale: Float32 | None):
    """Write this warpgroup's part of a tile, or of a share of its keys."""
    if const_expr(kernel.problem.is_split):
        finish_share(kernel, wg, block, tile, v_scale)
    else:
        own = tile.part(wg.index, kernel.tokens_per_warpgroup)
        scores, heads = wg.scores, wg.scores.packed_heads
        if const_expr(kernel.problem.operands.is_fp8 and heads & (heads - 1) != 0):
            # Quotients of rows would be kept from the beginning of the tile, in registers that there are not.
            scores = dataclasses.replace(scores, first_row=computed_here(scores.first_row))
        normalize(wg.softmax, scores, wg.out, own, block.mLSE, v_scale, block.launch.sinks)
        if const_expr(kernel.problem.operands.has_v_mean):
            add_mean(kernel, wg, block.scales.mean_of_v(tile))
        if const_expr(kernel.traits.stages_o):
            write_output(kernel, wg, block.tma, block.tiles, tile)
        else:
            store_rows(kernel, wg, block.tma.gO, own)


@cute.jit
def attend(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    tiles: Tiles,
    rings: Rings,
    loads: TileLoads | None,
    tile: QueryTile,
    blocks: KeyBlocks,
    kv_pos: Int32,
):
    """Accumulate O over the key blocks of one tile, in the order of `KeyBlocks.visits`; returns the next K/V position.

    After the first block, three loops visit the blocks cut by the mask's right edge, those seen whole, and those cut by
    its left edge. With `fixed_max` the second loop does not update the row maxima unless scores exceed them by too
    much. Before it, every row that sees any key must have seen one. Without a left edge the block of key 0 comes first
    and provides it, attention sinks included; with one, the first loop takes the first whole block as well. Hence
    without a left edge the first loop can leave the maxima alone, too (`masked_by_fixed_max`).
    """
    traits, scores = kernel.traits, kernel.problem.scores
    n_block, n_lo, n_hi = blocks.visits(kernel.first_keys_first)
    full_lo, full_hi = tile.full_blocks()
    if const_expr(traits.overlap):
        step = functools.partial(step_overlapped, kernel, wg, tiles, rings)
    elif const_expr(traits.warp_specialized):
        step = functools.partial(step_in_order, kernel, wg, tiles, rings)
    else:
        step = functools.partial(step_alone, kernel, wg, tiles, rings, loads)
    if const_expr(traits.overlap):
        first_scores(kernel, wg, tiles, rings, n_block, kv_pos)
    else:
        step(n_block, kv_pos, True)
        kv_pos += 1
    n_block = n_hi
    if const_expr(scores.mask != "full" or traits.fixed_max):
        right = n_block - full_hi + (1 if const_expr(traits.fixed_max and scores.has_left_edge) else 0)
        right = cutlass.max(cutlass.min(right, n_block - n_lo), 0)
        if const_expr(traits.masked_by_fixed_max and not scores.has_left_edge):
            kv_pos = fixed_steps(kernel, wg, rings, right, n_block, kv_pos, masked=True)
            n_block -= right
        else:
            for _ in cutlass.range(right, unroll=1):
                n_block -= 1
                step(n_block, kv_pos, True)
                kv_pos += 1
    whole = n_block - (full_lo if const_expr(scores.has_left_edge) else n_lo)
    if const_expr(traits.fixed_max):
        kv_pos = fixed_steps(kernel, wg, rings, whole, n_block, kv_pos)
        n_block -= cutlass.max(whole, 0)
    else:
        for _ in cutlass.range(whole, unroll=1):
            n_block -= 1
            step(n_block, kv_pos, False)
            kv_pos += 1
    if const_expr(scores.has_left_edge):
        for _ in cutlass.range(n_block - n_lo, unroll=1):
            n_block -= 1
            step(n_block, kv_pos, True)
            kv_pos += 1
    if const_expr(traits.overlap):
        last_product(kernel, wg, rings, kv_pos)
        kv_pos += 1
    return kv_pos


@cute.jit
def prepare_scores(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    n_block: Int32,
    masked: cutlass.Constexpr[bool],
    is_first: cutlass.Constexpr[bool],
):
    """Softcap and mask the scores of one key block, then update the row maxima."""
    bounds = wg.bounds if const_expr(masked) else None
    wg.scores.prepare(kernel.problem.scores, n_block * kernel.traits.tile_n, bounds)
    wg.softmax.take_peaks(wg.scores.values, is_first)


def exponentiate(wg: Warpgroup, rows: range) -> None:
    """Exponentials of some of this thread's rows, in place."""
    for row in rows:
        wg.softmax.exponentiate(wg.scores.values, row)


def store_p(kernel, wg: Warpgroup, tiles: Tiles) -> None:
    """Round the exponentials to the element type, into the registers or the tile that the PV product reads."""
    if kernel.traits.p_in_regs:
        round_p(wg)
        return
    rounded = rounded_fragment(wg.acc_S, kernel.dtype)
    copy = kernel.copy_p().get_slice(wg.thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(tiles.sP[None, None, wg.index]))
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()  # a warp's product reads only the 16 rows of P that the warp itself wrote


@cute.jit
def first_scores(kernel: cutlass.Constexpr, wg: Warpgroup, tiles: Tiles, rings: Rings, n_block: Int32, position: Int32):
    """The tile's first S and P; their PV product is issued by the next step."""
    wg = at_block(kernel, wg, n_block)
    finish_qk(kernel, wg, rings, position)
    prepare_scores(kernel, wg, n_block, True, True)
    exponentiate(wg, range(ROWS))
    store_p(kernel, wg, tiles)
    take_v_scale(wg, n_block)


@cute.jit
def last_product(kernel: cutlass.Constexpr, wg: Warpgroup, rings: Rings, position: Int32):
    """The tile's last PV product, without a QK product beside it."""
    if const_expr(kernel.traits.rescale_in_product):
        scale_rows(wg.out, wg.softmax.row_scale)
    finish_pv(wg, rings, position)


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
    wg = at_block(kernel, wg, n_block)
    product_both(kernel, wg, rings, position)
    prepare_scores(kernel, wg, n_block, masked, False)
    rows_before = kernel.traits.exp_rows_before_wait
    exponentiate(wg, range(rows_before))
    if const_expr(rows_before > 0):
        rings.v.wait(position)  # V landed before: a branch, past which ptxas does not move the exponentials
    await_pv(wg, rings, position)
    exponentiate(wg, range(rows_before, ROWS))
    store_p(kernel, wg, tiles)
    take_v_scale(wg, n_block)
    if const_expr(not kernel.traits.rescale_in_product):
        scale_rows(wg.out, wg.softmax.row_scale)


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
    finish_qk(kernel, wg, rings, position)
    prepare_scores(kernel, wg, n_block, masked, False)
    exponentiate(wg, range(ROWS))
    store_p(kernel, wg, tiles)
    scale_rows(wg.out, wg.softmax.row_scale)
    finish_pv(wg, rings, position)


@cute.jit
def step_alone(
    kernel: cutlass.Constexpr,
    wg: Warpgroup,
    tiles: Tiles,
    rings: Rings,
    loads: TileLoads,
    n_block: Int32,
    position: Int32,
    masked: cutlass.Constexpr[bool],
):
    """`step_in_order` without a producer: first the loads into the stage that the last step has released."""
    ahead = kernel.traits.kv_stage - 1
    load_ahead(loads, n_block - ahead, position + ahead)
    step_in_order(kernel, wg, tiles, rings, n_block, position, masked)
