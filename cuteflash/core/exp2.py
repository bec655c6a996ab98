"""2**x on two units: the special-function unit (16 a clock), or a polynomial on the FMA pipe (128 a clock).

At head dim 64 an H100's special-function unit needs as long for the exponentials as the tensor cores for the products,
so that part of them is better taken elsewhere. The polynomial follows Cody and Waite: x = n + f with n the nearest
integer, 2**f by a cubic, 2**n by shifting n + 127 to where the exponent is.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

# Minimax cubic of 2**f on [-1/2, 1/2], largest relative error 7.5e-5: a 52nd of bf16's 2**-8, a 6th of fp16's 2**-11.
CUBIC = (0.99992807, 0.69326099, 0.24261117, 0.05517168)
# Added to |x| < 2**22, leaves the nearest integer and the bias of fp32's exponent in the low mantissa bits.
ROUND_AND_BIAS = 1.5 * 2.0**23 + 127
SMALLEST = -126.0  # 2**SMALLEST is the smallest normal number
OUT_OF = 16  # shares are counted in sixteenths


def uses_polynomial(column: int, share: int) -> bool:
    """Whether the `column`-th exponential of a thread is one of `share` in 16, evenly spread."""
    return column * share % OUT_OF < share


def exp2(x: Float32) -> Float32:
    """2**x by `ex2.approx.ftz`."""
    return cute.math.exp2(x, fastmath=True)


def exp2_polynomial(x: Float32) -> Float32:
    """2**x for x < 127.5 without the special-function unit; x below -126 counts as that. NaN stays NaN."""
    x = cute.arch.fmax(x, SMALLEST, nan=True)
    rounded = x + ROUND_AND_BIAS
    f = x - (rounded - ROUND_AND_BIAS)
    p = Float32(CUBIC[3])
    for c in CUBIC[2::-1]:
        p = p * f + c
    # A product, not an addition to p's exponent bits: that would turn the NaN of a NaN score into a large number.
    power = cute.arch.inline_ptx("shl.b32 {$w0}, {$r0}, 23;", write_only_types=[Float32], read_only_args=[rounded])
    return p * power
