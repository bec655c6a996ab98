"""What a block asks L2 for before the launch ahead of it has ended: what it will look up first, one thing by another.

That launch may still write it. A copy in L2 follows what is written, so that asking early is always right.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

LINE_WORDS = 32  # of four bytes, in a line of the caches
WARP = 32


@cute.jit
def fetch_vectors(vectors: cutlass.Constexpr[tuple[Any, ...]], first_warp: cutlass.Constexpr[int] = 0):
    """Bring vectors of four-byte elements into L2, of each a line a thread of a block; None are skipped.

    The block's warps from `first_warp` on call it.
    """
    for vector in vectors:
        if const_expr(vector is not None):
            fetch_line(vector, cute.arch.thread_idx()[0] - WARP * first_warp)


@cute.jit
def fetch_table(table: cute.Tensor | None, first_warp: cutlass.Constexpr[int] = 0):
    """Bring the lines of a table of four-byte elements into L2, each by another thread of the grid, likewise."""
    if const_expr(table is not None):
        left_out = WARP * first_warp
        threads = cute.arch.block_dim()[0] - left_out
        fetch_line(table, cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0] - left_out)


@cute.jit
def fetch_line(tensor: cute.Tensor, number: Int32):
    """Bring one of the lines that a tensor of four-byte elements spans into L2, if it has so many."""
    first = number * LINE_WORDS
    if first < span_of(tensor):
        cute.arch.prefetch((tensor.iterator + first).llvm_ptr, cache_level="L2")


def span_of(tensor: cute.Tensor) -> Any:
    """Elements from a tensor's first one to its last one in memory; `cute.cosize` would divide to find that."""
    counts, strides = (cute.flatten_to_tuple(x) for x in (tensor.shape, tensor.stride))
    return 1 + sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True))
