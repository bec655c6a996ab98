"""Interval masks: query `i` sees the keys of one interval `[lo, hi)`.

Which key blocks a tile visits, which of them need no element mask, and the element mask itself all derive from
`kv_bounds`. The source runs on Python ints (with which the tests try every element) and on traced `Int32` values alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass

from cuteflash.problem import MaskKind, has_left_edge

Index = Any  # a Python int or a traced cutlass.Int32


def blocks_of(count: Index, size: Index) -> Index:
    """How many blocks of `size` hold `count`.

    A shift divides by a power of two, in one instruction: the quotient of signed values would take eight.
    """
    is_power = isinstance(size, int) and size & (size - 1) == 0
    return (count + size - 1) >> (size.bit_length() - 1) if is_power else (count + size - 1) // size


@dataclasses.dataclass(frozen=True)
class IntervalMask:
    """The keys each query of one sequence sees.

    Attributes:
        kind: ``"full"``, ``"causal"`` or ``"window"``.
        seqlen_q, seqlen_k: lengths; the last query is aligned with the last key.
        window_left, window_right: keys visible before and after the query's own position (``"window"`` only).
        chunk: positions of a chunk, at least 1; a query sees only keys of its own (``"window"`` only); None is none.
        tree: of the last `seqlen_q` keys a query may see fewer than its bounds say (``"causal"`` and ``"window"``).
    """

    kind: cutlass.Constexpr[MaskKind]
    seqlen_q: Index
    seqlen_k: Index
    window_left: Index
    window_right: Index
    chunk: Index | None = None
    tree: cutlass.Constexpr[bool] = False

    def kv_bounds(self, query: Index) -> tuple[Index, Index]:
        """The keys `[lo, hi)` that `query` sees; empty if `hi <= lo`."""
        if self.kind == "full":
            return 0, self.seqlen_k
        position = query + self.seqlen_k - self.seqlen_q
        if self.kind == "causal":
            return 0, cutlass.min(self.seqlen_k, position + 1)
        # The left window is clamped before the subtraction: unbounded is a large number, not infinity.
        lo = cutlass.max(position - cutlass.min(self.window_left, self.seqlen_k + self.seqlen_q), 0)
        hi = cutlass.min(position + cutlass.min(self.window_right, self.seqlen_k + self.seqlen_q) + 1, self.seqlen_k)
        if self.chunk is None:
            return lo, hi
        chunk = self._chunk()
        # Positions before the first key have the chunk that ends there, whatever their own would be.
        first = (cutlass.max(position + chunk, 0) // chunk - 1) * chunk
        return cutlass.max(lo, first), cutlass.min(hi, first + chunk)

    def n_blocks(self, first: Index, last: Index, tile_n: int) -> tuple[Index, Index]:
        """The key blocks `[lo, hi)` that some query of `first..last` (inclusive) sees."""
        lo, _ = self.kv_bounds(first)
        _, hi = self.kv_bounds(last)
        n_hi = cutlass.max((cutlass.max(hi, 0) + tile_n - 1) // tile_n, 0)
        n_lo = cutlass.min(lo // tile_n, n_hi) if has_left_edge(self.kind) else 0
        return n_lo, n_hi

    def most_blocks(self, tokens: int, tile_n: int) -> Index:
        """How many key blocks any `tokens` neighbouring queries visit at most, at least 1."""
        blocks = blocks_of(self.seqlen_k, tile_n)
        if self.kind == "window":
            seen = cutlass.min(self.window_left, self.seqlen_k) + cutlass.min(self.window_right, self.seqlen_k) + tokens
            blocks = cutlass.min(blocks, blocks_of(seen - 1, tile_n) + 1)
        return cutlass.max(blocks, 1)

    def full_n_blocks(self, first: Index, last: Index, tile_n: int) -> tuple[Index, Index]:
        """The key blocks `[lo, hi)` that every query of `first..last` (inclusive) sees whole; none if `lo > hi`."""
        _, hi = self.kv_bounds(first)
        if self.tree:
            hi = cutlass.min(hi, self.seqlen_k - self.seqlen_q)
        n_hi = cutlass.max(hi, 0) // tile_n
        if not has_left_edge(self.kind):
            return 0, n_hi
        lo, _ = self.kv_bounds(last)
        return (lo + tile_n - 1) // tile_n, n_hi

    # The same seen from the keys, for the backward: which queries see a key.

    def q_bounds(self, key: Index) -> tuple[Index, Index]:
        """The queries `[lo, hi)` that see `key`; empty if `hi <= lo`."""
        if self.kind == "full":
            return 0, self.seqlen_q
        position = key - self.seqlen_k + self.seqlen_q  # the query whose own position the key is
        if self.kind == "causal":
            return cutlass.max(position, 0), self.seqlen_q
        lo = cutlass.max(position - cutlass.min(self.window_right, self.seqlen_k + self.seqlen_q), 0)
        hi = cutlass.min(position + cutlass.min(self.window_left, self.seqlen_k + self.seqlen_q) + 1, self.seqlen_q)
        if self.chunk is None:
            return lo, hi
        chunk = self._chunk()
        first = key // chunk * chunk - self.seqlen_k + self.seqlen_q
        return cutlass.max(lo, first), cutlass.min(hi, first + chunk)

    def m_blocks(self, first: Index, last: Index, tile_m: int) -> tuple[Index, Index]:
        """The query blocks `[lo, hi)` in which some query sees one of the keys `first..last` (inclusive)."""
        lo, _ = self.q_bounds(first)
        _, hi = self.q_bounds(last)
        m_hi = cutlass.max((cutlass.max(hi, 0) + tile_m - 1) // tile_m, 0)
        return cutlass.min(lo // tile_m, m_hi), m_hi

    def full_m_blocks(self, first: Index, last: Index, tile_m: int) -> tuple[Index, Index]:
        """The query blocks `[lo, hi)` whose queries all see every key `first..last` (inclusive)."""
        lo, _ = self.q_bounds(last)
        _, hi = self.q_bounds(first)
        return (lo + tile_m - 1) // tile_m, cutlass.max(hi, 0) // tile_m

    def _chunk(self) -> Index:
        """Positions of a chunk; one that holds all keys is no longer than they are, so that sums stay in 32 bits."""
        return cutlass.max(cutlass.min(self.chunk, self.seqlen_k), 1)
