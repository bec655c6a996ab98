"""The public functions that append to a KV cache and that rotate by position."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.append_ops import append_kv_op, append_now, apply_rotary_op, rotate_now
from cuteflash.append_problem import AppendOptions, RotaryOptions
from cuteflash.coerce import flag, is_int, not_tensors
from cuteflash.operators import note_writes
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.validate import shown
from cuteflash.validate_append import AppendInputs, RotaryInputs

PLAIN = AppendOptions()


class AppendArguments(TypedDict, total=False):
    """The keyword arguments of `append_kv` that leave the result's type alone."""

    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    cu_seqlens_q: Tensor | None
    fixed_q: bool


@overload
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor | int,
    *,
    q: None = ...,
    **options: Unpack[AppendArguments],
) -> None: ...
@overload
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor | int,
    *,
    q: Tensor,
    **options: Unpack[AppendArguments],
) -> Tensor: ...
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor | int,
    *,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    fixed_q: bool = False,
) -> Tensor | None:
    """Write new tokens to a KV cache, K rotated by position on the way, and rotate Q for them: one launch on a GPU.

    Token i of sequence b goes to position ``cache_seqlens[b] + i`` of the sequence's cache. Left padding of a cache
    does not move positions. A position outside of the cache, and a page that does not exist, is never written; the host
    does not read `cache_seqlens`, so that a CUDA graph can hold the call.

    Args:
        k_cache: (batch_cache, seqlen_cache, kv_heads, head_dim), or with `page_table` (num_pages, page_size, kv_heads,
            head_dim); fp16, bf16 or e4m3, rows on 16-byte boundaries, any strides.
        v_cache: likewise, (..., head_dim_v).
        k: (batch, seqlen_new, kv_heads, head_dim), or with `cu_seqlens_k_new` (total_new, kv_heads, head_dim): fp16 or
            bf16, the caches' dtype unless that is e4m3.
        v: likewise, (..., head_dim_v).
        cache_seqlens: (batch,) int32, tokens that the cache of each sequence has already, or one int for all.
        page_table: (batch, pages of a sequence) int32, the pages of each sequence; any page size.
        cache_batch_idx: (batch,) int32, the entry of the caches, or row of the page table, that a sequence has, instead
            of its own number.
        cu_seqlens_k_new: (batch + 1,) int32, where the new tokens of each sequence begin, and the end of the last.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), fp32 or k's dtype: the first `rotary_dim` columns, a
            multiple of 16, are rotated in fp32 by the row of their position.
        rotary_interleaved: a pair is two neighbouring columns, not two that are ``rotary_dim / 2`` apart.
        rotary_seqlens: (batch,) int32, where the rotary positions begin, instead of `cache_seqlens`.
        k_descale, v_descale: fp32, (batch, kv_heads) or (kv_heads,), of e4m3 caches: an element x becomes
            ``x / descale``, rounded to nearest; what exceeds 448 becomes 448, NaN stays NaN.
        q: (batch, seqlen_q, heads, head_dim), or with `cu_seqlens_q` (total_q, heads, head_dim), to be rotated as well.
        cu_seqlens_q: (batch + 1,) int32, of q.
        fixed_q: all queries of a sequence get the position of its first new token, as attention without a causal mask
            or window takes them, instead of one each from there on.

    Returns:
        The rotated queries, a new tensor of q's shape; None without q.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that is not supported.
        ValueError: a shape, stride, device mix, combination of arguments, or tensor that requires grad, that is not
            allowed. What the small tensors say is checked on a CPU, and on a GPU only if ``CUTEFLASH_CHECK=1``. Nothing
            has been written then.
        NotImplementedError: a device or kind of tensor that is not supported, or e4m3 before compute capability 8.9.
    """
    seqlens: Any = cache_seqlens
    if not isinstance(seqlens, Tensor) and is_int(seqlens):
        seqlens = _vector("cache_seqlens", int(seqlens), k, cu_seqlens_k_new)
    inputs = AppendInputs(
        k_cache, v_cache, k, v, seqlens, page_table, cache_batch_idx, cu_seqlens_k_new, rotary_cos, rotary_sin,
        rotary_seqlens, k_descale, v_descale, q, cu_seqlens_q,
    )  # fmt: skip
    options = PLAIN
    if rotary_interleaved is not False or fixed_q is not False:
        options = AppendOptions(flag("rotary_interleaved", rotary_interleaved), flag("fixed_q", fixed_q))
    if is_plain_cuda_call(k_cache, k, v) and not (is_grad_enabled() and _requires_grad(inputs)):
        try:
            rotated = append_now(inputs, options)
        except AttributeError:  # of what is not a tensor
            _check_types(inputs, required=5)
            raise
        note_writes(k_cache, v_cache)
        return rotated
    _check_types(inputs, required=5)
    result: Tensor = append_kv_op(*inputs, *options)
    return None if q is None else result


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    fixed: bool = False,
) -> Tensor:
    """Rotate the first `rotary_dim` columns of every head by the angles of its token's position.

    Token i of sequence b has position ``seqlen_offsets[b] + i``. It is differentiable with respect to x.

    Args:
        x: (batch, seqlen, heads, head_dim), or with `cu_seqlens` (total, heads, head_dim), fp16 or bf16, rows on
            16-byte boundaries.
        cos, sin: (positions, rotary_dim / 2), fp32 or x's dtype; `rotary_dim` is a multiple of 16. Products are fp32.
        interleaved: a pair is two neighbouring columns, not two that are ``rotary_dim / 2`` apart.
        seqlen_offsets: the position of the first token, one int for all sequences or (batch,) int32.
        cu_seqlens: (batch + 1,) int32, where each packed sequence begins, and the end of the last. Tokens after that
            stay as they are.
        max_seqlen: tokens of the longest packed sequence, if known: the tables are then checked to have as many rows.
        fixed: all tokens of a sequence have the position of its first one.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: as `append_kv` does. The tables have a row for each position.
    """
    is_tensor = isinstance(seqlen_offsets, Tensor)
    if not is_tensor and not is_int(seqlen_offsets):
        raise TypeError(f"seqlen_offsets is {shown(seqlen_offsets)}; allowed: an int, a torch.Tensor")
    offsets = seqlen_offsets if isinstance(seqlen_offsets, Tensor) else None
    offset = 0 if isinstance(seqlen_offsets, Tensor) else _position("seqlen_offsets", int(seqlen_offsets))
    inputs = RotaryInputs(x, cos, sin, offsets, cu_seqlens)
    _check_types(inputs, required=3)
    options = RotaryOptions(flag("interleaved", interleaved), offset, flag("fixed", fixed))
    if max_seqlen is not None:
        _check_longest(max_seqlen, inputs, options)
    if is_plain_cuda_call(x, x, x) and not (is_grad_enabled() and _requires_grad(inputs)):
        return rotate_now(inputs, options)
    result: Tensor = apply_rotary_op(*inputs, *options)
    return result


def _vector(name: str, value: int, k: Tensor, ends: Tensor | None) -> Tensor:
    """An int for each sequence."""
    if not isinstance(k, Tensor):
        raise not_tensors(k=k)
    batch = ends.shape[0] - 1 if isinstance(ends, Tensor) else k.shape[0]
    return torch.full((batch,), _position(name, value), dtype=torch.int32, device=k.device)


def _position(name: str, value: int) -> int:
    """A position that int32 holds; ValueError otherwise."""
    if not 0 <= value < 2**31:
        raise ValueError(f"{name} is {shown(value)}; allowed: 0 or more, below 2**31, or a tensor")
    return value


def _check_types(inputs: AppendInputs | RotaryInputs, required: int) -> None:
    """Raise TypeError if an argument is not a tensor; those after the first `required` may be None."""
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor) and (x is not None or i < required):
            raise not_tensors(**{inputs._fields[i]: x})


def _requires_grad(inputs: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _check_longest(max_seqlen: int, inputs: RotaryInputs, options: RotaryOptions) -> None:
    if not is_int(max_seqlen):
        raise TypeError(f"max_seqlen is {shown(max_seqlen)}; allowed: None, an int")
    rows = options.offset + (min(int(max_seqlen), 1) if options.fixed else int(max_seqlen))
    if inputs.cos.dim() == 2 and inputs.cos.shape[0] < rows:
        raise ValueError(f"cos.shape[0] is {inputs.cos.shape[0]}; allowed: {rows} or more, the positions of max_seqlen")
