"""Traits of the sm90 family for 16-bit Q and an e4m3 cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.problem import Feature
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.base import SmemRegion
from cuteflash.traits.sm90 import PLAIN_FEATURES, WARPGROUP, WGMMA_K, FwdTraitsSm90

CHUNK = 16  # bytes that a lane converts at a time
FP32_BYTES = 4
LANES, WARPS = 32, WARPGROUP // 32
CACHE_FEATURES: frozenset[Feature] = PLAIN_FEATURES | {"varlen", "e4m3_cache"}
P_OFFSET = 8.0
# Registers a thread of the producer, of converting and of consumer warpgroups, by the number of the last two.
CACHE_SPLIT = {(1, 1): (56, 104, 240), (1, 2): (56, 88, 240), (2, 1): (56, 72, 192)}
FEW_LOADS = 16  # see `MERGE_LOADS`: blocks of so many threads have fewer registers
STATISTICS = 4  # that a thread of a consumer hands over with its part of O: maxima and sums of two rows


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """How the warps of a converting warpgroup share a tile: units of some rows and some chunks of these.

    Eight lanes access shared memory together. They take rows and chunks that lie in different banks, whatever the
    swizzles of the stored tile, whose rows have half as many bytes, and of the converted one.

    Attributes:
        chunks: of a unit's row.
        columns: units that lie beside each other, which one warp converts.
        row_units: units that a warp converts of each column, one below the other.
    """

    chunks: int
    columns: int
    row_units: int

    @property
    def rows(self) -> int:
        """Rows of a unit."""
        return LANES // self.chunks

    @classmethod
    def of(cls, tile_n: int, head_dim: int) -> Share | None:
        """That of a tile of K or V; None if it is not whole units for each warp."""
        chunks = 4 if head_dim % (4 * CHUNK) == 0 else 2
        found = cls(chunks, head_dim // (chunks * CHUNK), tile_n // (LANES // chunks * WARPS))
        is_whole = tile_n % (found.rows * WARPS) == 0 and head_dim % (chunks * CHUNK) == 0
        return found if is_whole and tile_n else None


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsCacheSm90(FwdTraitsSm90):
    """One way to run the sm90 forward kernel on e4m3 caches. What `FwdTraitsSm90` has, and:

    Attributes:
        stored_stage: tiles of K and V in flight, each, as memory has them; `kv_stage` counts those that are converted.
        converting_warpgroups: that convert tiles; of two one converts K and one V.
        key_warpgroups: consumer warpgroups that share a tile's 64 rows. Of two each reads half of the keys of a block,
            and the first one merges both results when the tile ends. One computes no faster than memory delivers
            less than 512 bytes a key.
    """

    merge_loads: ClassVar[int] = FEW_LOADS

    stored_stage: int = 2
    converting_warpgroups: int = 1
    key_warpgroups: int = 1

    @property
    def p_offset(self) -> float:
        """P is multiplied with 2 to this power: below 2^-14 fp16 loses bits, which the bf16 of other kernels has."""
        return P_OFFSET

    @property
    def producer_warpgroups(self) -> int:
        """Warpgroups in front of the consumers: one loads, the others convert."""
        return 1 + self.converting_warpgroups

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements."""
        return CACHE_FEATURES | ({"split"} if self.splits else set())

    @property
    def converter_regs(self) -> int:
        """Registers a thread of a converting warpgroup."""
        return CACHE_SPLIT[self.consumer_warpgroups, self.converting_warpgroups][1]

    @property
    def _register_split(self) -> tuple[int, int]:
        loading, _, consuming = CACHE_SPLIT[self.consumer_warpgroups, self.converting_warpgroups]
        return loading, consuming

    @property
    def paged_regs(self) -> tuple[int, int]:
        """See `FwdTraitsSm90.paged_regs`."""
        return self._register_split

    @property
    def stored_tiles(self) -> dict[str, tuple[int, int]]:
        """See `FwdTraitsSm90.stored_tiles`."""
        columns = {"stored_k": self.head_dim, "stored_v": self.head_dim_v}
        return {name: (self.tile_n * width, self.stored_stage) for name, width in columns.items()}

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """As of `FwdTraitsSm90`, O being the last region; where it is staged, parts of it were handed over before."""
        plan = self.plan_of_tiles()
        if self.key_warpgroups > 1:
            handed = (self.head_dim_v // 2 + STATISTICS) * WARPGROUP * FP32_BYTES
            plan["handed"] = SmemRegion(plan["o"].start, handed)
        return plan

    def share(self, head_dim: int) -> Share:
        """How a tile of K or V with these columns is shared."""
        found = Share.of(self.tile_n, head_dim)
        if found is None:
            raise ValueError(f"tile_n is {self.tile_n}; allowed with {head_dim} columns: what `check` allows")
        return found

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if not self.warp_specialized:
            return "e4m3 caches need warp_specialized: other warpgroups load and convert"
        consumers, converting = self.consumer_warpgroups, self.converting_warpgroups
        if (consumers, converting) not in CACHE_SPLIT:
            return f"{consumers} consumer and {converting} converting warpgroups: not one of {list(CACHE_SPLIT)}"
        if self.key_warpgroups > 1:
            if self.mma_warpgroups > 1 or self.pingpong or not (self.q_in_regs and self.p_in_regs):
                return "key_warpgroups needs one tile of 64 rows, q_in_regs, p_in_regs, and no pingpong"
            if self.tile_n % (self.key_warpgroups * WGMMA_K):
                return f"tile_n {self.tile_n} is not multiples of {WGMMA_K} keys for {self.key_warpgroups} warpgroups"
        if self.fixed_max:
            return "e4m3 caches: no fixed_max, which has one scale for all rows"
        if self.blocks_per_sm > 1:
            return "e4m3 caches: one block a multiprocessor, whose shared memory its tiles take"
        if self.stored_stage < 1:
            return f"stored_stage {self.stored_stage} is below 1: nothing would be loaded"
        for head_dim in (self.head_dim, self.head_dim_v):
            if Share.of(self.tile_n, head_dim) is None:
                return f"tile_n {self.tile_n} with {head_dim} columns is not whole units for {WARPS} warps"
        return FwdTraitsSm90.check(self, arch)
