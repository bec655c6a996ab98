"""Decoding of latent attention (MLA, of DeepSeek's models): attend to a cache of latents, and append to it."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.append import append_kv
from cuteflash.coerce import check_family, flag, is_int, not_tensors, number, splits_of
from cuteflash.limits import can_read
from cuteflash.mla_ops import mla_decode, mla_decode_cuda
from cuteflash.renaming import NAMING, rename
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.traits.arch import Family
from cuteflash.validate import REFERENCE_DTYPES, SCALES, check_strided, check_strides, holds, shown
from cuteflash.validate_fp8 import check_descale_values
from cuteflash.validate_mla import (
    LATENT_DIM,
    ROPE_DIM,
    ROW_DIM,
    MlaInputs,
    MlaOptions,
    check_descale,
    check_mla,
    check_row_format,
)

PIECES = ROW_DIM // ROPE_DIM  # heads, as which `append_kv` sees a row


class DecodeOptions(TypedDict, total=False):
    """The keyword arguments of `flash_mla_decode` that leave the result's type alone."""

    page_table: Tensor | None
    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    num_splits: int
    family: Family | None
    descale: Tensor | None


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
    descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of all query heads to one cached row for each token, whose first columns are its value, too.

    This is the absorbed form of multi-head latent attention: a row is the token's latent and its rotated key, and a
    query is multiplied by the up-projection of its head's keys beforehand, as O is by that of the values afterwards
    (`cuteflash.nn.MultiHeadLatentAttention` does both). The host reads no length and no table, so that a CUDA graph of
    a call replays with others. Inference only.

    Args:
        q: (batch, seqlen_q, heads, 576), fp16 or bf16 (on a CPU fp32 and fp64, too); up to 128 heads.
        kv_cache: (batch, seqlen_cache, 1, 576), or with `page_table` (num_pages, page_size, 1, 576), page_size a
            multiple of 64; q's dtype, or e4m3 with `descale`, and q's device. Rows past a sequence's last one may hold
            anything.
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
        descale: of a cache of e4m3, fp32, for all sequences () or (1,), or for each (batch,): what its elements are
            multiplied with. Products are those of fp16, which has all numbers of e4m3.

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
    for name, optional in (("page_table", page_table), ("descale", descale)):
        if optional is not None and not isinstance(optional, Tensor):
            raise not_tensors(**{name: optional})
    if not is_int(head_dim_v):
        raise TypeError(f"head_dim_v is {shown(head_dim_v)}; allowed: {LATENT_DIM}")
    if head_dim_v != LATENT_DIM:
        raise ValueError(f"head_dim_v is {shown(head_dim_v)}; allowed: {LATENT_DIM}")
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale, SCALES)
    check_family(family)
    options = MlaOptions(int(head_dim_v), scale, flag("causal", causal), splits_of(num_splits), family)
    lengths = lengths_of(cache_seqlens, q, kv_cache, page_table, descale)
    inputs = q, kv_cache, lengths, page_table
    trailing = () if descale is None else (descale,)
    if is_plain_cuda_call(q, kv_cache, kv_cache) and not (
        is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, kv_cache, descale))
    ):
        o, lse = mla_decode_cuda(*inputs, *options, *trailing)
    else:
        o, lse = mla_decode(*inputs, *options, *trailing)
    return (o, lse) if return_lse else o


def lengths_of(
    cache_seqlens: object, q: Tensor, kv_cache: Tensor, page_table: Tensor | None, descale: Tensor | None
) -> Tensor:
    """The lengths as the operator takes them.

    TypeError, ValueError: they are not a tensor, None or an int that the cache has rows for.
    """
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is not None and not is_int(cache_seqlens):
        raise TypeError(f"cache_seqlens is {shown(cache_seqlens)}; allowed: None, an int, a torch.Tensor")
    batch = q.shape[0] if q.dim() else 0
    unknown = q.new_empty(batch, dtype=torch.int32)
    inputs = MlaInputs(q, kv_cache, unknown, page_table, descale)
    check_mla(inputs, MlaOptions())  # before the cache's capacity is asked for
    capacity = inputs.capacity
    length: Any = capacity if cache_seqlens is None else cache_seqlens
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens is {shown(length)}; allowed: 0 to {capacity}, the rows of a sequence's cache")
    return unknown.fill_(length)


def append_latents(
    kv_cache: Tensor,
    rows: Tensor,
    cache_seqlens: int | Tensor,
    *,
    page_table: Tensor | None = None,
    descale: Tensor | None = None,
) -> None:
    """Write new tokens to a cache of latent attention: one launch on a GPU, which reads the lengths itself.

    Token i of sequence b goes to position ``cache_seqlens[b] + i`` of the sequence's cache. A position outside of the
    cache, and a page that does not exist, is never written.

    Args:
        kv_cache: (batch, seqlen_cache, 1, 576), or with `page_table` (num_pages, page_size, 1, 576).
        rows: (batch, seqlen_new, 1, 576) or (batch, seqlen_new, 576), the cache's dtype, or of 16 bits for one of e4m3:
            the latent of each token, then its rotated key.
        cache_seqlens: (batch,) int32, rows that the cache of each sequence has already, or one int for all.
        page_table: (batch, pages of a sequence) int32, the pages of each sequence.
        descale: of a cache of e4m3, as of `flash_mla_decode`: an element x becomes ``x / descale``, rounded to nearest;
            what exceeds 448 becomes 448, NaN stays NaN.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that is not supported.
        ValueError: a shape, stride, device mix, or tensor that requires grad, that is not allowed. What lengths and
            table say is checked on a CPU, and on a GPU only if ``CUTEFLASH_CHECK=1``. Nothing has been written then.
        NotImplementedError: a device or kind of tensor that is not supported, or e4m3 before compute capability 8.9.
    """
    for name, x in (("kv_cache", kv_cache), ("rows", rows)):
        if not isinstance(x, Tensor):
            raise not_tensors(**{name: x})
    if descale is not None and not isinstance(descale, Tensor):
        raise not_tensors(descale=descale)
    if rows.dim() == 3:
        rows = rows.unsqueeze(2)
    check_row_format("kv_cache", kv_cache)
    for name, x in (("kv_cache", kv_cache), ("rows", rows)):
        check_strided(name, x)
        if x.dim() != 4 or tuple(x.shape[2:]) != (1, ROW_DIM):
            raise ValueError(f"{name}.shape is {tuple(x.shape)}; allowed: (.., .., 1, {ROW_DIM})")
        if is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name} requires grad; allowed: tensors that do not, or a call under torch.no_grad()")
        check_strides(name, x)
    if rows.device != kv_cache.device:
        raise ValueError(f"rows.device is {rows.device}; allowed: {kv_cache.device}, that of kv_cache")
    if page_table is not None and holds(kv_cache.shape[1] == 0):
        raise ValueError("kv_cache.shape[1] (page_size) is 0; allowed: 1 or more")
    check_descale(descale, kv_cache, rows.shape[0])
    if descale is None and rows.dtype != kv_cache.dtype:
        raise TypeError(f"rows.dtype is {rows.dtype}; allowed: {kv_cache.dtype}, that of kv_cache")
    if descale is not None and rows.dtype not in REFERENCE_DTYPES:
        raise TypeError(f"rows.dtype is {rows.dtype}; allowed: 16-bit rows, which are divided by descale")
    if descale is not None and can_read(descale):
        check_descale_values({"descale": descale})
    # A row is 9 heads of a cache whose K and V are the halves of a head's 64 columns: one launch writes all of it.
    (k_cache, v_cache), (k, v) = (x.squeeze(2).unflatten(2, (PIECES, -1)).chunk(2, dim=3) for x in (kv_cache, rows))
    scales = None if descale is None else descale.reshape(-1, 1).expand(rows.shape[0], PIECES)
    try:
        append_kv(k_cache, v_cache, k, v, cache_seqlens, page_table=page_table, k_descale=scales, v_descale=scales)
    except NAMING as error:
        rename(error, {"k_cache": "kv_cache", "v_cache": "kv_cache", "k": "rows", "v": "rows", "k_descale": "descale"})
        raise
