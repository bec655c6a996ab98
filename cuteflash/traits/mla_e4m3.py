"""Traits of the kernel that decodes latent attention from an e4m3 cache, with mma.sync."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.problem import DTYPES, Feature
from cuteflash.traits.arch import BLOCK_SMEM, ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.sm80 import ADDRESS_REGS, MMA_K, MMA_M, WARP, registers_a_thread

PAIRS = LATENT_DIM // 2  # of bytes, which ldmatrix moves like 16-bit elements
STEPS = LATENT_DIM // MMA_K
COLUMNS = 64  # of a slab of keys, which a swizzle permutes: a warp has whole ones of O
ELEMENT_BYTES, STAT_BYTES = 2, 4
SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle, so that a tile's offset never carries into it
E4M3_CAPABILITY = 8, 9  # from which on e4m3 is converted by an instruction


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsE4m3:
    """One way to run the kernel.

    Attributes:
        tile_m: query rows of a tile, of which each warp has 16 in the product with K, and all in that with V.
        tile_n: keys of one step, a divisor of a page's rows; the warps with the same query rows share them.
        least_rows: query rows of a sequence from which on the row is taken.
        num_warps: of a block, each with as many columns of O.
        kv_stage: steps' keys in flight.
        k_parts: warps, 1 or 2, that share the columns of Q and K for the same rows and keys; they add up what they have
            through shared memory.
        trades_rows: two warps with neighbouring groups of 16 rows each multiply both with half of the columns, and
            trade what they have through shared memory: they do not convert the same elements.
        q_kept: of a warp's steps of 16 columns of Q, 36 of them over the parts of the columns, how many, the last ones,
            it keeps in registers.
        chains: accumulators of a product with K, added up at its end: each of its instructions waits for the one
            before on the same accumulator.
        blocks_per_sm: resident blocks of a multiprocessor: while one waits at a barrier, the other one computes.
        headroom: powers of two by which a score may exceed its row's maximum before that moves, and with it O and
            the row's sum are scaled: exponentials reach 2 to this power.
    """

    operation: ClassVar[Literal["mla"]] = "mla"
    family: ClassVar[Family] = "sm80"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    features: ClassVar[frozenset[Feature]] = frozenset({"split", "varlen", "e4m3_cache"})
    head_dim: ClassVar[int] = LATENT_DIM
    head_dim_v: ClassVar[int] = LATENT_DIM_V
    cluster: ClassVar[int] = 1

    tile_m: int
    tile_n: int
    least_rows: int = 1
    num_warps: int = 8
    kv_stage: int = 2
    k_parts: int = 1
    trades_rows: bool = False
    q_kept: int = STEPS
    chains: int = 1
    blocks_per_sm: int = 1
    headroom: float = 8.0

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP

    @property
    def warps_m(self) -> int:
        """Groups of 16 query rows."""
        return self.tile_m // MMA_M

    @property
    def key_groups(self) -> int:
        """Warps with the same query rows: each has other keys of S in the end."""
        return self.num_warps // self.warps_m

    @property
    def warps_n(self) -> int:
        """Warps that share the keys of a step in the product with K, for the same query rows and columns."""
        return self.key_groups // self.k_parts

    @property
    def warp_keys(self) -> int:
        """Keys of a step that a warp multiplies with Q."""
        return self.tile_n // self.warps_n

    @property
    def steps(self) -> int:
        """Steps of 16 columns that a warp has of Q and K."""
        return STEPS // self.column_parts

    @property
    def column_parts(self) -> int:
        """Warps that share the columns of Q and K."""
        return 2 if self.trades_rows else self.k_parts

    @property
    def product_warps_m(self) -> int:
        """Groups of query rows that warps have in the product with K."""
        return self.warps_m // 2 if self.trades_rows else self.warps_m

    @property
    def warp_columns(self) -> int:
        """Columns of O that a warp has."""
        return LATENT_DIM_V // self.num_warps

    @property
    def copy_rows(self) -> int:
        """Rows of keys that one access of every thread covers; of many threads some have none."""
        return min(self.num_threads * CHUNK // swizzle_width(PAIRS), self.tile_n)

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Q, keys as they are stored, P, halves of S, statistics of rows."""
        q = SmemRegion(0, self.tile_m * LATENT_DIM * ELEMENT_BYTES)
        pages = SmemRegion(q.end, self.kv_stage * self.tile_n * LATENT_DIM, self.kv_stage)
        p = SmemRegion(pages.end, self.tile_m * self.tile_n * ELEMENT_BYTES)
        halves = SmemRegion(p.end, 0 if self.column_parts == 1 else self.tile_m * self.tile_n * STAT_BYTES)
        maxima = SmemRegion(halves.end, self.tile_m * self.key_groups * STAT_BYTES)
        factors = SmemRegion(maxima.end, self.tile_m * STAT_BYTES)
        scales = SmemRegion(factors.end, self.tile_m * STAT_BYTES)
        statistics = {"maxima": maxima, "factors": factors, "scales": scales}
        return {"q": q, "pages": pages, "p": p, "halves": halves, **statistics}

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return plan_bytes(self.smem_plan)

    @property
    def accumulator_regs(self) -> int:
        """32-bit registers of a thread for O, S and the part of Q that it keeps."""
        fragments = self.tile_m * LATENT_DIM_V + self.chains * self.column_parts * self.tile_m * self.tile_n
        q_rows = self.tile_m // self.product_warps_m
        return fragments // self.num_threads + self.q_kept * q_rows * MMA_K // 2 // WARP

    def serves(self, rows: int) -> bool:
        """Whether sequences of so many query rows are decoded like this."""
        return rows >= self.least_rows

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        if arch.capability < E4M3_CAPABILITY:
            return f"{arch.name} does not convert e4m3, which compute capability 8.9 and later do"
        return self._tiles_complaint() or self._resources_complaint(arch)

    def _tiles_complaint(self) -> str | None:
        if self.tile_m % MMA_M or self.num_warps % max(self.warps_m, 1) or self.tile_m < MMA_M:
            return f"tile_m {self.tile_m} is not {MMA_M} rows for each warp, or each of 2, 4, .. of {self.num_warps}"
        if self.warp_columns % COLUMNS:
            return f"num_warps {self.num_warps} is not 1, 2, 4 or 8: each has multiples of {COLUMNS} columns of O"
        if self.k_parts not in (1, 2) or self.key_groups % self.k_parts:
            return f"k_parts {self.k_parts} is not 1, or 2 of {self.key_groups} warps with the same query rows"
        if self.trades_rows and (self.warps_m % 2 or self.k_parts > 1):
            return (
                f"trades_rows is for tiles of {2 * MMA_M} or 64 rows and k_parts 1, not {self.tile_m}, {self.k_parts}"
            )
        if PAGE_ROWS % self.tile_n or self.tile_n % (MMA_K * self.warps_n):
            return (
                f"tile_n {self.tile_n} is not a divisor of {PAGE_ROWS} and a multiple of {MMA_K} keys "
                f"for each of {self.warps_n} warps"
            )
        if self.tile_n % self.copy_rows:
            return f"tile_n {self.tile_n} is not a multiple of {self.copy_rows}, which {self.num_threads} threads copy"
        if self.kv_stage < 2:
            return f"kv_stage {self.kv_stage} is below 2"
        if not 0 <= self.q_kept <= self.steps or self.chains not in (1, 2, 4):
            return f"q_kept {self.q_kept}, chains {self.chains} are not 0 to {self.steps}, and 1, 2 or 4"
        if not 0 <= self.headroom <= 8:
            return f"headroom {self.headroom} is not 0 to 8: sums of 16-bit exponentials must not overflow"
        return None

    def _resources_complaint(self, arch: ArchSpec) -> str | None:
        resident = self.blocks_per_sm * (self.smem_bytes + BLOCK_SMEM)
        if self.smem_bytes > arch.smem_per_block or resident > arch.smem_per_sm:
            return (
                f"needs {self.smem_bytes} bytes of shared memory for each of {self.blocks_per_sm} blocks, {arch.name} "
                f"has {arch.smem_per_block} for one and {arch.smem_per_sm} in all"
            )
        limit = registers_a_thread(self.blocks_per_sm * self.num_threads, arch)
        if self.accumulator_regs > limit - ADDRESS_REGS:
            return f"fragments take {self.accumulator_regs} registers a thread, {limit} less {ADDRESS_REGS} are there"
        return None
