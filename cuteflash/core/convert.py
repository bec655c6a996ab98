"""Rounding fp32 fragments to the element type, two at a time."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

PACKED_CVT = {cutlass.BFloat16: "cvt.rn.bf16x2.f32", cutlass.Float16: "cvt.rn.f16x2.f32"}


def round_fragment(source: cute.Tensor, target: cute.Tensor) -> None:
    """Round `source` (fp32) into `target` (fp16 or bf16), both register tensors with pairs of neighbours adjacent.

    The instruction is spelled out: an ordinary conversion is one that the compiler may move past the loop's
    back edge, which keeps P alive as twice as many fp32 registers and makes WGMMA serialise (ptxas C7512).
    """
    instruction = PACKED_CVT[target.element_type]
    pairs = cute.recast_tensor(target, Uint32)
    for i in range(cute.size(pairs)):
        low, high = source[2 * i], source[2 * i + 1]
        pairs[i] = cute.arch.inline_ptx(
            f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
        )


def rounded_fragment(source: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """A copy of the fp32 register tensor `source`, rounded to `dtype`."""
    target = cute.make_rmem_tensor_like(source, dtype)
    round_fragment(source, target)
    return target
