"""Which key tiles a block of the one-pass backward works on: all of its roles visit the same ones in the same order."""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.core.bwd_launch import BwdLaunch
from cuteflash.core.tile import KeyTile
from cuteflash.kernels.sm90.bwd_bundles import Block, Visit
from cuteflash.kernels.sm90.handout import visit_tiles


@cute.jit
def visit_key_tiles(kernel: cutlass.Constexpr, block: Block, work: cutlass.Constexpr):
    """Call `work(visit)` for each of this block's tiles; a whole warp calls it."""
    visit = functools.partial(visit_tile, kernel, block.launch, work)
    if const_expr(kernel.traits.persistent):
        visit_tiles(block.handout, block.launch, visit)
    else:
        tile = block.tile
        if const_expr(tile is None):
            tile = block.launch.tile(cute.arch.block_idx()[0])
        visit(tile, Int32(0), Int32(0))


@cute.jit
def visit_tile(
    kernel: cutlass.Constexpr, launch: BwdLaunch, work: cutlass.Constexpr, tile: KeyTile, item: Int32, start: Int32
):
    """Visit a tile of the order, the block's `item`-th; returns the position of the step after its last one."""
    if const_expr(not launch.held_dq):
        start = visit_keys(kernel, launch, work, tile, (item, item), start)
    else:
        count = launch.key_tiles()
        for n_block in cutlass.range(count, unroll=1):
            keys = dataclasses.replace(tile, n_block=n_block, first_key=n_block * launch.tile_n)
            start = visit_keys(kernel, launch, work, keys, (item * count + n_block, item), start)
    return start


@cute.jit
def visit_keys(
    kernel: cutlass.Constexpr, launch: BwdLaunch, work: cutlass.Constexpr, tile: KeyTile, number: tuple, start: Int32
):
    """Visit a key tile; `number` is its (wave, item)."""
    is_shared = not launch.held_dq  # other blocks add to the same dQ at the same time
    is_descending = is_shared and kernel.in_turn
    blocks = tile.query_blocks(is_descending, is_spread=is_shared and not kernel.in_turn)
    visit = Visit(tile, blocks, wave=number[0], start=start, item=number[1])
    work(visit)
    return start + launch.steps(visit.blocks)
