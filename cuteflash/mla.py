"""Decoding of latent attention (MLA, of DeepSeek's models): attend to a cache of latents, and append to it."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.append import append_kv
from cuteflash.coerce import check_family, flag, is_int, not_tensors, number, splits_of
from cuteflash.mla_ops import mla_decode, mla_decode_cuda
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.traits.arch import Family
from cuteflash.validate import SCALES, shown
from cuteflash.validate_mla import LATENT_DIM, ROPE_DIM, ROW_DIM, MlaInputs, MlaOptions, check_mla

PIECES = ROW_DIM // ROPE_DIM  # heads, as which `append_kv` sees a row


class DecodeOptions(TypedDict, total=False):
    """The keyword arguments of `flash_mla_decode` that leave the result's type alone."""

    page_table: Tensor | None
    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    num_splits: int
    family: Family | None


@overload
def flash_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: int | Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...
@overload
def flash_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: int | Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: int | Tensor | None = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    cache_seqlens: int | Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    head_dim_v: int = LATENT_DIM,
    softmax_scale: float | None = None,
    causal: bool = False,
    num_splits: int = 0,
    family: Family | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of all query heads to one cached row for each token, whose first columns are its value, too.

    This is the absorbed form of multi-head latent attention: a row is the token's latent and its rotated key, and a
    query is multiplied by the up-projection of its head's keys beforehand, as O is by that of the values afterwards
    (`cuteflash.nn.MultiHeadLatentAttention` does both). The host reads no length and no table, so that a CUDA graph of
    a call replays with others. Inference only.

    Args:
        q: (batch, seqlen_q, heads, 576), fp16 or bf16 (on a CPU fp32 and fp64, too); up to 128 heads.
        kv_cache: (batch, seqlen_cache, 1, 576), or with `page_table` (num_pages, page_size, 1, 576), page_size a
            multiple of 64; q's dtype and device. Rows past a sequence's last one may hold anything.
        cache_seqlens: (batch,) int32, the rows of each sequence, the new ones included, or one int for all. None is all
            of the cache.
        page_table: (batch, pages of a sequence) int32, the pages of each sequence. Entries past its last row may hold
            anything.
        head_dim_v: 512, columns of a row that are its value.
        softmax_scale: factor of the scores; None is ``1 / sqrt(576)``. Models scale by the head dim before absorption,
            ``1 / sqrt(192)`` for DeepSeek-V3.
        causal: the last query is aligned with the last row, and a query sees no row after its own.
        num_splits: into how many parts a sequence's rows may be cut, 0 or more; 0 leaves it to the library. It never
            changes what is computed.
        family: kernel family to run on a GPU, ``"sm80"`` or ``"sm90"``; None is the best it has. CPUs ignore it.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        O, (batch, seqlen_q, heads, 512), contiguous, in q's dtype; with `return_lse` also LSE, (batch, heads,
        seqlen_q), fp32, natural logarithm. A query that sees no row gets O = 0 and LSE = -inf.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that is not supported.
        ValueError: a shape, stride, device mix or option that is not allowed. What lengths and table say is checked on
            a CPU, and on a GPU only under ``CUTEFLASH_CHECK=1``, which makes each call wait for the GPU.
        NotImplementedError: a device, family or kind of tensor that is not supported, or one that requires grad outside
            of ``torch.no_grad()``.
    """
    return_lse = flag("return_lse", return_lse)
    for name, x in (("q", q), ("kv_cache", kv_cache)):
        if not isinstance(x, Tensor):
            raise not_tensors(**{name: x})
    if page_table is not None and not isinstance(page_table, Tensor):
        raise not_tensors(page_table=page_table)
    if not is_int(head_dim_v):
        raise TypeError(f"head_dim_v is {shown(head_dim_v)}; allowed: {LATENT_DIM}")
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale, SCALES)
    check_family(family)
    options = MlaOptions(int(head_dim_v), scale, flag("causal", causal), splits_of(num_splits), family)
    lengths = lengths_of(cache_seqlens, q, kv_cache, page_table)
    inputs = MlaInputs(q, kv_cache, lengths, page_table)
    if is_plain_cuda_call(q, kv_cache, kv_cache) and not (
        is_grad_enabled() and (q.requires_grad or kv_cache.requires_grad)
    ):
        o, lse = mla_decode_cuda(*inputs, *options)
    else:
        o, lse = mla_decode(*inputs, *options)
    return (o, lse) if return_lse else o


def lengths_of(cache_seqlens: object, q: Tensor, kv_cache: Tensor, page_table: Tensor | None) -> Tensor:
    """The lengths as the operator takes them.

    TypeError, ValueError: they are not a tensor, None or an int that the cache has rows for.
    """
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is not None and not is_int(cache_seqlens):
        raise TypeError(f"cache_seqlens is {shown(cache_seqlens)}; allowed: None, an int, a torch.Tensor")
    batch = q.shape[0] if q.dim() else 0
    unknown = q.new_empty(batch, dtype=torch.int32)
    check_mla(MlaInputs(q, kv_cache, unknown, page_table), MlaOptions())  # before the cache's capacity is asked for
    capacity = MlaInputs(q, kv_cache, unknown, page_table).capacity
    length: Any = capacity if cache_seqlens is None else cache_seqlens
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens is {shown(length)}; allowed: 0 to {capacity}, the rows of a sequence's cache")
    return unknown.fill_(length)


def append_latents(
    kv_cache: Tensor, rows: Tensor, cache_seqlens: int | Tensor, *, page_table: Tensor | None = None
) -> None:
    """Write new tokens to a cache of latent attention: one launch on a GPU, which reads the lengths itself.

    Token i of sequence b goes to position ``cache_seqlens[b] + i`` of the sequence's cache. A position outside of the
    cache, and a page that does not exist, is never written.

    Args:
        kv_cache: (batch, seqlen_cache, 1, 576), or with `page_table` (num_pages, page_size, 1, 576).
        rows: (batch, seqlen_new, 1, 576) or (batch, seqlen_new, 576), the cache's dtype: the latent of each token, then
            its rotated key.
        cache_seqlens: (batch,) int32, rows that the cache of each sequence has already, or one int for all.
        page_table: (batch, pages of a sequence) int32, the pages of each sequence.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that is not supported.
        ValueError: a shape, stride, device mix, or tensor that requires grad, that is not allowed. What lengths and
            table say is checked on a CPU, and on a GPU only if ``CUTEFLASH_CHECK=1``. Nothing has been written then.
        NotImplementedError: a device or kind of tensor that is not supported.
    """
    for name, x in (("kv_cache", kv_cache), ("rows", rows)):
        if not isinstance(x, Tensor):
            raise not_tensors(**{name: x})
    if rows.dim() == 3:
        rows = rows.unsqueeze(2)
    for name, x in (("kv_cache", kv_cache), ("rows", rows)):
        if x.dim() != 4 or tuple(x.shape[2:]) != (1, ROW_DIM):
            raise ValueError(f"{name}.shape is {tuple(x.shape)}; allowed: (.., .., 1, {ROW_DIM})")
        if is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name} requires grad; allowed: tensors that do not, or a call under torch.no_grad()")
    if rows.dtype != kv_cache.dtype:
        raise TypeError(f"rows.dtype is {rows.dtype}; allowed: {kv_cache.dtype}, that of kv_cache")
    # A row is 9 heads of a cache whose K and V are the halves of a head's 64 columns: one launch writes all of it.
    (k_cache, v_cache), (k, v) = (x.squeeze(2).unflatten(2, (PIECES, -1)).chunk(2, dim=3) for x in (kv_cache, rows))
    append_kv(k_cache, v_cache, k, v, cache_seqlens, page_table=page_table)
