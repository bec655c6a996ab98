"""The producer: one warp that issues every TMA load of its block's tiles."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms import sm90 as atoms
from cuteflash.atoms.barriers import TmaRing
from cuteflash.core.tile import QueryTile
from cuteflash.core.work import Work
from cuteflash.kernels.sm90.bundles import Rings, Tiles, Tma


def _load(atom: cute.CopyAtom, ring: TmaRing, g: cute.Tensor, s: cute.Tensor, position: Int32, block: Int32) -> None:
    """Load box `block` as tile `position` of `ring`, once its stage is free."""
    barrier = ring.acquire(position)
    cute.copy(atom, g[None, block], s[None, ring.stage(position)], tma_bar_ptr=barrier)


@cute.jit
def load_tiles(kernel: cutlass.Constexpr, tma: Tma, tiles: Tiles, rings: Rings, work: Work):
    """Load Q once and K, V block by block for every tile of this block, last key block first."""
    traits = kernel.traits
    order, mask = work.order, work.mask
    kv_pos = Int32(0)
    q_pos = Int32(0)
    wave = Int32(0)
    index = order.index(wave, kernel.longest_first)
    while index < order.size():
        m_block, head, batch = order.tile(index, kernel.longest_first)
        tile = QueryTile(m_block * kernel.tile_tokens, head, batch, kernel.tile_tokens)
        n_lo, n_hi = tile.n_blocks(mask, traits.tile_n)
        kv_head = head // work.heads_per_kv
        gQ = cute.local_tile(tma.gQ[None, None, head, batch], kernel.query_box(traits.head_dim), (None, 0))
        gK = cute.local_tile(tma.gK[None, None, kv_head, batch], (traits.tile_n, traits.head_dim), (None, 0))
        gV = cute.local_tile(tma.gV[None, None, kv_head, batch], (traits.tile_n, traits.head_dim_v), (None, 0))
        tQsQ, tQgQ = atoms.tma_partition(tma.load_q, tiles.sQ_boxes, gQ)
        tKsK, tKgK = atoms.tma_partition(tma.load_k, tiles.sK, gK)
        tVsV, tVgV = atoms.tma_partition(tma.load_v, tiles.sV, gV)
        load_k = functools.partial(_load, tma.load_k, rings.k, tKgK, tKsK)
        load_v = functools.partial(_load, tma.load_v, rings.v, tVgV, tVsV)

        # The first K goes before Q: its stage is free while the consumers still read the last tile's Q.
        if n_hi > n_lo:
            load_k(kv_pos, n_hi - 1)
        barrier = rings.q.acquire(q_pos)
        for wg in cutlass.range_constexpr(traits.mma_warpgroups):
            box = m_block * traits.mma_warpgroups + wg
            cute.copy(tma.load_q, tQgQ[None, box], tQsQ[None, wg], tma_bar_ptr=barrier)
        q_pos += 1
        if n_hi > n_lo:
            for i in cutlass.range(n_hi - n_lo - 1, unroll=1):
                load_k(kv_pos + 1, n_hi - 2 - i)
                load_v(kv_pos, n_hi - 1 - i)
                kv_pos += 1
            load_v(kv_pos, n_lo)
            kv_pos += 1
        wave += 1
        index = order.index(wave, kernel.longest_first)
