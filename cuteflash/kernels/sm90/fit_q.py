"""Queries of bf16 made into fp16, as `cuteflash.core.fit_half` says, and the factors of their scores."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cuteflash.core.fit_half import TOP, exponent_of, fitted, larger_exponent, power_of_two
from cuteflash.kernels.sm90.convert import WORDS, chunk_at, copy_chunk
from cuteflash.kernels.sm90.swizzle import CHUNK, swizzled
from cuteflash.kernels.sm90.warpgroup import ROWS, Warpgroup
from cuteflash.traits.sm90 import WGMMA_M


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
