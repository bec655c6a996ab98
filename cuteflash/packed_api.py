"""The function for packed sequences. It checks what an operator's schema cannot say; the operators check the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.arguments import Fp8Options, FwdOptions
from cuteflash.coerce import (
    UNBOUNDED_WINDOW,
    Window,
    descales_of,
    flag,
    formats_without_scales,
    fp8_options_of,
    is_int,
    not_tensors,
    options_of,
)
from cuteflash.fp8_packed_ops import fp8_varlen_fwd, fp8_varlen_fwd_lse
from cuteflash.kvcache_ops import kvcache_fwd, kvcache_fwd_cuda, kvcache_fwd_lse, kvcache_fwd_lse_cuda
from cuteflash.packed_ops import (
    attend_plain_packed,
    varlen_fwd,
    varlen_fwd_cuda,
    varlen_fwd_lse,
    varlen_fwd_lse_cuda,
)
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass, length_class_of_packed
from cuteflash.validate import reads_values, shown
from cuteflash.validate_fp8_packed import Fp8PackedInputs, check_fp8_packed
from cuteflash.validate_kvcache import KvCacheInputs, check_kvcache
from cuteflash.validate_packed import PackedInputs, check_longest, check_packed, check_vector


class VarlenOptions(TypedDict, total=False):
    """The keyword arguments of `flash_attn_varlen_func` that leave the result's type alone."""

    seqused_q: Tensor | None
    seqused_k: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: Window | None
    softcap: float
    pack_gqa: bool | None
    family: Family | None
    deterministic: bool
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_mean: Tensor | None
    transposed_v: bool
    out_dtype: torch.dtype | None
    page_table: Tensor | None


Longest = int | Tensor | None


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: Longest = ...,
    max_seqlen_k: Longest = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: Longest = ...,
    max_seqlen_k: Longest = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: Longest = ...,
    max_seqlen_k: Longest = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Longest = None,
    max_seqlen_k: Longest = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = UNBOUNDED_WINDOW,
    softcap: float = 0.0,
    pack_gqa: bool | None = None,
    family: Family | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_mean: Tensor | None = None,
    transposed_v: bool = False,
    out_dtype: torch.dtype | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of sequences that lie one after the other, each with its own length, as `flash_attn_func`.

    Sequence i is the rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])`` of q and the result, and those between
    ``cu_seqlens_k[i]`` and ``cu_seqlens_k[i + 1]`` of k and v; either length may be 0. On a GPU the vectors are never
    read by the host: no call waits for the GPU, none compiles because of lengths, and a CUDA graph replays with others.

    Args:
        q: (total_q, heads, head_dim), as for `flash_attn_func` in all else.
        k, v: (total_k, kv_heads, head_dim), and head_dim_v.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,), int32, contiguous, on q's device; begin with 0 and never decrease.
            Rows after the last element's may follow in q, k and v: those of k and v are not read, and in the result
            they get O = 0 and LSE = -inf. Their gradients are 0, and what flows into their O and LSE is not read.
        max_seqlen_q, max_seqlen_k: lengths that no sequence exceeds; int, int tensor of one element, or None. Two ints
            help to choose the fastest kernel, and decide nothing else; a compiled graph does not look at them.
        seqused_q, seqused_k: (batch,), int32, how many rows of each sequence count, the first ones; None is all. The
            others are as if they were not there; in the result they get O = 0 and LSE = -inf, and their gradients are
            0.
        softmax_scale, causal, window_size, softcap, pack_gqa, family: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`: gradients are bitwise repeatable. The forward always is.
        q_descale, k_descale, v_descale, v_mean: as for `flash_attn_func`, each sequence being an entry of the batch:
            (batch, kv_heads), and (batch, kv_heads, head_dim_v).
        transposed_v: with scales, v is (kv_heads, head_dim_v, keys), in the order of keys that `flash_attn_func` takes.
            Sequence i begins at key ``(cu_seqlens_k[i] // 128 + i) * 128``, and there are ``(total_k // 128 + batch) *
            128`` keys. Those from a sequence's last one that counts up to the next multiple of 16 are zeros; all others
            that belong to no sequence are not read.
        out_dtype: as for `flash_attn_func`.
        page_table: (batch, pages of a sequence), int32, each row contiguous, on q's device: k and v are then pages of
            a cache, (num_pages, page_size, kv_heads, head_dim) and head_dim_v, and row r of sequence i is row ``r %
            page_size`` of page ``page_table[i, r // page_size]``. Lengths are `seqused_k` or, without it, those of
            `cu_seqlens_k`, one of which is needed; entries after a sequence's last page are not read, nor are rows
            after its last key. Inference only: tensors that need a gradient are refused.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        O, (total_q, heads, head_dim_v), contiguous, in q's dtype; with `return_lse` also LSE, (heads, total_q), fp32,
        natural logarithm. Both are differentiable. Selective checkpointing knows a call with gradients as
        ``torch.ops.cuteflash.varlen_fwd_lse``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attn_func`; also for a vector of another dtype, shape,
            device or stride, and for a negative max_seqlen.
        ValueError: what the vectors say is wrong; the sequence is named. It takes reading them to see that one does not
            begin with 0, decreases or exceeds its tensor, that more rows are used than there are, or that a max_seqlen
            is too small. So it is checked on a CPU, and on a GPU under ``CUTEFLASH_CHECK=1`` (in the environment),
            which makes each call wait for the GPU, and under which `cu_seqlens` also have to end with their tensors. Of
            a compiled graph the max_seqlens are not checked. Without the check such vectors make a kernel read and
            write memory that is not theirs.
    """
    if page_table is not None:
        formats = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "v_mean": v_mean}
        _refuse_with_pages(**formats, seqused_q=seqused_q, out_dtype=out_dtype, transposed_v=transposed_v or None)
        options = options_of(softmax_scale, causal, window_size, softcap, pack_gqa, family, deterministic, None)
        paged = _paged_inputs((q, k, v), cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)
        return _attend_paged(paged, options, {"q": max_seqlen_q, "k": max_seqlen_k}, flag("return_lse", return_lse))
    is_plain = is_plain_cuda_call(q, k, v)
    if not (is_plain and isinstance(cu_seqlens_q, Tensor) and isinstance(cu_seqlens_k, Tensor)):
        tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        if not (isinstance(cu_seqlens_k, Tensor) and all(isinstance(x, Tensor) for x in tensors.values())):
            raise not_tensors(**tensors)
    for name, optional in (("seqused_q", seqused_q), ("seqused_k", seqused_k), ("v_mean", v_mean)):
        if optional is not None and not isinstance(optional, Tensor):
            raise TypeError(f"{name} is a {type(optional).__name__}; allowed: None, a torch.Tensor")
    longest_q, longest_k = _known_limit("max_seqlen_q", max_seqlen_q), _known_limit("max_seqlen_k", max_seqlen_k)
    lengths = None
    if longest_q is not None and longest_k is not None and not torch.compiler.is_compiling():
        lengths = _length_class(q, k, cu_seqlens_q, longest_q, longest_k)
    options = options_of(softmax_scale, causal, window_size, softcap, pack_gqa, family, deterministic, lengths)
    inputs = PackedInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    compares = (max_seqlen_q is not None or max_seqlen_k is not None) and _can_read(cu_seqlens_q)
    limits = {"q": max_seqlen_q, "k": max_seqlen_k} if compares else {}
    return_lse = flag("return_lse", return_lse)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        descales = descales_of(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        fp8_inputs = Fp8PackedInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, *descales, seqused_q, seqused_k, v_mean)
        return _attend_fp8(fp8_inputs, fp8_options_of(options, transposed_v, out_dtype), limits, return_lse)
    if transposed_v is not False or out_dtype is not None or v_mean is not None:
        raise formats_without_scales(transposed_v, out_dtype, v_mean)
    if limits:
        check_packed(inputs, options)
        check_longest(inputs, limits)
    return _attend(inputs, options, is_plain, return_lse)


def _attend(
    inputs: PackedInputs, options: FwdOptions, is_plain: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with 16-bit operands; `is_plain` ones on a GPU go past the dispatcher."""
    result: Tensor | tuple[Tensor, Tensor]
    q, k, v = inputs[:3]
    if not is_plain:
        result = (varlen_fwd_lse if return_lse else varlen_fwd)(*inputs, *options)
    elif is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        result = attend_plain_packed(inputs, options, return_lse)
    else:
        result = (varlen_fwd_lse_cuda if return_lse else varlen_fwd_cuda)(*inputs, *options)
    return result


def _attend_fp8(
    inputs: Fp8PackedInputs, options: Fp8Options, limits: Mapping[str, Longest], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with 8-bit operands; `limits`, if not empty, are compared with the lengths."""
    if limits:
        check_fp8_packed(inputs, options)
        check_longest(inputs.packed, limits)
    result: Tensor | tuple[Tensor, Tensor] = (fp8_varlen_fwd_lse if return_lse else fp8_varlen_fwd)(*inputs, *options)
    return result


def _refuse_with_pages(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            described = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise NotImplementedError(f"{name} is {described}; supported with page_table: not given")


def _paged_inputs(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor,
) -> KvCacheInputs:
    """The tensors of a call with pages, whose lengths may be given as ends."""
    named = dict(zip(("q", "k", "v"), tensors, strict=True)) | {"cu_seqlens_q": cu_seqlens_q, "page_table": page_table}
    lengths = {"cu_seqlens_k": cu_seqlens_k} if seqused_k is None else {"seqused_k": seqused_k}
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError("seqused_k is None; allowed with page_table: the lengths, as seqused_k or as cu_seqlens_k")
    named |= {name: value for name, value in lengths.items() if value is not None}
    if not all(isinstance(x, Tensor) for x in named.values()):
        raise not_tensors(**named)
    if seqused_k is None and cu_seqlens_k is not None:
        check_vector("cu_seqlens_k", cu_seqlens_k, tensors[0].device)
        seqused_k = cu_seqlens_k.diff()
    return KvCacheInputs(*tensors, cu_seqlens_q, seqused_k, page_table)


def _attend_paged(
    inputs: KvCacheInputs, options: FwdOptions, limits: dict[str, Longest], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with pages; `limits` are compared with the lengths, and help to choose a kernel."""
    longest_q, longest_k = (_known_limit(f"max_seqlen_{side}", limit) for side, limit in limits.items())
    if longest_q is not None and longest_k is not None and not torch.compiler.is_compiling():
        check_kvcache(inputs, options)
        if inputs.batch:
            rows_k = inputs.batch * min(longest_k, inputs.capacity)
            found = length_class_of_packed(inputs.q.shape[0], rows_k, inputs.batch, longest_q, longest_k)
            options = options._replace(lengths=found)
    q, k, v, cu_seqlens_q, seqused_k, *_ = inputs
    assert cu_seqlens_q is not None
    if any(limit is not None for limit in limits.values()) and _can_read(cu_seqlens_q):
        check_kvcache(inputs, options)
        check_longest(PackedInputs(q, k, v, cu_seqlens_q, cu_seqlens_q, seqused_k=seqused_k), limits)
    result: Tensor | tuple[Tensor, Tensor]
    if is_plain_cuda_call(q, k, v) and not (is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        result = (kvcache_fwd_lse_cuda if return_lse else kvcache_fwd_cuda)(*inputs, *options)
    else:
        result = (kvcache_fwd_lse if return_lse else kvcache_fwd)(*inputs, *options)
    return result


def _known_limit(name: str, value: object) -> int | None:
    """A checked limit of lengths; None if there is none, or the host does not know it."""
    if type(value) is int and value >= 0:  # first, since it is what most calls have
        return value
    if value is None or isinstance(value, torch.SymInt):
        return None
    allowed = "None, an int of 0 or more, an integer tensor of one element"
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool or value.numel() != 1:
            raise TypeError(f"{name} is a tensor, {value.dtype} of shape {tuple(value.shape)}; allowed: {allowed}")
        return None
    if not is_int(value):
        raise TypeError(f"{name} is {shown(value)}; allowed: {allowed}")
    limit: int = int(value)  # type: ignore[call-overload]
    if limit < 0:
        raise ValueError(f"{name} is {shown(value)}; allowed: {allowed}")
    return limit


def _length_class(q: Tensor, k: Tensor, cu_seqlens: Tensor, longest_q: int, longest_k: int) -> LengthClass | None:
    """The class of sequences with these limits; None if the sizes are not known yet, or not those of a correct call."""
    try:
        rows_q, rows_k, ends = q.shape[0], k.shape[0], cu_seqlens.shape[0]
    except IndexError:
        return None
    if type(rows_q) is type(rows_k) is type(ends) is int and ends > 1:
        return length_class_of_packed(rows_q, rows_k, ends - 1, longest_q, longest_k)
    return None


def _can_read(vector: Tensor) -> bool:
    """Whether a vector's values are there to be checked."""
    if torch.compiler.is_compiling() or type(vector) is not Tensor:
        return False
    return vector.device.type == "cpu" or (reads_values() and vector.device.type == "cuda")
