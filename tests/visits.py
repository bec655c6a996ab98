"""Which query tiles the blocks of a one-pass backward visit, of one head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cuteflash.core.mask import IntervalMask
from cuteflash.core.tile import KeyTile


def visits(mask: IntervalMask, tile_m: int, tile_n: int, **order: bool) -> Iterator[tuple[Any, Any]]:
    """Each key tile and query tile that it visits, one key tile after the other; `order` as for `query_blocks`."""
    for n_block in range(-(-mask.seqlen_k // tile_n)):
        first: Any = n_block * tile_n
        tile: Any = KeyTile(n_block, 0, 0, 0, 0, 0, first, mask, tile_m, tile_n)  # type: ignore[arg-type]
        blocks = tile.query_blocks(**order)
        m_block = blocks.first
        for _ in range(blocks.count):
            yield tile, m_block
            m_block = blocks.following(m_block)
