"""The function for packed sequences. It checks what an operator's schema cannot say; the operators check the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.arguments import Fp8InferenceOptions, Fp8Options, FwdOptions, with_sinks
from cuteflash.coerce import (
    UNBOUNDED_WINDOW,
    Fp8,
    Window,
    check_not_inferred,
    check_not_quantised,
    check_sinks_alone,
    descales_of,
    flag,
    formats_without_scales,
    fp8_of,
    fp8_options_of,
    inference_options_of,
    not_tensors,
    options_of,
)
from cuteflash.fp8_packed_inference_ops import fp8_varlen_inference, fp8_varlen_inference_lse
from cuteflash.fp8_packed_ops import fp8_varlen_fwd, fp8_varlen_fwd_lse
from cuteflash.limits import Longest, can_read, class_of_limits, known_limit
from cuteflash.packed_ops import (
    attend_plain_packed,
    varlen_fwd,
    varlen_fwd_cuda,
    varlen_fwd_lse,
    varlen_fwd_lse_cuda,
)
from cuteflash.paged_api import attend_paged, check_optional, paged_inputs, refuse_with_pages
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.traits.arch import Family
from cuteflash.validate_fp8_packed import Fp8PackedInputs, check_fp8_packed
from cuteflash.validate_packed import PackedInputs, check_limits, check_packed
from cuteflash.validate_quantize import check_fp8_packed_inference

KV_SCALES = ("k_descale", "v_descale")  # that e4m3 pages have, too


class EightBits(NamedTuple):
    """The arguments of `flash_attn_varlen_func` that belong to attention in 8 bits."""

    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    v_mean: Any = None
    transposed_v: Any = False
    out_dtype: Any = None
    fp8: Any = False

    @property
    def has_descales(self) -> bool:
        return self.q_descale is not None or self.k_descale is not None or self.v_descale is not None

    def given(self) -> Iterable[tuple[str, Any]]:
        """Names and values."""
        return zip(self._fields, self, strict=True)

    def unlike_default(self) -> dict[str, Any]:
        """Names and values, None for those that are not given."""
        return {name: None if x is False else x for name, x in self.given()}


class VarlenOptions(TypedDict, total=False):
    """The keyword arguments of `flash_attn_varlen_func` that leave the result's type alone."""

    seqused_q: Tensor | None
    seqused_k: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: Window | None
    softcap: float
    attention_chunk: int
    pack_gqa: bool | None
    family: Family | None
    deterministic: bool
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    v_mean: Tensor | None
    transposed_v: bool
    out_dtype: torch.dtype | None
    num_splits: int
    page_table: Tensor | None
    sinks: Tensor | None
    fp8: bool | Fp8


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
    attention_chunk: int = 0,
    pack_gqa: bool | None = None,
    family: Family | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_mean: Tensor | None = None,
    transposed_v: bool = False,
    out_dtype: torch.dtype | None = None,
    num_splits: int = 1,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    fp8: bool | Fp8 = False,
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
        softmax_scale, causal, window_size, softcap, attention_chunk, pack_gqa, family: as for `flash_attn_func`.
        deterministic: as for `flash_attn_func`: gradients are bitwise repeatable. The forward always is.
        q_descale, k_descale, v_descale, v_mean: as for `flash_attn_func`, each sequence being an entry of the batch:
            (batch, kv_heads), and (batch, kv_heads, head_dim_v). Scales of 128 tokens each are (1, kv_heads, blocks),
            as `quantize_qkv` gives them: those of sequence i begin at block ``cu_seqlens[i] // 128 + i``.
        transposed_v: with scales, v is (kv_heads, head_dim_v, keys), in the order of keys that `flash_attn_func` takes.
            Sequence i begins at key ``(cu_seqlens_k[i] // 128 + i) * 128``, and there are ``(total_k // 128 + batch) *
            128`` keys. Those from a sequence's last one that counts up to the next multiple of 16 are zeros; all others
            that belong to no sequence are not read.
        out_dtype: as for `flash_attn_func`.
        num_splits: as for `flash_attn_func`. Sequences of any lengths share the blocks evenly.
        page_table: (batch, pages of a sequence), int32, each row contiguous, on q's device: k and v are then pages of
            a cache, (num_pages, page_size, kv_heads, head_dim) and head_dim_v, and row r of sequence i is row ``r %
            page_size`` of page ``page_table[i, r // page_size]``. Lengths are `seqused_k` or those of `cu_seqlens_k`,
            one of which is given; entries after a sequence's last page are not read, nor are rows
            after its last key. Inference only: tensors that need a gradient are refused.
        sinks: as for `flash_attn_func`. Rows that belong to no sequence, or do not count, keep LSE = -inf.
        fp8: as for `flash_attn_func`, with scales and a mean of V for each sequence. Rows that do not count change
            nothing.
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
    eight = None
    if not (q_descale is k_descale is v_descale is v_mean is None is out_dtype and transposed_v is fp8 is False):
        eight = EightBits(q_descale, k_descale, v_descale, v_mean, transposed_v, out_dtype, fp8)
    longest_q, longest_k = known_limit("max_seqlen_q", max_seqlen_q), known_limit("max_seqlen_k", max_seqlen_k)
    is_plain = is_plain_cuda_call(q, k, v)
    is_packed = is_plain and page_table is None and isinstance(cu_seqlens_q, Tensor)
    options = options_of(
        softmax_scale, causal, window_size, softcap, pack_gqa, family, deterministic,
        class_of_limits(q, k, cu_seqlens_q, longest_q, longest_k) if is_packed else None,
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip
    return_lse = return_lse is not False and flag("return_lse", return_lse)
    if page_table is not None:
        refuse_with_pages(seqused_q=seqused_q, **(eight or EightBits()).unlike_default() | dict.fromkeys(KV_SCALES))
        places = cu_seqlens_q, cu_seqlens_k, seqused_k, page_table
        paged, lengths = paged_inputs((q, k, v), *places, (sinks, k_descale, v_descale))
        return attend_paged(paged, options, {"q": max_seqlen_q, "k": max_seqlen_k}, return_lse, lengths)
    if not (is_packed and isinstance(cu_seqlens_k, Tensor)):
        if cu_seqlens_k is None or not all(isinstance(x, Tensor) for x in (q, k, v, cu_seqlens_q, cu_seqlens_k)):
            raise not_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        options = options._replace(lengths=class_of_limits(q, k, cu_seqlens_q, longest_q, longest_k))
    if not (seqused_q is seqused_k is v_mean is None):
        check_optional(seqused_q=seqused_q, seqused_k=seqused_k, v_mean=v_mean)
    inputs = PackedInputs(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    compares = (max_seqlen_q is not None or max_seqlen_k is not None) and can_read(cu_seqlens_q)
    limits = {"q": max_seqlen_q, "k": max_seqlen_k} if compares else {}
    if eight is None and sinks is None:
        return _attend_half(inputs, options, None, limits, return_lse, is_plain)
    return _attend(inputs, options, eight or EightBits(), sinks, limits, return_lse, is_plain)


def _attend(
    inputs: PackedInputs,
    options: FwdOptions,
    eight: EightBits,
    sinks: Tensor | None,
    limits: Mapping[str, Longest],
    return_lse: bool,
    is_plain: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call without pages; `is_plain` as `is_plain_cuda_call` says, `limits` as for `_attend_fp8`."""
    if sinks is not None:
        check_sinks_alone(sinks, *eight)
    if eight.has_descales:
        descales = {name: given for name, given in eight.given() if name.endswith("descale")}
        check_not_inferred(eight.fp8, **descales)
        fp8_inputs = Fp8PackedInputs(*inputs[:5], *descales_of(**descales), *inputs[5:], eight.v_mean)
        return _attend_fp8(fp8_inputs, fp8_options_of(options, eight.transposed_v, eight.out_dtype), limits, return_lse)
    if eight.fp8 is not False and (how := fp8_of(eight.fp8)) is not None:
        check_not_quantised(eight.transposed_v, eight.v_mean)
        return _quantise_and_attend(inputs, inference_options_of(options, how, eight.out_dtype), limits, return_lse)
    if eight.transposed_v is not False or eight.out_dtype is not None or eight.v_mean is not None:
        raise formats_without_scales(eight.transposed_v, eight.out_dtype, eight.v_mean)
    return _attend_half(inputs, options, sinks, limits, return_lse, is_plain)


def _attend_half(
    inputs: PackedInputs,
    options: FwdOptions,
    sinks: Tensor | None,
    limits: Mapping[str, Longest],
    return_lse: bool,
    is_plain: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with 16-bit tensors."""
    if limits:
        check_packed(inputs, options)
        check_limits(inputs, limits)
    result: Tensor | tuple[Tensor, Tensor]
    if sinks is not None:
        result = (varlen_fwd_lse if return_lse else varlen_fwd)(*inputs, *with_sinks(options, sinks))
    elif not is_plain:
        result = (varlen_fwd_lse if return_lse else varlen_fwd)(*inputs, *options)
    elif is_grad_enabled() and (inputs[0].requires_grad or inputs[1].requires_grad or inputs[2].requires_grad):
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
        check_limits(inputs.packed, limits)
    result: Tensor | tuple[Tensor, Tensor] = (fp8_varlen_fwd_lse if return_lse else fp8_varlen_fwd)(*inputs, *options)
    return result


def _quantise_and_attend(
    inputs: PackedInputs, options: Fp8InferenceOptions, limits: Mapping[str, Longest], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with 16-bit tensors through FP8; `limits` as for `_attend_fp8`."""
    if limits:
        check_fp8_packed_inference(inputs, options)
        check_limits(inputs, limits)
    run = fp8_varlen_inference_lse if return_lse else fp8_varlen_inference
    result: Tensor | tuple[Tensor, Tensor] = run(*inputs, *options)
    return result
