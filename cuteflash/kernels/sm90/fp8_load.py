"""Loads of 8-bit operands whose V lies as its rows are stored: the producer warpgroup turns each tile into V^T.

WGMMA reads 8-bit operands only if the dimension that it sums over is contiguous, which for V is that of the keys, and
TMA does not transpose. The warps move pairs of bytes with ldmatrix and stmatrix, whose elements have 16 bits:

    ldmatrix.trans   a lane gets two columns of two neighbouring keys, and the same of the keys 8 further
    byte permutes    sort these eight bytes by column: four keys of an even and four of an odd one
    stmatrix         writes them as rows of V^T, even columns and odd ones apart

The four keys of a register are those that a lane's P has in its register, see `warpgroup.round_p`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warp as warp_instructions

from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm90.bundles import Block
from cuteflash.kernels.sm90.handout import hand_out, tile_of_words, visit_tiles
from cuteflash.kernels.sm90.load import make_tile_loads
from cuteflash.kernels.sm90.swizzle import CHUNK, chunk_beside, swizzled
from cuteflash.traits.fp8_sm90 import TURNED_COLUMNS, TURNED_KEYS, TURNING_WARPS, FwdTraitsFp8Sm90

EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # selectors of a byte permute
HANDING_WARP = 1  # that finds the tiles of packed sequences: meanwhile its share of V waits


@cute.jit
def load_and_turn(kernel: cutlass.Constexpr, block: Block):
    """Load every tile of this block, and turn its V; all warps of the producer call it.

    One of them also hands out the tiles of packed sequences.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    turning = Turning.of(kernel.traits, warp)
    visit = functools.partial(load_and_turn_tile, kernel, block, turning)
    if const_expr(block.handout is None):
        visit_tiles(None, block.launch, visit)
    elif warp == HANDING_WARP:
        follow = functools.partial(turn_until, kernel, block, turning)
        hand_out(block.handout, block.launch, follow, (Int32(0), Int32(0)))
    else:
        visit_tiles(block.handout, block.launch, visit)


@cute.jit
def turn_until(kernel: cutlass.Constexpr, block: Block, turning: Turning, done: tuple[Int32, Int32], position: Int32):
    """Turn this warp's share of the tiles before `position`; `done` is (tiles, position of the next V)."""
    tiles, kv_pos = done
    while tiles < position:
        tile = tile_of_words(block.launch, block.handout.handed(tiles))
        blocks = tile.visited_blocks()
        for _ in cutlass.range(blocks.hi - blocks.lo, unroll=1):
            turn(kernel, block, turning, kv_pos)
            kv_pos += 1
        tiles += 1
    return tiles, kv_pos


@cute.jit
def load_and_turn_tile(
    kernel: cutlass.Constexpr, block: Block, turning: Turning, tile: QueryTile, q_pos: Int32, kv_pos: Int32
):
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
            turn(kernel, block, turning, kv_pos)
            if warp == 0:
                if const_expr(not ahead):
                    loads.v(kv_pos + 1, n_hi - 1 - i)
            kv_pos += 1
        turn(kernel, block, turning, kv_pos)
        kv_pos += 1
    return kv_pos


@dataclasses.dataclass(frozen=True)
class Turning:
    """How the warps of the producer share a tile of V, (keys, columns), and where this lane's rows of matrices lie.

    A part is 16 keys x 32 columns. Those of a warp follow each other at constant distances, so that an address is one
    of the lane's, XORed with a constant if the swizzle asks for it, and a constant beside it.

    Attributes:
        keys, columns: of the tile, and of V^T the other way around.
        over_columns: warps that share the columns of the same keys; the others have other keys.
        loaded, stored: where this lane's row of the first part begins, in V as it is stored and in V^T.
        selectors: of the byte permutes that make the first and the second word of two registers.
    """

    keys: cutlass.Constexpr[int]
    columns: cutlass.Constexpr[int]
    over_columns: cutlass.Constexpr[int]
    loaded: Int32
    stored: Int32
    selectors: tuple[Int32, Int32]

    @classmethod
    def of(cls, traits: FwdTraitsFp8Sm90, warp: Int32) -> Turning:
        """That of a warp."""
        keys, columns, over_columns = traits.tile_n, traits.head_dim_v, traits.turning_columns
        lane = cute.arch.lane_idx()
        matrix, row = lane // 8, lane % 8
        key, column = warp // over_columns * TURNED_KEYS, warp % over_columns * TURNED_COLUMNS
        # Matrices: keys 0 to 7 and 8 to 15 of columns 0 to 15, then of columns 16 to 31.
        loaded = swizzled(key + matrix % 2 * 8 + row, column // CHUNK + matrix // 2, keys, columns)
        # Matrices: one of two neighbouring columns, each, of 0 to 15, then of 16 to 31.
        is_odd, first, second = matrix % 2, Int32(EVEN_BYTES), Int32(ODD_BYTES)
        if const_expr(traits.mixes_columns):
            is_odd = is_odd ^ row // 4
            first, second = (Int32(a ^ lane // 16 * (EVEN_BYTES ^ ODD_BYTES)) for a in (EVEN_BYTES, ODD_BYTES))
        stored = swizzled(column + matrix // 2 * CHUNK + is_odd + 2 * row, key // CHUNK, columns, keys)
        return cls(keys, columns, over_columns, loaded, stored, (first, second))

    def parts(self) -> list[tuple[int, int]]:
        """The first key and the first column of each part of a warp, less those of its first one."""
        step_keys = TURNING_WARPS // self.over_columns * TURNED_KEYS
        step_columns = self.over_columns * TURNED_COLUMNS
        return list(itertools.product(range(0, self.keys, step_keys), range(0, self.columns, step_columns)))

    def load(self, tile: Int32, part: tuple[int, int]) -> cute.Tensor:
        """Four registers: two columns of two neighbouring keys, and of the keys 8 further; then 16 columns further."""
        key, column = part
        found = cute.make_rmem_tensor((8, 1), cutlass.Uint16)
        atom = cute.make_copy_atom(warp_instructions.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), cutlass.Uint16)
        cute.copy(atom, chunk_beside(tile + self.loaded, key, column // CHUNK, (self.keys, self.columns)), found)
        return found

    def sort_and_store(self, tile: Int32, part: tuple[int, int], found: cute.Tensor) -> None:
        """Make words of four keys of a column each, and store them as rows of V^T."""
        key, column = part
        sorted_bytes = cute.make_rmem_tensor((8, 1), cutlass.Uint16)
        pairs, words = cute.recast_tensor(found, Int32), cute.recast_tensor(sorted_bytes, Int32)
        for half in range(2):
            for i, selector in enumerate(self.selectors):
                words[2 * half + i] = cute.arch.prmt(pairs[2 * half], pairs[2 * half + 1], selector)
        atom = cute.make_copy_atom(warp_instructions.StMatrix8x8x16bOp(transpose=False, num_matrices=4), cutlass.Uint16)
        cute.copy(atom, sorted_bytes, chunk_beside(tile + self.stored, column, key // CHUNK, (self.columns, self.keys)))


@cute.jit
def turn(kernel: cutlass.Constexpr, block: Block, turning: Turning, position: Int32):
    """Turn this warp's share of V at `position`, once it is there and its place is free."""
    traits, tiles, rings = kernel.traits, block.tiles, block.rings
    nbytes = traits.tile_n * traits.head_dim_v
    rings.stored_v.wait(position)
    rings.v.wait_free(position)
    stored = (tiles.stored_v + rings.stored_v.stage(position) * nbytes).toint()
    turned = (tiles.turned_v + rings.v.stage(position) * nbytes).toint()
    for part in turning.parts():
        turning.sort_and_store(turned, part, turning.load(stored, part))
    cute.arch.fence_view_async_shared()
    rings.v.publish(position)
    rings.stored_v.release(position)
