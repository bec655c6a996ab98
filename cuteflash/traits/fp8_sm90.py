"""Traits of the sm90 family for 8-bit Q, K and V."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.problem import FP8_DTYPES, Feature
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.sm90 import FwdTraitsSm90

TURNING_WARPS = 4  # all of the producer warpgroup
TURNED_KEYS, TURNED_COLUMNS = 16, 32  # of V, that a warp turns at a time
FIXED_P_OFFSET, MOVING_P_OFFSET = 4.0, 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsFp8Sm90(FwdTraitsSm90):
    """One way to run the sm90 forward kernel on 8-bit operands. What `FwdTraitsSm90` has, and:

    Attributes:
        two_level: each P V is accumulated from zero and then added to O in fp32, as the tensor cores keep only 13
            fraction bits of a sum of 8-bit products. Takes as many registers as O.
        turns_v: the producer warpgroup turns tiles of V as it is stored into Vᵀ. Without it only Vᵀ can be given.
    """

    element_bytes: ClassVar[int] = 1
    dtypes: ClassVar[tuple[str, ...]] = FP8_DTYPES

    two_level: bool = False
    turns_v: bool = False

    @property
    def p_offset(self) -> float:
        """P is multiplied with 2 to this power: e4m3 ends at 448, and below 2^-6 it loses bits.

        Fixed maxima leave room for scores above them.
        """
        return FIXED_P_OFFSET if self.fixed_max else MOVING_P_OFFSET

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements."""
        return frozenset({"softcap", "lse", "turned_v"} if self.turns_v else {"softcap", "lse"})

    @property
    def turning_columns(self) -> int:
        """Warps that share the columns of a tile of V which is turned; the others share its keys."""
        return 1 if self.tile_n % (TURNING_WARPS * TURNED_KEYS) == 0 else 2

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if not (self.warp_specialized and self.overlap and self.p_in_regs):
            return "8-bit operands need warp_specialized, overlap and p_in_regs"
        if self.q_in_regs or self.share_q_o:
            return "8-bit operands: no q_in_regs, no share_q_o, as O takes twice Q's memory"
        if self.rescale_in_product and self.two_level:
            return "rescale_in_product with two_level: O is not part of the product"
        if self.turns_v:
            columns = self.turning_columns
            keys = TURNING_WARPS // columns * TURNED_KEYS
            if self.tile_n % keys or self.head_dim_v % (columns * TURNED_COLUMNS):
                return (
                    f"turns_v takes tile_n in multiples of {TURNING_WARPS * TURNED_KEYS}, or of {keys} with head_dim_v "
                    f"in multiples of {columns * TURNED_COLUMNS}, not {self.tile_n} and {self.head_dim_v}"
                )
        return FwdTraitsSm90.check(self, arch)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for S, O, P, the sum beside O with `two_level`, and exponentials not yet rounded."""
        s, o, p = self.tile_n // 2, self.head_dim_v // 2, self.tile_n // 8
        unrounded = self.tile_n // 4 * self.exp_rows_before_wait if self.fixed_max else 0
        return s + o * (2 if self.two_level else 1) + p + unrounded


def is_two_level(traits: object) -> bool:
    """Whether traits, of whatever kind, accumulate 8-bit products in two levels."""
    return isinstance(traits, FwdTraitsFp8Sm90) and traits.two_level
