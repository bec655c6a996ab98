"""The fp32 workspace of a backward: row statistics and the gradient of Q before it is rounded.

    lse_log2   (heads_q, rows)               log-sum-exp times log2(e); +inf for rows without a key and rows that pad
    delta      (heads_q, rows)               rowsum(dO * O) minus the gradient of the log-sum-exp; 0 for rows that pad
    dq         (heads_q, tiles, tile_m * d)  the sum of dQ tiles, each in the order of the main kernel's fragments
    turns      (parts, heads_q, tiles)       how many blocks have come to a part of a tile, int32, if the first one
                                             stores what the others add to, or they add in turn (`KeyTile.turn_at`)

A backward that sums up dQ in registers has neither of the last two.

The rows of each sequence are padded to whole tiles of `tile_m` rows, so that tiles neither overlap nor need a
predicate. The source runs on Python ints and on traced values alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cuteflash.core.tile_numbers import count_tiles

Index = Any  # a Python int or a traced cutlass.Int32
PREPARE_WARPS = 8  # of the blocks that compute the statistics of a tile each
PARTS = 2  # of a dQ tile, at most, that are added one apart from the other


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Where the parts of a workspace lie, in elements.

    Attributes:
        batch, heads: batch entries and query heads.
        tiles: query tiles of one sequence; of packed sequences, the tile numbers of all together.
        tile_m: rows of a tile.
        head_dim: columns of dQ in it, padded; 0 if dQ needs no sum in memory, and so no turns.
    """

    batch: Index
    heads: Index
    tiles: Index
    tile_m: int
    head_dim: int

    @classmethod
    def dense(cls, batch: Index, heads: Index, seqlen_q: Index, tile_m: int, head_dim: int) -> Workspace:
        """The workspace of a batch whose sequences have one length."""
        return cls(batch, heads, (seqlen_q + tile_m - 1) // tile_m, tile_m, head_dim)

    @classmethod
    def packed(cls, batch: Index, heads: Index, rows: Index, tile_m: int, head_dim: int) -> Workspace:
        """The workspace of `batch` packed sequences in tensors of `rows` rows; see `tile_numbers.first_tile`."""
        return cls(1, heads, count_tiles(rows, batch, tile_m), tile_m, head_dim)

    @property
    def rows(self) -> Index:
        """Padded rows of all sequences of one head."""
        return self.batch * self.tiles * self.tile_m

    @property
    def sink_parts(self) -> Index:
        """Parts that add up to the gradient of a head's sink, in a tensor of their own: one of each warp and tile."""
        return self.batch * self.tiles * PREPARE_WARPS

    @property
    def size(self) -> Index:
        """Elements of the whole workspace; as an int it may pass 32 bits."""
        turns = PARTS * self.batch * self.tiles if self.head_dim else 0
        return self.heads * (self.rows * (2 + self.head_dim) + turns)
