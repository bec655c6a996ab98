"""The functions of the module `flash_attn_interface`, FlashAttention-3: same names, arguments, order and results.

    from flash_attn_interface import flash_attn_func            # before
    from cuteflash.compat.flash_attn_interface import flash_attn_func

What differs:

- `sm_margin` raises NotImplementedError. `get_scheduler_metadata` takes `total_q`, too, see there.
- `qv` is for latent attention alone: q and k of 64 columns, qv and v of 512, v and k the columns of one cache, which
  is dense or has pages of a multiple of 64 rows. Inference only. `flash_attn_varlen_func` also knows it as `q_v`, as
  vLLM's fork does.
- `flash_attn_with_kvcache` writes to the caches it is given or raises: it never copies them. A cache of 8 bits is
  attended to as a whole. 16-bit q takes `k_descale` and `v_descale` with e4m3 caches; of a 16-bit one descale
  factors raise NotImplementedError.
- 8-bit q, k and v may be e5m2, too. Their keys are not split: `num_splits` above 1 raises ValueError. Descale factors
  with 16-bit ones raise TypeError.
- The log-sum-exp is differentiable.
- `s_aux`, attention sinks, which forks of FlashAttention-3 have, and their gradient.
- CPU tensors run the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cuteflash import api, packed_api
from cuteflash.coerce import is_int, not_tensors
from cuteflash.combine import flash_attn_combine
from cuteflash.compat.common import attend, attend_cached
from cuteflash.compat.latent import Queries, attend_latent
from cuteflash.compat.metadata import get_scheduler_metadata
from cuteflash.paged_api import lengths_of_pages
from cuteflash.unsupported import NOTHING, ZERO, refuse
from cuteflash.validate import FP8_DTYPES, check_strided, shown
from cuteflash.validate_kvcache import E4M3

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]
NAMES = {"sinks": "s_aux", "return_lse": "return_attn_probs"}  # what our functions' arguments are here
NAMES_OF_CACHES = {"return_lse": "return_softmax_lse"}
NAMES_OF_WHOLE_CACHES = NAMES_OF_CACHES | {"k": "k_cache", "v": "v_cache"}  # to which nothing is appended


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or with `num_heads_q` the heads of q, of k and of v one after the
            other: (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim).
    """
    return _attend(
        api.flash_attn_func,
        _unpacked(qkv, num_heads_q),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) to k and v (batch, seqlen_k, kv_heads, head_dim).

    Args:
        q_descale, k_descale, v_descale: fp32 (batch, kv_heads), with 8-bit q, k and v; None is 1. O is bf16 then.
        s_aux: (heads,), the `sinks` of `cuteflash.flash_attn_func`, as forks of FlashAttention-3 name them.

    Returns:
        O, (batch, seqlen_q, heads, head_dim_v); with `return_attn_probs` (O, LSE), LSE fp32 (batch, heads, seqlen_q).

    Raises:
        NotImplementedError: an argument that the module's text names is used.
        TypeError, ValueError: as `cuteflash.flash_attn_func`.
    """
    if qv is not None:
        _refuse_with_qv(sm_margin=sm_margin, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, s_aux=s_aux)
        return attend_latent(
            q, k, v, qv, Queries(), names=NAMES,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, attention_chunk=attention_chunk,
            softcap=softcap, num_splits=num_splits, return_lse=return_attn_probs,
        )  # fmt: skip
    return _attend(
        api.flash_attn_func,
        (q, k, v),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        sm_margin=sm_margin,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sinks=s_aux,
        return_lse=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    q_v: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim).

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), the first token of each sequence, then the total.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        seqused_q, seqused_k: int32 (batch,), how many of a sequence's tokens are used; None is all.
        q_descale, k_descale, v_descale, s_aux: as of `flash_attn_func`.
        page_table: int32 (batch, pages of a sequence): k and v are pages, (num_pages, page_size, kv_heads, head_dim),
            and either `seqused_k` or `cu_seqlens_k` says how long each sequence is.
        qv, q_v: (total_q, heads, 512), either of the two names, with `page_table`.

    Returns:
        O, (total_q, heads, head_dim_v); with `return_attn_probs` (O, LSE), LSE fp32 (heads, total_q).
    """
    if q_v is not None and qv is not None:
        raise TypeError("q_v and qv are both given; allowed: one of them")
    qv = qv if q_v is None else q_v
    if qv is not None:
        _refuse_with_qv(
            sm_margin=sm_margin, seqused_q=seqused_q, s_aux=s_aux,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        lengths, name = _lengths(q, page_table, cu_seqlens_k, seqused_k)
        return attend_latent(
            q, k, v, qv, Queries(cu_seqlens_q, max_seqlen_q), names=NAMES | {"cache_seqlens": name},
            cache_seqlens=lengths, page_table=page_table,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, attention_chunk=attention_chunk,
            softcap=softcap, num_splits=num_splits, return_lse=return_attn_probs,
        )  # fmt: skip
    return _attend(
        packed_api.flash_attn_varlen_func,
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        sm_margin=sm_margin,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sinks=s_aux,
        return_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache, (batch_cache, seqlen_cache, kv_heads, head_dim), to which k and v are appended in place.

    Args:
        page_table: int32 (batch, pages of a sequence), with caches of pages, (num_pages, page_size, kv_heads,
            head_dim), of any size.
        scheduler_metadata: what `get_scheduler_metadata` returned for this step.
        q_descale, k_descale, v_descale: with q and whole caches of 8 bits, as of `flash_attn_func`. The last two also
            with 16-bit q and e4m3 caches, to which a 16-bit k and v are appended; None is 1.
        qv: shaped as q but for its 512 columns; no k and v are appended then.

    Returns:
        O, shaped as q but for its columns, those of v_cache; with `return_softmax_lse` (O, LSE).

    Raises:
        NotImplementedError: an argument that the module's text names is used; with 8 bits also one that extends,
            rotates, shortens, pages, indexes or schedules the cache.
        TypeError, ValueError: as `cuteflash.flash_attn_with_kvcache`.
    """
    extent: dict[str, Any] = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "page_table": page_table,
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "max_seqlen_q": max_seqlen_q,
        "rotary_seqlens": rotary_seqlens,
    }  # fmt: skip
    given: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
        "pack_gqa": pack_gqa, "return_lse": return_softmax_lse, "attention_chunk": attention_chunk,
    }  # fmt: skip
    descales: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse(sm_margin=(sm_margin, ZERO))
    if qv is not None:
        names = ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q")
        used = {name: extent.pop(name) for name in names}
        _refuse_with_qv(k=k, v=v, scheduler_metadata=scheduler_metadata, **extent, **descales)
        lengths, table, ends, longest = used.values()
        given.pop("pack_gqa")
        queries = Queries(ends, None if ends is None else longest)
        latent: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "num_splits": num_splits}
        return attend_latent(q, k_cache, v_cache, qv, queries, names=NAMES_OF_WHOLE_CACHES, **latent, **given)
    if isinstance(q, Tensor) and q.dtype in FP8_DTYPES:
        others = {"k": k, "v": v, "scheduler_metadata": scheduler_metadata} | extent
        refuse(**{name: (value, NOTHING) for name, value in others.items()})
        tensors = q, k_cache, v_cache
        more = descales | given | {"num_splits": num_splits, "sm_margin": 0}
        return _attend(api.flash_attn_func, tensors, names=NAMES_OF_WHOLE_CACHES, **more)
    if isinstance(q, Tensor) and isinstance(k_cache, Tensor) and k_cache.dtype == E4M3 and k_cache.dim() > 1:
        refuse(q_descale=(descales.pop("q_descale"), NOTHING))
        ones = _ones((q, k_cache), cu_seqlens_q)
        given |= {name: ones if x is None else x for name, x in descales.items()}
    else:
        refuse(**{name: (value, NOTHING) for name, value in descales.items()})
    options = extent | given | {"rotary_interleaved": rotary_interleaved, "num_splits": num_splits}
    options["scheduler_metadata"] = scheduler_metadata
    return attend_cached(q, (k_cache, v_cache), (k, v), names=NAMES_OF_CACHES, **options)


def _attend(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    lengths: Sequence[Any] = (),
    *,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    sm_margin: int,
    names: Mapping[str, str] = NAMES,
    **options: Any,
) -> Any:
    """The result of a public function, which is what FlashAttention-3 returns."""
    refuse(sm_margin=(sm_margin, ZERO))
    descales: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if all(isinstance(x, Tensor) and x.dtype in FP8_DTYPES and x.dim() > 1 for x in tensors):
        ends = lengths[0] if lengths else None  # cu_seqlens_q
        descales = {name: _ones(tensors, ends) if x is None else x for name, x in descales.items()}
    return attend(function, tensors, lengths, names=names, **descales, **options)


def _refuse_with_qv(sm_margin: int = 0, **others: object) -> None:
    """Raise NotImplementedError, naming the first argument that latent attention does not have."""
    refuse(sm_margin=(sm_margin, ZERO))
    for name, value in others.items():
        if value is not None:
            described = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise NotImplementedError(f"{name} is {described} with qv; cuteflash supports None")


def _lengths(
    q: Tensor, page_table: Tensor | None, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None
) -> tuple[Tensor, str]:
    """`lengths_of_pages` of a call with `qv`. ValueError: there are no pages."""
    if not isinstance(q, Tensor):
        raise not_tensors(q=q)
    if page_table is None:
        raise ValueError("page_table is None; allowed with qv: a tensor, k and v being the pages of a cache")
    return lengths_of_pages(cu_seqlens_k, seqused_k, q.device)


def _ones(tensors: Sequence[Tensor], ends: Any) -> Tensor:
    """Descale factors that change nothing: one for each KV head and sequence, all in one place."""
    q, k = tensors[:2]
    batch = ends.shape[0] - 1 if isinstance(ends, Tensor) and ends.dim() == 1 else q.shape[0]
    return q.new_ones((), dtype=torch.float32).expand(max(batch, 0), k.shape[-2])


def _unpacked(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v."""
    if not isinstance(qkv, Tensor):
        raise not_tensors(qkv=qkv)
    check_strided("qkv", qkv)
    if num_heads_q is not None and not is_int(num_heads_q):
        raise TypeError(f"num_heads_q is {shown(num_heads_q)}; allowed: None, an int")
    if qkv.dim() == 5 and qkv.shape[2] == 3 and num_heads_q is None:
        q, k, v = qkv.unbind(2)
        return q, k, v
    if qkv.dim() == 4 and num_heads_q is not None:
        kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if kv_heads > 0 and rest == 0:
            q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], dim=2)
            return q, k, v
    raise ValueError(
        f"qkv.shape is {tuple(qkv.shape)} with num_heads_q {shown(num_heads_q)}; allowed: "
        "(batch, seqlen, 3, heads, head_dim) with None, or (batch, seqlen, num_heads_q + 2 * kv_heads, head_dim)"
    )
