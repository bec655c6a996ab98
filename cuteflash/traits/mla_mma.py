"""What the traits of both kernels of the sm80 family that decode latent attention have in common."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V
from cuteflash.problem import DTYPES, Feature
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.chunks import CHUNK, swizzle_width
from cuteflash.traits.sm80 import MMA_M, WARP, registers_a_thread, residency_complaint

ELEMENT_BYTES, STAT_BYTES = 2, 4
EARLY_LAUNCH_CAPABILITY = 9, 0
SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle, so that a tile's offset never carries into it


@dataclasses.dataclass(frozen=True, slots=True)
class MlaTraitsMma(abc.ABC):
    """One way to run a kernel, but for what its products ask.

    Attributes:
        tile_m: query rows of a tile, of which each warp has 16 in the product with K, and all in that with V.
        tile_n: keys of one step, a divisor of a page's rows; the warps with the same query rows share them.
        least_rows: query rows of a sequence from which on the row is taken: a small tile leaves registers for Q.
        num_warps: of a block, each with as many columns of O.
        kv_stage: steps' keys in flight.
        k_parts: warps, 1 or 2, that share the columns of Q and K for the same rows and keys. Each then has half as many
            of Q's columns to keep, and twice as many keys, so that a fragment of Q serves more of them; they add up
            what they have through shared memory.
        q_kept: of a warp's steps of columns of Q how many, the last ones, it keeps in registers.
        chains: accumulators of a product with K, added up at its end: each of its instructions waits for the one
            before on the same accumulator.
        headroom: powers of two by which a score may exceed its row's maximum before that moves, and with it O and
            the row's sum are scaled: exponentials reach 2 to this power.
        blocks_per_sm: resident blocks of a multiprocessor: while one waits at a barrier, the other one computes.
        early_launch: blocks begin where those of the launch before end, and wait for it themselves (programmatic
            dependent launch), from compute capability 9.0 on.
    """

    operation: ClassVar[Literal["mla"]] = "mla"
    family: ClassVar[Family] = "sm80"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    features: ClassVar[frozenset[Feature]] = frozenset({"split", "varlen"})
    head_dim: ClassVar[int] = LATENT_DIM
    head_dim_v: ClassVar[int] = LATENT_DIM_V
    columns: ClassVar[int]  # of 16 bits of a cached row
    part_words: ClassVar[int] = LATENT_DIM_V + 1  # of a row of a part of split keys, fp32: O and its log-sum-exp
    tile_cost: ClassVar[int] = 1  # pages that are read in the time that a block takes between two tiles

    tile_m: int
    tile_n: int
    least_rows: int = 1
    num_warps: int = 8
    kv_stage: int = 2
    k_parts: int = 1
    q_kept: int = 0
    chains: int = 1
    headroom: float = 8.0
    blocks_per_sm: int = 1
    early_launch: bool = False

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Steps that a warp makes along the columns of Q and K."""

    @property
    @abc.abstractmethod
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Q, keys, P, halves of S, statistics of rows."""

    @property
    @abc.abstractmethod
    def accumulator_regs(self) -> int:
        """32-bit registers of a thread for O, S and the part of Q that it keeps."""

    @abc.abstractmethod
    def _products_complaint(self) -> str | None:
        """What the products do not run with."""

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
    def column_parts(self) -> int:
        """Warps that share the columns of Q and K."""
        return self.k_parts

    @property
    def copy_rows(self) -> int:
        """Rows of keys that one access of every thread covers; of many threads some have none."""
        return min(self.num_threads * CHUNK // swizzle_width(self.columns), self.tile_n)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        return plan_bytes(self.smem_plan)

    def serves(self, rows: int) -> bool:
        """Whether sequences of so many query rows are decoded like this."""
        return rows >= self.least_rows

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        if self.early_launch and arch.capability < EARLY_LAUNCH_CAPABILITY:
            return f"early_launch: {arch.name} has no programmatic dependent launch"
        return self._tiles_complaint() or residency_complaint(self, arch, "O, S and Q")

    def register_limit(self, arch: ArchSpec) -> int:
        """Registers the compiler may give a thread, with `blocks_per_sm` blocks on one multiprocessor."""
        return registers_a_thread(self.blocks_per_sm * self.num_threads, arch)

    def _tiles_complaint(self) -> str | None:
        if self.tile_m % MMA_M or self.num_warps % max(self.warps_m, 1) or self.tile_m < MMA_M:
            return f"tile_m {self.tile_m} is not {MMA_M} rows for each warp, or each of 2, 4, .. of {self.num_warps}"
        if self.k_parts not in (1, 2) or self.key_groups % self.k_parts:
            return f"k_parts {self.k_parts} is not 1, or 2 of {self.key_groups} warps with the same query rows"
        complaint = self._products_complaint()
        if complaint is not None:
            return complaint
        if self.tile_n % self.copy_rows:
            return f"tile_n {self.tile_n} is not a multiple of {self.copy_rows}, which {self.num_threads} threads copy"
        if self.kv_stage < 2:
            return f"kv_stage {self.kv_stage} is below 2"
        if not 0 <= self.q_kept <= self.steps or self.chains not in (1, 2, 4):
            return f"q_kept {self.q_kept}, chains {self.chains} are not 0 to {self.steps}, and 1, 2 or 4"
        if not 0 <= self.headroom <= 8:
            return f"headroom {self.headroom} is not 0 to 8: sums of 16-bit exponentials must not overflow"
        return None
