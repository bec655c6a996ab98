"""What is asked of a kernel: everything that changes the generated code, and nothing that does not.

A problem never holds a length, a batch size, a stride, a scale or a window size: those are run-time
arguments of the compiled kernel, so calls that differ only in them share one compilation.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

Dtype = Literal["fp16", "bf16"]
MaskKind = Literal["full", "causal", "window"]

DTYPES: tuple[str, ...] = get_args(Dtype)
MASK_KINDS: tuple[str, ...] = get_args(MaskKind)

HEAD_DIM_STEP = 8
HEAD_DIM_MAX = 256
PACK_GQA_MAX = 64  # query heads one tile can fold together: the smallest tile_m
UNBOUNDED = 1 << 30  # a window side without an edge, as kernels get it: beyond every length, and sums stay in 32 bits
LENGTH_MAX = UNBOUNDED - 1024  # rows or keys of one call: a tile reaches past the end, and its indices are 32-bit


@dataclasses.dataclass(frozen=True, slots=True)
class FwdProblem:
    """One forward attention kernel to generate.

    Attributes:
        dtype: element type of Q, K, V and O.
        head_dim: columns of Q and K; a multiple of 8 up to 256.
        head_dim_v: columns of V and O; a multiple of 8 up to 256.
        mask: ``"full"``, ``"causal"`` (bottom-right aligned) or ``"window"`` (both edges at run time).
        has_softcap: scores pass through ``softcap * tanh(score / softcap)``.
        has_lse: the log-sum-exp of each row is written, fp32, natural log.
        packed_heads: query heads of one KV head folded into the rows of a tile (``pack_gqa``); 1 is none.
    """

    dtype: Dtype
    head_dim: int
    head_dim_v: int
    mask: MaskKind = "full"
    has_softcap: bool = False
    has_lse: bool = False
    packed_heads: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.mask not in MASK_KINDS:
            raise ValueError(f"mask is {self.mask!r}; allowed: {', '.join(MASK_KINDS)}")
        for name, value in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if not HEAD_DIM_STEP <= value <= HEAD_DIM_MAX or value % HEAD_DIM_STEP:
                raise ValueError(f"{name} is {value}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}")
        if not 1 <= self.packed_heads <= PACK_GQA_MAX:
            raise ValueError(f"packed_heads is {self.packed_heads}; allowed: 1 to {PACK_GQA_MAX}")


def mask_of_window(window_left: int, window_right: int, seqlen_q: int) -> tuple[MaskKind, int, int]:
    """The mask kind of a window, with both sides as a kernel takes them.

    Args:
        window_left: keys a query sees before its own, bottom-right aligned; -1 is all.
        window_right: keys a query sees after its own; -1 is all, 0 with `window_left` -1 is causal.
        seqlen_q: queries of one sequence. A single query is the last row of the score matrix, which no right edge
            cuts, so decoding takes the kernel without a mask.

    Returns:
        (mask kind, left, right) with ``UNBOUNDED`` for a side of -1.
    """
    left = UNBOUNDED if window_left < 0 else min(window_left, UNBOUNDED)
    right = UNBOUNDED if window_right < 0 else min(window_right, UNBOUNDED)
    if window_left < 0 and (window_right < 0 or seqlen_q == 1):
        return "full", left, right
    if window_left < 0 and window_right == 0:
        return "causal", left, right
    return "window", left, right
