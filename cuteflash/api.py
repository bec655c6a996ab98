"""The public functions. They check what an operator's schema cannot say; the operators check the rest."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.arguments import FwdOptions, with_sinks
from cuteflash.coerce import (
    UNBOUNDED_WINDOW,
    Fp8,
    Window,
    check_family,
    check_not_quantised,
    check_sinks_alone,
    chunk_of,
    flag,
    formats_without_scales,
    fp8_of,
    fp8_options_of,
    inference_options_of,
    not_tensors,
    number,
    scales_of,
    splits_of,
    window_of,
)
from cuteflash.fp8_inference_ops import inference_of
from cuteflash.fp8_ops import fp8_fwd, fp8_fwd_lse
from cuteflash.ops import attend_plain, fwd, fwd_cuda, fwd_lse, fwd_lse_cuda
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.traits.arch import Family
from cuteflash.validate import SCALES, SOFTCAPS


class Options(TypedDict, total=False):
    """The keyword arguments that leave the result's type alone."""

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
    fp8: bool | Fp8
    num_splits: int
    sinks: Tensor | None


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    fp8: bool | Fp8 = False,
    num_splits: int = 1,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(softmax_scale * q k^T + mask) v``, without the score matrix in memory.

    Query i of a sequence sits at position ``i + seqlen_k - seqlen_q`` of the keys (masks are aligned bottom-right), and
    sees key j where ``position - left <= j <= position + right``. A query that sees no key gets O = 0 and LSE = -inf
    (with `sinks` the sink).

    Args:
        q: (batch, seqlen_q, heads, head_dim). fp16 or bf16; on a CPU also fp32 and fp64. `head_dim` is a multiple of 8
            up to 256. The last dimension is contiguous; every other stride is free as long as rows start on 16-byte
            boundaries (0, as of an expanded tensor, too).
        k: (batch, seqlen_k, kv_heads, head_dim), dtype and device of q; `heads` is a multiple of `kv_heads`, and query
            head h reads KV head ``h // (heads // kv_heads)``.
        v: (batch, seqlen_k, kv_heads, head_dim_v); `head_dim_v` is a multiple of 8 up to 256.
        softmax_scale: factor of the scores, positive and finite; None is ``1 / sqrt(head_dim)``.
        causal: a query sees no key after its position; with a window, its right side becomes 0.
        window_size: (left, right) keys seen before and after a query's position; -1 is all, None is (-1, -1).
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask; 0 is none.
        attention_chunk: positions are cut into chunks of so many, from the first key on, and a query sees only keys of
            its own chunk, of those that `causal` and `window_size` let it see; 0 is none. Not of 8-bit operands.
        pack_gqa: fold the query heads of a KV head into the rows of a tile, which pays for short `seqlen_q`. None
            leaves it to a heuristic, True needs at most 64 query heads a KV head. Never changes what is computed.
        family: kernel family to run on a GPU, ``"sm80"`` or ``"sm90"``; None is the best it has. CPUs ignore it.
        deterministic: the backward gives bitwise equal gradients for equal inputs, which costs it speed; so does
            ``torch.use_deterministic_algorithms(True)`` while the backward runs. The forward always is deterministic.
        q_descale, k_descale, v_descale: (batch, kv_heads), fp32, positive and finite. All three make q, k and v tensors
            of ``torch.float8_e4m3fn``, or all of ``torch.float8_e5m2``, whose elements stand for themselves times the
            scale of their head; q's scale is that of the KV head that the query head reads. `head_dim` and
            `head_dim_v` are then multiples of 16, a GPU has to be a Hopper, and there is no gradient. P is rounded to
            e4m3: see docs/fp8.md.
            Of shape (batch, kv_heads, blocks), each 128 tokens have scales of their own; GPUs run that for head dims up
            to 160, and for 192 with a `head_dim_v` of 128.
        v_mean: (batch, kv_heads, head_dim_v), fp32, with scales: the mean of V's columns, taken out of V before it was
            quantised, as by ``cuteflash.quantize_qkv(..., smooth_v=True)``. It is added to O before O is rounded; a
            query that sees no key keeps O = 0.
        transposed_v: with scales, v is (batch, kv_heads, head_dim_v, keys), keys being `seqlen_k` in whole 128s, in the
            order that the product reads: in each 16 keys, position ``4 t + 2 j + b`` holds key ``8 j + 2 t + b``.
            Keys past `seqlen_k` are zeros. Faster, as otherwise the kernel turns V.
        out_dtype: with scales or `fp8`, the dtype of O, ``torch.bfloat16`` or ``torch.float16``. None is bf16, with
            `fp8` q's dtype.
        fp8: for inference, quantise q, k and v of 16 bits to FP8 and attend to that, in one call: Q and K with a scale
            for each KV head, V less its mean, which is added to O, and transposed. `head_dim` and `head_dim_v` are
            multiples of 16, a GPU has to be a Hopper, and tensors that require a gradient are refused. A
            ``cuteflash.Fp8`` says how to quantise, True is ``Fp8()``.
        num_splits: into how many parts the keys of a query tile are split at most, each read by another block of the
            GPU. That pays if few queries see many keys, as in decoding; 0 leaves it to a heuristic, 1 is none. Parts
            are summed up in fp32, in an order that is always the same. With scales or `fp8` nothing is split, and only
            0 and 1 are allowed. A backward is never split.
        sinks: (heads,) a logit of each query head, fp32 or q's dtype, that joins the softmax of its rows and has no
            value: ``O = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))``. LSE includes it, and it has a gradient;
            softcap and `softmax_scale` leave it alone. -inf is no sink, as None is. See docs/sinks.md.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        O, (batch, seqlen_q, heads, head_dim_v), contiguous, in q's dtype (or `out_dtype`); with `return_lse` also LSE,
        (batch, heads, seqlen_q), fp32 (fp64 for fp64 inputs), natural logarithm. A dimension of size 0 gives an empty
        result, and `seqlen_k` 0 gives O = 0 and LSE = -inf. Both are differentiable; a query that sees no key neither
        gets nor gives a gradient.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not supported, or two dtypes mixed.
        ValueError: a shape, stride, alignment, device mix, scale, softcap or window that is not allowed.
        NotImplementedError: a device, family or kind of tensor (nested, sparse) that is not supported, a second
            derivative, or forward-mode AD.

    Under ``torch.autocast`` q, k and v are taken in its dtype, as by torch's own attention. With gradients, q, k, v, O
    and LSE are kept for the backward; selective checkpointing knows the call as ``torch.ops.cuteflash.fwd_lse``.
    """
    is_plain = is_plain_cuda_call(q, k, v)
    if not (is_plain or (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor))):
        raise not_tensors(q=q, k=k, v=v)
    left, right = (-1, -1) if window_size is UNBOUNDED_WINDOW or window_size is None else window_of(window_size)
    right = 0 if causal is not False and flag("causal", causal) else right
    if softmax_scale is not None and type(softmax_scale) is not float:  # NumPy's float64 is one of its subclasses
        softmax_scale = number("softmax_scale", softmax_scale, SCALES)
    softcap = softcap if type(softcap) is float else number("softcap", softcap, SOFTCAPS)
    return_lse = return_lse is not False and flag("return_lse", return_lse)
    options: tuple[Any, ...] = (softmax_scale, left, right, softcap)
    is_usual = type(attention_chunk) is type(num_splits) is int and attention_chunk == 0 and num_splits == 1
    if not is_usual or pack_gqa is not None or family is not None or deterministic is not False:
        # Only then, as trailing defaults are cheapest left out: 0.1 us each in the dispatcher.
        options += _execution(pack_gqa, family, deterministic, attention_chunk, num_splits)
    result: Tensor | tuple[Tensor, Tensor]
    if sinks is not None:
        check_sinks_alone(sinks, q_descale, k_descale, v_descale, v_mean, transposed_v, out_dtype, fp8)
        result = (fwd_lse if return_lse else fwd)(q, k, v, *with_sinks(FwdOptions(*options), sinks))
    elif q_descale is not None or k_descale is not None or v_descale is not None:
        scales = scales_of(fp8, v_mean, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
        fp8_options = fp8_options_of(FwdOptions(*options), transposed_v, out_dtype)
        result = (fp8_fwd_lse if return_lse else fp8_fwd)(q, k, v, *scales, *fp8_options)
    elif fp8 is not False and (how := fp8_of(fp8)) is not None:
        check_not_quantised(transposed_v, v_mean)
        inference = inference_options_of(FwdOptions(*options), how, out_dtype)
        result = inference_of(q, k, v, is_plain, return_lse)(q, k, v, *inference)
    elif transposed_v is not False or out_dtype is not None or v_mean is not None:
        raise formats_without_scales(transposed_v, out_dtype, v_mean)
    elif not is_plain:
        result = (fwd_lse if return_lse else fwd)(q, k, v, *options)
    elif is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        result = attend_plain(q, k, v, options, return_lse)
    else:
        result = (fwd_lse_cuda if return_lse else fwd_cuda)(q, k, v, *options)
    return result


def _execution(
    pack_gqa: bool | None, family: Family | None, deterministic: bool, attention_chunk: int, num_splits: int
) -> tuple[Any, ...]:
    """The options that follow the softcap; of those with defaults the last are left out."""
    if pack_gqa is not None:
        pack_gqa = flag("pack_gqa", pack_gqa, "None, ")
    check_family(family)
    if deterministic is not False:
        deterministic = flag("deterministic", deterministic)
    options = pack_gqa, family, deterministic
    chunk, splits = chunk_of(attention_chunk), splits_of(num_splits)
    if splits != 1:
        return *options, None, chunk, splits
    return (*options, None, chunk) if chunk else options
