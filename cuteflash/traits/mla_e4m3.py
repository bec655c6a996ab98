"""Traits of the kernel that decodes latent attention from an e4m3 cache, with mma.sync."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.problem import Feature
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.base import SmemRegion
from cuteflash.traits.mla_mma import ELEMENT_BYTES, STAT_BYTES, MlaTraitsMma
from cuteflash.traits.sm80 import MMA_K, MMA_M, WARP

PAIRS = LATENT_DIM // 2  # of bytes, which ldmatrix moves like 16-bit elements
STEPS = LATENT_DIM // MMA_K
COLUMNS = 64  # of a slab of keys, which a swizzle permutes: a warp has whole ones of O
E4M3_CAPABILITY = 8, 9  # from which on e4m3 is converted by an instruction


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsE4m3(MlaTraitsMma):
    """One way to run the kernel, as `MlaTraitsMma` describes it.

    Attributes:
        q_kept: of a warp's steps of 16 columns of Q, 36 of them over the parts of the columns, how many, the last ones,
            it keeps in registers.
        trades_rows: two warps with neighbouring groups of 16 rows each multiply both with half of the columns, and
            trade what they have through shared memory: they do not convert the same elements.
    """

    features: ClassVar[frozenset[Feature]] = frozenset({"split", "varlen", "e4m3_cache"})
    columns: ClassVar[int] = PAIRS

    q_kept: int = STEPS
    trades_rows: bool = False

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
    def accumulator_regs(self) -> int:
        """32-bit registers of a thread for O, S and the part of Q that it keeps."""
        fragments = self.tile_m * LATENT_DIM_V + self.chains * self.column_parts * self.tile_m * self.tile_n
        q_rows = self.tile_m // self.product_warps_m
        return fragments // self.num_threads + self.q_kept * q_rows * MMA_K // 2 // WARP

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family in arch.families and arch.capability < E4M3_CAPABILITY:
            return f"{arch.name} does not convert e4m3, which compute capability 8.9 and later do"
        return MlaTraitsMma.check(self, arch)

    def _products_complaint(self) -> str | None:
        if self.warp_columns % COLUMNS:
            return f"num_warps {self.num_warps} is not 1, 2, 4 or 8: each has multiples of {COLUMNS} columns of O"
        if self.trades_rows and (self.warps_m % 2 or self.k_parts > 1):
            return (
                f"trades_rows is for tiles of {2 * MMA_M} or 64 rows and k_parts 1, not {self.tile_m}, {self.k_parts}"
            )
        if PAGE_ROWS % self.tile_n or self.tile_n % (MMA_K * self.warps_n):
            return (
                f"tile_n {self.tile_n} is not a divisor of {PAGE_ROWS} and a multiple of {MMA_K} keys "
                f"for each of {self.warps_n} warps"
            )
        return None
