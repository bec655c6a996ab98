"""Tiles of an e4m3 cache made into fp16 tiles, as the products read them: the role of the converting warpgroups.

    loading warps               converting warpgroups                           consumers
    e4m3 ──TMA──► stored tile   16 bytes a lane, cvt.f16x2.e4m3x2, 32 bytes ──► fp16 tile, swizzled for WGMMA

All numbers of e4m3 are numbers of fp16, NaN is NaN, and rows past the last key are zeros as they were loaded. The
scales are left to the softmax and to the end of the tile. How lanes share a tile: `cuteflash.traits.cache_sm90.Share`.
"""

from __future__ import annotations

import functools
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.atoms.barriers import Ring
from cuteflash.core.convert import halves_of_e4m3
from cuteflash.core.mask import Index
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm90.bundles import Block
from cuteflash.kernels.sm90.handout import visit_tiles
from cuteflash.kernels.sm90.swizzle import swizzle_bytes, swizzled
from cuteflash.traits.cache_sm90 import CHUNK, WARPS, Share
from cuteflash.traits.sm90 import WARPGROUP

WORDS = CHUNK // 4  # registers with a chunk of stored elements


@cute.jit
def convert(kernel: cutlass.Constexpr, block: Block):
    """Convert the tiles of K and V of every query tile of this block; all warps of the converting warpgroups call it.

    The first warpgroup converts K and, if there is no second one, V as well.
    """
    if const_expr(kernel.traits.converting_warpgroups == 1):
        visit_tiles(block.handout, block.launch, functools.partial(convert_tiles, kernel, block, ("k", "v")))
    elif cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) == 1:
        visit_tiles(block.handout, block.launch, functools.partial(convert_tiles, kernel, block, ("k",)))
    else:
        visit_tiles(block.handout, block.launch, functools.partial(convert_tiles, kernel, block, ("v",)))


@cute.jit
def convert_tiles(
    kernel: cutlass.Constexpr,
    block: Block,
    names: cutlass.Constexpr[tuple[str, ...]],
    tile: QueryTile,
    q_pos: Int32,
    kv_pos: Int32,
):
    """Convert the key blocks that a query tile visits; returns the next K/V position."""
    blocks = tile.visited_blocks()
    for _ in cutlass.range(blocks.hi - blocks.lo, unroll=1):
        for name in names:
            convert_tile(kernel, block, name, kv_pos)
        kv_pos += 1
    return kv_pos


def convert_tile(kernel, block: Block, name: str, position: Int32) -> None:
    """Convert the tile of K or V at `position`, once it is there and the place of the converted one is free."""
    traits, base, rings = kernel.traits, block.tiles.base, block.rings
    stored_ring, ring = (rings.stored_k, rings.k) if name == "k" else (rings.stored_v, rings.v)
    columns = traits.head_dim if name == "k" else traits.head_dim_v
    nbytes = traits.tile_n * columns
    stored = base + traits.smem_plan[f"stored_{name}"].start + stage_bytes(stored_ring, position, nbytes)
    converted = base + traits.smem_plan[name].start + stage_bytes(ring, position, 2 * nbytes)
    convert_share(stored_ring, ring, position, (stored, converted), (traits.tile_n, columns), traits.share(columns))


def stage_bytes(ring: Ring, position: Int32, nbytes: int) -> Int32:
    """Where the stage of a tile of so many bytes begins."""
    return cute.assume(ring.stage(position) * nbytes, divby=nbytes)


@cute.jit
def convert_share(
    stored_ring: Ring,
    ring: Ring,
    position: Int32,
    tiles: tuple[cute.Pointer, cute.Pointer],
    shape: cutlass.Constexpr[tuple[int, int]],
    share: cutlass.Constexpr[Share],
):
    """Convert this warp's share of a tile of `shape`, and publish it; the stored tile is released."""
    stored, converted = tiles
    rows, columns = shape
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    row, chunk = place(share, cute.arch.lane_idx())
    # From one of a warp's units to the next rows: all of a swizzle's pattern, so that only the first are looked up.
    step, first = share.rows * swizzle_bytes(columns), warp * share.row_units
    chunks = cute.make_rmem_tensor((WORDS, share.row_units, share.columns), Uint32)
    stored_ring.wait(position)
    for column in cutlass.range_constexpr(share.columns):
        at = swizzled(row, column * share.chunks + chunk, rows, columns) + first * step
        for i in cutlass.range_constexpr(share.row_units):
            copy_chunk(chunk_at(stored, at + i * step), chunks[None, i, column])
    step = share.rows * swizzle_bytes(2 * columns)
    ring.wait_free(position)
    for column, half in itertools.product(range(share.columns), range(2)):
        at = swizzled(row, 2 * (column * share.chunks + chunk) + half, rows, 2 * columns) + first * step
        for i in cutlass.range_constexpr(share.row_units):
            found = cute.make_rmem_tensor(WORDS, Uint32)
            for word in cutlass.range_constexpr(WORDS // 2):
                found[2 * word], found[2 * word + 1] = halves_of_e4m3(chunks[half * WORDS // 2 + word, i, column])
            copy_chunk(found, chunk_at(converted, at + i * step))
    cute.arch.fence_view_async_shared()
    ring.publish(position)
    stored_ring.release(position)


def place(share: Share, lane: Index) -> tuple[Index, Index]:
    """(row, chunk) of a lane in a unit.

    Units of four chunks have eight rows, of which eight lanes take two that differ in their first and third bits: then
    four chunks of either lie in the two halves of the banks, or in their even and odd parts. Units of two chunks have
    16 rows, and eight lanes take four that follow each other.
    """
    row = lane // 8 ^ lane // 4 % 2 * 5 if share.chunks == 4 else lane // 2
    return row, lane % share.chunks


def chunk_at(start: cute.Pointer, offset: Int32) -> cute.Tensor:
    """The 16 bytes of shared memory `offset` bytes after `start`, as words; both are multiples of 16 bytes."""
    pointer = start + cute.assume(offset, divby=CHUNK)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(WORDS))


def copy_chunk(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copy 16 bytes between shared memory and registers."""
    cute.copy(cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=8 * CHUNK), source, target)
