"""Products of tensor cores with which the quantising kernels convert, add and rotate a thread's elements.

Thread 4g + t of a warp has elements of an operand's rows g and g + 8, in columns that t gives, and of these rows of the
result. So whatever rows are taken for, what a thread gets comes from four neighbouring threads, and with the identity
it comes from itself: 16-bit elements in fp32, added to what is in fp32 already, four in an instruction.

An element that is not finite makes NaN of all that its row of the operand gives.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cuteflash.problem import Dtype

QUAD = 4  # threads that an operand's row is in
PTX_TYPES = {"fp16": "f16", "bf16": "bf16"}
ONES = {"fp16": 0x3C003C00, "bf16": 0x3F803F80}  # a pair of 1
SIGNS, SECOND_SIGN = 0x80008000, 0x80000000  # of a pair; the latter that of fp32, too
FIRST, SECOND = 0xFFFF, 0xFFFF0000  # halves of a pair

Sums = tuple[Float32, ...]  # four of a thread
ZEROS = (0.0,) * 4


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a thread has of a product's second operand, one half of which is the identity or minus it, the other zero.

    Row 2t + b of a half and column g meet in thread 4g + t.

    Attributes:
        first, second: with the identity in the first and in the second half. All four are registers of their own, by
            zeros that the compiler does not know: it would make copies for each product.
        dtype: of the elements.
    """

    first: tuple[Uint32, Uint32]
    second: tuple[Uint32, Uint32]
    dtype: cutlass.Constexpr[Dtype]

    @classmethod
    def of(cls, dtype: Dtype, count: Int32, is_negative: bool = False) -> Identity:
        """For elements of `dtype`; `count` is a number that is not negative, of which the compiler knows nothing."""
        t, g = place_of_lane()
        ones = Uint32(ONES[dtype] ^ (SIGNS if is_negative else 0))
        half = cutlass.select_(g & 1 == 1, Uint32(SECOND), Uint32(FIRST))
        pair = cutlass.select_(g >> 1 == t, ones & half, Uint32(0))
        none = count >> 31
        zeros = Uint32(none & t), Uint32(none & g)
        return cls((pair, zeros[0]), (zeros[1], pair ^ zeros[0]), dtype)

    def add_first(self, sums: Sums, words: tuple[Uint32, ...]) -> Sums:
        """Add the first two of four pairs."""
        return mma(sums, words, self.first, self.dtype)

    def add_second(self, sums: Sums, words: tuple[Uint32, ...]) -> Sums:
        """Add the last two of four pairs."""
        return mma(sums, words, self.second, self.dtype)


def place_of_lane() -> tuple[Int32, Int32]:
    """t and g of thread 4g + t of a warp."""
    lane = cute.arch.lane_idx()
    return lane % QUAD, lane // QUAD


def odd_bits(a: Int32) -> Int32:
    """Whether a number of two bits has an odd number of them."""
    return (a ^ (a >> 1)) & 1


def signs_of(dtype: Dtype) -> Uint32:
    """What a thread has of Hadamard's matrix as the second operand of a product, up to its sign: two elements, 1 or -1.

    Row 16t + 2p + f and column 16g' + 2n + g'' of the matrix meet in thread 4g + t, if g is 2g' + g''; the element is
    negative if their numbers have an odd number of bits in common. Those of p and n are `Held.sign`'s.
    """
    t, g = place_of_lane()
    pair = Uint32(ONES[dtype]) ^ cutlass.select_(odd_bits(t & (g >> 1)) == 1, Uint32(SIGNS), Uint32(0))
    return pair ^ cutlass.select_(g & 1 == 1, Uint32(SECOND_SIGN), Uint32(0))


def mma(c: Sums, a: tuple[Uint32, ...], b: tuple[Uint32, ...], dtype: Dtype, use: str = "") -> Sums:
    """c + a b of a warp: 16 rows, 8 columns, sums over 16. The compiler merges equal ones of one `use` only."""
    shape = f"m16n8k16.row.col.f32.{PTX_TYPES[dtype]}.{PTX_TYPES[dtype]}.f32"
    return product(shape, c, a, b, use)


def product(shape: str, c: Sums, a: tuple, b: tuple[Uint32, ...], use: str = "") -> Sums:
    """An mma of four registers, two, and four of sums."""
    code = (
        f"mma.sync.aligned.{shape} "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    note = f" // {use}" if use else ""
    return tuple(cute.arch.inline_ptx(code + note, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c]))
