"""How rows of 16-bit elements lie in swizzled shared memory, in both families."""

from __future__ import annotations

import math

CHUNK = 8  # elements of one 16-byte access


def swizzle_width(cols: int) -> int:
    """Columns of the slabs a shared-memory tile is swizzled in: the widest of 64, 32, 16 that divides `cols`."""
    return math.gcd(cols, 64)
