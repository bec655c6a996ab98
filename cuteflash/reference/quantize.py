"""Quantising Q, K and V to FP8 by its definition, in torch: what the operator does on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.problem import E4M3_MAX
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeOptions

FP8 = torch.float8_e4m3fn
TINY = torch.finfo(torch.float32).tiny
KEYS_OF_GROUP = (2, 4, 2)  # j, t, b of key 8j + 2t + b


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: tuple[Tensor, Tensor, Tensor] | None,
    tables: tuple[Tensor, Tensor] | None,
    options: QuantizeOptions,
) -> tuple[Tensor | None, ...]:
    """Q, K and V or V^T as e4m3, their descales and V's mean; the mean is None without `smooth_v`.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim).
        descales: those that are given; None computes them.
        tables: cosines and sines of a rotary embedding, (seqlen, rotary_dim / 2).
        options: see `QuantizeOptions`.
    """
    kv_heads = k.shape[2]
    q, k = (_rotated(x.float(), tables, options) for x in (q, k))
    v, v_mean = v.float(), None
    if options.smooth_v:
        v_mean = _finite(v).double().sum(1).div(max(v.shape[1], 1)).float()
        v = v - v_mean[:, None]
    by_block = options.granularity == "block"
    scales = descales or [_descale(x, kv_heads, by_block) for x in (q, k, v)]
    q8, k8, v8 = (_rounded(x, of_elements(scale, x)) for x, scale in zip((q, k, v), scales, strict=True))
    return q8, k8, _transposed(v8) if options.transpose_v else v8, *scales, v_mean


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's Hadamard matrix, elements 1 and -1; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _rotated(x: Tensor, tables: tuple[Tensor, Tensor] | None, options: QuantizeOptions) -> Tensor:
    if tables is not None:
        cos, sin = (table.float()[:, None] for table in tables)
        turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
        shape, dim = ((-1, 2), -1) if options.rotary_interleaved else ((2, -1), -2)
        a, b = turned.unflatten(-1, shape).unbind(dim)
        x = torch.cat((torch.stack((a * cos - b * sin, a * sin + b * cos), dim).flatten(-2), rest), -1)
    if options.hadamard:
        rotation = hadamard_matrix(options.hadamard).to(x.device)
        blocks = x.unflatten(-1, (x.shape[-1] // options.hadamard, options.hadamard))
        x = (blocks @ rotation * options.hadamard**-0.5).flatten(-2)
    return x


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def _descale(x: Tensor, kv_heads: int, by_block: bool) -> Tensor:
    """The scale of each KV head, or of each of its blocks of tokens: its largest finite magnitude / 448."""
    batch, seqlen, heads, head_dim = x.shape
    magnitudes = _finite(x).abs()
    if by_block:
        blocks = -(-seqlen // BLOCK_TOKENS)
        magnitudes = torch.nn.functional.pad(magnitudes, (0, 0, 0, 0, 0, blocks * BLOCK_TOKENS - seqlen))
        shape = (batch, blocks, BLOCK_TOKENS, kv_heads, heads // max(kv_heads, 1) * head_dim)
        magnitudes = magnitudes.reshape(shape).permute(0, 3, 1, 2, 4).flatten(3)
    else:
        magnitudes = magnitudes.reshape(batch, seqlen, kv_heads, -1 if x.numel() else 0).transpose(1, 2).flatten(2)
    largest = magnitudes.amax(-1) if magnitudes.shape[-1] else magnitudes.new_zeros(magnitudes.shape[:-1])
    return torch.where(largest > 0, (largest / E4M3_MAX).clamp_min(TINY), 1.0)


def of_elements(descale: Tensor, x: Tensor) -> Tensor:
    """A tensor's descales, (batch, kv_heads[, blocks of 128 tokens]), expanded to (batch, seqlen, heads, 1)."""
    _, seqlen, heads, _ = x.shape
    scale = descale.repeat_interleave(heads // max(descale.shape[1], 1), dim=1)
    if scale.dim() == 2:
        return scale[:, None, :, None]
    return scale.repeat_interleave(BLOCK_TOKENS, dim=2)[:, :, :seqlen].transpose(1, 2)[..., None]


def _rounded(x: Tensor, descale: Tensor) -> Tensor:
    """What is too large, an infinity, too, becomes 448; NaN stays what it is."""
    return (x * (1 / descale)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def _transposed(v8: Tensor) -> Tensor:
    """(batch, kv_heads, head_dim_v, keys) of (batch, seqlen, kv_heads, head_dim_v): the keys are padded by zeros to a
    multiple of 128, and position 4t + 2j + b of each 16 holds key 8j + 2t + b."""
    bits = torch.nn.functional.pad(v8.view(torch.uint8), (0, 0, 0, 0, 0, -v8.shape[1] % BLOCK_TOKENS))
    keys = bits.permute(0, 2, 3, 1)
    groups = keys.unflatten(-1, (keys.shape[-1] // 16, *KEYS_OF_GROUP))
    transposed: Tensor = groups.transpose(-3, -2).flatten(-4).contiguous().view(FP8)
    return transposed
