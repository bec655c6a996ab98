"""Traits of the sm80 backward (cp.async, ldmatrix, mma.sync m16n8k16)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from cuteflash.core.workspace import Workspace
from cuteflash.problem import Feature, Operation
from cuteflash.traits.arch import BLOCK_SMEM, ArchSpec, Family
from cuteflash.traits.base import SmemRegion, plan_bytes
from cuteflash.traits.sm80 import ADDRESS_REGS, CHUNK, MMA_K, MMA_M, MMA_N, REGS_STEP, WARP, swizzle_width

STATISTIC_BYTES = 4  # fp32


@dataclasses.dataclass(frozen=True, slots=True)
class BwdTraitsSm80:
    """One way to run the sm80 backward kernel: one pass, dQ summed up in memory.

    S and dP are computed transposed, keys as rows. The warps of a block divide each product in their own way; along its
    columns go those that are left.

    Attributes:
        tile_m: query rows of one step of the main loop.
        tile_n: keys of one block.
        head_dim: columns of the Q and K tiles, the problem's head dim padded up to a multiple of 16.
        head_dim_v: columns of the V and O tiles, padded likewise.
        num_warps: warps of one block.
        s_warps: warps along the keys of S and dP.
        dkv_warps: warps along the keys of dK and dV.
        dq_warps: warps along the queries of dQ.
        stages: Q and dO tiles in flight (1: each step waits for its own).
        fresh_addresses: compute shared-memory addresses again in each step: it takes time, but otherwise the swizzled
            address of every k-block may take a register for the whole loop.
        double_buffer: fetch the next k-block's fragments by ldmatrix while the tensor cores work on this one.
        vector_add: dQ is added 16 bytes at once, which takes sm_90 or later.
        blocks_per_sm: resident blocks the compiler must leave registers for.
    """

    operation: ClassVar[Operation] = "bwd"
    family: ClassVar[Family] = "sm80"
    features: ClassVar[frozenset[Feature]] = frozenset(
        {"softcap", "deterministic", "varlen"}
    )  # those that the kernel implements
    element_bytes: ClassVar[int] = 2  # fp16 and bf16
    max_head_dim: ClassVar[int] = 256

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    num_warps: int = 8
    s_warps: int = 4
    dkv_warps: int = 4
    dq_warps: int = 2
    stages: int = 2
    fresh_addresses: bool = False
    double_buffer: bool = True
    vector_add: bool = False
    blocks_per_sm: int = 1

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP

    @property
    def p_in_regs(self) -> bool:
        """Whether P and dS, as operands of dV and dK, are what a thread computed itself."""
        return self.s_warps == self.dkv_warps == self.num_warps

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """K, V, Q, dO, dS, P if it does not stay in registers, and row statistics; dK and dV are staged as K and V."""
        plan: dict[str, SmemRegion] = {}

        def append(name: str, elements: int, stages: int = 1, nbytes: int = self.element_bytes) -> None:
            plan[name] = SmemRegion(plan_bytes(plan) if plan else 0, elements * nbytes * stages, stages)

        append("k", self.tile_n * self.head_dim)
        append("v", self.tile_n * self.head_dim_v)
        append("q", self.tile_m * self.head_dim, self.stages)
        append("do", self.tile_m * self.head_dim_v, self.stages)
        append("ds", self.tile_m * self.tile_n)
        if not self.p_in_regs:
            append("p", self.tile_m * self.tile_n)
        append("lse", self.tile_m, self.stages, STATISTIC_BYTES)
        append("delta", self.tile_m, self.stages, STATISTIC_BYTES)
        return plan

    @property
    def smem_bytes(self) -> int:
        return plan_bytes(self.smem_plan)

    def workspace(self, batch: Any, heads: Any, seqlen_q: Any) -> Workspace:
        """The fp32 workspace of a call, for Python ints or traced values."""
        return Workspace.dense(batch, heads, seqlen_q, self.tile_m, self.head_dim)

    def workspace_packed(self, batch: Any, heads: Any, rows: Any) -> Workspace:
        """The same of `batch` packed sequences, in tensors of `rows` queries."""
        return Workspace.packed(batch, heads, rows, self.tile_m, self.head_dim)

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if self.family not in arch.families:
            return f"{arch.name} does not run the {self.family} family"
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            if value % MMA_K or not 0 < value <= self.max_head_dim:
                return f"{name} {value} is not a multiple of {MMA_K} up to {self.max_head_dim}"
        if self.stages not in (1, 2) or self.blocks_per_sm < 1:
            return f"stages {self.stages} is not 1 or 2, or blocks_per_sm {self.blocks_per_sm} is below 1"
        return self._check_warps() or self._check_copies() or self._check_limits(arch)

    def _check_warps(self) -> str | None:
        """Whether the warps divide each product into whole instructions."""
        for name, rows, cols in (
            ("s_warps", self.tile_n, (self.tile_m,)),
            ("dkv_warps", self.tile_n, (self.head_dim, self.head_dim_v)),
            ("dq_warps", self.tile_m, (self.head_dim,)),
        ):
            warps = getattr(self, name)
            if warps < 1 or self.num_warps % warps:
                return f"{name} {warps} does not divide num_warps {self.num_warps}"
            step_m, step_n = MMA_M * warps, 2 * MMA_N * (self.num_warps // warps)
            if rows % step_m or any(width % step_n for width in cols):
                shape = " or ".join(f"{rows}x{width}" for width in dict.fromkeys(cols))
                return (
                    f"{name} {warps} of {self.num_warps} warps take {step_m}x{step_n} at once, "
                    f"which does not divide {shape}"
                )
        return None

    def _check_copies(self) -> str | None:
        """Whether the threads copy whole tiles."""
        for name in ("head_dim", "head_dim_v"):
            rows = self.num_threads * CHUNK // swizzle_width(getattr(self, name))
            if self.tile_m % rows or self.tile_n % rows:
                tiles = f"tile_m {self.tile_m} or tile_n {self.tile_n} is not a multiple"
                return f"{self.num_threads} threads copy {rows} rows of {name} at once: {tiles}"
        return None

    def _check_limits(self, arch: ArchSpec) -> str | None:
        """Whether the multiprocessor has what the block needs."""
        if self.vector_add and arch.capability < (9, 0):
            return f"vector_add needs sm_90 or later, the target is {arch.name}"
        if self.smem_bytes > arch.smem_per_block:
            return f"needs {self.smem_bytes} bytes of shared memory, {arch.name} has {arch.smem_per_block}"
        if self.blocks_per_sm * self.num_threads > arch.max_threads_per_sm:
            return f"{self.blocks_per_sm} blocks of {self.num_threads} threads do not fit into one SM of {arch.name}"
        resident_bytes = self.blocks_per_sm * (self.smem_bytes + BLOCK_SMEM)
        if resident_bytes > arch.smem_per_sm:
            return (
                f"{self.blocks_per_sm} blocks of {self.smem_bytes} + {BLOCK_SMEM} bytes of shared memory need "
                f"{resident_bytes}, one SM of {arch.name} has {arch.smem_per_sm}"
            )
        limit = self.register_limit(arch)
        if self.accumulator_regs > limit - ADDRESS_REGS:
            return (
                f"dK, dV, S and dP fragments take {self.accumulator_regs} registers a thread, "
                f"{limit} less {ADDRESS_REGS} for addresses are there with {self.blocks_per_sm} x {self.num_threads} "
                f"threads on an SM"
            )
        return None

    def register_limit(self, arch: ArchSpec) -> int:
        """Registers the compiler may give a thread, with `blocks_per_sm` blocks on one multiprocessor."""
        share = arch.regs_per_sm // (self.blocks_per_sm * self.num_threads)
        return min(arch.max_regs_per_thread, share // REGS_STEP * REGS_STEP)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for dK and dV, S and dP."""
        return self.tile_n * (self.head_dim + self.head_dim_v + 2 * self.tile_m) // self.num_threads

    @property
    def ahead(self) -> int:
        """By how many k-blocks fragments are fetched before they are needed."""
        return 1 if self.double_buffer else 0
