"""The producer warp of the latent-attention decode: Q of a tile, and its pages into two places in turn."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import wait_phase
from cuteflash.core.latent import LatentLaunch, each_latent_tile, place_of
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.common.mla_parts import joins
from cuteflash.kernels.sm90.mla_decode_bundles import (
    FIRST_PAGE,
    LAST_SLAB,
    SLABS_BUT_LAST,
    MlaBlock,
    parity,
)
from cuteflash.traits.mla_sm90 import CONSUMERS, ELEMENT_BYTES, PART_SLABS, PARTS, SLAB, SLABS, WGMMA_M

NOT_JOINED = -1


@cute.jit
def load(kernel: cutlass.Constexpr, block: MlaBlock):
    """Load all tiles of this block; one warp calls it.

    What the last one is to be put together with comes after the loop: lanes that go different ways inside of it would
    keep the coordinates of boxes out of uniform registers.
    """
    joined = cute.make_rmem_tensor(1, Int32)
    joined[0] = NOT_JOINED
    each_latent_tile(block.launch, functools.partial(load_tile, kernel, block, joined))
    if const_expr(block.parts is not None):
        if joined[0] != NOT_JOINED:
            load_other(block, joined[0])


@cute.jit
def load_tile(
    kernel: cutlass.Constexpr, block: MlaBlock, joined: cute.Tensor, tile: QueryTile, q_pos: Int32, kv_pos: Int32
):
    """Load Q and the pages of a tile; returns the position of the next one's.

    `joined` becomes twice the owner of a tile whose second part this block adds to its own, and the parity of the phase
    in which Q is let go of, or `NOT_JOINED`.

    Most of Q is not needed any more once the last tile's last scores are there, and goes first; its last slab goes
    behind the first page, since P lies there until the last product.
    """
    blocks = tile.visited_blocks()
    first, end = blocks.lo, blocks.hi
    # Pages that are loaded before the last slab of Q: none of the block's first tile, which would wait for them.
    ahead = cutlass.min(first + cutlass.min(q_pos, 1), end)
    place = place_of(block, tile, first, end)
    if q_pos > 0:
        fetch_q(block, tile)
    load_q(block, tile, q_pos, range(SLABS - 1), SLABS_BUT_LAST)
    kv_pos, place = load_pages(kernel, block, tile, (first, first, ahead, end), place, kv_pos)
    load_q(block, tile, q_pos, range(SLABS - 1, SLABS), LAST_SLAB)
    kv_pos, _ = load_pages(kernel, block, tile, (first, ahead, end, end), place, kv_pos)
    if const_expr(block.parts is not None):
        joined[0] = cutlass.select_(joins(tile.share), 2 * tile.share.owner + (q_pos & 1), Int32(NOT_JOINED))
    return kv_pos


@cute.jit
def load_other(block: MlaBlock, joined: Int32):
    """Load another block's part of the block's last tile, where most of Q was."""
    wait_phase(block.rings.q_empty + SLABS_BUT_LAST, joined & 1)
    block.parts.fetch_other(joined // 2, rows_of_block(block.launch))


def rows_of_block(launch: LatentLaunch) -> Int32:
    """Rows of the block's tiles, all of which are the same query tile of different sequences."""
    return cutlass.min(launch.rows - cute.arch.block_idx()[0] % launch.line.by_lanes * launch.tile_m, launch.tile_m)


@cute.jit
def load_pages(
    kernel: cutlass.Constexpr,
    block: MlaBlock,
    tile: QueryTile,
    numbers: tuple[Int32, Int32, Int32, Int32],
    place: tuple[Int32, Int32],
    kv_pos: Int32,
):
    """Load some pages of a tile; returns the position, and where the page after them lies.

    Args:
        numbers: the first page of the tile, the first one to load, the end of those, the end of the tile's.
        place: where the first one to load lies.
    """
    first, begin, stop, end = numbers
    for number in cutlass.range(begin, stop, unroll=1):
        following = place_of(block, tile, number + 1, end)
        page = (number - first) % CONSUMERS
        load_page(kernel, block, place, page, parity(kv_pos, page))
        kv_pos = kv_pos ^ (FIRST_PAGE << page)
        place = following
    return kv_pos, place


def fetch_q(block: MlaBlock, tile: QueryTile) -> None:
    """Bring a tile's rows of Q into L2, while the last tile's are still needed."""
    _, tQgQ = q_boxes(block, tile)
    with cute.arch.elect_one():
        for slab in range(SLABS):
            cute.prefetch(block.tma.load_q, tQgQ[None, slab])


@cute.jit
def load_q(
    block: MlaBlock,
    tile: QueryTile,
    q_pos: Int32,
    slabs: cutlass.Constexpr[range],
    part: cutlass.Constexpr[int],
):
    """Load slabs of the tile's rows of Q once the last tile's are not needed any more; rows past the last become 0."""
    rings, tma = block.rings, block.tma
    wait_phase(rings.q_empty + part, (q_pos & 1) ^ 1)
    tQsQ, tQgQ = q_boxes(block, tile)
    with cute.arch.elect_one():
        nbytes = len(slabs) * WGMMA_M * SLAB * ELEMENT_BYTES
        cute.arch.mbarrier_arrive_and_expect_tx(rings.q_full + part, nbytes)
    for slab in cutlass.range_constexpr(slabs.start, slabs.stop):
        cute.copy(tma.load_q, tQgQ[None, slab], tQsQ[None, slab], tma_bar_ptr=rings.q_full + part)


@cute.jit
def load_page(kernel: cutlass.Constexpr, block: MlaBlock, place: tuple[Int32, Int32], page: Int32, phase: Int32):
    """Load what lies at `place` as page 0 or 1, each part once its place is free."""
    traits, rings, tma = kernel.traits, block.rings, block.tma
    inside, entry = place
    phase = phase ^ 1
    rows = traits.tile_n
    boxes = cute.local_tile(tma.gK[None, None, entry], (rows, SLAB), (inside, None))  # (rows, columns, slab)
    tKsK, tKgK = atoms.tma_partition(tma.load_k, block.tiles.sK_slabs, boxes)
    for group, slabs in enumerate(traits.slabs_of_groups):
        for part in parts_from(slabs):  # all of it first: until then the phase of the page before may be incomplete
            wait_phase(rings.empty + PARTS * page + part, phase)
        barrier = rings.full + page * rings.groups + group
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(slabs) * rows * SLAB * ELEMENT_BYTES)
        for slab in slabs:
            cute.copy(tma.load_k, tKgK[None, slab], tKsK[None, page * SLABS + slab], tma_bar_ptr=barrier)


def parts_from(slabs: tuple[int, ...]) -> list[int]:
    """The parts of a page whose first slab is among these."""
    return [slab // PART_SLABS for slab in slabs if slab % PART_SLABS == 0]


def q_boxes(block: MlaBlock, tile: QueryTile) -> tuple[cute.Tensor, cute.Tensor]:
    """(slabs of Q in shared memory, slabs of a tile's rows), partitioned for TMA."""
    boxes = cute.local_tile(block.tma.gQ[None, None, tile.batch], (WGMMA_M, SLAB), (tile.m_block, None))
    return atoms.tma_partition(block.tma.load_q, block.tiles.sQ_slabs, boxes)
