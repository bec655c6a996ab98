"""Traits of the sm90 kernel for few query rows and an e4m3 cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.problem import DTYPES, Feature, Operation
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, head_dims_complaint, memory_complaint, plan_bytes
from cuteflash.traits.cache_sm90 import CACHE_FEATURES, CHUNK, FEW_LOADS, FP32_BYTES, P_OFFSET
from cuteflash.traits.sm90 import (
    ADDRESS_REGS,
    ARRIVAL_BYTES,
    MBARRIER_BYTES,
    SWIZZLE_ALIGN,
    WARPGROUP,
)

CONSUMERS = 2  # warpgroups
WARPS = CONSUMERS * WARPGROUP // 32  # that share the keys of a block
MMA_KEYS, MMA_ROWS = 16, 8  # keys or columns of V, and query rows, of one mma.sync
PADDING = 4  # fp32 between rows of O in shared memory, so that pairs of four rows lie in different banks
REGISTERS = 72, 216  # a thread of the producer, which looks up pages, and of the consumers
STATISTICS = 2  # of a row: its maximum and its sum


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsFewSm90:
    """One way to run the kernel, whose keys are always split.

    Attributes:
        tile_m: query rows of a tile.
        tile_n: keys of a block; each of 8 warps takes as many of them.
        head_dim, head_dim_v: of the problem, padded to multiples of 32.
        kv_stage: tiles of K and V in flight, each, as memory has them.
    """

    operation: ClassVar[Operation] = "fwd"
    family: ClassVar[Family] = "sm90"
    element_bytes: ClassVar[int] = 2
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    max_head_dim: ClassVar[int] = 256
    merge_loads: ClassVar[int] = FEW_LOADS
    mma_warpgroups: ClassVar[int] = 1  # parts of a tile with rows of their own
    blocks_per_sm: ClassVar[int] = 1
    q_stage: ClassVar[int] = 1
    p_offset: ClassVar[float] = P_OFFSET  # as of `FwdTraitsCacheSm90`

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    kv_stage: int = 3

    @property
    def num_threads(self) -> int:
        """One warpgroup loads."""
        return (1 + CONSUMERS) * WARPGROUP

    @property
    def warp_keys(self) -> int:
        """Keys of a block that a warp reads."""
        return self.tile_n // WARPS

    @property
    def producer_regs(self) -> int:
        """Registers a thread of the producer warpgroup."""
        return REGISTERS[0]

    @property
    def mma_regs(self) -> int:
        """Registers a thread of a consumer warpgroup."""
        return REGISTERS[1]

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements."""
        return CACHE_FEATURES | {"split"}

    def serves(self, rows: int) -> bool:
        """Whether calls with so many query rows a tile run like this."""
        return rows <= self.tile_m

    def tile_tokens(self, packed_heads: int) -> int:
        """Queries of a tile."""
        return self.tile_m // packed_heads

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Barriers, Q, K and V as they are stored, and what the warps find of O, maxima and sums."""
        stages = self.q_stage + 2 * self.kv_stage
        plan = {"barriers": SmemRegion(0, 2 * stages * MBARRIER_BYTES)}
        found = WARPS * self.tile_m * (self.head_dim_v + PADDING + STATISTICS) * FP32_BYTES
        for name, nbytes, count in (
            ("q", self.tile_m * self.head_dim * self.element_bytes, 1),
            ("k", self.tile_n * self.head_dim, self.kv_stage),
            ("v", self.tile_n * self.head_dim_v, self.kv_stage),
            ("found", found, 1),
        ):
            start = -(-plan_bytes(plan) // SWIZZLE_ALIGN) * SWIZZLE_ALIGN
            plan[name] = SmemRegion(start, count * nbytes, count)
        return plan

    @property
    def smem_arrival(self) -> SmemRegion:
        """A word of kernels that split keys, in the room that the plan leaves before Q."""
        return SmemRegion(self.smem_plan["barriers"].end, ARRIVAL_BYTES)

    @property
    def smem_bytes(self) -> int:
        return plan_bytes(self.smem_plan)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for Q, S, P and O."""
        lanes = 32
        q, o = (self.tile_m * columns // lanes for columns in (self.head_dim // 2, self.head_dim_v))
        s = self.tile_m * self.warp_keys // lanes
        return q + o + s + s // 2

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        complaint = head_dims_complaint(self, arch, 2 * CHUNK)
        if complaint is not None:
            return complaint
        if self.tile_m % MMA_ROWS or not self.tile_m:
            return f"tile_m {self.tile_m} is not multiples of {MMA_ROWS} rows"
        if self.tile_n % (WARPS * MMA_KEYS) or not 0 < self.tile_n <= 2 * WARPS * MMA_KEYS:
            return f"tile_n {self.tile_n} is not {MMA_KEYS} or {2 * MMA_KEYS} keys for each of {WARPS} warps"
        if self.kv_stage < 2:
            return f"kv_stage {self.kv_stage} is below 2: nothing would be loaded ahead"
        if self.accumulator_regs > self.mma_regs - ADDRESS_REGS:
            return (
                f"Q, S, P and O fragments take {self.accumulator_regs} registers a thread, "
                f"{self.mma_regs} less {ADDRESS_REGS} for addresses are there"
            )
        return memory_complaint(self, arch)
