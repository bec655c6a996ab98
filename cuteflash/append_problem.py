"""Appending to a KV cache and rotating by position: options, what the kernel is generated for, and its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from cuteflash.problem import DTYPES, HEAD_DIM_MAX, HEAD_DIM_STEP, Dtype, HalfDtype

RotaryDtype = Literal["fp16", "bf16", "fp32"]
Rows = Literal["none", "dense", "packed"]

ROTARY_STEP = 16  # half of the rotated columns are whole loads of 8
ITEMS_MAX = 2**31 - 2**16  # what one thread works on, counted in 32 bits


class AppendOptions(NamedTuple):
    """The arguments of the operator that appends, after its tensors.

    Attributes:
        rotary_interleaved: pairs of columns that the rotary embedding rotates are neighbours, not ``rotary_dim / 2``
            apart.
        fixed_q: all queries of a sequence get the position of its first new token, not one each from there on.
    """

    rotary_interleaved: bool = False
    fixed_q: bool = False


class RotaryOptions(NamedTuple):
    """The arguments of the operator that rotates, after its tensors.

    Attributes:
        interleaved: see `AppendOptions`.
        offset: the position of the first token of each sequence, if there is no tensor of them.
        fixed: all tokens of a sequence get the position of its first one.
        inverse: rotate by the negative angle.
    """

    interleaved: bool = False
    offset: int = 0
    fixed: bool = False
    inverse: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AppendProblem:
    """What the kernel is generated for.

    Attributes:
        dtype: element type of Q, K and V.
        head_dim: columns of Q and K.
        head_dim_v: columns of V; 0 if nothing is appended.
        cache_dtype: element type of both caches; None if nothing is appended.
        q: how the queries to rotate lie in memory, if there are any.
        k: how the new tokens do.
        is_paged: the caches consist of pages.
        has_batch_idx: a tensor says which entry of the caches, or row of the page table, a sequence has.
        has_seqlens: a tensor says where each sequence goes on; otherwise all do so at the same position.
        has_rotary_seqlens: another one says at which position the rotary embedding goes on.
        rotary_dim: columns of Q and K that the rotary embedding rotates; 0 is none.
        rotary_interleaved: see `AppendOptions`.
        rotary_dtype: element type of the cosines and sines.
        counts: how many tokens each sequence has after the call is written, too.
    """

    dtype: HalfDtype
    head_dim: int
    head_dim_v: int = 0
    cache_dtype: Dtype | None = None
    q: Rows = "none"
    k: Rows = "none"
    is_paged: bool = False
    has_batch_idx: bool = False
    has_seqlens: bool = True
    has_rotary_seqlens: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_dtype: RotaryDtype = "fp32"
    counts: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.cache_dtype not in (None, "e4m3", self.dtype):
            raise ValueError(f"cache_dtype is {self.cache_dtype!r}; allowed: None, {self.dtype}, e4m3")
        for name in ("head_dim", "head_dim_v") if self.appends else ("head_dim",):
            value = getattr(self, name)
            if not HEAD_DIM_STEP <= value <= HEAD_DIM_MAX or value % HEAD_DIM_STEP:
                raise ValueError(f"{name} is {value}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}")

    @property
    def appends(self) -> bool:
        """Whether K and V are written to caches."""
        return self.k != "none"

    @property
    def quantises(self) -> bool:
        """Whether the caches have 8-bit elements with descales."""
        return self.cache_dtype == "e4m3"


class AppendTensors(NamedTuple):
    """The tensors of the kernel; inside it CuTe tensors, outside torch's. What a problem lacks is None."""

    q: Any = None  # (batch, seqlen_q, heads, head_dim) or (total_q, heads, head_dim)
    q_out: Any = None  # as q
    k: Any = None  # (batch, seqlen_new, kv_heads, head_dim) or (total_new, kv_heads, head_dim)
    v: Any = None  # likewise, head_dim_v
    k_cache: Any = None  # (batch_cache, seqlen_cache, kv_heads, head_dim) or (num_pages, page_size, ...)
    v_cache: Any = None  # likewise, head_dim_v
    cache_seqlens: Any = None  # (batch,) int32: the first position that a sequence writes
    rotary_seqlens: Any = None  # (batch,) int32: where its rotary positions begin, if that is elsewhere
    cu_seqlens_q: Any = None  # (batch + 1,) int32
    cu_seqlens_k_new: Any = None  # (batch + 1,) int32
    page_table: Any = None  # (entries, pages of each) int32
    cache_batch_idx: Any = None  # (batch,) int32
    cos: Any = None  # (seqlen_rotary, rotary_dim / 2)
    sin: Any = None
    k_descale: Any = None  # (batch, kv_heads) fp32
    v_descale: Any = None
    seqlens_after: Any = None  # (batch,) int32: tokens of each sequence after the call


class AppendScalars(NamedTuple):
    """The numbers of the kernel."""

    offset: Any  # Int32: added to all positions
    q_step: Any  # Int32: 1, or 0 if all queries of a sequence have one position
    sign: Any  # Float32: 1, or -1 to rotate backwards
