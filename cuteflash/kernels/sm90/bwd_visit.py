"""Which key tiles a block of the one-pass backward works on: all of its roles visit the same ones in the same order."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.core.launch import BwdLaunch
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
    kernel: cutlass.Constexpr, launch: BwdLaunch, work: cutlass.Constexpr, tile: KeyTile, wave: Int32, start: Int32
):
    """Visit a tile, the block's `wave`-th; returns the position of the step after its last one."""
    in_turn = kernel.in_turn
    visit = Visit(tile, tile.query_blocks(is_descending=in_turn, is_spread=not in_turn), wave, start)
    work(visit)
    return start + launch.steps(visit.blocks)
