"""What Hopper's tensor cores make of sums of 8-bit products, and of attention: a model, bitwise right on an H200.

Each instruction adds 32 products to the accumulator C. All 33 are aligned to the largest exponent among them and cut
toward zero at 13 fraction bits, added exactly, and the sum is cut at 13 fraction bits again. C is cut even if all
products are 0. So what an fp32 accumulator holds has 13 fraction bits, and small terms of a long sum are lost:

    one level     C runs on through all keys; of positive P and V of mean 1, 19 % is lost at 16384 keys
    two levels    C starts from 0 for each block of keys and is added to O in fp32: 0.03 %
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.problem import E4M3_MAX
from cuteflash.reference.fp8 import dequantised
from cuteflash.reference.masks import visible
from cuteflash.reference.tiles import finite_or_zero, grouped, heads_last, scores

PRODUCTS = 32  # of one instruction
FRACTION_BITS = 13
# What is smaller is subnormal, and has this exponent.
LEAST_EXPONENTS = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
LEAST_EXPONENT = LEAST_EXPONENTS[torch.float8_e4m3fn]
NO_EXPONENT = -1000.0  # of zero
WARP_ROWS, FRAGMENT_COLUMNS = 16, 8  # of a warp's part of a product: a thread has two neighbouring columns of every 8


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


class FixedMaxima(NamedTuple):
    """How a kernel with the trait `fixed_max` keeps row maxima, so that P may exceed 1; see `kernels.sm90.fixed_max`.

    Only blocks that move a maximum make the row's largest P a power of 2, which rounding leaves exact. The rows of a
    warp are taken to be neighbouring queries of one head.

    Attributes:
        tile_m: queries of a tile.
        masked: blocks that the mask cuts keep the maxima, too, if the mask has no left edge.
    """

    tile_m: int
    masked: bool = False

    def order(self, blocks: int, has_left_edge: bool) -> list[int]:
        """The key blocks as the kernel visits them."""
        backwards = list(reversed(range(blocks)))
        return backwards if has_left_edge else [0, *backwards[:-1]]

    def moving(self, mask: Tensor, tile_n: int, has_left_edge: bool) -> Tensor:
        """(s_q, blocks) in which blocks a row's maximum moves in any case, of the (s_q, s_k) mask of visible keys."""
        blocks = torch.nn.functional.pad(mask, (0, -mask.shape[1] % tile_n)).unflatten(1, (-1, tile_n)).all(-1)
        tiles = []
        for rows in blocks.split(self.tile_m):
            whole = rows.all(0)
            moves = ~whole
            if has_left_edge:
                moves[whole.nonzero()[-1:, 0]] = True
            else:
                moves &= not self.masked
                moves[0] = True
            tiles.append(moves.expand_as(rows))
        return torch.cat(tiles)

    def outgrown(self, p: Tensor) -> Tensor:
        """(..., s_q) whether a row's warp redoes a block, of P (..., s_q, keys) under the present maxima."""
        s_q = p.shape[-2]
        padded = torch.nn.functional.pad(p, (0, -p.shape[-1] % FRAGMENT_COLUMNS, 0, -s_q % WARP_ROWS))
        of_threads = padded.unflatten(-1, (-1, FRAGMENT_COLUMNS // 2, 2)).sum((-3, -1))
        of_warps: Tensor = (of_threads > E4M3_MAX).any(-1).unflatten(-1, (-1, WARP_ROWS)).any(-1)
        return of_warps.repeat_interleave(WARP_ROWS, dim=-1)[..., :s_q]


class KernelModel(NamedTuple):
    """What a kernel's errors depend on.

    Attributes:
        tile_n: keys of a block.
        p_offset: P is multiplied with 2 to this power before it is rounded.
        is_two_level: each block's product starts from 0.
        fixed: of a kernel that does not compare each score with the maxima; None is one that does.
    """

    tile_n: int
    p_offset: float
    is_two_level: bool
    fixed: FixedMaxima | None = None


def modelled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Iterable[Tensor],
    mask: tuple[float, int, int],
    model: KernelModel,
) -> Tensor:
    """O as the kernels are expected to compute it, before it is rounded, in fp64.

    The scores are taken as exact: their products are few, and an error of theirs does not grow with the keys. Slow: for
    a few thousand pairs of query and key.

    Args:
        q, k, v: (b, s, h, d) of 8 bits, v as rows.
        descales: the scales of q, k and v, fp32 (b, h_k).
        mask: softmax_scale, window_left and window_right, see `naive.naive_attention`.
        model: of the kernel. Its tiles begin with the first of these queries.
    """
    softmax_scale, left, right = mask
    tile_n, p_offset, is_two_level, fixed = model
    q_scale, k_scale, v_scale = descales
    s_q, s_k = q.shape[1], k.shape[1]
    queries, keys, values = grouped(dequantised(q, q_scale), dequantised(k, k_scale), v.float())
    m = queries.new_full(queries.shape[:4], float("-inf"))
    out, ell = m.new_zeros(*m.shape, v.shape[3], dtype=torch.float64), torch.zeros_like(m)
    order, moving = list(range(-(-s_k // tile_n))), None
    if fixed is not None and s_k:
        seen = visible(0, s_q, 0, s_k, s_k - s_q, left, right, q.device)
        seen = torch.ones(s_q, s_k, dtype=torch.bool, device=q.device) if seen is None else seen
        order, moving = fixed.order(len(order), left >= 0), fixed.moving(seen, tile_n, left >= 0)
    for n in order:
        j0, j1 = n * tile_n, min((n + 1) * tile_n, s_k)
        seen = visible(0, s_q, j0, j1, s_k - s_q, left, right, q.device)
        s = scores(queries, keys[:, :, j0:j1], softmax_scale, 0.0, seen)
        new = torch.maximum(m, s.amax(-1))
        if fixed is not None and moving is not None:
            under_present = torch.exp(s - finite_or_zero(m)[..., None]) * 2.0**p_offset
            new = torch.where(moving[:, n] | fixed.outgrown(under_present), new, m)
        shift = finite_or_zero(new)
        rescale = torch.exp(m - shift)
        p = torch.exp(s - shift[..., None]) * 2.0**p_offset
        ell, m, out = ell * rescale + p.sum(-1), new, out * rescale[..., None]
        add_product(out, p, values[:, :, j0:j1], LEAST_EXPONENTS[v.dtype], is_two_level)
    out = out / ell.masked_fill(ell == 0, 1.0)[..., None] * v_scale[:, :, None, None, None]
    return heads_last(out, torch.float64)


def add_product(out: Tensor, p: Tensor, values: Tensor, least_exponent: int, is_two_level: bool) -> None:
    """Add a block's product to O (b, h_k, g, s_q, d_v), with P (b, h_k, g, s_q, keys) rounded.

    Args:
        out: O, changed in place.
        p: P, times its factor.
        values: V (b, h_k, keys, d_v).
        least_exponent: see `accumulate`.
        is_two_level: the product starts from 0.
    """
    padding = 0, -p.shape[-1] % PRODUCTS
    rounded = torch.nn.functional.pad(p.to(torch.float8_e4m3fn).float(), padding)
    vt = torch.nn.functional.pad(values.mT, padding)
    for at in itertools.product(*(range(size) for size in out.shape[:3])):
        start = torch.zeros_like(out[at]) if is_two_level else out[at]
        product = accumulate(start, rounded[at], vt[at[:2]], least_exponent)
        out[at] = out[at] + product if is_two_level else product
