"""What a block asks L2 for before the launch ahead of it has ended: what it will look up first, one thing by another.

That launch may still write it. A copy in L2 follows what is written, so that asking early is always right.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

LINE_WORDS = 32  # of four bytes, in a line of the caches


@cute.jit
def fetch_vectors(vectors: cutlass.Constexpr[tuple[Any, ...]]):
    """Bring vectors of four-byte elements into L2, of each a line a thread; None are skipped."""
    for vector in vectors:
        if const_expr(vector is not None):
            fetch_line(vector, cute.arch.thread_idx()[0])


@cute.jit
def fetch_table(table: cute.Tensor | None):
    """Bring the lines of a table of four-byte elements into L2, each by another thread of the grid."""
    if const_expr(table is not None):
        fetch_line(table, cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0])


@cute.jit
def fetch_line(tensor: cute.Tensor, number: Int32):
    """Bring one of the lines that a tensor of four-byte elements spans into L2, if it has so many."""
    first = number * LINE_WORDS
    if first < cute.cosize(tensor.layout):
        cute.arch.prefetch((tensor.iterator + first).llvm_ptr, cache_level="L2")
