"""Which key tiles a block of the one-pass backward works on: all of its roles visit the same ones in the same order."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.core.launch import BwdLaunch
from cuteflash.core.schedule import each_tile
from cuteflash.kernels.sm90.bwd_bundles import Visit


@cute.jit
def visit_tiles(kernel: cutlass.Constexpr, launch: BwdLaunch, work: cutlass.Constexpr):
    """Call `work(visit)` for each of this block's tiles; a whole warp calls it.

    Persistent blocks are for dense batches. Tiles of packed sequences differ in what they cost: each has its own block.
    """
    visit = functools.partial(visit_index, kernel, launch, work)
    if const_expr(kernel.is_persistent):
        each_tile(launch.order, visit)
    else:
        visit(cute.arch.block_idx()[0], Int32(0), Int32(0))


@cute.jit
def visit_index(
    kernel: cutlass.Constexpr, launch: BwdLaunch, work: cutlass.Constexpr, index: Int32, wave: Int32, start: Int32
):
    """Visit the tile with number `index` of the order; returns the position of the step after its last one."""
    tile = launch.tile(index)
    in_turn = kernel.problem.is_deterministic
    visit = Visit(tile, tile.query_blocks(is_descending=in_turn, is_spread=not in_turn), wave, start)
    if const_expr(kernel.problem.storage.k == "dense"):
        work(visit)
    elif tile.exists():
        work(visit)
    return start + launch.steps(visit.blocks)
