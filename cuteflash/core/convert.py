"""Rounding fp32 fragments to the element type, as many elements at a time as a register holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

PACKED_CVT = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


def round_pair(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Uint32:
    """Two fp32 values rounded to `dtype` (fp16 or bf16), the first in the lower half.

    The instruction is spelled out: an ordinary conversion is one that the compiler may move past the loop's
    back edge, which keeps P alive as twice as many fp32 registers and makes WGMMA serialise (ptxas C7512).
    """
    return cute.arch.inline_ptx(
        f"{PACKED_CVT[dtype]} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def round_four(values: Sequence[Float32]) -> Uint32:
    """Four fp32 values rounded to e4m3, the first in the lowest byte; what is beyond 448 becomes 448, NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high};}",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def rounded_words(values: Sequence[Float32], dtype: type[cutlass.Numeric]) -> Iterator[Uint32]:
    """Registers with fp32 values rounded to `dtype` (fp16, bf16 or e4m3), the first in the lowest bits."""
    if dtype.width == 8:
        yield from (round_four(values[i : i + 4]) for i in range(0, len(values), 4))
    else:
        yield from (round_pair(values[i], values[i + 1], dtype) for i in range(0, len(values), 2))


def halves_of_e4m3(word: Uint32) -> tuple[Uint32, Uint32]:
    """The four e4m3 values in a register as fp16, which holds them exactly: two registers, the first value lowest."""
    low, high = cute.arch.inline_ptx(
        "{.reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high;}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )
    return low, high


def unpack_pair(pair: Uint32, dtype: type[cutlass.Numeric]) -> tuple[Float32, Float32]:
    """The two values of `dtype` (fp16 or bf16) in a register, as fp32; bf16 takes one instruction a value."""
    halves = cute.make_rmem_tensor((2,), Uint32 if dtype is cutlass.BFloat16 else dtype)
    if dtype is cutlass.BFloat16:
        halves[0], halves[1] = pair << Uint32(16), pair & Uint32(0xFFFF0000)
        values = cute.recast_tensor(halves, Float32)
        return values[0], values[1]
    cute.recast_tensor(halves, Uint32)[0] = pair
    return halves[0].to(Float32), halves[1].to(Float32)


def round_fragment(source: cute.Tensor, target: cute.Tensor) -> None:
    """Round `source` (fp32) into `target` (fp16 or bf16), both register tensors with pairs of neighbours adjacent."""
    pairs = cute.recast_tensor(target, Uint32)
    for i in range(cute.size(pairs)):
        pairs[i] = round_pair(source[2 * i], source[2 * i + 1], target.element_type)


def rounded_fragment(source: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A copy of the fp32 register tensor `source`, rounded to `dtype`."""
    target = cute.make_rmem_tensor_like(source, dtype)
    round_fragment(source, target)
    return target
