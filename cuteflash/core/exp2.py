"""2**x on two units: the special-function unit (16 a clock), or a polynomial on the FMA pipe (128 a clock).

At head dim 64 an H100's special-function unit needs as long for the exponentials as the tensor cores for the products,
so that part of them is better taken elsewhere. The polynomial follows Cody and Waite: x = n + f with n the nearest
integer, 2**f by a cubic, n added to the exponent bits.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

# Minimax cubic of 2**f on [-1/2, 1/2], largest relative error 7.5e-5: a 26th of bf16's half-ulp, a 6th of fp16's.
CUBIC = (0.99992807, 0.69326099, 0.24261117, 0.05517168)
ROUND_TO_INTEGER = 1.5 * 2.0**23  # added to |x| < 2**22, leaves the nearest integer in the low mantissa bits
SMALLEST = -126.0  # 2**SMALLEST is the smallest normal number
OUT_OF = 16  # shares are counted in sixteenths


def uses_polynomial(column: int, share: int) -> bool:
    """Whether the `column`-th exponential of a thread is one of `share` in 16, evenly spread."""
    return column * share % OUT_OF < share


def exp2(x: Float32) -> Float32:
    """2**x by `ex2.approx.ftz`."""
    return cute.math.exp2(x, fastmath=True)


def exp2_polynomial(x: Float32) -> Float32:
    """2**x for finite x <= 128 without the special-function unit; what is under 2**-126 becomes about that."""
    x = cute.arch.fmax(x, SMALLEST, nan=True)
    rounded = x + ROUND_TO_INTEGER
    f = x - (rounded - ROUND_TO_INTEGER)
    p = Float32(CUBIC[3])
    for c in CUBIC[2::-1]:
        p = p * f + c
    return cute.arch.inline_ptx(
        "{ .reg .b32 n; shl.b32 n, {$r0}, 23; add.s32 {$w0}, n, {$r1}; }",
        write_only_types=[Float32],
        read_only_args=[rounded, p],
    )
