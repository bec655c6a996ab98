"""Rows of accumulators from registers to memory, 16 bytes at a time.

Four lanes have a row, each two neighbouring columns of every 8. They trade these, so that each gets 8 neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.convert import round_pair
from cuteflash.core.views import aligned

LANES = 4  # that have a row
OCTET = 8  # 16-bit elements of a store


def octet_of_lane(values: Sequence[Float32], place: Int32, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """8 neighbouring elements of a row, rounded to a 16-bit `dtype`, by the `place`-th of its lanes.

    `values` are a lane's two columns of each of four groups of 8; lane `place` gets the whole of the `place`-th group.
    """
    pairs = [round_pair(values[i], values[i + 1], dtype) for i in range(0, OCTET, 2)]
    octet = cute.make_rmem_tensor(OCTET, dtype)
    words = cute.recast_tensor(octet, Uint32)
    for i, word in enumerate(transposed_in_quads(pairs, place)):
        words[i] = word
    return octet


def store_octet(octet: cute.Tensor, line: cute.Tensor, column: Int32) -> None:
    """Store an octet in a contiguous row that lies on 16 bytes, from `column` on, a multiple of 8."""
    bits = OCTET * line.element_type.width
    target = cute.make_tensor(aligned(line.iterator + column, bits // 8), cute.make_layout(OCTET))
    cute.copy(cute.make_copy_atom(CopyUniversalOp(), line.element_type, num_bits_per_copy=bits), octet, target)


def transposed_in_quads(words: list[Uint32], place: Int32) -> list[Uint32]:
    """Of four neighbouring lanes with four words each, lane `place` gets word `place` of each lane, in their order."""
    words = list(words)
    for bit in (1, 2):
        upper = place & bit != 0
        for low in (i for i in range(LANES) if not i & bit):
            high = low | bit
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, words[low], words[high]), offset=bit)
            words[low], words[high] = (
                cutlass.select_(upper, other, words[low]),
                cutlass.select_(upper, words[high], other),
            )
    return words
