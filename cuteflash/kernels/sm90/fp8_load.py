"""Loads of 8-bit operands whose V lies as its rows are stored: the producer warpgroup turns each tile into V^T.

WGMMA reads 8-bit operands only if the dimension that it sums over is contiguous, which for V is that of the keys, and
TMA does not transpose. The warps move pairs of bytes with ldmatrix and stmatrix, whose elements have 16 bits:

    ldmatrix.trans   a lane gets two columns of two neighbouring keys, and the same of the keys 8 further
    byte permutes    sort these eight bytes by column: four keys of an even and four of an odd one
    stmatrix         writes them as rows of V^T, even columns and odd ones apart

The four keys of a register are those that a lane's P has in its register, see `warpgroup.round_p`.
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warp as warp_instructions

from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm90.bundles import Block
from cuteflash.kernels.sm90.handout import hand_out, tile_of_words, visit_tiles
from cuteflash.kernels.sm90.load import make_tile_loads
from cuteflash.kernels.sm90.swizzle import CHUNK, swizzled
from cuteflash.traits.fp8_sm90 import TURNED_COLUMNS, TURNED_KEYS, TURNING_WARPS

EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # selectors of a byte permute
HANDING_WARP = 1  # that finds the tiles of packed sequences: meanwhile its share of V waits


@cute.jit
def load_and_turn(kernel: cutlass.Constexpr, block: Block):
    """Load every tile of this block, and turn its V; all warps of the producer call it.

    One of them also hands out the tiles of packed sequences.
    """
    visit = functools.partial(load_and_turn_tile, kernel, block)
    if const_expr(block.handout is None):
        visit_tiles(None, block.launch, visit)
    elif cute.arch.make_warp_uniform(cute.arch.warp_idx()) == HANDING_WARP:
        hand_out(block.handout, block.launch, functools.partial(turn_until, kernel, block), (Int32(0), Int32(0)))
    else:
        visit_tiles(block.handout, block.launch, visit)


@cute.jit
def turn_until(kernel: cutlass.Constexpr, block: Block, done: tuple[Int32, Int32], position: Int32):
    """Turn this warp's share of the tiles before `position`; `done` is (tiles, position of the next V)."""
    tiles, kv_pos = done
    while tiles < position:
        tile = tile_of_words(block.launch, block.handout.handed(tiles))
        blocks = tile.visited_blocks()
        for _ in cutlass.range(blocks.hi - blocks.lo, unroll=1):
            turn(kernel, block, Int32(HANDING_WARP), kv_pos)
            kv_pos += 1
        tiles += 1
    return tiles, kv_pos


@cute.jit
def load_and_turn_tile(kernel: cutlass.Constexpr, block: Block, tile: QueryTile, q_pos: Int32, kv_pos: Int32):
    """As `load_tile`, by the first warp, one key block ahead of that whose V all warps turn."""
    blocks = tile.visited_blocks()
    n_block, n_lo, n_hi = blocks.visits(kernel.first_keys_first)
    loads = make_tile_loads(kernel, block, tile, blocks)
    ahead = kernel.traits.stored_v_stage > 1  # otherwise the place of the next V is free when this one is turned
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        if n_hi >= n_lo:
            loads.k(kv_pos, n_block)
        loads.q(q_pos)
        if n_hi >= n_lo:
            loads.v(kv_pos, n_block)
    if n_hi >= n_lo:
        for i in cutlass.range(n_hi - n_lo, unroll=1):
            if warp == 0:
                loads.k(kv_pos + 1, n_hi - 1 - i)
                if const_expr(ahead):
                    loads.v(kv_pos + 1, n_hi - 1 - i)
            turn(kernel, block, warp, kv_pos)
            if warp == 0:
                if const_expr(not ahead):
                    loads.v(kv_pos + 1, n_hi - 1 - i)
            kv_pos += 1
        turn(kernel, block, warp, kv_pos)
        kv_pos += 1
    return kv_pos


@cute.jit
def turn(kernel: cutlass.Constexpr, block: Block, warp: Int32, position: Int32):
    """Turn this warp's share of V at `position`, once it is there and its place is free."""
    traits, tiles, rings = kernel.traits, block.tiles, block.rings
    nbytes = traits.tile_n * traits.head_dim_v
    rings.stored_v.wait(position)
    rings.v.wait_free(position)
    stored = tiles.stored_v + rings.stored_v.stage(position) * nbytes
    turned = tiles.turned_v + rings.v.stage(position) * nbytes
    over_columns = traits.turning_columns
    over_keys = TURNING_WARPS // over_columns
    parts = traits.head_dim_v // (over_columns * TURNED_COLUMNS)  # more at a time do not fit into the registers
    first_key, first_columns = warp // over_columns * TURNED_KEYS, warp % over_columns * TURNED_COLUMNS
    for i in cutlass.range(traits.tile_n // (over_keys * TURNED_KEYS), unroll=1):
        key = first_key + i * (over_keys * TURNED_KEYS)
        for j in cutlass.range(parts, unroll=1 if parts % 2 else 2):
            column = first_columns + j * (over_columns * TURNED_COLUMNS)
            turn_part(stored, turned, key, column, traits.tile_n, traits.head_dim_v)
    cute.arch.fence_view_async_shared()
    rings.v.publish(position)
    rings.stored_v.release(position)


@cute.jit
def turn_part(
    stored: cute.Pointer,
    turned: cute.Pointer,
    key: Int32,
    column: Int32,
    keys: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Turn 16 keys x 32 columns of a (keys, columns) tile from `key` and `column` on, by a warp."""
    lane = cute.arch.lane_idx()
    matrix, row = lane // 8, lane % 8
    load = cute.make_copy_atom(warp_instructions.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), cutlass.Uint16)
    store = cute.make_copy_atom(warp_instructions.StMatrix8x8x16bOp(transpose=False, num_matrices=4), cutlass.Uint16)
    found, sorted_bytes = (cute.make_rmem_tensor((8, 1), cutlass.Uint16) for _ in range(2))
    # Matrices: keys 0 to 7 and 8 to 15 of columns 0 to 15, then of columns 16 to 31.
    offset = swizzled(key + matrix % 2 * 8 + row, column // CHUNK + matrix // 2, keys, columns)
    cute.copy(load, chunk(stored + offset), found)
    pairs, words = cute.recast_tensor(found, Int32), cute.recast_tensor(sorted_bytes, Int32)
    for half in cutlass.range_constexpr(2):
        low, high = pairs[2 * half], pairs[2 * half + 1]
        words[2 * half] = cute.arch.prmt(low, high, EVEN_BYTES)
        words[2 * half + 1] = cute.arch.prmt(low, high, ODD_BYTES)
    # Matrices: even and odd columns of 0 to 15, then of 16 to 31.
    offset = swizzled(column + matrix // 2 * CHUNK + matrix % 2 + 2 * row, key // CHUNK, columns, keys)
    cute.copy(store, sorted_bytes, chunk(turned + offset))


def chunk(start: cute.Pointer) -> cute.Tensor:
    """The 16 bytes of a matrix's row at `start`."""
    return cute.make_tensor(cute.recast_ptr(start.align(CHUNK), dtype=cutlass.Uint16), cute.make_layout((8, 1)))
