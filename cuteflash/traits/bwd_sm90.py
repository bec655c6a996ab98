"""Traits of the sm90 backward (TMA, WGMMA, warp-specialised)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from cuteflash.core.workspace import Workspace
from cuteflash.problem import DTYPES, Feature, Operation
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.base import SmemRegion, head_dims_complaint, memory_complaint, plan_bytes
from cuteflash.traits.chunks import swizzle_width
from cuteflash.traits.sm90 import (
    MBARRIER_BYTES,
    REGISTER_SPLIT,
    SWIZZLE_ALIGN,
    WARPGROUP,
    WGMMA_K,
    WGMMA_M,
    handout_regions,
)

STATISTIC_BYTES = 4  # fp32
WORD_BYTES = 4
REGISTERS = 65536  # of a multiprocessor
APART_PRODUCER_REGS = 32  # registers a thread of the producer beside a warpgroup that only computes dQ
DQ_ADDRESS_REGS = 32  # registers a thread of a warpgroup that only computes dQ needs beside the accumulator
BWD_ADDRESS_REGS = 12  # registers a thread needs at least beside its fragments: most addresses are uniform

DqShare = Literal["rows", "columns", "transposed", "turns", "apart"]


@dataclasses.dataclass(frozen=True, slots=True)
class BwdTraitsSm90:
    """One way to run the sm90 backward kernel: one pass, dQ summed up in memory.

    Attributes:
        tile_m: query rows of one step of the main loop.
        tile_n: keys of one block, 64 for each consumer warpgroup.
        head_dim: columns of the Q and K tiles, the problem's head dim padded up to a multiple of 16.
        head_dim_v: columns of the V and O tiles, padded likewise.
        kv_stage: K and V tiles in flight; more than one only of persistent blocks.
        q_stage: Q tiles in flight.
        do_stage: dO tiles in flight.
        k_in_regs, v_in_regs: K is in registers for the product S, V for dP; otherwise both are read from shared
            memory.
        delta_early: delta is fetched before the exponentials, in a register for every 4 queries; otherwise after them.
        keep_thread: the thread's index stays in a register; otherwise it is read again in each step.
        pingpong: named barriers let one warpgroup's products run while another does its pointwise part.
        persistent: a block works on many key tiles, and the next one's loads overlap with this one's end; otherwise
            each tile has a block. Tiles of packed sequences, which differ in what they cost, are handed out on demand.
        dq: how the warpgroups share the product dQ. ``"rows"``, ``"columns"``: each computes half of the rows (`tile_m`
            128) or columns (64) of every tile. ``"transposed"``: half of the columns, as rows of dQ^T = K^T dS^T, which
            takes any `tile_m`. ``"turns"``: step by step one after the other a whole tile (`tile_m` 64). ``"apart"``: a
            third warpgroup computes dQ, of other `tile_m` than 64 transposed, and the two that have the keys never wait
            for each other.
        in_turn: blocks add to a tile of dQ of a dense batch in a fixed order, as in deterministic calls: so they stay a
            step apart, and no two add to the same tile at the same time. Packed sequences, many of them short, do not.
        lone_tiles: the only block of a sequence whose keys are one tile, and whose queries all see a key, stores dQ
            itself, rounded.
        held_dq: a persistent block takes all key tiles of a KV head of a dense batch, one after the other, and holds
            dQ of so many query tiles, if there are no more: each is stored rounded with its last keys, and no other
            block adds to it. Between key tiles whole tiles (dq ``"apart"``) stay in shared memory, and parts go through
            memory. 0 is none; it needs `lone_tiles`.
        last_rounds: a block that finds that all others have added to a tile of dQ brings the sum back, adds its part,
            rounds it and stores it, so that less is left for the kernel after this one; with `in_turn`, nothing. It is
            not for blocks with `lone_tiles`, nor for a dq in turns.
    """

    operation: ClassVar[Operation] = "bwd"
    family: ClassVar[Family] = "sm90"
    features: ClassVar[frozenset[Feature]] = frozenset(
        {"softcap", "deterministic", "varlen", "sink"}
    )  # those that the kernel implements
    first_stores: ClassVar[bool] = True
    early_launch: ClassVar[bool] = True
    turns_at_once: ClassVar[int] = 0
    lone_blocks: ClassVar[bool] = False
    element_bytes: ClassVar[int] = 2
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    max_head_dim: ClassVar[int] = 128
    ds_stage: ClassVar[int] = 2  # a step's dS is read while the next one is written

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    kv_stage: int = 1
    q_stage: int = 2
    do_stage: int = 2
    k_in_regs: bool = False
    v_in_regs: bool = False
    delta_early: bool = True
    keep_thread: bool = False
    pingpong: bool = True
    persistent: bool = False
    dq: DqShare = "columns"
    in_turn: bool = False
    lone_tiles: bool = False
    held_dq: int = 0
    last_rounds: bool = False

    @property
    def mma_warpgroups(self) -> int:
        return self.tile_n // WGMMA_M

    @property
    def dq_stages(self) -> int:
        """Parts of dQ in shared memory."""
        return max(self.mma_warpgroups, self.held_dq if self.is_dq_apart else 0)

    @property
    def is_dq_apart(self) -> bool:
        """Whether a warpgroup of its own computes dQ."""
        return self.dq == "apart"

    @property
    def is_dq_transposed(self) -> bool:
        """Whether dQ is computed as dQ^T = K^T dS^T, of which any number of queries is an extent."""
        return self.dq == "transposed" or (self.is_dq_apart and self.tile_m != WGMMA_M)

    @property
    def is_dq_whole(self) -> bool:
        """Whether one warpgroup computes a whole tile of dQ, which goes through the two stages in turn."""
        return self.dq in ("turns", "apart")

    @property
    def num_threads(self) -> int:
        return (1 + self.mma_warpgroups + self.is_dq_apart) * WARPGROUP

    @property
    def producer_regs(self) -> int:
        """Registers a thread of the warpgroup that loads and adds dQ."""
        return APART_PRODUCER_REGS if self.is_dq_apart else REGISTER_SPLIT[self.mma_warpgroups][0]

    @property
    def dq_regs(self) -> int:
        """Registers a thread of the warpgroup that computes dQ; 0 if there is none."""
        return self.dq_accumulator_regs + DQ_ADDRESS_REGS if self.is_dq_apart else 0

    @property
    def mma_regs(self) -> int:
        """Registers a thread of a consumer warpgroup."""
        split = REGISTER_SPLIT[self.mma_warpgroups][1]
        left = REGISTERS // WARPGROUP - self.producer_regs - self.dq_regs
        return left // self.mma_warpgroups // 8 * 8 if self.is_dq_apart else split

    @property
    def dq_accumulator_regs(self) -> int:
        """Registers a thread of what computes dQ needs for its accumulator."""
        rows, cols = self.dq_part
        return rows * cols // WARPGROUP

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of dQ that one warpgroup computes at a time."""
        rows = self.tile_m // self.mma_warpgroups if self.dq == "rows" else self.tile_m
        split = self.dq in ("columns", "transposed")
        return rows, self.head_dim // self.mma_warpgroups if split else self.head_dim

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Barriers, row statistics, K, V, Q, dO, dS, dQ as it waits to be added, and tiles that are handed out."""
        rings = 2 * self.kv_stage + self.q_stage + self.do_stage + self.ds_stage + self.dq_stages
        barriers = 2 * rings + self.kv_stage + 1  # full and empty; gradients of each stage of K and V; a tile's steps
        plan = {"barriers": SmemRegion(0, barriers * MBARRIER_BYTES)}

        def append(name: str, nbytes: int, stages: int, align: int = SWIZZLE_ALIGN) -> None:
            start = -(-plan_bytes(plan) // align) * align
            plan[name] = SmemRegion(start, nbytes * stages, stages)

        append("lse", self.tile_m * STATISTIC_BYTES, self.q_stage, 128)
        append("delta", self.tile_m * STATISTIC_BYTES, self.do_stage, 128)
        append("k", self.tile_n * self.head_dim * self.element_bytes, self.kv_stage)
        append("v", self.tile_n * self.head_dim_v * self.element_bytes, self.kv_stage)
        append("q", self.tile_m * self.head_dim * self.element_bytes, self.q_stage)
        append("do", self.tile_m * self.head_dim_v * self.element_bytes, self.do_stage)
        append("ds", self.tile_m * self.tile_n * self.element_bytes, self.ds_stage)
        rows, cols = self.dq_part
        append("dq", rows * cols * 4, self.dq_stages)
        if self.last_rounds:
            append("sums", WORD_BYTES, self.dq_stages, 16)
        if self.persistent:
            start = plan_bytes(plan)
            plan["handout"] = SmemRegion(start, handout_regions(start)[-1].end - start)
        return plan

    @property
    def stores_dq(self) -> bool:
        """Whether blocks store some of dQ as it is returned."""
        return self.lone_tiles or self.last_rounds

    @property
    def smem_handout(self) -> tuple[SmemRegion, SmemRegion]:
        """Barriers and words of the tiles that are handed out to persistent blocks."""
        return handout_regions(self.smem_plan["handout"].start)

    @property
    def smem_bytes(self) -> int:
        return plan_bytes(self.smem_plan)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for the accumulators dK and dV, S, dP and dQ, and for the operands P, dS, K and V.

        dQ takes the place of S, and dS replaces dP element by element.
        """
        gradients, scores, operand = (self.head_dim + self.head_dim_v) // 2, self.tile_m // 2, self.tile_m // 4
        dq = 0 if self.is_dq_apart else self.dq_accumulator_regs
        keys = self.head_dim // 4 * self.k_in_regs + self.head_dim_v // 4 * self.v_in_regs
        return keys + gradients + scores + max(scores, dq) + operand

    def workspace(self, batch: Any, heads: Any, seqlen_q: Any) -> Workspace:
        """The fp32 workspace of a call, for Python ints or traced values."""
        return Workspace.dense(batch, heads, seqlen_q, self.tile_m, self.head_dim)

    def workspace_packed(self, batch: Any, heads: Any, rows: Any) -> Workspace:
        """The same of `batch` packed sequences, in tensors of `rows` queries."""
        return Workspace.packed(batch, heads, rows, self.tile_m, self.head_dim)

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if complaint := head_dims_complaint(self, arch, WGMMA_K):
            return complaint
        if self.tile_m % WGMMA_K:
            return f"tile_m {self.tile_m} is not a multiple of {WGMMA_K}, the k extent of the dK and dV products"
        if self.tile_n != 2 * WGMMA_M:
            return f"tile_n {self.tile_n} is not {2 * WGMMA_M}: {WGMMA_M} keys for each of 2 warpgroups"
        if self.kv_stage > 1 and not self.persistent:
            return f"kv_stage {self.kv_stage} without persistent: a block loads K and V once"
        if self.held_dq and not (self.dq != "turns" and self.persistent and self.lone_tiles):
            return f"held_dq {self.held_dq} needs persistent, lone_tiles, and a dq without turns; dq is {self.dq!r}"
        if self.last_rounds and self.lone_tiles:
            return "last_rounds with lone_tiles: the only block of a tile is its last one, too"
        if self.last_rounds and self.dq == "turns":
            return (
                "last_rounds with dq 'turns': a warpgroup adds to what it computed while another product is in flight"
            )
        rows, cols = self.dq_part
        if (cols if self.is_dq_transposed else rows) != WGMMA_M:
            return (
                f"dq {self.dq!r}, tile_m {self.tile_m}: a warpgroup gets {rows}x{cols}, not {WGMMA_M} rows of a product"
            )
        if cols % swizzle_width(self.head_dim):
            return f"dq {self.dq!r} gives a warpgroup {cols} columns, not whole slabs of {swizzle_width(self.head_dim)}"
        if self.accumulator_regs > self.mma_regs - BWD_ADDRESS_REGS:
            return (
                f"dK, dV, S, dP, dQ and P fragments take {self.accumulator_regs} registers a thread, "
                f"{self.mma_regs} less {BWD_ADDRESS_REGS} for addresses are there"
            )
        return memory_complaint(self, arch)
