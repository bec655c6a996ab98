"""Attention with a KV cache in one call: rotate and append new tokens in place, then attend to the cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.append_ops import append_and_count, append_kv_op, append_launch_of
from cuteflash.append_planning import lengths_after
from cuteflash.append_problem import AppendOptions
from cuteflash.arguments import FwdOptions
from cuteflash.calls import Known, looks_of
from cuteflash.coerce import UNBOUNDED_WINDOW, Window, flag, is_int, not_tensors, options_of
from cuteflash.kvcache_ops import kvcache_fwd, kvcache_fwd_cuda, kvcache_fwd_lse, kvcache_fwd_lse_cuda
from cuteflash.kvcache_planning import Planner
from cuteflash.kvcache_steps import Step, StepTensors, key_of, steps
from cuteflash.operators import note_writes
from cuteflash.schedule_planning import check_metadata_size
from cuteflash.torch_internals import is_plain_cuda_call, is_watched
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass, length_class_of_packed
from cuteflash.validate import holds, reads_values, shown
from cuteflash.validate_append import AppendInputs, check_append
from cuteflash.validate_append_values import check_append_values
from cuteflash.validate_kvcache import KvCacheInputs, check_cache_addresses, check_cache_values, check_kvcache
from cuteflash.validate_packed import check_vector

checked: Known[bool] = Known()


class CacheOptions(TypedDict, total=False):
    """The keyword arguments of `flash_attn_with_kvcache` that leave the result's type alone."""

    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    max_seqlen_q: int | None
    rotary_seqlens: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: Window | None
    attention_chunk: int
    softcap: float
    rotary_interleaved: bool
    num_splits: int
    pack_gqa: bool | None
    family: Family | None
    sinks: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    scheduler_metadata: Tensor | None
    tree_mask: Tensor | None


class NewTokens(NamedTuple):
    """What is appended to the caches before attention, and how it is rotated."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_seqlens: Tensor | None


@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[CacheOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
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
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = UNBOUNDED_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    family: Family | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    tree_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to a KV cache, to which new tokens are appended first, in place: one call a decode step.

    With k and v, token i of sequence b is written to position ``cache_seqlens[b] + i`` of its cache, K rotated by its
    position if there is a rotary embedding, and Q is rotated, too. Then the queries attend to the keys from
    ``cache_leftpad[b]`` (0) up to ``cache_seqlens[b]`` plus the new ones; the last query is aligned with the last key.
    The host reads no length and no table, so that a CUDA graph of a call replays with others. Inference only.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with `cu_seqlens_q` (total_q, heads, head_dim).
        k_cache: (batch_cache, seqlen_cache, kv_heads, head_dim), or with `page_table` (num_pages, page_size, kv_heads,
            head_dim), pages of any size; q's dtype, or ``torch.float8_e4m3fn`` with head dims that are multiples of 16,
            and q's device. Rows past a sequence's last key may hold anything.
        v_cache: likewise, (..., head_dim_v).
        k: (batch, seqlen_new, kv_heads, head_dim), or with `cu_seqlens_k_new` (total_new, kv_heads, head_dim); q's
            dtype, also beside e4m3 caches. None appends nothing.
        v: likewise, (..., head_dim_v).
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), fp32 or q's dtype, with k and v: the first `rotary_dim`
            columns of q and k, a multiple of 16, are rotated. Query i gets the position of new token i, or without
            causal, window and chunk all queries get that of the first.
        cache_seqlens: (batch,) int32, tokens that each sequence's cache holds before the call, left padding included,
            or one int for all. None is all of the cache, and not allowed with k and v.
        cache_batch_idx: (batch,) int32, the entry of the caches, or the row of the page table, that each sequence has.
        cache_leftpad: (batch,) int32, how many of a cache entry's first rows are no keys. Positions of the rotary
            embedding count them, those of `attention_chunk` do not.
        page_table: (batch, pages of a sequence) int32, the pages of each sequence. Entries past its last key may hold
            anything.
        cu_seqlens_q: (batch + 1,) int32, the first query of each sequence, then the end of the last one.
        cu_seqlens_k_new: (batch + 1,) int32, likewise of the new tokens.
        max_seqlen_q: a number of queries that no sequence exceeds, with `cu_seqlens_q`; it helps to choose the fastest
            kernel and decides nothing else.
        rotary_seqlens: (batch,) int32, where rotary positions begin, instead of `cache_seqlens`.
        softmax_scale, causal, window_size, attention_chunk, softcap, pack_gqa, family, sinks: as for `flash_attn_func`.
        k_descale, v_descale: fp32, (batch, kv_heads) or (kv_heads,), of e4m3 caches: an element stands for itself times
            its head's scale, and what is appended is divided by it and rounded, as by `append_kv`. On a GPU such caches
            need sm_89 or later; tree masks of them need the sm80 family.
        rotary_interleaved: a rotated pair is two neighbouring columns, not two that are ``rotary_dim / 2`` apart.
        num_splits: into how many parts a sequence's keys may be cut, 0 or more; 0 leaves it to the library. It never
            changes what is computed.
        scheduler_metadata: what `get_scheduler_metadata` returned for these lengths, sizes and options: all layers of a
            step may share it. None computes it in each call. It never changes what is computed.
        tree_mask: (batch, seqlen_q) int64, or (total_q,), with `causal` and up to 64 queries a sequence: bit j of query
            i's mask says whether it sees the key of query j, its own included; bits of later queries do not count. It
            sees the keys before those of the queries in any case, as far as the window goes. Not with a rotary
            embedding, whose positions would be places in the cache, not depths in the tree: see `apply_rotary`.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        O, (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v), contiguous, in q's dtype; with
        `return_lse` also LSE, (batch, heads, seqlen_q) or (heads, total_q), fp32, natural logarithm. A query that sees
        no key gets O = 0 and LSE = -inf.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not supported, or two that do not belong together.
        ValueError: a shape, stride, device mix, combination of arguments or option that is not allowed, or a tensor
            that requires grad outside of ``torch.no_grad()``. What vectors and tables say, as a cache that is too short
            or a page that does not exist, is checked on a CPU, and on a GPU only under ``CUTEFLASH_CHECK=1``, which
            makes each call wait for the GPU. The caches have not been written to then.
        NotImplementedError: a device, family or kind of tensor that is not supported.
    """
    tensors = StepTensors(
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cache_leftpad, cu_seqlens_q,
        cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, sinks, k_descale, v_descale, scheduler_metadata,
        tree_mask,
    )  # fmt: skip
    settings = (
        softmax_scale, causal, window_size, attention_chunk, softcap, rotary_interleaved, num_splits, pack_gqa, family,
        max_seqlen_q, return_lse,
    )  # fmt: skip
    key = key_of(tensors, settings, window_size)
    if key is not None:
        last, step = steps.last
        if key == last or (step := steps.get(key)) is not None:
            return cast("Tensor | tuple[Tensor, Tensor]", step(tensors))
    new = NewTokens(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens)
    caches = KvCacheInputs(
        q, k_cache, v_cache, cu_seqlens_q, None, page_table, cache_batch_idx, cache_leftpad, sinks, k_descale,
        v_descale, scheduler_metadata, tree_mask,
    )  # fmt: skip
    _check_types(caches, new, cache_seqlens)
    options = options_of(
        softmax_scale, causal, window_size, softcap, pack_gqa, family, False, _length_class(caches, max_seqlen_q),
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip
    caches = caches._replace(seqused_k=_begins(cache_seqlens, caches))
    flags = flag("rotary_interleaved", rotary_interleaved), flag("return_lse", return_lse)
    return _append_and_attend(caches, new, options, flags, key)


def _append_and_attend(
    caches: KvCacheInputs, new: NewTokens, options: FwdOptions, flags: tuple[bool, bool], key: Hashable | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Append if there is something to append, and attend; for calls with a key, note how equal ones do it.

    Args:
        flags: `rotary_interleaved` and `return_lse`.
    """
    interleaved, return_lse = flags
    append = None
    if new.k is not None:
        caches, append = _append(caches, new, options, interleaved)
    elif not torch.compiler.is_compiling():
        _check_gradients(caches)
        if _reads(caches.q) and not is_watched():
            check_kvcache(caches, options)
            check_cache_values(caches, complete=reads_values(), lengths="cache_seqlens")
    run = kvcache_fwd_lse_cuda if return_lse else kvcache_fwd_cuda
    operands = caches[:3]
    result: Tensor | tuple[Tensor, Tensor]
    if not is_plain_cuda_call(*operands) or (is_grad_enabled() and any(x.requires_grad for x in operands)):
        result = (kvcache_fwd_lse if return_lse else kvcache_fwd)(*caches, *options)
        return result
    result = run(*caches, *options)
    if key is not None:
        steps.keep(key, Step(run.launch_of(caches, tuple(options)), append))
    return result


def _append(
    caches: KvCacheInputs, new: NewTokens, options: FwdOptions, interleaved: bool
) -> tuple[KvCacheInputs, Callable[..., Any] | None]:
    """Append and rotate, after all checks of the call.

    Returns:
        The tensors of the attention that follows, and for plain CUDA tensors the launch that appended.
    """
    q, k_cache, v_cache, cu_seqlens_q, begins, page_table, cache_batch_idx, *_ = caches
    k, v, ends, cos, sin, rotary_seqlens = new
    k, v, begins = cast(Tensor, k), cast(Tensor, v), cast(Tensor, begins)  # as `_check_types` found
    rotated_q, rotated_ends = (None, None) if cos is None else (q, cu_seqlens_q)
    is_fixed = max(options.window_left, options.window_right) < 0 and options.attention_chunk == 0
    inputs = AppendInputs(
        k_cache, v_cache, k, v, begins, page_table, cache_batch_idx, ends, cos, sin, rotary_seqlens,
        caches.k_descale, caches.v_descale, rotated_q, rotated_ends,
    )  # fmt: skip
    append_options = AppendOptions(interleaved, is_fixed)
    if not torch.compiler.is_compiling():  # a graph that is traced writes nothing, and operators check it as well
        _check_once(caches, inputs, options, append_options)
    if q.device.type in ("cpu", "cuda") and _is_real(q) and not is_watched():
        check_cache_addresses(caches)
    if _reads(q):
        check_append_values(inputs, append_options)
        ended = caches._replace(seqused_k=lengths_after(begins, k, ends))
        check_cache_values(ended, complete=reads_values(), lengths="cache_seqlens")
    rotated: Tensor | None
    launch = None
    if is_plain_cuda_call(q, k_cache, k):
        rotated, seqused = append_and_count(inputs, append_options)
        launch = append_launch_of(inputs, append_options, counts=True)
        note_writes(k_cache, v_cache)
    else:
        seqused = lengths_after(begins, k, ends)
        rotated = append_kv_op(*inputs, *append_options)
    return caches._replace(q=q if cos is None or rotated is None else rotated, seqused_k=seqused), launch


def _check_once(
    caches: KvCacheInputs, inputs: AppendInputs, options: FwdOptions, append_options: AppendOptions
) -> None:
    """Check what a call looks like, so that nothing is written before an error: calls that look alike only once."""
    _check_gradients(caches, inputs)
    if not is_plain_cuda_call(caches.q, caches.k_cache, caches.v_cache):
        _check(caches, inputs, options, append_options)
        return
    call = looks_of(caches), looks_of(inputs[2:4]), looks_of(inputs[7:11]), options, append_options
    if checked.last[0] != call:
        checked.find(call, _check, caches, inputs, options, append_options)


def _check_gradients(*inputs: KvCacheInputs | AppendInputs) -> None:
    if is_grad_enabled():
        for name, x in (item for given in inputs for item in given._asdict().items()):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} requires grad; allowed: tensors that do not, or a call under torch.no_grad(), as this "
                    "attention has no gradient"
                )


def _check(caches: KvCacheInputs, inputs: AppendInputs, options: FwdOptions, append_options: AppendOptions) -> bool:
    """Check tensors and options; on a GPU also that it has a kernel, which is compiled now."""
    check_kvcache(caches, options)
    check_append(inputs, append_options)
    if caches.q.device.type == "cuda":
        Planner(has_lse=False).launch(caches, options)
    elif caches.q.device.type == "cpu":
        check_metadata_size(caches.scheduler_metadata, 0)
    return True


def _check_types(caches: KvCacheInputs, new: NewTokens, cache_seqlens: object) -> None:
    """Raise if an argument has the wrong type, or a tensor is given without one that it belongs to."""
    for i, (name, x) in enumerate((*caches._asdict().items(), *new._asdict().items())):
        if not isinstance(x, Tensor) and (x is not None or i < 3):
            raise not_tensors(**{name: x})
    if new.k is None:
        for name, x in new._asdict().items():
            if x is not None:
                raise ValueError(f"{name} is given without k; allowed: None, as nothing is appended and rotated")
        return
    if new.v is None:
        raise ValueError("v is None; allowed with k: a tensor")
    if new.rotary_cos is not None and caches.tree_mask is not None:
        raise ValueError("rotary_cos is given with tree_mask; allowed: None, with q and k rotated by their depths")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; allowed with k and v: an int or a tensor, where they are written to")


def _begins(cache_seqlens: int | Tensor | None, caches: KvCacheInputs) -> Tensor | None:
    """Tokens of each sequence before the call, as the operators take them."""
    if cache_seqlens is None:
        return None
    batch = _batch_of(caches)
    if isinstance(cache_seqlens, Tensor):
        check_vector("cache_seqlens", cache_seqlens, caches.q.device)
        if batch is not None and holds(cache_seqlens.shape[0] != batch):
            raise ValueError(f"cache_seqlens.shape is {tuple(cache_seqlens.shape)}; allowed: {(batch,)}, the batch")
        return cache_seqlens
    if not is_int(cache_seqlens):
        raise TypeError(f"cache_seqlens is {shown(cache_seqlens)}; allowed: None, an int, a torch.Tensor")
    if caches.k_cache.dim() == 4 and (caches.page_table is None or caches.page_table.dim() == 2):
        most = caches.capacity
        if not 0 <= cache_seqlens <= most:
            raise ValueError(f"cache_seqlens is {shown(cache_seqlens)}; allowed: 0 to {most}, the rows of an entry")
    return torch.full((batch or 0,), int(cache_seqlens), dtype=torch.int32, device=caches.q.device)


def _batch_of(caches: KvCacheInputs) -> int | None:
    """Sequences of a call; None if its queries say none, which the checks of all tensors complain of."""
    ends = caches.cu_seqlens_q
    if ends is None:
        return caches.q.shape[0] if caches.q.dim() else None
    return ends.shape[0] - 1 if ends.dim() == 1 and not holds(ends.shape[0] == 0) else None


def _length_class(caches: KvCacheInputs, max_seqlen_q: object) -> LengthClass | None:
    """The class of packed queries with this limit; None if the sizes say it, or are not those of a correct call."""
    if max_seqlen_q is None:
        return None
    if not is_int(max_seqlen_q) or max_seqlen_q < 0:  # type: ignore[operator]
        kind = ValueError if is_int(max_seqlen_q) else TypeError
        raise kind(f"max_seqlen_q is {shown(max_seqlen_q)}; allowed: None, an int of 0 or more")
    ends, table = caches.cu_seqlens_q, caches.page_table
    if ends is None or torch.compiler.is_compiling() or caches.k_cache.dim() != 4 or not caches.q.dim():
        return None
    if ends.dim() != 1 or ends.shape[0] < 2 or (table is not None and table.dim() != 2):
        return None
    longest: int = int(max_seqlen_q)  # type: ignore[call-overload]
    batch, keys = ends.shape[0] - 1, caches.capacity
    return length_class_of_packed(caches.q.shape[0], batch * keys, batch, longest, keys)


def _is_real(q: Tensor) -> bool:
    """Whether this is no call that is traced."""
    return not torch.compiler.is_compiling() and type(q) is Tensor


def _reads(q: Tensor) -> bool:
    """Whether the values of small tensors are checked before anything is written."""
    if not _is_real(q):
        return False
    return q.device.type == "cpu" or (reads_values() and q.device.type == "cuda")
