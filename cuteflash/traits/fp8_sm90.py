"""Traits of the sm90 family for 8-bit Q, K and V."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from cuteflash.problem import E4M3_MAX, FP8_DTYPES, Feature
from cuteflash.quantize_problem import BLOCK_TOKENS
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.sm90 import FwdTraitsSm90

TURNING_WARPS = 4  # all of the producer warpgroup
TURNED_KEYS, TURNED_COLUMNS = 16, 32  # of V, that a warp turns at a time
LANES_OF_ROW = 4  # that share a row of S
PLAIN_FEATURES: frozenset[Feature] = frozenset({"softcap", "lse", "v_mean"})
TURNING_FEATURES: frozenset[Feature] = PLAIN_FEATURES | {"turned_v"}
HANDING_REGS = 40, 232  # of the producer and of two consumer warpgroups, see `REGISTER_SPLIT`
FIXED_P_OFFSET, MOVING_P_OFFSET = 4.0, 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsFp8Sm90(FwdTraitsSm90):
    """One way to run the sm90 forward kernel on 8-bit operands. What `FwdTraitsSm90` has, and:

    Attributes:
        two_level: each P V is accumulated from zero and then added to O in fp32, as the tensor cores keep only 13
            fraction bits of a sum of 8-bit products. Takes as many registers as O.
        masked_by_fixed_max: with `fixed_max`, blocks cut by the mask's right edge do not update the row maxima either,
            unless the mask has a left edge, too. Costs code, pays if such blocks are many.
        turns_v: the producer warpgroup turns tiles of V as it is stored into Vᵀ. Without it only Vᵀ can be given.
        stored_v_stage: with `turns_v`, tiles of V in flight that are not turned yet; `kv_stage` counts those that are.
        stages_o: O goes through shared memory and leaves it by TMA. Without, four lanes trade pairs, and each stores 16
            bytes: some more instructions a tile, for memory that the wide heads need for V.
    """

    element_bytes: ClassVar[int] = 1
    dtypes: ClassVar[tuple[str, ...]] = FP8_DTYPES
    address_regs: ClassVar[int] = 16

    two_level: bool = False
    masked_by_fixed_max: bool = False
    turns_v: bool = False
    stored_v_stage: int = 2
    stages_o: bool = True

    @property
    def p_offset(self) -> float:
        """P is multiplied with 2 to this power: e4m3 ends at 448, and below 2^-6 it loses bits.

        Fixed maxima leave room for scores above them. As many equal scores as a thread has in a block must not sum up
        to more than 448 under their own maximum: such a block would be repaired, and no maximum would help it. The
        power is whole, so that the largest P of a row, which is 1 times it, is exact: it may be most of the row's sum.
        """
        if not self.fixed_max:
            return MOVING_P_OFFSET
        room = math.log2(0.99 * E4M3_MAX / (self.tile_n // LANES_OF_ROW))  # exp2 is not exact
        return min(FIXED_P_OFFSET, math.floor(room))

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements.

        Scales of 128 tokens need key blocks with one scale, and an accumulator apart that V's is applied to. Packed
        sequences may leave the fragments fewer registers.
        """
        found = TURNING_FEATURES if self.turns_v else PLAIN_FEATURES
        if self.two_level and BLOCK_TOKENS % self.tile_n == 0:
            found |= {"block_scales"}
        if self.accumulator_regs <= self.packed_regs[1] - self.address_regs:
            found |= {"varlen"}
        return found

    @property
    def packed_regs(self) -> tuple[int, int]:
        """See `FwdTraitsSm90.packed_regs`: a warp that turns V and hands out tiles does not fit into 24 registers."""
        if self.turns_v and self.mma_warpgroups == 2:
            return HANDING_REGS
        return self.producer_regs, self.mma_regs

    @property
    def stored_tiles(self) -> dict[str, tuple[int, int]]:
        """See `FwdTraitsSm90.stored_tiles`."""
        return {"stored_v": (self.tile_n * self.head_dim_v, self.stored_v_stage)} if self.turns_v else {}

    @property
    def turning_columns(self) -> int:
        """Warps that share the columns of a tile of V which is turned; the others share its keys."""
        return 1 if self.tile_n % (TURNING_WARPS * TURNED_KEYS) == 0 else 2

    @property
    def mixes_columns(self) -> bool:
        """Whether a warp that turns V stores four even and four odd columns at a time, instead of eight of a kind.

        All even, or all odd, those 8 apart share their banks. Tiles whose keys are no power of two keep that: the
        explorer draws the exchange as a swizzle of the numbers of elements.
        """
        return self.tile_n & (self.tile_n - 1) == 0

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if not (self.warp_specialized and self.overlap and self.p_in_regs):
            return "8-bit operands need warp_specialized, overlap and p_in_regs"
        if self.share_q_o:
            return "8-bit operands: no share_q_o, as O takes twice Q's memory"
        if self.rescale_in_product and self.two_level:
            return "rescale_in_product with two_level: O is not part of the product"
        if self.masked_by_fixed_max and not self.fixed_max:
            return "masked_by_fixed_max needs fixed_max"
        if self.turns_v:
            if self.stored_v_stage < 1:
                return f"stored_v_stage {self.stored_v_stage} is below 1: nothing would be turned"
            columns = self.turning_columns
            keys = TURNING_WARPS // columns * TURNED_KEYS
            if self.tile_n % keys or self.head_dim_v % (columns * TURNED_COLUMNS):
                return (
                    f"turns_v takes tile_n in multiples of {TURNING_WARPS * TURNED_KEYS}, or of {keys} with head_dim_v "
                    f"in multiples of {columns * TURNED_COLUMNS}, not {self.tile_n} and {self.head_dim_v}"
                )
        return FwdTraitsSm90.check(self, arch)


def is_two_level(traits: object) -> bool:
    """Whether traits, of whatever kind, accumulate 8-bit products in two levels."""
    return isinstance(traits, FwdTraitsFp8Sm90) and traits.two_level
