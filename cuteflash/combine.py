"""Attention over disjoint keys, put together: partial results and their log-sum-exps give those of all keys.

Plain torch, in fp32: differentiable, on every device, without a kernel of its own. `num_splits` of the attention
functions does not need these functions, since its kernels put their parts together themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.validate import HALF_DTYPES, REFERENCE_DTYPES, check_strided


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Put results over disjoint parts of the keys together, with the names and shapes of FlashAttention-3.

    Args:
        out_partial: (parts, batch, seqlen, heads, head_dim) or, of packed sequences, (parts, total, heads, head_dim);
            fp32, each part normalized by itself.
        lse_partial: (parts, batch, seqlen, heads) or (parts, total, heads), fp32, natural logarithm. Where it is -inf,
            the part has no key, and its `out_partial` is not read.
        out: what the result is written to; None is a new tensor.
        out_dtype: fp32, fp16 or bf16; None is that of `out`, without it fp32.

    Returns:
        O, (batch, seqlen, heads, head_dim), and LSE, (batch, seqlen, heads), fp32; 0 and -inf if no part has a key.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or devices that do not belong together, or no part.
    """
    _check("out_partial", out_partial, (torch.float32,))
    _check("lse_partial", lse_partial, (torch.float32,))
    if out_partial.dim() not in (4, 5) or out_partial.shape[0] == 0:
        allowed = "(parts, batch, seqlen, heads, head_dim) or (parts, total, heads, head_dim), with a part"
        raise ValueError(f"out_partial.shape is {tuple(out_partial.shape)}; allowed: {allowed}")
    _check_like("lse_partial", lse_partial, out_partial, out_partial.shape[:-1])
    dtypes = (torch.float32, *HALF_DTYPES)
    if out_dtype not in (None, *dtypes):
        raise TypeError(f"out_dtype is {out_dtype}; allowed: None, {', '.join(map(str, dtypes))}")
    if out is not None:
        _check("out", out, dtypes if out_dtype is None else (out_dtype,))
        _check_like("out", out, out_partial, out_partial.shape[1:])
        if torch.is_grad_enabled() and out.requires_grad:
            raise ValueError("out requires grad; allowed: a tensor that does not, as it is written to")
    result, lse = _combined(out_partial, lse_partial)
    if out is not None:
        return out.copy_(result), lse
    return result.to(out_dtype or torch.float32), lse


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Put the results of two calls over disjoint keys together, as for a shared prefix and what follows it.

    Args:
        out_a, out_b: O, (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        lse_a, lse_b: LSE, (batch, heads, seqlen) or (heads, total), fp32 (fp64 for fp64 inputs), as
            `flash_attn_func` and `flash_attn_varlen_func` return it.

    Returns:
        (O, LSE) of all keys, shaped and typed as the arguments: what a call with both keys gives, but for rounding.

    Raises:
        TypeError, ValueError: as `flash_attn_combine`.
    """
    _check("out_a", out_a, REFERENCE_DTYPES)
    _check("out_b", out_b, (out_a.dtype,))
    if out_a.dim() not in (3, 4):
        allowed = "(batch, seqlen, heads, head_dim) or (total, heads, head_dim)"
        raise ValueError(f"out_a.shape is {tuple(out_a.shape)}; allowed: {allowed}")
    _check_like("out_b", out_b, out_a, out_a.shape)
    exact = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    *batch, seqlen, heads, _ = out_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check(name, lse, (exact,))
        _check_like(name, lse, out_a, torch.Size((*batch, heads, seqlen)))
    lses = torch.stack((lse_a, lse_b)).transpose(-1, -2)
    result, lse = _combined(torch.stack((out_a, out_b)).to(exact), lses)
    return result.to(out_a.dtype), lse.transpose(-1, -2).contiguous()


def _combined(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(parts, .., head_dim) and (parts, ..): the sum weighted by the exponentials of `lses`, and their log-sum-exp."""
    has_keys = lses != float("-inf")
    peak = lses.detach().amax(0)
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    weights = torch.where(has_keys, (lses - peak).exp(), 0.0)
    total = weights.sum(0)
    is_empty = total == 0.0
    divisor = torch.where(is_empty, 1.0, total)
    weighted = torch.where(has_keys[..., None], parts, 0.0) * weights[..., None]
    lse = torch.where(is_empty, float("-inf"), peak + divisor.log())
    return weighted.sum(0) / divisor[..., None], lse


def _check(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; allowed: a torch.Tensor")
    check_strided(name, tensor)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")


def _check_like(name: str, tensor: Tensor, other: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}.shape is {tuple(tensor.shape)}; allowed: {tuple(shape)}")
    if tensor.device != other.device:
        raise ValueError(f"{name}.device is {tensor.device}; allowed: {other.device}")
