"""Traits of the kernel that decodes latent attention on Hopper."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.problem import DTYPES
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.sm90 import MBARRIER_BYTES, REGISTER_FILE, SWIZZLE_ALIGN, WARPGROUP, WGMMA_M

CONSUMERS = 2  # warpgroups, each with half of O's columns
SLAB = 64  # columns of 16 bits in a row of the 128-byte swizzle, and of one TMA box
SLABS, SLABS_V = LATENT_DIM // SLAB, LATENT_DIM_V // SLAB
HALF_SLABS = SLABS_V // CONSUMERS  # of a warpgroup's columns of O
ELEMENT_BYTES, STAT_BYTES = 2, 4
ROW_STATISTICS = 2 * CONSUMERS  # maxima and sums of 64 rows, by each warpgroup
STATISTICS_START = 256  # bytes, past all barriers
REGS_STEP = 8
# Of 32-bit registers a thread: O, S, P and the last columns of Q; beside them addresses and statistics.
HELD_REGS = (LATENT_DIM_V // CONSUMERS + PAGE_ROWS + PAGE_ROWS // 2 + SLAB // 2) * WGMMA_M // WARPGROUP
ADDRESS_REGS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsSm90:
    """One way to run the kernel: 64 query rows, two consumer warpgroups, two pages in flight.

    Attributes:
        groups: slabs of 64 columns of a page that arrive together, in order; products of the first ones begin while
            the others are on their way. A group lies in one half of V's columns, or in the second and what follows.
        cluster: blocks that load pages for each other, 1 or 2: query tiles of the same sequences. Each loads every
            other group, for both; 2 needs an even number of query tiles.
        headroom: powers of two by which a score may exceed its row's maximum before that moves, and with it O and
            the row's sum are scaled: exponentials reach 2 to this power.
        producer_regs, mma_regs: registers a thread.
    """

    operation: ClassVar[str] = "mla"
    family: ClassVar[Family] = "sm90"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    tile_m: ClassVar[int] = WGMMA_M
    tile_n: ClassVar[int] = PAGE_ROWS
    head_dim: ClassVar[int] = LATENT_DIM
    head_dim_v: ClassVar[int] = LATENT_DIM_V
    blocks_per_sm: ClassVar[int] = 1
    num_threads: ClassVar[int] = (1 + CONSUMERS) * WARPGROUP

    groups: tuple[int, ...] = (2, 2, 2, 3)
    cluster: int = 1
    headroom: float = 8.0
    producer_regs: int = 40
    mma_regs: int = 232

    @property
    def group_starts(self) -> tuple[int, ...]:
        """The first slab of each group, then the number of slabs."""
        return tuple(sum(self.groups[:i]) for i in range(len(self.groups) + 1))

    @property
    def left_groups(self) -> int:
        """How many groups hold the first half of V's columns."""
        return self.group_starts.index(HALF_SLABS)

    @property
    def barriers(self) -> int:
        """mbarriers: both parts of Q full and empty; of each page its groups full, and its halves empty."""
        return 4 + CONSUMERS * (len(self.groups) + 2)

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Barriers, statistics of rows, Q, two pages, and P of the first warpgroup.

        P of the second one lies over the last slab of Q, which both keep in registers.
        """
        slab = WGMMA_M * SLAB * ELEMENT_BYTES
        page = PAGE_ROWS * LATENT_DIM * ELEMENT_BYTES
        barriers = SmemRegion(0, self.barriers * MBARRIER_BYTES)
        statistics = SmemRegion(STATISTICS_START, ROW_STATISTICS * WGMMA_M * STAT_BYTES)
        q = SmemRegion(-(-statistics.end // SWIZZLE_ALIGN) * SWIZZLE_ALIGN, SLABS * slab)
        pages = SmemRegion(q.end, CONSUMERS * page, CONSUMERS)
        return {
            "barriers": barriers,
            "statistics": statistics,
            "q": q,
            "p1": SmemRegion(q.start + SLABS_V * slab, slab),
            "pages": pages,
            "p0": SmemRegion(pages.end, slab),
        }

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return plan_bytes(self.smem_plan)

    def serves(self, rows: int) -> bool:
        """Whether sequences of so many query rows are decoded like this: a cluster has tiles of one sequence."""
        return -(-rows // self.tile_m) % self.cluster == 0

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        if any(size < 1 for size in self.groups) or sum(self.groups) != SLABS or HALF_SLABS not in self.group_starts:
            return f"groups {self.groups} are not {SLABS} slabs, of which some groups hold the first {HALF_SLABS}"
        if self.cluster not in (1, 2):
            return f"cluster {self.cluster} is not 1 or 2"
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
