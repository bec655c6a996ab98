"""Length classes: how far a call's lengths alone, which no kernel is compiled for, decide which row is fastest.

decode  a handful of queries against a long cache: one row block, the time is that of reading K and V
short   a prologue, an epilogue and the block scheduler weigh against a main loop of few steps
long    the main loop is all that counts
"""

from __future__ import annotations

from typing import Literal, get_args

LengthClass = Literal["decode", "short", "long"]
LENGTH_CLASSES: tuple[LengthClass, ...] = get_args(LengthClass)

DECODE_QUERIES = 16  # the m extent of the smallest tensor-core instruction: beyond it a query tile begins to be used
# Main loops below a dozen steps of 128 keys. 1536 lies between the powers of two that are common and that are timed, so
# no such length sits on the edge: 1024 is short, 2048 is long.
LONG_LENGTH = 1536


def length_class_of(seqlen_q: int, seqlen_k: int) -> LengthClass:
    """The class of a call with `seqlen_q` queries and `seqlen_k` keys a sequence."""
    if seqlen_q <= DECODE_QUERIES:
        return "decode"
    return "short" if max(seqlen_q, seqlen_k) < LONG_LENGTH else "long"
