"""Where the rows of a query tile lie in the problem: tokens, heads, visible keys."""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import Int32

from cuteflash.core.mask import IntervalMask


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """One work item: the queries `[first_token, first_token + tokens)` of a head, or of the heads packed with it.

    A row of the tile is (token, packed head), the head running fastest.

    Attributes:
        first_token: first query of the tile.
        head: query head, or KV head where `packed_heads` query heads are folded into the rows.
        batch: batch entry.
    """

    first_token: Int32
    head: Int32
    batch: Int32
    tokens: cutlass.Constexpr[int]

    def n_blocks(self, mask: IntervalMask, tile_n: int):
        """The key blocks `[lo, hi)` this tile visits."""
        return mask.n_blocks(self.first_token, self._last(mask), tile_n)

    def visits(self, mask: IntervalMask, tile_n: int, first_keys_first: bool):
        """(first, lo, hi): this tile visits key block `first`, then `[lo, hi)` from its end; `lo > hi` if it has none.

        The first is the last block, or with `first_keys_first` the one of key 0.
        """
        lo, hi = self.n_blocks(mask, tile_n)
        return (lo, lo + 1, hi) if first_keys_first else (hi - 1, lo, hi - 1)

    def full_n_blocks(self, mask: IntervalMask, tile_n: int):
        """The key blocks `[lo, hi)` that every query of this tile sees whole."""
        return mask.full_n_blocks(self.first_token, self._last(mask), tile_n)

    def rows(self, mask: IntervalMask, packed_heads: int) -> Int32:
        """How many rows of the tile exist."""
        return cutlass.min(self.tokens, mask.seqlen_q - self.first_token) * packed_heads

    def _last(self, mask: IntervalMask) -> Int32:
        return cutlass.min(self.first_token + self.tokens, mask.seqlen_q) - 1
