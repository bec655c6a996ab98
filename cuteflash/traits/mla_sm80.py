"""Traits of the kernel that decodes latent attention on Ampere and Ada."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, PAGE_ROWS
from cuteflash.traits.base import SmemRegion
from cuteflash.traits.chunks import swizzle_width
from cuteflash.traits.mla_mma import ELEMENT_BYTES, STAT_BYTES, MlaTraitsMma
from cuteflash.traits.sm80 import MMA_K, MMA_M, MMA_N, WARP

STEP = 2 * MMA_K  # columns of Q and K of which a part of the columns takes every other
STEPS = LATENT_DIM // STEP
LDMATRIX_KEYS = 2 * MMA_N  # of an ldmatrix.x4 of K with 16 columns; with 32 columns half as many


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsSm80(MlaTraitsMma):
    """One way to run the kernel, as `MlaTraitsMma` describes it.

    Attributes:
        q_kept: of a warp's steps of 32 columns of Q, 18 of them over `k_parts`, how many, the last ones, it keeps in
            registers. These come by way of shared memory that is used later; the others have some of their own.
    """

    columns: ClassVar[int] = LATENT_DIM

    q_kept: int = STEPS

    @property
    def steps(self) -> int:
        """Steps of 32 columns that a warp has of Q and K."""
        return STEPS // self.k_parts

    @property
    def fetch(self) -> int:
        """Columns of Q and K that fragments are fetched of at once."""
        return MMA_K if self.tile_n // self.warps_n >= LDMATRIX_KEYS else STEP

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
    def accumulator_regs(self) -> int:
        """32-bit registers of a thread for O, S and the part of Q that it keeps."""
        scores = self.chains * self.k_parts * self.tile_m * self.tile_n
        return (self.tile_m * LATENT_DIM_V + scores) // self.num_threads + self.q_kept * MMA_M * STEP // 2 // WARP

    def _products_complaint(self) -> str | None:
        if PAGE_ROWS % self.tile_n or self.tile_n % (MMA_N * self.key_groups) or self.tile_n % MMA_K:
            return (
                f"tile_n {self.tile_n} is not a divisor of {PAGE_ROWS} and a multiple of {MMA_N} keys "
                f"for each of {self.key_groups} warps, and of {MMA_K}"
            )
        pages, q = self.smem_plan["pages"], self.smem_plan["q"]
        if self.kv_stage > 1 and q.end > pages.start + pages.nbytes // self.kv_stage:
            return f"q_kept {self.q_kept}: Q ends at {q.end}, beyond the first stage of keys"
        return None
