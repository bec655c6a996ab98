"""Length classes: the part of a call's lengths that decides which row is fastest. Kernels are not compiled for lengths.

decode  a handful of queries against a long cache: one query tile, and the time is that of reading K and V
short   the main loop has few steps, so that prologue, epilogue and scheduling of blocks count
long    only the main loop counts
"""

from __future__ import annotations

from typing import Literal, get_args

LengthClass = Literal["decode", "short", "long"]
LENGTH_CLASSES: tuple[LengthClass, ...] = get_args(LengthClass)

DECODE_QUERIES = 16  # the m extent of the smallest tensor-core instruction: more queries begin to fill a query tile
# Main loops below a dozen steps of 128 keys. 1536 lies between the powers of two that are common and that are timed, so
# no such length sits on the edge: 1024 is short, 2048 is long.
LONG_LENGTH = 1536


def length_class_of(seqlen_q: int, seqlen_k: int) -> LengthClass:
    """The class of a call with `seqlen_q` queries and `seqlen_k` keys a sequence."""
    if seqlen_q <= DECODE_QUERIES:
        return "decode"
    return "short" if max(seqlen_q, seqlen_k) < LONG_LENGTH else "long"
