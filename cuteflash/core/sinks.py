"""Attention sinks: a logit of each query head that joins the softmax of its rows and has no value."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cuteflash.core.lengths import Index
from cuteflash.core.tile import QueryTile


@dataclasses.dataclass(frozen=True)
class Sinks:
    """The sinks of a forward.

    Attributes:
        logits: (heads_q,)
        sequences: number of packed sequences; the one with this number holds the rows that belong to none, and has no
            sink. None if queries are dense.
    """

    logits: cute.Tensor
    sequences: Index | None

    def of(self, tile: QueryTile, packed_head: Int32) -> Float32:
        """The sink of one of the heads whose rows are in a tile; -inf is none.

        Parts of a tile have none: it joins when they are merged.
        """
        logit = self.of_all_keys(tile, packed_head)
        return logit if tile.share is None else cutlass.select_(tile.share.is_whole(), logit, -Float32.inf)

    def of_all_keys(self, tile: QueryTile, packed_head: Int32) -> Float32:
        """As `of`, also of a tile whose keys are split."""
        logit = self.logits[tile.head * tile.packed_heads + packed_head].to(Float32)
        return logit if self.sequences is None else cutlass.select_(tile.sequence < self.sequences, logit, -Float32.inf)
