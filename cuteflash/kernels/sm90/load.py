"""TMA loads: by a producer warp for all tiles of its block, or by a consumer's warp between its steps."""

from __future__ import annotations

import dataclasses
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.schedule import each_tile
from cuteflash.core.tile import QueryTile
from cuteflash.kernels.sm90.bundles import Block, Rings, Tma


def _load(atom: cute.CopyAtom, ring: TmaRing, g: cute.Tensor, s: cute.Tensor, position: Int32, block: Int32) -> None:
    """Load box `block` as tile `position` of `ring`, once its stage is free."""
    barrier = ring.acquire(position)
    cute.copy(atom, g[None, block], s[None, ring.stage(position)], tma_bar_ptr=barrier)


@dataclasses.dataclass(frozen=True)
class TileLoads:
    """The loads of one query tile; a whole warp calls them.

    Attributes:
        tma, rings: what they go through.
        tQgQ, tKgK, tVgV: (box, n) in global memory, n counting warpgroups' query boxes or key blocks.
        tQsQ, tKsK, tVsV: (box, stage) in shared memory, each stage of Q being as many boxes as warpgroups.
        first_q_box: the tile's first query box.
        n_lo: its first key block.
    """

    tma: Tma
    rings: Rings
    tQgQ: cute.Tensor
    tQsQ: cute.Tensor
    tKgK: cute.Tensor
    tKsK: cute.Tensor
    tVgV: cute.Tensor
    tVsV: cute.Tensor
    first_q_box: Int32
    n_lo: Int32

    def q(self, position: Int32, warpgroups: int) -> None:
        """Load the tile's queries as tile `position` of their ring, once it is free."""
        barrier = self.rings.q.acquire(position)
        first = self.rings.q.stage(position) * warpgroups
        for wg in range(warpgroups):
            box = self.first_q_box + wg
            cute.copy(self.tma.load_q, self.tQgQ[None, box], self.tQsQ[None, first + wg], tma_bar_ptr=barrier)

    def k(self, position: Int32, n_block: Int32) -> None:
        """Load K of a key block as tile `position` of its ring, once the stage is free."""
        _load(self.tma.load_k, self.rings.k, self.tKgK, self.tKsK, position, n_block)

    def v(self, position: Int32, n_block: Int32) -> None:
        """Load V of a key block as tile `position` of its ring, once the stage is free."""
        _load(self.tma.load_v, self.rings.v, self.tVgV, self.tVsV, position, n_block)


def make_tile_loads(kernel, block: Block, m_block: Int32, tile: QueryTile) -> TileLoads:
    """Partition the boxes of query tile `m_block`."""
    tma, tiles, rings, work = block.tma, block.tiles, block.rings, block.work
    traits = kernel.traits
    head, batch, kv_head = tile.head, tile.batch, tile.head // work.heads_per_kv
    n_lo, _ = tile.n_blocks(work.mask, traits.tile_n)
    gQ = cute.local_tile(tma.gQ[None, None, head, batch], kernel.query_box(traits.head_dim), (None, 0))
    gK = cute.local_tile(tma.gK[None, None, kv_head, batch], (traits.tile_n, traits.head_dim), (None, 0))
    gV = cute.local_tile(tma.gV[None, None, kv_head, batch], (traits.tile_n, traits.head_dim_v), (None, 0))
    tQsQ, tQgQ = atoms.tma_partition(tma.load_q, tiles.sQ_boxes, gQ)
    tKsK, tKgK = atoms.tma_partition(tma.load_k, tiles.sK, gK)
    tVsV, tVgV = atoms.tma_partition(tma.load_v, tiles.sV, gV)
    return TileLoads(tma, rings, tQgQ, tQsQ, tKgK, tKsK, tVgV, tVsV, m_block * traits.mma_warpgroups, n_lo)


@cute.jit
def load_ahead(loads: TileLoads, n_block: Int32, position: Int32):
    """Load K and V of a key block, if the tile has it, by the block's first warp; the others go on."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        if n_block >= loads.n_lo:
            loads.k(position, n_block)
            loads.v(position, n_block)


@cute.jit
def load_first(kernel: cutlass.Constexpr, loads: TileLoads, q_pos: Int32, kv_pos: Int32, n_hi: Int32):
    """Load Q and all but one stage of K and V, by the block's first warp."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        loads.q(q_pos, kernel.traits.mma_warpgroups)
    for i in cutlass.range_constexpr(kernel.traits.kv_stage - 1):
        load_ahead(loads, n_hi - 1 - i, kv_pos + i)


@cute.jit
def load(kernel: cutlass.Constexpr, block: Block):
    """Load every tile of this block; a whole warp calls it."""
    each_tile(block.work.order, kernel.longest_first, functools.partial(load_tile, kernel, block))


@cute.jit
def load_tile(kernel: cutlass.Constexpr, block: Block, index: Int32, q_pos: Int32, kv_pos: Int32):
    """Load Q once and K, V block by block, in the order of `QueryTile.visits`; returns the next K/V position."""
    traits = kernel.traits
    m_block, head, batch = block.work.order.tile(index, kernel.longest_first)
    tile = QueryTile(m_block * kernel.tile_tokens, head, batch, kernel.tile_tokens)
    n_block, n_lo, n_hi = tile.visits(block.work.mask, traits.tile_n, kernel.first_keys_first)
    loads = make_tile_loads(kernel, block, m_block, tile)

    # The first K goes before Q: its stage is free while the consumers still read the last tile's Q.
    if n_hi >= n_lo:
        loads.k(kv_pos, n_block)
    loads.q(q_pos, traits.mma_warpgroups)
    if n_hi >= n_lo:
        for i in cutlass.range(n_hi - n_lo, unroll=1):
            following = n_hi - 1 - i
            loads.k(kv_pos + 1, following)
            loads.v(kv_pos, n_block)
            n_block = following
            kv_pos += 1
        loads.v(kv_pos, n_block)
        kv_pos += 1
    return kv_pos
