"""The public function that quantises Q, K and V to FP8 for attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from cuteflash.coerce import flag, is_int, not_tensors
from cuteflash.fp8_planning import FP8_NAMES
from cuteflash.quantize_ops import quantize_cuda, quantize_qkv_op, quantize_qkv_varlen_op, quantize_varlen_cuda
from cuteflash.quantize_problem import GRANULARITIES, HADAMARD_BLOCKS, Granularity, QuantizeOptions
from cuteflash.torch_internals import is_plain_cuda_call
from cuteflash.validate import shown


class QuantizedQKV(NamedTuple):
    """Q, K and V in FP8 with their scales: an element stands for its value times its descale.

    Attributes:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, kv_heads, head_dim).
        v: (batch, seqlen_k, kv_heads, head_dim_v); None if V^T was asked for.
        vt: V^T, (batch, kv_heads, head_dim_v, keys), `keys` is seqlen_k rounded up to a multiple of 128; None unless it
            was asked for. Position ``4t + 2j + b`` of each 16 keys holds key ``8j + 2t + b`` (t < 4, j < 2, b < 2), the
            order in which FP8 attention takes them, and keys beyond seqlen_k are 0.
        q_descale, k_descale, v_descale: fp32, (batch, kv_heads), or (batch, kv_heads, blocks) for blocks of 128 tokens.
            The query heads of a KV head share one.
        v_mean: V's mean over the tokens, (batch, kv_heads, head_dim_v) fp32, which was subtracted from V and is added
            to O after attention; None unless V was smoothed.

    Of packed sequences q, k and v are (rows, heads, head_dim), and each sequence is an entry of the batch in q_descale,
    k_descale, v_descale and v_mean. What has blocks of 128 tokens has them for all sequences together, ``total // 128 +
    batch``, those of sequence i from number ``cu_seqlens[i] // 128 + i`` on: descales of blocks are (1, kv_heads,
    blocks), V^T is (kv_heads, head_dim_v, 128 * blocks). Rows and keys that do not count are 0, the descale of a block
    without any is 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    vt: Tensor | None
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    v_mean: Tensor | None


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    granularity: Granularity = "head",
    hadamard: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    transpose_v: bool = False,
    smooth_v: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedQKV:
    """Q, K and V in FP8 for FP8 attention, rotated and scaled on the way, on a GPU in one pass over the memory.

    An element x becomes ``x / descale``, rounded to nearest. A descale that is computed is the largest finite magnitude
    that shares it, after all rotations and without V's mean, divided by the largest number (448, of e5m2 57344); it is
    1 if they are all 0. It costs a second pass over the memory, unless it is one for each 128 tokens. NaN stays NaN, in
    its own rows; what exceeds the largest number times its descale becomes that number, with its sign, and so does an
    infinity. Neither changes how other rows are rounded, nor does what lies in rows that do not count. Under
    ``CUTEFLASH_CHECK=1`` (in the environment) a warning counts the elements that a given descale brought there.

    Args:
        q: (batch, seqlen_q, heads, head_dim), fp16 or bf16, `head_dim` a multiple of 16 up to 256. The last dimension
            is contiguous, every other stride free as long as rows start on 16-byte boundaries: slices of a fused
            projection are taken as they are.
        k: (batch, seqlen_k, kv_heads, head_dim), dtype and device of q; `heads` is a multiple of `kv_heads`.
        v: (batch, seqlen_k, kv_heads, head_dim_v), likewise.
        q_descale, k_descale, v_descale: scales to use, positive, fp32, shaped as `granularity` says; all or none.
        granularity: ``"head"``: descales are (batch, kv_heads); ``"block"``: (batch, kv_heads, blocks), one for each
            128 tokens, the last ones possibly fewer.
        hadamard: rotate each block of so many columns of Q and K, 32, 64, 128 or 256, by an orthonormal Hadamard
            matrix: ``Q K^T`` stays what it is, and outlier channels are spread over the block. It comes after the
            rotary embedding. None is no rotation.
        rotary_cos, rotary_sin: (seqlen, rotary_dim / 2), 16-bit or fp32: the first `rotary_dim` columns of Q and K,
            a multiple of 16, are rotated as `cuteflash.nn.apply_rotary_emb` does it, in fp32, and the result is rounded
            to the dtype of q. Q and K have the same length. Of packed sequences row i is the position of a sequence's
            row i, and there are as many as the longest one has, or more.
        rotary_interleaved: a pair is two neighbouring columns, not two that are ``rotary_dim / 2`` apart.
        transpose_v: return V^T in the order in which attention takes its keys, in place of V.
        smooth_v: subtract V's mean over the tokens, elements that are not finite counted as 0, and return it. The
            rows of attention's weights have sum 1, so that it is added to O as it is.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32: q, k and v are packed sequences, (rows, heads, head_dim), as
            those of `flash_attn_varlen_func`; both or neither. The host does not read them.
        seqused_q, seqused_k: (batch,) int32: how many rows of each packed sequence count, the first ones; None is all.
        dtype: of the result, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, for all three.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not supported, or two dtypes mixed.
        ValueError: a shape, stride, alignment, device mix, block size or scale that is not allowed. On a GPU the values
            of scales and vectors are only read if ``CUTEFLASH_CHECK=1``.
        NotImplementedError: a device other than a Hopper GPU or a CPU, or a kind of tensor that is not supported.
    """
    given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    vectors = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    vectors |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    tensors = {"q": q, "k": k, "v": v} | {name: x for name, x in (given | vectors).items() if x is not None}
    if not all(isinstance(x, Tensor) for x in tensors.values()):
        raise not_tensors(**tensors)
    if not isinstance(granularity, str):
        raise TypeError(f"granularity is {shown(granularity)}; allowed: {', '.join(map(repr, GRANULARITIES))}")
    _check_block(hadamard)
    transpose_v, smooth_v = flag("transpose_v", transpose_v), flag("smooth_v", smooth_v)
    if not isinstance(dtype, torch.dtype) or dtype not in FP8_NAMES:
        raise TypeError(f"dtype is {shown(dtype)}; allowed: {', '.join(map(str, FP8_NAMES))}")
    options = QuantizeOptions(
        granularity,
        int(hadamard or 0),
        flag("rotary_interleaved", rotary_interleaved),
        transpose_v,
        smooth_v,
        FP8_NAMES[dtype],
    )
    is_packed = _is_packed(vectors)
    if is_plain_cuda_call(q, k, v) and not (is_grad_enabled() and any(x.requires_grad for x in tensors.values())):
        quantise = quantize_varlen_cuda if is_packed else quantize_cuda
    else:
        quantise = quantize_qkv_varlen_op if is_packed else quantize_qkv_op
    results = quantise(q, k, v, *(vectors.values() if is_packed else ()), *given.values(), *options)
    q8, k8, v8, *computed, mean = results
    return QuantizedQKV(
        q=q8,
        k=k8,
        v=None if transpose_v else v8,
        vt=v8 if transpose_v else None,
        q_descale=computed[0] if q_descale is None else q_descale,
        k_descale=computed[1] if k_descale is None else k_descale,
        v_descale=computed[2] if v_descale is None else v_descale,
        v_mean=mean if smooth_v else None,
    )


def _check_block(hadamard: object) -> None:
    """Raise if `hadamard` is not an int that an operator may be given; the operators check which one."""
    allowed = f"allowed: None, {', '.join(map(str, HADAMARD_BLOCKS))}"
    if hadamard is not None and not is_int(hadamard):
        raise TypeError(f"hadamard is {shown(hadamard)}; {allowed}")
    if hadamard is not None and not 0 <= hadamard <= max(HADAMARD_BLOCKS):  # type: ignore[operator]
        raise ValueError(f"hadamard is {shown(hadamard)}; {allowed}")


def _is_packed(vectors: Mapping[str, Tensor | None]) -> bool:
    """Whether these vectors describe packed sequences. ValueError if one that belongs to another is missing."""
    given = [name for name, vector in vectors.items() if vector is not None]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if given and name not in given:
            raise ValueError(f"{name} is None; allowed with {given[0]}: a tensor")
    return bool(given)
