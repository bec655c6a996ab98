"""Attention of prompts and training in the plain form of latent attention, whose keys come in two parts."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor, is_grad_enabled

from cuteflash.coerce import flag, not_tensors, number
from cuteflash.limits import Longest, can_read, class_of_limits, known_limit
from cuteflash.mla_prefill_ops import mla_prefill, mla_prefill_cuda
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.validate import SCALES
from cuteflash.validate_mla_prefill import PrefillInputs, PrefillOptions, check_prefill
from cuteflash.validate_packed import check_limits


class Options(TypedDict, total=False):
    """The keyword arguments of `flash_mla_prefill` that leave the result's type alone."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: Longest
    max_seqlen_k: Longest
    softmax_scale: float | None
    causal: bool
    deterministic: bool


@overload
def flash_mla_prefill(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def flash_mla_prefill(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_mla_prefill(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_mla_prefill(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Longest = None,
    max_seqlen_k: Longest = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose heads have keys of their own but for the last 64 columns, which all share. Differentiable.

    The result is that of `flash_attn_func`, or of `flash_attn_varlen_func` with vectors, with ``torch.cat((k,
    k_rope.expand(..)), -1)`` as keys. On Hopper the forward does not make that tensor if k has a multiple of 64
    columns; otherwise, and for the backward, it is made in the call.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with vectors packed, (total_q, heads, head_dim): 192 columns for
            DeepSeek-V3; fp16 or bf16 (on a CPU fp32 and fp64, too).
        k: (batch, seqlen_k, heads, head_dim - 64) or (total_k, heads, head_dim - 64).
        k_rope: (batch, seqlen_k, 1, 64) or (total_k, 1, 64).
        v: (batch, seqlen_k, heads, head_dim_v) or (total_k, heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, as `flash_attn_varlen_func` takes
            them; None for dense ones.
        softmax_scale: factor of the scores; None is ``1 / sqrt(head_dim)``.
        causal: the last query is aligned with the last key, and a query sees no key after its own.
        deterministic: gradients are the same in every run.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        O, (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v), in q's dtype; with `return_lse` also
        LSE, (batch, heads, seqlen_q) or (heads, total_q), fp32. A query that sees no key gets O = 0 and LSE = -inf.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not supported, or one vector without the other.
        ValueError: a shape, stride, device mix or option that is not allowed. What vectors say is checked on a CPU, and
            on a GPU only under ``CUTEFLASH_CHECK=1``, which makes each call wait for the GPU.
        NotImplementedError: a device or kind of tensor that is not supported.
    """
    return_lse = flag("return_lse", return_lse)
    inputs = PrefillInputs(q, k, k_rope, v, cu_seqlens_q, cu_seqlens_k)
    for i, (name, x) in enumerate(inputs._asdict().items()):
        if not isinstance(x, Tensor) and (x is not None or i < 4):
            raise not_tensors(**{name: x})
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale, SCALES)
    options = PrefillOptions(scale, flag("causal", causal), flag("deterministic", deterministic))
    limits = {"q": max_seqlen_q, "k": max_seqlen_k}
    if any(limit is not None for limit in limits.values()):
        options = _with_lengths(inputs, options, limits)
    tensors = inputs[:4]
    needs_grad = is_grad_enabled() and any(x.requires_grad for x in tensors)
    if is_plain_cuda_call(q, k, v) and is_plain_cuda_call(k_rope, k, v) and not needs_grad:
        o, lse = mla_prefill_cuda(*inputs, *options)
    else:
        o, lse = mla_prefill(*inputs, *options)
    return (o, lse) if return_lse else o


def _with_lengths(inputs: PrefillInputs, options: PrefillOptions, limits: dict[str, Longest]) -> PrefillOptions:
    """The options with the class of lengths that limits of packed sequences say; they are compared with the lengths."""
    known = {side: known_limit(f"max_seqlen_{side}", limit) for side, limit in limits.items()}
    ends = inputs.cu_seqlens_q
    if ends is None:
        name = next(f"max_seqlen_{side}" for side, limit in limits.items() if limit is not None)
        raise ValueError(f"{name} is given without cu_seqlens_q; allowed: None, as all sequences have one length")
    if can_read(ends):
        check_prefill(inputs, options)
        check_limits(inputs.packed(inputs.k), limits)
    return options._replace(lengths=class_of_limits(inputs.q, inputs.k, ends, known["q"], known["k"]))
