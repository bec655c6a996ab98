"""Traits of the sm80 backward (cp.async, ldmatrix, mma.sync m16n8k16)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from cuteflash.core.workspace import Workspace
from cuteflash.problem import DTYPES, Feature, Operation
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, head_dims_complaint, plan_bytes
from cuteflash.traits.sm80 import (
    MMA_K,
    MMA_M,
    MMA_N,
    REGS_STEP,
    WARP,
    copies_complaint,
    registers_a_thread,
    residency_complaint,
)

STATISTIC_BYTES = 4  # fp32
WARPGROUP = 4 * WARP  # that change their share of the registers together
TURN_STEPS = 1, 2, 4, 8, 16  # powers of two, at most a warp's lanes
TURN_REGS = 24  # the fewest that a thread can keep


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
        fresh_loops: compute what depends on the thread, such as addresses, again before each loop over query blocks, of
            which a mask has two or three for each query head: what is kept for one takes a register in the others, too.
        fresh_bounds: compute the bounds of a mask in each step that needs them.
        double_buffer: fetch the next k-block's fragments by ldmatrix while the tensor cores work on this one.
        vector_add: dQ is added 16 bytes at once, which takes sm_90 or later.
        lone_tiles: the only block of a sequence whose keys are one tile computes delta and stores dQ itself, rounded.
        turn_steps: a deterministic call awaits and passes on the turns of so many steps together: fewer fences, but the
            block that comes next starts later.
        turn_warpgroup: four more warps in a deterministic call, of which two await and pass on the turns; it needs
            sm_90a, on which the four leave registers to the others.
        idle_warpgroup: the four warps of `turn_warpgroup` are there in other calls, too, idle: they leave registers to
            the others. Query blocks are then visited from the last to the first, as in deterministic calls.
        blocks_per_sm: resident blocks the compiler must leave registers for.
    """

    operation: ClassVar[Operation] = "bwd"
    family: ClassVar[Family] = "sm80"
    features: ClassVar[frozenset[Feature]] = frozenset(
        {"softcap", "deterministic", "varlen", "sink"}
    )  # those that the kernel implements
    first_stores: ClassVar[bool] = False
    early_launch: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    held_dq: ClassVar[int] = 0
    in_turn: ClassVar[bool] = False
    last_rounds: ClassVar[bool] = False
    element_bytes: ClassVar[int] = 2
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
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
    fresh_loops: bool = False
    fresh_bounds: bool = False
    double_buffer: bool = True
    vector_add: bool = False
    lone_tiles: bool = False
    turn_steps: int = 1
    turn_warpgroup: bool = False
    idle_warpgroup: bool = False
    blocks_per_sm: int = 1

    @property
    def lone_blocks(self) -> bool:
        """See `BwdTraits`."""
        return self.lone_tiles

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP

    @property
    def turns_at_once(self) -> int:
        """See `BwdTraits`; if turns are passed on a batch at a time, blocks of a head run a batch behind each other."""
        return 4 if self.turn_steps == 1 else 2

    def mma_regs(self, arch: ArchSpec) -> int:
        """Registers a thread that computes has with a `turn_warpgroup`, whose threads keep `TURN_REGS`."""
        threads = self.num_threads + WARPGROUP
        left = self._launch_regs(arch) * threads - TURN_REGS * WARPGROUP
        return min(arch.max_regs_per_thread, left // self.num_threads) // REGS_STEP * REGS_STEP

    def _launch_regs(self, arch: ArchSpec) -> int:
        """Registers a thread starts with, if there is a `turn_warpgroup`."""
        return registers_a_thread(self.blocks_per_sm * (self.num_threads + WARPGROUP), arch)

    @property
    def p_in_regs(self) -> bool:
        """Whether P and dS, as operands of dV and dK, are what a thread computed itself."""
        return self.s_warps == self.dkv_warps == self.num_warps

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """K, V, Q, dO, dS, P if it does not stay in registers, O of lone tiles, and row statistics.

        dK and dV are staged as K and V, dQ of lone tiles as Q.
        """
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
        if self.lone_tiles:
            append("o", self.tile_m * self.head_dim_v, self.stages)
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
        complaint = head_dims_complaint(self, arch, MMA_K)
        if complaint is not None:
            return complaint
        if self.stages not in (1, 2) or self.blocks_per_sm < 1:
            return f"stages {self.stages} is not 1 or 2, or blocks_per_sm {self.blocks_per_sm} is below 1"
        if self.turn_steps not in TURN_STEPS:
            return f"turn_steps {self.turn_steps} is not one of {', '.join(map(str, TURN_STEPS))}"
        if self.turn_steps > 1 and self.turn_warpgroup:
            return f"turn_steps {self.turn_steps} is not 1, but turn_warpgroup passes on every turn by itself"
        if self.idle_warpgroup and not self.turn_warpgroup:
            return "idle_warpgroup needs turn_warpgroup, whose warps it keeps in calls that take no turns"
        if self.lone_tiles and self.turn_warpgroup:
            return "lone_tiles with turn_warpgroup: lone tiles take no turns, and a block's threads all work on them"
        return self._check_warps() or copies_complaint(self) or self._check_limits(arch)

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

    def _check_limits(self, arch: ArchSpec) -> str | None:
        """Whether the multiprocessor has what the block needs."""
        if self.vector_add and arch.capability < (9, 0):
            return f"vector_add needs sm_90 or later, the target is {arch.name}"
        if self.turn_warpgroup and (arch.name != "sm_90a" or self.num_warps % 4):
            return (
                f"turn_warpgroup needs sm_90a and num_warps a multiple of 4; the target is {arch.name}, "
                f"num_warps is {self.num_warps}"
            )
        if self.turn_warpgroup and self.mma_regs(arch) <= self._launch_regs(arch):
            return (
                f"turn_warpgroup leaves no registers to {self.num_warps} warps, which start with "
                f"{self._launch_regs(arch)} a thread"
            )
        return residency_complaint(self, arch, "dK, dV, S and dP")

    def register_limit(self, arch: ArchSpec) -> int:
        """Registers the compiler may give a thread, with `blocks_per_sm` blocks on one multiprocessor."""
        if self.turn_warpgroup:
            return self.mma_regs(arch)
        return registers_a_thread(self.blocks_per_sm * self.num_threads, arch)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for dK and dV, S and dP."""
        return self.tile_n * (self.head_dim + self.head_dim_v + 2 * self.tile_m) // self.num_threads

    @property
    def ahead(self) -> int:
        """By how many k-blocks fragments are fetched before they are needed."""
        return 1 if self.double_buffer else 0
