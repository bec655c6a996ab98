"""The softmax of the sm80 family's latent decodes: rows of S are spread over some warps, rows of O over all of them."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.core.convert import rounded_fragment
from cuteflash.core.scores import computed_here
from cuteflash.core.softmax import exp2, quad_max
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import QUAD, copy_chunk
from cuteflash.kernels.sm80.mla_bundles import MlaBlock, MlaFragments
from cuteflash.traits.sm80 import WARP

ROWS = 2  # of S that one thread holds elements of
ROW_GROUP_BARRIER = 1  # + group of query rows; 0 is `__syncthreads`


def sync_row_group(kernel, f: MlaFragments) -> None:
    """A barrier of all warps with the same query rows."""
    threads = kernel.traits.key_groups * WARP
    cute.arch.barrier(barrier_id=ROW_GROUP_BARRIER + f.row_group, number_of_threads=threads)


@cute.jit
def add_parts(kernel: cutlass.Constexpr, block: MlaBlock, f: MlaFragments):
    """S from the products of both parts of the columns: each of two warps gets half of the keys."""
    halves, warps = block.tiles.halves, kernel.traits.warps_m * WARP
    product, mine = f.accs_S[0], f.acc_S
    count = cute.size(mine)
    is_first = f.k_part == 0
    other = f.thread + cutlass.select_(is_first, warps, -warps)
    chunk = cute.make_rmem_tensor(QUAD, Float32)
    for i in cutlass.range_constexpr(0, count, QUAD):
        for e in cutlass.range_constexpr(i, i + QUAD):
            chunk[e - i] = cutlass.select_(is_first, product[count + e], product[e])
            mine[e] = cutlass.select_(is_first, product[e], product[count + e])
        copy_chunk(chunk, halves[None, other, i // QUAD])
    sync_row_group(kernel, f)
    for i in cutlass.range_constexpr(0, count, QUAD):
        copy_chunk(halves[None, f.thread, i // QUAD], chunk)
        for e in cutlass.range_constexpr(i, i + QUAD):
            mine[e] = mine[e] + chunk[e - i]


@cute.jit
def hide(kernel: cutlass.Constexpr, f: MlaFragments, tile: QueryTile, page: Int32):
    """Hide the keys of a step that a row does not see, if there are any."""
    _, full_hi = tile.full_blocks()
    if page >= full_hi:
        here = dataclasses.replace(tile, first_token=computed_here(tile.first_token))
        f.scores.set_bounds(f.bounds, here)
        f.scores.hide(page * kernel.traits.tile_n, f.bounds, False)


@cute.jit
def soften(kernel: cutlass.Constexpr, block: MlaBlock, f: MlaFragments, tile: QueryTile, page: Int32):
    """Turn a step's scores into exponentials, round them into sP and add them to the sums; write O's factors.

    The warps with the same rows find a row's maximum together. It moves only if a score exceeds it by more than the
    headroom, after a tile's first steps hardly ever.
    """
    traits, tiles = kernel.traits, block.tiles
    if const_expr(traits.k_parts > 1):
        add_parts(kernel, block, f)
    hide(kernel, f, tile, page)
    values, scale = f.scores.values, block.launch.scale_log2
    is_first_lane = f.thread % 4 == 0
    for r in cutlass.range_constexpr(ROWS):
        peak = values[r, 0]
        for c in cutlass.range_constexpr(1, cute.size(values.shape[1])):
            peak = cute.arch.fmax(peak, values[r, c])
        peak = quad_max(peak) * scale
        if is_first_lane:
            tiles.by_warps[f.scores.row(r), f.key_group] = peak
    sync_row_group(kernel, f)
    for r in cutlass.range_constexpr(ROWS):
        row = f.scores.row(r)
        peak = tiles.by_warps[row, 0]
        for w in cutlass.range_constexpr(1, traits.key_groups):
            peak = cute.arch.fmax(peak, tiles.by_warps[row, w])
        old = f.row_max[r]
        new = cutlass.select_(peak > old + traits.headroom, peak, old)
        factor = exp2(old - new)
        total = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(values.shape[1])):
            p = exp2(values[r, c] * scale - new)
            values[r, c] = p
            total += p
        f.row_max[r] = new
        f.row_sum[r] = f.row_sum[r] * factor + total
        if f.scores.first_key == 0:
            tiles.of_rows[row] = factor
    copy = kernel.store_p().get_slice(f.thread)
    cute.copy(copy, copy.retile(rounded_fragment(f.acc_S, kernel.dtype)), copy.partition_D(tiles.sP))


@cute.jit
def scale_out(block: MlaBlock, f: MlaFragments):
    """Multiply O's rows with their factors, unless all of a warp's are 1."""
    values = f.out.values
    rows = cute.size(values.shape[0])
    factors = cute.make_rmem_tensor(rows, Float32)
    moved = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        factors[r] = block.tiles.of_rows[f.out.row(r)]
        moved = moved | (factors[r] != 1.0)
    if cute.arch.vote_any_sync(moved):
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(cute.size(values.shape[1])):
                values[r, c] = values[r, c] * factors[r]
