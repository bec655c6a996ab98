"""The producer warp of the latent-attention decode: Q of a tile, and its pages into two places in turn."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.latent import each_latent_tile
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm90.mla_decode_bundles import LEFT, RIGHT, MlaBlock, next_position, parity
from cuteflash.mla_problem import LATENT_DIM
from cuteflash.traits.mla_sm90 import ELEMENT_BYTES, SLAB, SLABS, WGMMA_M


@cute.jit
def load(kernel: cutlass.Constexpr, block: MlaBlock):
    """Load all tiles of this block; one warp calls it."""
    each_latent_tile(block.launch, functools.partial(load_tile, kernel, block))


@cute.jit
def load_tile(kernel: cutlass.Constexpr, block: MlaBlock, tile: QueryTile, q_pos: Int32, kv_pos: Int32):
    """Load Q and the pages of a tile; returns the position of the next one's.

    The first pages go before Q, whose place the output of the last tile leaves later than its pages.
    """
    blocks = tile.visited_blocks()
    count = cutlass.max(blocks.hi - blocks.lo, 0)
    ahead = cutlass.min(count, 2)
    last = blocks.hi - 1
    entry = place_of(block, tile, blocks.lo, last)
    for i in cutlass.range(ahead, unroll=1):
        following = place_of(block, tile, blocks.lo + i + 1, last)
        load_page(kernel, block, entry, i, kv_pos)
        entry = following
    load_q(block, tile, q_pos)
    for i in cutlass.range(ahead, count, unroll=1):
        following = place_of(block, tile, blocks.lo + i + 1, last)
        load_page(kernel, block, entry, i, kv_pos)
        entry = following
    return next_position(kv_pos, (count + 1) // 2, count // 2)


@cute.jit
def place_of(block: MlaBlock, tile: QueryTile, page: Int32, last: Int32):
    """Where a page of a tile lies, or (0, 0) if the tile does not read it; looked up while the one before it loads."""
    inside, entry = Int32(0), Int32(0)
    if page <= last:
        inside, entry = block.pages.place(tile.sequence, page)
    return inside, entry


@cute.jit
def load_q(block: MlaBlock, tile: QueryTile, q_pos: Int32):
    """Load the tile's rows of Q once the last tile's are not needed any more; rows past the last one become 0."""
    rings, tma, sQ = block.rings, block.tma, block.tiles.sQ
    wait_phase(rings.q_empty, (q_pos & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(rings.q_full, cute.size(sQ) * ELEMENT_BYTES)
    gQ = cute.local_tile(tma.gQ[None, None, tile.batch], (WGMMA_M, LATENT_DIM), (None, 0))
    stages = cute.make_tensor(sQ.iterator, cute.append(sQ.layout, cute.make_layout(1)))
    tQsQ, tQgQ = atoms.tma_partition(tma.load_q, stages, gQ)
    cute.copy(tma.load_q, tQgQ[None, tile.m_block], tQsQ[None, 0], tma_bar_ptr=rings.q_full)


@cute.jit
def load_page(kernel: cutlass.Constexpr, block: MlaBlock, place: tuple[Int32, Int32], number: Int32, kv_pos: Int32):
    """Load page `number` of a tile, which lies at `place`, each half once its place is free."""
    traits, rings, tma = kernel.traits, block.rings, block.tma
    inside, entry = place
    page = number % 2
    phase = parity(kv_pos, page, number // 2) ^ 1
    rows = traits.tile_n
    boxes = cute.local_tile(tma.gK[None, None, entry], (rows, SLAB), (inside, None))  # (rows, columns, slab)
    tKsK, tKgK = atoms.tma_partition(tma.load_k, block.tiles.sK_slabs, boxes)
    for group in cutlass.range_constexpr(len(traits.groups)):
        first, end = traits.group_starts[group : group + 2]
        if cutlass.const_expr(group == 0):
            wait_phase(rings.empty + 2 * page + LEFT, phase)
        if cutlass.const_expr(group == traits.left_groups):
            wait_phase(rings.empty + 2 * page + RIGHT, phase)
        barrier = rings.full + page * rings.groups + group
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, (end - first) * rows * SLAB * ELEMENT_BYTES)
        for slab in cutlass.range_constexpr(first, end):
            cute.copy(tma.load_k, tKgK[None, slab], tKsK[None, page * SLABS + slab], tma_bar_ptr=barrier)
