"""Queries of bf16 made into fp16, whose range is smaller: each row is scaled by a power of two, and its scores back.

The largest element of a row comes to lie in [2^14, 2^15). fp16 has 11 bits down to 2^-14, so that a row's elements keep
the 8 bits of bf16 over 31 powers of two below its largest one, and what is smaller is rounded to multiples of 2^-39 of
that: far below what the fp32 sums of the product keep.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32

from cuteflash.core.convert import round_pair, unpack_pair
from cuteflash.kernels.sm90.convert import WORDS, chunk_at, copy_chunk
from cuteflash.kernels.sm90.swizzle import CHUNK, swizzled
from cuteflash.kernels.sm90.warpgroup import ROWS, Warpgroup
from cuteflash.traits.sm90 import WGMMA_M

EXPONENT = 0x7F800000  # bits of fp32, and of a bf16 in the upper half of a register
EXPONENT_BITS = 23
LEAST, MOST = 16, 254  # exponents that a row's largest element is taken to have at least and at most
TOP = 141  # the exponent that it gets
BIAS = 127


@cute.jit
def fit_q(kernel: cutlass.Constexpr, wg: Warpgroup, base: cute.Pointer, tile: Int32):
    """Convert this warpgroup's rows of a Q tile in place; returns the factors of the scores of this thread's rows.

    Args:
        base: of the block's shared memory.
        tile: the number of the (64, head_dim) tile.
    """
    columns = 2 * kernel.traits.head_dim
    start = base + kernel.traits.smem_plan["q"].start + cute.assume(tile * (WGMMA_M * columns), divby=CHUNK)
    lane = cute.arch.lane_idx()
    row, half = wg.thread // 2, lane % 2  # two lanes a row, of the rows that the warp's products read
    peak = Uint32(0)
    for chunk in cutlass.range(half, columns // CHUNK, 2, unroll=2):
        words = cute.make_rmem_tensor(WORDS, Uint32)
        copy_chunk(chunk_at(start, swizzled(row, chunk, WGMMA_M, columns)), words)
        for i in cutlass.range_constexpr(WORDS):
            peak = larger_exponent(peak, words[i])
    peak = cutlass.max(peak, cute.arch.shuffle_sync_bfly(peak, offset=1))
    exponent = exponent_of(peak)
    factor = power_of_two(TOP - exponent)
    for chunk in cutlass.range(half, columns // CHUNK, 2, unroll=2):
        words = cute.make_rmem_tensor(WORDS, Uint32)
        place = chunk_at(start, swizzled(row, chunk, WGMMA_M, columns))
        copy_chunk(place, words)
        for i in cutlass.range_constexpr(WORDS):
            words[i] = fitted(words[i], factor)
        copy_chunk(words, place)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()  # a warp's product reads only the 16 rows of Q that the warp itself wrote
    factors = cute.make_rmem_tensor(ROWS, Float32)
    for r in cutlass.range_constexpr(ROWS):
        factors[r] = power_of_two(cute.arch.shuffle_sync(exponent, lane // 4 * 2 + r * 16) - TOP)
    return factors


def fit_q_registers(wg: Warpgroup) -> cute.Tensor:
    """Convert Q in the registers of the product's operand, whose words hold the thread's two rows in turn; likewise."""
    words, factors = cute.recast_tensor(wg.tSrQ, Uint32), cute.make_rmem_tensor(ROWS, Float32)
    for r in range(ROWS):
        peak = Uint32(0)
        for i in range(r, cute.size(words), ROWS):
            peak = larger_exponent(peak, words[i])
        for lanes in (1, 2):
            peak = cutlass.max(peak, cute.arch.shuffle_sync_bfly(peak, offset=lanes))
        exponent = exponent_of(peak)
        factor, factors[r] = power_of_two(TOP - exponent), power_of_two(exponent - TOP)
        for i in range(r, cute.size(words), ROWS):
            words[i] = fitted(words[i], factor)
    return factors


def larger_exponent(peak: Uint32, word: Uint32) -> Uint32:
    """The largest exponent, as the bits of an fp32, of `peak` and of the two bf16 of a word."""
    return cutlass.max(peak, cutlass.max(word & EXPONENT, word << 16 & EXPONENT))


def exponent_of(peak: Uint32) -> Int32:
    """The exponent in the bits of an fp32, within limits in which the factors are normal numbers."""
    return cutlass.min(cutlass.max(Int32(peak >> EXPONENT_BITS), LEAST), MOST)


def fitted(word: Uint32, factor: Float32) -> Uint32:
    """The two bf16 of a word times a factor, as fp16."""
    low, high = unpack_pair(word, BFloat16)
    return round_pair(low * factor, high * factor, Float16)


def power_of_two(exponent: Int32) -> Float32:
    """2 to this power, which a normal number has."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = (exponent + BIAS) << EXPONENT_BITS
    return cute.recast_tensor(bits, Float32)[0]


def with_row_factors(kernel, wg: Warpgroup, factors: cute.Tensor) -> Warpgroup:
    """The warpgroup with a factor of each row in the scale of its scores."""
    scales = cute.make_rmem_tensor_like(factors)
    softcap = kernel.problem.scores.softcap
    scale = wg.scores.inner_scale if softcap else wg.softmax.scale_log2
    for r in range(ROWS):
        scales[r] = scale * factors[r]
    if softcap:
        return dataclasses.replace(wg, scores=dataclasses.replace(wg.scores, row_scales=scales))
    return dataclasses.replace(wg, softmax=dataclasses.replace(wg.softmax, row_scales=scales))
