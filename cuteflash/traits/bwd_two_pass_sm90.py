"""Traits of the sm90 backward in two passes (TMA, WGMMA, warp-specialised)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from cuteflash.core.workspace import Workspace
from cuteflash.problem import DTYPES, Feature, Operation
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, head_dims_complaint, memory_complaint, plan_bytes
from cuteflash.traits.bwd_sm90 import STATISTIC_BYTES
from cuteflash.traits.sm90 import (
    ADDRESS_REGS,
    MBARRIER_BYTES,
    PAGED_SPLIT,
    REGISTER_SPLIT,
    SWIZZLE_ALIGN,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
)

CONSUMERS = 2  # warpgroups beside the producer's


@dataclasses.dataclass(frozen=True, slots=True)
class BwdTwoPassTraitsSm90:
    """One way to run the sm90 backward in two passes: dK and dV by key tiles, dQ by query tiles, each sum in registers.

    Attributes:
        tile_m: query rows of one step of the dK, dV pass.
        tile_n: keys of one of its blocks, 64: one warpgroup sums up dV, one dK.
        head_dim: columns of the Q and K tiles, the problem's head dim padded up to a multiple of 16.
        head_dim_v: columns of the V and O tiles, padded likewise.
        q_stage, do_stage: Q and dO tiles in flight in the dK, dV pass.
        dq_tile_n: keys of one step of the dQ pass, whose blocks have 64 query rows for each warpgroup.
        k_stage, v_stage: K and V tiles in flight in the dQ pass.
        pingpong: named barriers let one warpgroup's products run while the other does its pointwise part (dQ pass).
    """

    operation: ClassVar[Operation] = "bwd"
    family: ClassVar[Family] = "sm90"
    # Those that the kernels implement.
    features: ClassVar[frozenset[Feature]] = frozenset({"softcap", "deterministic", "varlen", "sink"})
    first_stores: ClassVar[bool] = False
    early_launch: ClassVar[bool] = True
    turns_at_once: ClassVar[int] = 0
    lone_tiles: ClassVar[bool] = False
    lone_blocks: ClassVar[bool] = False
    held_dq: ClassVar[int] = 0
    in_turn: ClassVar[bool] = False
    last_rounds: ClassVar[bool] = False
    stores_dq: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    element_bytes: ClassVar[int] = 2
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    max_head_dim: ClassVar[int] = 256
    dq_tile_m: ClassVar[int] = CONSUMERS * WGMMA_M  # query rows of a block of the dQ pass
    p_stage: ClassVar[int] = 2  # P of one step is read while that of the next is written

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    q_stage: int = 3
    do_stage: int = 3
    dq_tile_n: int = 64
    k_stage: int = 2
    v_stage: int = 1
    pingpong: bool = True

    @property
    def num_threads(self) -> int:
        return (1 + CONSUMERS) * WARPGROUP

    @property
    def producer_regs(self) -> int:
        """Registers a thread of the producer warpgroup."""
        return REGISTER_SPLIT[CONSUMERS][0]

    @property
    def mma_regs(self) -> int:
        """Registers a thread of a consumer warpgroup."""
        return REGISTER_SPLIT[CONSUMERS][1]

    @property
    def packed_regs(self) -> tuple[int, int]:
        """Both, in the dQ pass of packed sequences, whose producer looks up where their rows lie."""
        return PAGED_SPLIT[2]

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Of the dK, dV pass: barriers, row statistics, K, V, Q, dO, and P on its way between the warpgroups."""
        plan = _barriers(2 * (1 + 1 + self.q_stage + self.do_stage + self.p_stage))
        _append(plan, "lse", self.tile_m * STATISTIC_BYTES, self.q_stage, 128)
        _append(plan, "delta", self.tile_m * STATISTIC_BYTES, self.do_stage, 128)
        _append(plan, "k", self.tile_n * self.head_dim * self.element_bytes, 1)
        _append(plan, "v", self.tile_n * self.head_dim_v * self.element_bytes, 1)
        _append(plan, "q", self.tile_m * self.head_dim * self.element_bytes, self.q_stage)
        _append(plan, "do", self.tile_m * self.head_dim_v * self.element_bytes, self.do_stage)
        _append(plan, "p", self.tile_m * self.tile_n * self.element_bytes, self.p_stage)
        return plan

    @property
    def dq_smem_plan(self) -> dict[str, SmemRegion]:
        """Of the dQ pass: barriers, Q (later dQ), dO, K, V."""
        plan = _barriers(2 * (1 + 1 + self.k_stage + self.v_stage))
        _append(plan, "q", self.dq_tile_m * self.head_dim * self.element_bytes, 1)
        _append(plan, "do", self.dq_tile_m * self.head_dim_v * self.element_bytes, 1)
        _append(plan, "k", self.dq_tile_n * self.head_dim * self.element_bytes, self.k_stage)
        _append(plan, "v", self.dq_tile_n * self.head_dim_v * self.element_bytes, self.v_stage)
        return plan

    @property
    def smem_bytes(self) -> int:
        return max(plan_bytes(self.smem_plan), plan_bytes(self.dq_smem_plan))

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for accumulators and operands, in the pass that needs more."""
        dkv = max(self.head_dim, self.head_dim_v) // 2 + self.tile_m // 2 + self.tile_m // 4
        dq = self.head_dim // 2 + self.dq_tile_n + self.dq_tile_n // 4
        return max(dkv, dq)

    def workspace(self, batch: Any, heads: Any, seqlen_q: Any) -> Workspace:
        """The fp32 workspace of a call, for Python ints or traced values."""
        return Workspace.dense(batch, heads, seqlen_q, self.tile_m, 0)

    def workspace_packed(self, batch: Any, heads: Any, rows: Any) -> Workspace:
        """The same of `batch` packed sequences, in tensors of `rows` queries."""
        return Workspace.packed(batch, heads, rows, self.tile_m, 0)

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        complaint = head_dims_complaint(self, arch, WGMMA_K)
        if complaint is not None:
            return complaint
        for name in ("tile_m", "dq_tile_n"):
            value = getattr(self, name)
            if value % WGMMA_K or not 0 < value <= 2 * WGMMA_M:
                return f"{name} {value} is not a multiple of {WGMMA_K} up to {2 * WGMMA_M}"
        if self.tile_n != WGMMA_M:
            return f"tile_n {self.tile_n} is not {WGMMA_M}, the rows of one product"
        if min(self.q_stage, self.do_stage) < 2 or min(self.k_stage, self.v_stage) < 1:
            return "q_stage and do_stage are at least 2, k_stage and v_stage 1"
        if self.accumulator_regs > self.mma_regs - ADDRESS_REGS:
            return (
                f"accumulators and operands take {self.accumulator_regs} registers a thread, "
                f"{self.mma_regs} less {ADDRESS_REGS} for addresses are there"
            )
        return memory_complaint(self, arch)


def _barriers(count: int) -> dict[str, SmemRegion]:
    return {"barriers": SmemRegion(0, count * MBARRIER_BYTES)}


def _append(plan: dict[str, SmemRegion], name: str, nbytes: int, stages: int, align: int = SWIZZLE_ALIGN) -> None:
    """Add `stages` tiles of `nbytes` behind what a plan has."""
    start = -(-plan_bytes(plan) // align) * align
    plan[name] = SmemRegion(start, nbytes * stages, stages)
