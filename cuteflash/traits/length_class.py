"""Length classes: the part of a call's lengths that decides which row is fastest. Kernels are not compiled for lengths.

decode    a handful of queries against a long cache: one query tile, and the time is that of reading K and V
tiny      a sequence is a small part of a usual tile
small     a sequence is half of a usual tile at most; a class of the backward, to the forward it is tiny
brief     a sequence is a few small tiles, and large ones stay partly empty
short     the main loop has few steps, so that prologue, epilogue and scheduling of blocks count
moderate  a backward's blocks of one head that wait for each other lose a part of the loop; to the forward it is short
medium    a backward's main loop still has few steps; a class of the backward, the forward takes the rows for long
long      only the main loop counts

A class decides what is fast, never what is right: every row gives the same result at all lengths.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

from cuteflash.mla_problem import AnyOperation, MlaProblem

LengthClass = Literal["decode", "tiny", "small", "brief", "short", "moderate", "medium", "long"]
LENGTH_CLASSES: tuple[LengthClass, ...] = get_args(LengthClass)

DECODE_QUERIES = 16  # the m extent of the smallest tensor-core instruction: more queries begin to fill a query tile
TINY_LENGTH, SMALL_LENGTH = 32, 64  # one tile of two warps, of a warpgroup
# Main loops of a few steps of 128 keys, up to half a dozen, below a dozen, and below two dozen. The borders lie between
# the powers of two that are common and that are timed, so that no such length sits on an edge: 256 is brief, 512 is
# short, 1024 moderate, 2048 medium, 4096 long.
SHORT_LENGTH, MODERATE_LENGTH, MEDIUM_LENGTH, LONG_LENGTH = 449, 769, 1536, 3072
LONG_CACHE = 16  # keys a query, at least


def length_class_of(seqlen_q: int, seqlen_k: int, operation: AnyOperation | None = "fwd") -> LengthClass:
    """The class of a call with `seqlen_q` queries and `seqlen_k` keys a sequence; of cached latents there is one.

    Args:
        operation: None is the class of the main loop, as fine as any operation asks for.
    """
    longer = seqlen_q if seqlen_q > seqlen_k else seqlen_k  # every new shape comes here, and max() takes 0.1 us
    if operation == "bwd" and longer <= SMALL_LENGTH:
        return "tiny" if longer <= TINY_LENGTH else "small"
    if seqlen_q <= DECODE_QUERIES or operation == MlaProblem.operation:
        return "decode"
    if longer < SHORT_LENGTH:
        return "tiny" if operation == "fwd" and longer <= SMALL_LENGTH else "brief"
    if longer < MEDIUM_LENGTH:
        return "short" if longer < MODERATE_LENGTH or operation == "fwd" else "moderate"
    return "medium" if longer < LONG_LENGTH and operation != "fwd" else "long"


@functools.lru_cache(maxsize=1024)  # a call with known sizes costs 0.1 us of host time
def length_class_of_packed(
    rows_q: int, rows_k: int, batch: int, longest_q: int | None = None, longest_k: int | None = None
) -> LengthClass:
    """The class of `batch` packed sequences, at least one, of which the host only knows the sizes of their tensors.

    A forward passes it on to its backward, so it is as fine as either asks for. It is that of the mean length or, if it
    is known which length none exceeds, of the geometric mean of the two: the work of a sequence grows with the square
    of its length, so that a few long ones among many short ones are most of it. A few queries are `decode` only against
    a long cache, with few keys they are brief sequences.

    Args:
        rows_q, rows_k: queries and keys of all sequences together.
        longest_q, longest_k: lengths that no sequence exceeds; None is not known.
    """
    length_q, length_k = (-(-rows // batch) for rows in (rows_q, rows_k))
    is_small = False
    if longest_q is not None and longest_k is not None:
        longest = max(longest_q, longest_k)
        if longest <= TINY_LENGTH:
            return "tiny"
        is_small = longest <= SMALL_LENGTH
        length_q, length_k = math.isqrt(length_q * longest_q), math.isqrt(length_k * longest_k)
    found = length_class_of(length_q, length_k, operation=None)
    if found == "decode" and length_k >= LONG_CACHE * length_q:
        return found
    if is_small:
        return "small"
    return "brief" if found == "decode" else found
