"""The functions of the package `flash_attn`, FlashAttention-2: same names, arguments, order and results.

    from flash_attn import flash_attn_func                      # before
    from cuteflash.compat.flash_attn import flash_attn_func

What differs:

- `dropout_p` above 0 and `alibi_slopes` raise NotImplementedError.
- `flash_attn_with_kvcache` writes to the caches it is given or raises: it never copies them.
- With `return_attn_probs=True` the third result, `S_dmask`, is None: FlashAttention-2 fills it under dropout only.
- The log-sum-exp of a query that sees no key is -inf, not inf, and it is differentiable.
- CPU tensors run the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cuteflash import api, packed_api, packing
from cuteflash.coerce import not_tensors
from cuteflash.compat.common import attend, attend_cached
from cuteflash.unsupported import NOTHING, ZERO, refuse

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
NAMES = {"page_table": "block_table", "return_lse": "return_attn_probs"}  # what our functions' arguments are here
NAMES_OF_CACHES = NAMES | {"return_lse": "return_softmax_lse"}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) to k and v (batch, seqlen_k, kv_heads, head_dim).

    Returns:
        O, shaped as q; with `return_attn_probs` (O, LSE, None), LSE fp32 (batch, heads, seqlen_q).

    Raises:
        NotImplementedError: `dropout_p` or `alibi_slopes` is used.
        TypeError, ValueError: as `cuteflash.flash_attn_func`.
    """
    return _attend(
        api.flash_attn_func,
        (q, k, v),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor, (batch, seqlen_k, 2, kv_heads, head_dim)."""
    return _attend(
        packing.flash_attn_kvpacked_func,
        (q, kv),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor, (batch, seqlen, 3, heads, head_dim)."""
    return _attend(
        packing.flash_attn_qkvpacked_func,
        (qkv,),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim).

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), the first token of each sequence, then the total.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        block_table: int32 (batch, pages of a sequence): k and v are pages, (num_pages, page_size, kv_heads, head_dim),
            and `cu_seqlens_k` only says how long each sequence is.

    Returns:
        O, shaped as q; with `return_attn_probs` (O, LSE, None), LSE fp32 (heads, total_q).
    """
    if cu_seqlens_k is None and block_table is not None:  # `seqused_k`, which would do instead, is no argument here
        raise not_tensors(cu_seqlens_k=cu_seqlens_k)
    return _attend(
        packed_api.flash_attn_varlen_func,
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        page_table=block_table,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, (total_k, 2, kv_heads, head_dim)."""
    return _attend(
        packing.flash_attn_varlen_kvpacked_func,
        (q, kv),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor, (total, 3, heads, head_dim)."""
    return _attend(
        packing.flash_attn_varlen_qkvpacked_func,
        (qkv,),
        (cu_seqlens, max_seqlen),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache, (batch_cache, seqlen_cache, kv_heads, head_dim), to which k and v are appended in place.

    Args:
        block_table: int32 (batch, pages of a sequence), with caches of pages, (num_pages, page_size, kv_heads,
            head_dim), of any size.

    Returns:
        O, shaped as q; with `return_softmax_lse` (O, LSE).

    Raises:
        NotImplementedError: `alibi_slopes` is used.
        TypeError, ValueError: as `cuteflash.flash_attn_with_kvcache`.
    """
    refuse(alibi_slopes=(alibi_slopes, NOTHING))
    return attend_cached(
        q,
        (k_cache, v_cache),
        (k, v),
        names=NAMES_OF_CACHES,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )


def _attend(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    lengths: Sequence[Any] = (),
    *,
    dropout_p: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    names: Mapping[str, str] = NAMES,
    **options: Any,
) -> Any:
    """O, or O, LSE and `S_dmask`, of a public function."""
    refuse(
        dropout_p=(dropout_p, ZERO),
        alibi_slopes=(alibi_slopes, NOTHING),
    )
    result = attend(function, tensors, lengths, names=names, return_lse=return_attn_probs, **options)
    return (*result, None) if return_attn_probs else result
