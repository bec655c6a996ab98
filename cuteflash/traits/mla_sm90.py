"""Traits of the kernel that decodes latent attention on Hopper."""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar, Literal

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.problem import DTYPES, Feature
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.sm90 import MBARRIER_BYTES, REGISTER_FILE, SWIZZLE_ALIGN, WARPGROUP, WGMMA_M

CONSUMERS = 2  # warpgroups, each with half of O's columns
SLAB = 64  # columns of 16 bits in a row of the 128-byte swizzle, and of one TMA box
SLABS, SLABS_V = LATENT_DIM // SLAB, LATENT_DIM_V // SLAB
HALF_SLABS = SLABS_V // CONSUMERS  # of a warpgroup's columns of O
PART_SLABS = 2  # of a part of a page, which is let go of as a whole; the slab that is not V's is a part of its own
PARTS = -(-SLABS // PART_SLABS)
# The slabs of a page as they arrive and are multiplied with Q: in the order in which those of the page before are let
# go of. What is not V's has been read once the scores are there; then both warpgroups read their halves part by part.
ORDER = (SLABS_V, 0, 1, 4, 5, 2, 3, 6, 7)
ELEMENT_BYTES, STAT_BYTES = 2, 4
ROW_STATISTICS = 2 * CONSUMERS  # maxima and sums of 64 rows, by each warpgroup
PART_STATISTICS = 2 + CONSUMERS  # of a row of a part, 16 bytes: `kernels/sm90/mla_decode_parts.py`
STATISTICS_START = 256  # bytes, past all barriers
REGS_STEP = 8
# Of 32-bit registers a thread: O, S, P and the last columns of Q; beside them addresses and statistics.
HELD_REGS = (LATENT_DIM_V // CONSUMERS + PAGE_ROWS + PAGE_ROWS // 2 + SLAB // 2) * WGMMA_M // WARPGROUP
ADDRESS_REGS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsSm90:
    """One way to run the kernel: 64 query rows, two consumer warpgroups, two pages in flight.

    Attributes:
        groups: numbers of slabs of 64 columns of a page that arrive together, in `ORDER`; products of the first ones
            begin while the others are on their way.
        headroom: powers of two by which a score may exceed its row's maximum before that moves, and with it O and
            the row's sum are scaled: exponentials reach 2 to this power.
        producer_regs, mma_regs: registers a thread.
    """

    operation: ClassVar[Literal["mla"]] = "mla"
    family: ClassVar[Family] = "sm90"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    features: ClassVar[frozenset[Feature]] = frozenset({"split", "varlen"})
    tile_m: ClassVar[int] = WGMMA_M
    tile_n: ClassVar[int] = PAGE_ROWS
    head_dim: ClassVar[int] = LATENT_DIM
    head_dim_v: ClassVar[int] = LATENT_DIM_V
    blocks_per_sm: ClassVar[int] = 1
    part_words: ClassVar[int] = LATENT_DIM_V * ELEMENT_BYTES // STAT_BYTES + PART_STATISTICS  # of a row, fp32
    tile_cost: ClassVar[int] = 2  # pages that are read in the time that a block takes between two tiles
    num_threads: ClassVar[int] = (1 + CONSUMERS) * WARPGROUP

    groups: tuple[int, ...] = (1, 2, 2, 2, 2)
    headroom: float = 8.0
    producer_regs: int = 40
    mma_regs: int = 232

    @property
    def slabs_of_groups(self) -> tuple[tuple[int, ...], ...]:
        """The slabs of each group."""
        ends = tuple(itertools.accumulate(self.groups))
        return tuple(ORDER[end - size : end] for size, end in zip(self.groups, ends, strict=True))

    def groups_of_half(self, who: int) -> tuple[int, ...]:
        """The groups with some of a warpgroup's columns of V."""
        own = set(range(who * HALF_SLABS, (who + 1) * HALF_SLABS))
        return tuple(group for group, slabs in enumerate(self.slabs_of_groups) if own & set(slabs))

    @property
    def barriers(self) -> int:
        """mbarriers: both parts of Q full and empty; of each page its groups full, its parts empty; parts to merge."""
        return 5 + CONSUMERS * (len(self.groups) + PARTS)

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Barriers, statistics of rows, Q, two pages, P of the first warpgroup, and statistics of another block's part.

        P of the second one lies over the last slab of Q, which both keep in registers.
        """
        slab = WGMMA_M * SLAB * ELEMENT_BYTES
        page = PAGE_ROWS * LATENT_DIM * ELEMENT_BYTES
        barriers = SmemRegion(0, self.barriers * MBARRIER_BYTES)
        statistics = SmemRegion(STATISTICS_START, ROW_STATISTICS * WGMMA_M * STAT_BYTES)
        q = SmemRegion(-(-statistics.end // SWIZZLE_ALIGN) * SWIZZLE_ALIGN, SLABS * slab)
        pages = SmemRegion(q.end, CONSUMERS * page, CONSUMERS)
        p0 = SmemRegion(pages.end, slab)
        return {
            "barriers": barriers,
            "statistics": statistics,
            "q": q,
            "p1": SmemRegion(q.start + SLABS_V * slab, slab),
            "pages": pages,
            "p0": p0,
            "beside": SmemRegion(p0.end, PART_STATISTICS * WGMMA_M * STAT_BYTES),
        }

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return plan_bytes(self.smem_plan)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread of a consumer warpgroup needs for O, S, P and the last columns of Q."""
        return HELD_REGS

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        if any(size < 1 for size in self.groups) or sum(self.groups) != SLABS:
            return f"groups {self.groups} are not {SLABS} slabs"
        if not 0 <= self.headroom <= 8:
            return f"headroom {self.headroom} is not 0 to 8: sums of 16-bit exponentials must not overflow"
        if self.smem_bytes > arch.smem_per_block:
            return f"needs {self.smem_bytes} bytes of shared memory, {arch.name} has {arch.smem_per_block}"
        return self._registers_complaint()

    def _registers_complaint(self) -> str | None:
        regs = self.producer_regs, self.mma_regs
        if any(count % REGS_STEP or not REGS_STEP * 3 <= count <= 256 for count in regs):
            return f"producer_regs, mma_regs {regs} are not multiples of {REGS_STEP} from {3 * REGS_STEP} to 256"
        if WARPGROUP * (self.producer_regs + CONSUMERS * self.mma_regs) > self._launch_regs:
            return f"producer_regs, mma_regs {regs} are more than the {self._launch_regs} that a block is launched with"
        if self.mma_regs < HELD_REGS + ADDRESS_REGS:
            return f"mma_regs {self.mma_regs} do not hold {HELD_REGS} and {ADDRESS_REGS} for addresses"
        return None

    @property
    def _launch_regs(self) -> int:
        return REGISTER_FILE // self.num_threads // REGS_STEP * REGS_STEP * self.num_threads
