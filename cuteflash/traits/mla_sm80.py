"""Traits of the kernel that decodes latent attention on Ampere and Ada."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.problem import DTYPES, Feature
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.sm80 import ADDRESS_REGS, MMA_K, MMA_M, MMA_N, WARP, registers_a_thread

STEP = 2 * MMA_K  # columns of Q and K of which a part of the columns takes every other
STEPS = LATENT_DIM // STEP
LDMATRIX_KEYS = 2 * MMA_N  # of an ldmatrix.x4 of K with 16 columns; with 32 columns half as many
ELEMENT_BYTES, STAT_BYTES = 2, 4
SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle, so that a tile's offset never carries into it


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsSm80:
    """One way to run the kernel.

    Attributes:
        tile_m: query rows of a tile, of which each warp has 16 in the product with K, and all in that with V.
        tile_n: keys of one step, a divisor of a page's rows; the warps with the same query rows share them.
        least_rows: query rows of a sequence from which on the row is taken: a small tile leaves registers for Q.
        num_warps: of a block, each with as many columns of O.
        kv_stage: steps' keys in flight.
        k_parts: warps, 1 or 2, that share the columns of Q and K for the same rows and keys. Each then has half as many
            of Q's columns to keep, and twice as many keys, so that a fragment of Q serves more of them; they add up
            what they have through shared memory.
        q_kept: of a warp's steps of 32 columns of Q, 18 of them over `k_parts`, how many, the last ones, it keeps in
            registers. These come by way of shared memory that is used later; the others have some of their own.
        chains: accumulators of a product with K, added up at its end: each of its instructions waits for the one
            before on the same accumulator.
        headroom: powers of two by which a score may exceed its row's maximum before that moves, and with it O and
            the row's sum are scaled: exponentials reach 2 to this power.
    """

    operation: ClassVar[Literal["mla"]] = "mla"
    family: ClassVar[Family] = "sm80"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    features: ClassVar[frozenset[Feature]] = frozenset({"split", "varlen"})
    head_dim: ClassVar[int] = LATENT_DIM
    head_dim_v: ClassVar[int] = LATENT_DIM_V
    blocks_per_sm: ClassVar[int] = 1
    cluster: ClassVar[int] = 1

    tile_m: int
    tile_n: int
    least_rows: int = 1
    num_warps: int = 8
    kv_stage: int = 2
    k_parts: int = 1
    q_kept: int = STEPS
    chains: int = 1
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
    def steps(self) -> int:
        """Steps of 32 columns that a warp has of Q and K."""
        return STEPS // self.k_parts

    @property
    def fetch(self) -> int:
        """Columns of Q and K that fragments are fetched of at once."""
        return MMA_K if self.tile_n // self.warps_n >= LDMATRIX_KEYS else STEP

    @property
    def copy_rows(self) -> int:
        """Rows of keys that one access of every thread covers."""
        return self.num_threads * CHUNK // swizzle_width(LATENT_DIM)

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Q, P, halves of S, keys, statistics of rows.

        What is kept of Q in registers lies over what follows it, of the keys over the stage that is loaded last.
        """
        slab, tile = swizzle_width(LATENT_DIM), self.tile_m * self.tile_n
        others = -(-(self.steps - self.q_kept) * self.k_parts * STEP // slab) * slab  # columns
        p = SmemRegion(others * self.tile_m * ELEMENT_BYTES, tile * ELEMENT_BYTES)
        halves = SmemRegion(p.end, 0 if self.k_parts == 1 else tile * STAT_BYTES)
        pages = SmemRegion(halves.end, self.kv_stage * self.tile_n * LATENT_DIM * ELEMENT_BYTES, self.kv_stage)
        maxima = SmemRegion(pages.end, self.tile_m * self.key_groups * STAT_BYTES)
        return {
            "q": SmemRegion(0, self.tile_m * LATENT_DIM * ELEMENT_BYTES),
            "p": p,
            "halves": halves,
            "pages": pages,
            "maxima": maxima,
            "factors": SmemRegion(maxima.end, self.tile_m * STAT_BYTES),
        }

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return plan_bytes(self.smem_plan)

    @property
    def accumulator_regs(self) -> int:
        """32-bit registers of a thread for O, S and the part of Q that it keeps."""
        scores = self.chains * self.k_parts * self.tile_m * self.tile_n
        return (self.tile_m * LATENT_DIM_V + scores) // self.num_threads + self.q_kept * MMA_M * STEP // 2 // WARP

    def register_limit(self, arch: ArchSpec) -> int:
        """Registers the compiler may give a thread."""
        return registers_a_thread(self.num_threads, arch)

    def serves(self, rows: int) -> bool:
        """Whether sequences of so many query rows are decoded like this."""
        return rows >= self.least_rows

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        return self._tiles_complaint() or self._resources_complaint(arch)

    def _tiles_complaint(self) -> str | None:
        if self.tile_m % MMA_M or self.num_warps % max(self.warps_m, 1) or self.tile_m < MMA_M:
            return f"tile_m {self.tile_m} is not {MMA_M} rows for each warp, or each of 2, 4, .. of {self.num_warps}"
        if self.k_parts not in (1, 2) or self.key_groups % self.k_parts:
            return f"k_parts {self.k_parts} is not 1, or 2 of {self.key_groups} warps with the same query rows"
        if PAGE_ROWS % self.tile_n or self.tile_n % (MMA_N * self.key_groups) or self.tile_n % MMA_K:
            return (
                f"tile_n {self.tile_n} is not a divisor of {PAGE_ROWS} and a multiple of {MMA_N} keys "
                f"for each of {self.key_groups} warps, and of {MMA_K}"
            )
        if self.tile_n % self.copy_rows:
            return f"tile_n {self.tile_n} is not a multiple of {self.copy_rows}, which {self.num_threads} threads copy"
        if self.kv_stage < 2:
            return f"kv_stage {self.kv_stage} is below 2"
        if not 0 <= self.q_kept <= self.steps or self.chains not in (1, 2, 4):
            return f"q_kept {self.q_kept}, chains {self.chains} are not 0 to {self.steps}, 1, 2 or 4"
        pages, q = self.smem_plan["pages"], self.smem_plan["q"]
        if q.end > pages.start + pages.nbytes // self.kv_stage:
            return f"q_kept {self.q_kept}: Q ends at {q.end}, beyond the first stage of keys"
        if not 0 <= self.headroom <= 8:
            return f"headroom {self.headroom} is not 0 to 8: sums of 16-bit exponentials must not overflow"
        return None

    def _resources_complaint(self, arch: ArchSpec) -> str | None:
        if self.smem_bytes > arch.smem_per_block:
            return f"needs {self.smem_bytes} bytes of shared memory, {arch.name} has {arch.smem_per_block}"
        limit = self.register_limit(arch)
        if self.accumulator_regs > limit - ADDRESS_REGS:
            return f"fragments take {self.accumulator_regs} registers a thread, {limit} less {ADDRESS_REGS} are there"
        return None
