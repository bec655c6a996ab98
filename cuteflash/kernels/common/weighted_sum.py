"""Sums of the parts of a row of O whose keys are split, by a warp whose lanes have the factors of parts."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cuteflash.core.softmax import LN_2

WARP = 32
QUAD = 4  # fp32 elements of a load


def lane_distances(groups: int) -> list[int]:
    """What lies between lanes with the same columns, of `groups` groups of a warp's lanes, as bits of their numbers."""
    distances, distance = [], WARP // groups
    while distance < WARP:
        distances.append(distance)
        distance *= 2
    return distances


def add_parts(acc: cute.Tensor, factor: Float32, skipped: Int32, step: int, values: cute.Tensor) -> None:
    """Add (4, parts) values to acc (4,), each times the factor of its part, which the lane of its number has.

    A part of factor 0 may hold anything, and lanes past the last part have that factor. Parts are `step` apart.
    """
    for i in range(cute.size(values.shape[1])):
        add_unless_zero(acc, cute.arch.shuffle_sync(factor, skipped + i * step), values[None, i])


def add_unless_zero(acc: cute.Tensor, factor: Float32, values: cute.Tensor) -> None:
    """acc (4,) += factor * values (4,), but nothing if the factor is 0: by predicates, which cost no instruction."""
    adds = ""
    for e in range(QUAD):
        total, added, value = f"{{$w{e}}}", f"{{$r{1 + e}}}", f"{{$r{1 + QUAD + e}}}"
        adds += f"mov.f32 {total}, {added}; @weighs fma.rn.f32 {total}, {{$r0}}, {value}, {added}; "
    sums = cute.arch.inline_ptx(
        f"{{.reg .pred weighs; setp.neu.f32 weighs, {{$r0}}, 0f00000000; {adds}}}",
        write_only_types=[Float32] * QUAD,
        read_only_args=[factor, *(acc[e] for e in range(QUAD)), *(values[e] for e in range(QUAD))],
    )
    for e in range(QUAD):
        acc[e] = sums[e]


def inverse_of(total: Float32) -> Float32:
    """What a row's sum is multiplied with, by the sum of its weights or of those of its parts; 0 without a key."""
    return cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)


def quick_inverse_of(total: Float32) -> Float32:
    """`inverse_of` by one instruction. Kernels that merge rows of latents spill with it, and do not with a division."""
    return cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total))


def merged_lse(peak: Float32, total: Float32) -> Float32:
    """The log-sum-exp of a row, by the largest one of its parts and the sum of their weights, `exp(lse - peak)`."""
    lse = peak + cute.math.log2(total, fastmath=True) * LN_2
    return cutlass.select_(total == 0.0, -Float32.inf, lse)


def after(lse: Float32, values: cute.Tensor, count: Int32) -> Float32:
    """`lse`, once all `values` are there: otherwise most loads are issued after the first use of `lse`.

    Args:
        count: not negative, which the compiler does not know.
    """
    words, one = cute.recast_tensor(values, Int32), cute.make_rmem_tensor(1, Float32)
    one[0] = lse
    bits = cute.recast_tensor(one, Int32)
    for i in range(0, cute.size(words), QUAD):
        bits[0] = bits[0] | words[i] & (count >> 31)
    return one[0]


def largest_of_warp(value: Float32) -> Float32:
    """The largest value of a warp's lanes, as an integer of the same order, for which there is one instruction."""
    return reordered(cute.arch.warp_redux_sync(reordered(value, Float32, Int32), "max"), Int32, Float32)


def reordered(value, source: type, target: type):
    """The bits of an fp32 as an int32 which is larger if the fp32 is, or the other way."""
    word = cute.make_rmem_tensor(1, source)
    word[0] = value
    bits = cute.recast_tensor(word, Int32)
    bits[0] = bits[0] ^ (bits[0] >> 31 & 0x7FFFFFFF)
    return cute.recast_tensor(word, target)[0]


def load_words(start: Int64, offset: int, count: int, left: Int32 | int = 1, least: int = 0) -> tuple[Uint32, ...]:
    """Up to 4 words `offset` bytes behind an address, with one load, if `left` is more than `least`; otherwise 0.

    Of a register that is loaded under a condition, and not set before, the compiler keeps what it held at the
    kernel's beginning.
    """
    zeros = "".join(f"mov.b32 {{$w{i}}}, 0; " for i in range(count))
    words, vector = ", ".join(f"{{$w{i}}}" for i in range(count)), f".v{count}" if count > 1 else ""
    words = f"{{{words}}}" if count > 1 else words
    found = cute.arch.inline_ptx(
        f"{{.reg .pred there; setp.gt.s32 there, {{$r1}}, {least}; {zeros}"
        f"@there ld.global{vector}.b32 {words}, [{{$r0}}+{offset}];}}",
        write_only_types=[Uint32] * count,
        read_only_args=[start, Int32(left)],
    )
    return found if count > 1 else (found,)


def float_of(word: Uint32) -> Float32:
    """The fp32 whose bits these are."""
    words = cute.make_rmem_tensor(1, Uint32)
    words[0] = word
    return cute.recast_tensor(words, Float32)[0]


def address_here(pointer: cute.Pointer) -> Int64:
    """An address in memory, which is not computed later than here."""
    return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[pointer])
