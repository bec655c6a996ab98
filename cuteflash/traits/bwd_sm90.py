"""Traits of the sm90 backward (TMA, WGMMA, warp-specialised)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from cuteflash.core.workspace import Workspace
from cuteflash.problem import Feature, Operation
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.sm80 import swizzle_width
from cuteflash.traits.sm90 import (
    MBARRIER_BYTES,
    REGISTER_SPLIT,
    SWIZZLE_ALIGN,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
)

STATISTIC_BYTES = 4  # fp32
BWD_ADDRESS_REGS = 12  # registers a thread needs at least beside its fragments: most addresses are uniform

DqShare = Literal["rows", "columns", "transposed", "turns"]


@dataclasses.dataclass(frozen=True, slots=True)
class BwdTraitsSm90:
    """One way to run the sm90 backward kernel: one pass, dQ summed up in memory.

    Attributes:
        tile_m: query rows of one step of the main loop.
        tile_n: keys of one block, 64 for each consumer warpgroup.
        head_dim: columns of the Q and K tiles, the problem's head dim padded up to a multiple of 16.
        head_dim_v: columns of the V and O tiles, padded likewise.
        q_stage: Q tiles in flight.
        do_stage: dO tiles in flight.
        overlap: the products that need P and dS of a step run beside the next step's scores; otherwise only dQ does.
        pingpong: named barriers let one warpgroup's products run while another does its pointwise part.
        dq: how the warpgroups share the product dQ. ``"rows"``, ``"columns"``: each computes half of the rows (`tile_m`
            128) or columns (64) of every tile. ``"transposed"``: half of the columns, as rows of dQ^T = K^T dS^T, which
            takes any `tile_m`. ``"turns"``: step by step one after the other a whole tile (`tile_m` 64).
    """

    operation: ClassVar[Operation] = "bwd"
    family: ClassVar[Family] = "sm90"
    features: ClassVar[frozenset[Feature]] = frozenset({"softcap", "deterministic"})  # those that the kernel implements
    element_bytes: ClassVar[int] = 2  # fp16 and bf16
    max_head_dim: ClassVar[int] = 128
    ds_stage: ClassVar[int] = 2  # a step's dS is read while the next one is written

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    q_stage: int = 2
    do_stage: int = 2
    overlap: bool = False
    pingpong: bool = True
    dq: DqShare = "columns"

    @property
    def mma_warpgroups(self) -> int:
        return self.tile_n // WGMMA_M

    @property
    def num_threads(self) -> int:
        return (1 + self.mma_warpgroups) * WARPGROUP

    @property
    def producer_regs(self) -> int:
        """Registers a thread of the warpgroup that loads and adds dQ."""
        return REGISTER_SPLIT[self.mma_warpgroups][0]

    @property
    def mma_regs(self) -> int:
        """Registers a thread of a consumer warpgroup."""
        return REGISTER_SPLIT[self.mma_warpgroups][1]

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of dQ that one warpgroup computes at a time."""
        rows = self.tile_m // self.mma_warpgroups if self.dq == "rows" else self.tile_m
        split = self.dq in ("columns", "transposed")
        return rows, self.head_dim // self.mma_warpgroups if split else self.head_dim

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Barriers, row statistics, K, V, Q, dO, dS and dQ as it waits to be added."""
        barriers = 2 * (1 + 1 + self.q_stage + self.do_stage) + 1 + 2 * self.mma_warpgroups
        plan = {"barriers": SmemRegion(0, barriers * MBARRIER_BYTES)}

        def append(name: str, nbytes: int, stages: int, align: int = SWIZZLE_ALIGN) -> None:
            start = -(-plan_bytes(plan) // align) * align
            plan[name] = SmemRegion(start, nbytes * stages, stages)

        append("lse", self.tile_m * STATISTIC_BYTES, self.q_stage, 128)
        append("delta", self.tile_m * STATISTIC_BYTES, self.do_stage, 128)
        append("k", self.tile_n * self.head_dim * self.element_bytes, 1)
        append("v", self.tile_n * self.head_dim_v * self.element_bytes, 1)
        append("q", self.tile_m * self.head_dim * self.element_bytes, self.q_stage)
        append("do", self.tile_m * self.head_dim_v * self.element_bytes, self.do_stage)
        append("ds", self.tile_m * self.tile_n * self.element_bytes, self.ds_stage)
        rows, cols = self.dq_part
        append("dq", rows * cols * 4, self.mma_warpgroups)
        return plan

    @property
    def smem_bytes(self) -> int:
        return plan_bytes(self.smem_plan)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for the accumulators dK and dV, S, dP and dQ, and for P and dS as operands.

        Without `overlap` dQ takes the place of S, and dS replaces dP element by element.
        """
        gradients, scores, operand = (self.head_dim + self.head_dim_v) // 2, self.tile_m // 2, self.tile_m // 4
        rows, cols = self.dq_part
        dq = rows * cols // WARPGROUP
        if self.overlap:
            return gradients + 2 * scores + 2 * operand + dq
        return gradients + scores + max(scores, dq) + operand

    def workspace(self, batch: Any, heads: Any, seqlen_q: Any) -> Workspace:
        """The fp32 workspace of a call, for Python ints or traced values."""
        return Workspace.dense(batch, heads, seqlen_q, self.tile_m, self.head_dim)

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value % WGMMA_K or not 0 < value <= self.max_head_dim:
                return f"{name} {value} is not a multiple of {WGMMA_K} up to {self.max_head_dim}"
        if self.tile_m % WGMMA_K:
            return f"tile_m {self.tile_m} is not a multiple of {WGMMA_K}, the k extent of the dK and dV products"
        if self.tile_n != 2 * WGMMA_M:
            return f"tile_n {self.tile_n} is not {2 * WGMMA_M}: {WGMMA_M} keys for each of 2 warpgroups"
        rows, cols = self.dq_part
        if (cols if self.dq == "transposed" else rows) != WGMMA_M:
            return (
                f"dq {self.dq!r}, tile_m {self.tile_m}: a warpgroup gets {rows}x{cols}, not {WGMMA_M} rows of a product"
            )
        if cols % swizzle_width(self.head_dim):
            return f"dq {self.dq!r} gives a warpgroup {cols} columns, not whole slabs of {swizzle_width(self.head_dim)}"
        if self.overlap and min(self.q_stage, self.do_stage) < 3:
            return "overlap needs q_stage and do_stage 3: two tiles are read while one is loaded"
        if self.accumulator_regs > self.mma_regs - BWD_ADDRESS_REGS:
            return (
                f"dK, dV, S, dP, dQ and P fragments take {self.accumulator_regs} registers a thread, "
                f"{self.mma_regs} less {BWD_ADDRESS_REGS} for addresses are there"
            )
        if self.smem_bytes > arch.smem_per_block:
            return f"needs {self.smem_bytes} bytes of shared memory, {arch.name} has {arch.smem_per_block}"
        return None
