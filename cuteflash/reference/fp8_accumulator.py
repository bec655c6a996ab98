"""What Hopper's tensor cores make of sums of 8-bit products, and of attention: a model, bitwise right on an H200.

Each instruction adds 32 products to the accumulator C. All 33 are aligned to the largest exponent among them and cut
toward zero at 13 fraction bits, added exactly, and the sum is cut at 13 fraction bits again. C is cut even if all
products are 0. So what an fp32 accumulator holds has 13 fraction bits, and small terms of a long sum are lost:

    one level     C runs on through all keys; of positive P and V of mean 1, 19 % is lost at 16384 keys
    two levels    C starts from 0 for each block of keys and is added to O in fp32: 0.03 %
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cuteflash.reference.fp8 import dequantised
from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import finite_or_zero, grouped, heads_last, scores

PRODUCTS = 32  # of one instruction
FRACTION_BITS = 13
# What is smaller is subnormal, and has this exponent.
LEAST_EXPONENTS = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
LEAST_EXPONENT = LEAST_EXPONENTS[torch.float8_e4m3fn]
NO_EXPONENT = -1000.0  # of zero


def accumulate(c: Tensor, a: Tensor, b: Tensor, least_exponent: int = LEAST_EXPONENT) -> Tensor:
    """C + A B^T as the instructions compute it, fp32 values in fp64.

    Args:
        c: (m, n).
        a: (m, k) e4m3 values in any floating type; k is a multiple of 32.
        b: (n, k), likewise, or values of the type whose `LEAST_EXPONENTS` is `least_exponent`.
    """
    total = c.double()
    for start in range(0, a.shape[1], PRODUCTS):
        left, right = (x[:, start : start + PRODUCTS].double() for x in (a, b))
        products = left[:, None] * right[None]
        # A product of two mantissas in [1, 2) is not normalised: its exponent is the sum of theirs.
        exponents = element_exponents(left)[:, None] + element_exponents(right, least_exponent)[None]
        exponents = exponents.masked_fill(products == 0, NO_EXPONENT)
        largest = torch.maximum(exponents.amax(-1), exponents_of(total))
        unit = torch.exp2(largest - FRACTION_BITS)
        total = (torch.trunc(products / unit[..., None]).sum(-1) + torch.trunc(total / unit)) * unit
        total = cut(total)
    return total


def cut(x: Tensor) -> Tensor:
    """Fp64 values cut toward zero at the accumulator's fraction bits."""
    unit = torch.exp2(exponents_of(x) - FRACTION_BITS)
    return torch.trunc(x / unit) * unit


def exponents_of(x: Tensor) -> Tensor:
    """The exponents of fp64 values."""
    return (torch.frexp(x).exponent.double() - 1).masked_fill(x == 0, NO_EXPONENT)


def element_exponents(x: Tensor, least_exponent: int = LEAST_EXPONENT) -> Tensor:
    """The exponents of values as they are stored in 8 bits."""
    return exponents_of(x).clamp(min=least_exponent)


def modelled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Iterable[Tensor],
    mask: tuple[float, int, int],
    *,
    tile_n: int = 128,
    p_offset: float = 8.0,
    is_two_level: bool = True,
) -> Tensor:
    """O as the kernels are expected to compute it, before it is rounded, in fp64.

    The scores are taken as exact: their products are few, and an error of theirs does not grow with the keys. Slow: for
    a few thousand pairs of query and key.

    Args:
        q, k, v: (b, s, h, d) of 8 bits, v as rows.
        descales: the scales of q, k and v, fp32 (b, h_k).
        mask: softmax_scale, window_left and window_right, see `naive.naive_attention`.
        tile_n: keys of a block.
        p_offset: P is multiplied with 2 to this power before it is rounded.
        is_two_level: each block's product starts from 0.
    """
    softmax_scale, left, right = mask
    q_scale, k_scale, v_scale = descales
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(dequantised(q, q_scale), dequantised(k, k_scale), v.float())
    b, h_k, group, _, _ = queries.shape
    out = queries.new_zeros(b, h_k, group, s_q, v.shape[3], dtype=torch.float64)
    m = queries.new_full((b, h_k, group, s_q), float("-inf"))
    ell = torch.zeros_like(m)
    for j0 in range(0, s_k, tile_n):
        j1 = min(j0 + tile_n, s_k)
        s = scores(
            queries, keys[:, :, j0:j1], softmax_scale, 0.0, visible(0, s_q, j0, j1, s_k - s_q, left, right, q.device)
        )
        new = torch.maximum(m, s.amax(-1))
        shift = finite_or_zero(new)
        rescale = torch.exp(m - shift)
        p = torch.exp(s - shift[..., None]) * 2.0**p_offset
        ell, m, out = ell * rescale + p.sum(-1), new, out * rescale[..., None]
        padding = 0, -(j1 - j0) % PRODUCTS
        rounded = torch.nn.functional.pad(p.to(torch.float8_e4m3fn).float(), padding)
        vt = torch.nn.functional.pad(values[:, :, j0:j1].mT, padding)
        for i in range(b * h_k * group):
            at = i // (h_k * group), i // group % h_k, i % group
            start = torch.zeros_like(out[at]) if is_two_level else out[at]
            product = accumulate(start, rounded[at], vt[at[:2]], LEAST_EXPONENTS[v.dtype])
            out[at] = out[at] + product if is_two_level else product
    out = out / ell.masked_fill(ell == 0, 1.0)[..., None] * v_scale[:, :, None, None, None]
    return heads_last(out, torch.float64)
