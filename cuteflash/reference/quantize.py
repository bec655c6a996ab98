"""Quantising Q, K and V to FP8 by its definition, in torch: what the operator does on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cuteflash.core.tile_numbers import first_tile
from cuteflash.problem import FP8_MAX
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeOptions

FP8_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
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
    """Q, K and V or V^T in 8 bits, their descales and V's mean; the mean is None without `smooth_v`.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim).
        descales: those that are given; None computes them.
        tables: cosines and sines of a rotary embedding, (seqlen or more, rotary_dim / 2).
        options: see `QuantizeOptions`.
    """
    kv_heads = k.shape[2]
    q, k = (_rotated(x, tables, options) for x in (q, k))
    v, v_mean = v.float(), None
    if options.smooth_v:
        v_mean = _finite(v).double().sum(1).div(max(v.shape[1], 1)).float()
        v = v - v_mean[:, None]
    by_block = options.granularity == "block"
    scales = descales or [_descale(x, kv_heads, by_block, FP8_MAX[options.to]) for x in (q, k, v)]
    q8, k8, v8 = (_rounded(x, of_elements(scale, x), options.to) for x, scale in zip((q, k, v), scales, strict=True))
    return q8, k8, _transposed(v8) if options.transpose_v else v8, *scales, v_mean


def quantize_packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    spans: Iterable[tuple[slice, slice]],
    descales: tuple[Tensor, Tensor, Tensor] | None,
    tables: tuple[Tensor, Tensor] | None,
    options: QuantizeOptions,
    results: Sequence[Tensor],
) -> None:
    """The same of packed sequences, one after the other.

    Args:
        tensors: Q, K and V, (rows, heads, head_dim).
        spans: of each sequence the rows of Q and of K that count; they begin with the sequence.
        descales, tables, options: see `quantize`; descales of blocks are (1, kv_heads, blocks), those of a sequence
            from `first_tile` on.
        results: where to put what `quantize` returns. What belongs to no row that counts becomes 0, and a descale 1.
    """
    by_block, (q, k, v) = options.granularity == "block", tensors
    values, scales, mean = results[:3], results[3:6], results[6]
    for x in values:
        x.view(torch.uint8).zero_()
    for x in scales:
        x.fill_(1)
    for i, (of_q, of_k) in enumerate(spans):
        parts = [
            (slice(None), slice(start, start + -(-(part.stop - part.start) // BLOCK_TOKENS)))
            for part in (of_q, of_k, of_k)
            for start in (first_tile(part.start, i, BLOCK_TOKENS),)
        ]
        given = None
        if descales is not None:
            given = tuple(x[:, *part] if by_block else x[i : i + 1] for x, part in zip(descales, parts, strict=True))
        found = quantize(q[None, of_q], k[None, of_k], v[None, of_k], given, tables, options)  # type: ignore[arg-type]
        keys = slice(parts[2][1].start * BLOCK_TOKENS, parts[2][1].stop * BLOCK_TOKENS)
        places = of_q, of_k, (..., keys) if options.transpose_v else of_k
        for x, place, value in zip(values, places, found, strict=False):
            assert value is not None
            x.view(torch.uint8)[place] = value[0].view(torch.uint8)
        if descales is None:
            for x, part, value in zip(scales, parts, found[3:6], strict=True):
                assert value is not None
                x[(0, *part) if by_block else i] = value[0]
        if found[6] is not None:
            mean[i] = found[6][0]


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's Hadamard matrix, elements 1 and -1; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _rotated(x: Tensor, tables: tuple[Tensor, Tensor] | None, options: QuantizeOptions) -> Tensor:
    """Q or K after its rotations, fp32; a rotary embedding's result is rounded to the element type of `x`."""
    dtype, x = x.dtype, x.float()
    if tables is not None:
        cos, sin = (table[: x.shape[1]].float()[:, None] for table in tables)
        turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
        shape, dim = ((-1, 2), -1) if options.rotary_interleaved else ((2, -1), -2)
        a, b = turned.unflatten(-1, shape).unbind(dim)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim).flatten(-2)
        x = torch.cat((turned.to(dtype).float(), rest), -1)
    if options.hadamard:
        rotation = hadamard_matrix(options.hadamard).to(x.device)
        blocks = x.unflatten(-1, (x.shape[-1] // options.hadamard, options.hadamard))
        x = (blocks @ rotation * options.hadamard**-0.5).flatten(-2)
    return x


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def _descale(x: Tensor, kv_heads: int, by_block: bool, largest_number: float) -> Tensor:
    """The scale of each KV head, or of each of its blocks of tokens: its largest finite magnitude / that of 8 bits."""
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
    return torch.where(largest > 0, (largest / largest_number).clamp_min(TINY), 1.0)


def of_elements(descale: Tensor, x: Tensor) -> Tensor:
    """A tensor's descales, (batch, kv_heads[, blocks of 128 tokens]), expanded to (batch, seqlen, heads, 1)."""
    _, seqlen, heads, _ = x.shape
    scale = descale.repeat_interleave(heads // max(descale.shape[1], 1), dim=1)
    if scale.dim() == 2:
        return scale[:, None, :, None]
    return scale.repeat_interleave(BLOCK_TOKENS, dim=2)[:, :, :seqlen].transpose(1, 2)[..., None]


def _rounded(x: Tensor, descale: Tensor, to: str) -> Tensor:
    """What is too large, an infinity, too, becomes the largest number; NaN stays what it is."""
    return (x * (1 / descale)).clamp(-FP8_MAX[to], FP8_MAX[to]).to(FP8_TYPES[to])


def _transposed(v8: Tensor) -> Tensor:
    """(batch, kv_heads, head_dim_v, keys) of (batch, seqlen, kv_heads, head_dim_v): the keys are padded by zeros to a
    multiple of 128, and position 4t + 2j + b of each 16 holds key 8j + 2t + b."""
    bits = torch.nn.functional.pad(v8.view(torch.uint8), (0, 0, 0, 0, 0, -v8.shape[1] % BLOCK_TOKENS))
    keys = bits.permute(0, 2, 3, 1)
    groups = keys.unflatten(-1, (keys.shape[-1] // 16, *KEYS_OF_GROUP))
    transposed: Tensor = groups.transpose(-3, -2).flatten(-4).contiguous().view(v8.dtype)
    return transposed
