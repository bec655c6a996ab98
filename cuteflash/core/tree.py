"""New tokens that form a tree: each query sees all keys before them, and those of them that its bits name.

The bits of a query are 64, of which bit j is token j of its sequence. A thread holds them turned around and inverted:
bit i says whether the key i places before the query's own is hidden, so that a distance is all that a score needs.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from cuteflash.core.tile import QueryTile
from cuteflash.problem import TREE_TOKENS_MAX

WORD = 32


@dataclasses.dataclass(frozen=True)
class Tree:
    """The bits of all queries: (2 rows,) Int32, the low word of each first."""

    words: cute.Tensor

    def hidden_before(self, tile: QueryTile, token: Int32) -> tuple[Int32, Int32]:
        """The turned and inverted bits of a tile's query, as two words, the low one first."""
        last = cutlass.max(tile.mask.seqlen_q - 1, 0)
        query = cutlass.min(tile.first_token + token, last)  # rows of a tile that do not exist take those of the last
        row = tile.batch * tile.mask.seqlen_q + tile.first_q + query
        low, high = (Uint32(cute.arch.brev(self.words[2 * row + i] ^ -1)) for i in (1, 0))
        shift = cutlass.max(TREE_TOKENS_MAX - 1 - query, 0)
        bits = (Uint64(high) << WORD | Uint64(low)) >> Uint64(shift)
        return Int32(Uint32(bits)), Int32(Uint32(bits >> WORD))


def is_hidden(words: tuple[Int32, Int32], distance: Int32) -> Boolean:
    """Whether the bits hide the key so many places before a query's own, 0 or more."""
    low, high = words
    word = cutlass.select_(distance < WORD, low, high)
    return (distance < TREE_TOKENS_MAX) & ((word >> (distance & (WORD - 1)) & 1) != 0)
