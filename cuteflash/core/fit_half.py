"""Rows of bf16 or fp32 made into fp16, whose range is smaller: each is scaled by a power of two, and results back.

The largest element of a row comes to lie in [2^14, 2^15). fp16 has 11 bits down to 2^-14, so that a row's elements keep
the 8 bits of bf16 over 31 powers of two below its largest one, and what is smaller is rounded to multiples of 2^-39 of
that: far below what the fp32 sums of the product keep.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32

from cuteflash.core.convert import round_pair, unpack_pair

EXPONENT = 0x7F800000  # bits of fp32, and of a bf16 in the upper half of a register
EXPONENT_BITS = 23
LEAST, MOST = 16, 254  # exponents that a row's largest element is taken to have at least and at most
TOP = 141  # the exponent that it gets
BIAS = 127


def larger_exponent(peak: Uint32, word: Uint32) -> Uint32:
    """The largest exponent, as the bits of an fp32, of `peak` and of the two bf16 of a word."""
    return cutlass.max(peak, cutlass.max(word & EXPONENT, word << 16 & EXPONENT))


def exponent_of(peak: Uint32) -> Int32:
    """The exponent in the bits of an fp32, within limits in which the factors are normal numbers."""
    return cutlass.min(cutlass.max(Int32(peak >> EXPONENT_BITS), LEAST), MOST)


def bits_of(value: Float32) -> Uint32:
    """The bits of an fp32."""
    bits = cute.make_rmem_tensor(1, Float32)
    bits[0] = value
    return cute.recast_tensor(bits, Uint32)[0]


def fitted(word: Uint32, factor: Float32) -> Uint32:
    """The two bf16 of a word times a factor, as fp16."""
    low, high = unpack_pair(word, BFloat16)
    return round_pair(low * factor, high * factor, Float16)


def power_of_two(exponent: Int32) -> Float32:
    """2 to this power, which a normal number has."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = (exponent + BIAS) << EXPONENT_BITS
    return cute.recast_tensor(bits, Float32)[0]
