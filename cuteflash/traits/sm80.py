"""Traits of the sm80 family (cp.async, ldmatrix, mma.sync m16n8k16)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

from cuteflash.problem import DTYPES, Feature, Operation
from cuteflash.traits.arch import BLOCK_SMEM, ArchSpec, Family
from cuteflash.traits.base import MERGE_LOADS, FwdTraits, SmemRegion, head_dims_complaint, memory_complaint, plan_bytes
from cuteflash.traits.chunks import CHUNK, swizzle_width

WARP = 32
MMA_M, MMA_N, MMA_K = 16, 8, 16
ARRIVAL_BYTES = 16
ADDRESS_REGS = 16  # registers a thread needs at least beside its fragments
REGS_STEP = 8  # the compiler's register limit is a multiple of this
PLAIN_FEATURES: frozenset[Feature] = frozenset({"softcap", "lse", "varlen", "sink"})
SPLIT_FEATURES: frozenset[Feature] = frozenset({"split", "tree"})  # of rows that may split keys


class ResidentTraits(Protocol):
    """What decides how many blocks of this family are resident together."""

    @property
    def num_threads(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...
    @property
    def accumulator_regs(self) -> int: ...
    def register_limit(self, arch: ArchSpec) -> int: ...


class BlockTraits(FwdTraits, ResidentTraits, Protocol):
    """What traits of this family have beyond a forward's."""


def copy_rows(traits: BlockTraits, cols: int) -> int:
    """Rows of a tile of `cols` columns that one access of every thread covers."""
    return traits.num_threads * CHUNK // swizzle_width(cols)


def copies_complaint(traits: BlockTraits) -> str | None:
    """Why the threads do not copy whole tiles, None if they do."""
    for name in ("head_dim", "head_dim_v"):
        rows = copy_rows(traits, getattr(traits, name))
        if traits.tile_m % rows or traits.tile_n % rows:
            tiles = f"tile_m {traits.tile_m} or tile_n {traits.tile_n} is not a multiple"
            return f"{traits.num_threads} threads copy {rows} rows of {name} at once: {tiles}"
    return None


def registers_a_thread(threads: int, arch: ArchSpec) -> int:
    """Registers the compiler may give each of a multiprocessor's resident threads."""
    share = arch.regs_per_sm // threads
    return min(arch.max_regs_per_thread, share // REGS_STEP * REGS_STEP)


def residency_complaint(traits: ResidentTraits, arch: ArchSpec, fragments: str) -> str | None:
    """Why the resident blocks do not fit into a multiprocessor, None if they do; `fragments` names what they hold."""
    blocks, threads = traits.blocks_per_sm, traits.num_threads
    complaint = memory_complaint(traits, arch)
    if complaint is not None:
        return complaint
    if blocks * threads > arch.max_threads_per_sm:
        return f"{blocks} blocks of {threads} threads do not fit into one SM of {arch.name}"
    resident_bytes = blocks * (traits.smem_bytes + BLOCK_SMEM)
    if resident_bytes > arch.smem_per_sm:
        return (
            f"{blocks} blocks of {traits.smem_bytes} + {BLOCK_SMEM} bytes of shared memory need {resident_bytes}, "
            f"one SM of {arch.name} has {arch.smem_per_sm}"
        )
    limit = traits.register_limit(arch)
    if traits.accumulator_regs > limit - ADDRESS_REGS:
        return (
            f"{fragments} fragments take {traits.accumulator_regs} registers a thread, {limit} less {ADDRESS_REGS} "
            f"for addresses are there with {blocks} x {threads} threads on an SM"
        )
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsSm80:
    """One way to run the sm80 forward kernel.

    Attributes:
        tile_m: query rows of one block.
        tile_n: key rows of one step of the main loop.
        head_dim: columns of the Q and K tiles, the problem's head dim padded up to a multiple of 16.
        head_dim_v: columns of the V and O tiles, padded likewise.
        num_warps: warps of one block; each owns `tile_m / num_warps` rows.
        kv_stage: K and V tiles in flight (1: load K while PV runs and V while QK runs).
        q_in_regs: keep the Q fragments in registers for the whole loop.
        double_buffer: fetch the next k-block's fragments by ldmatrix while the tensor cores work on this one.
        async_copy: cp.async writes shared memory directly; otherwise every load passes through registers and is waited
            for.
        swizzle_bits: how many address bits are XORed with the row, at most: 3 over 64, 2 over 32 and 1 over 16 columns
            keep every access free of bank conflicts; 0 stores rows as they are.
        eager_loads: K and V are loaded while products run; otherwise a step loads both and waits.
        fused_softmax: the scale is folded into the exponent's multiply-add and row sums are reduced once a tile.
        longest_first: the long tiles of a causal or windowed problem start first.
        cutlass_symbol: leave "cutlass" in the kernel's symbol, for which ptxas schedules more aggressively: more
            latency hidden, more registers and sometimes spills.
        late_addresses: compute where rows of O and of the log-sum-exp go after the loop over keys, through which it
            would otherwise take registers.
        blocks_per_sm: resident blocks the compiler must leave registers for.
        splits: the keys of a tile may be dealt to several blocks (`cuteflash.core.split`); such rows run nothing else.
    """

    operation: ClassVar[Operation] = "fwd"
    family: ClassVar[Family] = "sm80"
    element_bytes: ClassVar[int] = 2
    merge_loads: ClassVar[int] = MERGE_LOADS // 2  # with more, kernels with sinks spill
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    max_head_dim: ClassVar[int] = 256

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    num_warps: int = 4
    kv_stage: int = 1
    q_in_regs: bool = False
    double_buffer: bool = True
    async_copy: bool = True
    swizzle_bits: int = 3
    eager_loads: bool = True
    fused_softmax: bool = True
    longest_first: bool = True
    cutlass_symbol: bool = False
    late_addresses: bool = False
    blocks_per_sm: int = 1
    splits: bool = False

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements."""
        return PLAIN_FEATURES | SPLIT_FEATURES if self.splits else PLAIN_FEATURES

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP

    @property
    def p_offset(self) -> float:
        """P is multiplied with 2 to this power."""
        return 0.0

    @property
    def loaded_columns(self) -> tuple[int, int]:
        """Columns of the tiles of K and of V as they are loaded, in elements of Q."""
        return self.head_dim, self.head_dim_v

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Q, V, K; the epilogue stages O over all of them."""
        q = SmemRegion(0, self.tile_m * self.head_dim * self.element_bytes)
        k_bytes, v_bytes = (self.kv_stage * self.tile_n * x * self.element_bytes for x in self.loaded_columns)
        v = SmemRegion(q.end, v_bytes, self.kv_stage)
        k = SmemRegion(v.end, k_bytes, self.kv_stage)
        plan = {"q": q, "v": v, "k": k, "o": SmemRegion(0, self.tile_m * self.head_dim_v * self.element_bytes)}
        if self.splits:
            plan["arrival"] = SmemRegion(plan_bytes(plan), ARRIVAL_BYTES)
        return plan

    @property
    def smem_bytes(self) -> int:
        return plan_bytes(self.smem_plan)

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        complaint = head_dims_complaint(self, arch, MMA_K)
        if complaint is not None:
            return complaint
        if self.tile_m % (MMA_M * self.num_warps):
            return f"tile_m {self.tile_m} is not a multiple of {MMA_M} rows x {self.num_warps} warps"
        if self.tile_n % MMA_K:
            return f"tile_n {self.tile_n} is not a multiple of {MMA_K}, the k extent of the PV product"
        if self.kv_stage < 1 or self.blocks_per_sm < 1:
            return f"kv_stage {self.kv_stage} or blocks_per_sm {self.blocks_per_sm} is below 1"
        complaint = copies_complaint(self)
        if complaint is not None:
            return complaint
        if not 0 <= self.swizzle_bits <= 3:
            return f"swizzle_bits {self.swizzle_bits} is not 0 to 3"
        if self.kv_stage > 1 and not (self.eager_loads and self.async_copy):
            return f"kv_stage {self.kv_stage} needs eager_loads and async_copy: without them no load runs ahead"
        return residency_complaint(self, arch, "Q, S and O")

    def tile_tokens(self, packed_heads: int) -> int:
        """Queries of a tile. Rows hold whole tokens: heads that do not divide `tile_m` leave some unused."""
        return self.tile_m // packed_heads

    def register_limit(self, arch: ArchSpec) -> int:
        """Registers the compiler may give a thread, with `blocks_per_sm` blocks on one multiprocessor."""
        return registers_a_thread(self.blocks_per_sm * self.num_threads, arch)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for the S and O accumulators and, with `q_in_regs`, for Q; P replaces S."""
        accumulators = self.tile_m * (self.tile_n + self.head_dim_v) // self.num_threads
        q = self.tile_m * self.head_dim // self.num_threads // 2 if self.q_in_regs else 0
        return accumulators + q

    @property
    def ahead(self) -> int:
        """By how many k-blocks fragments are fetched before they are needed."""
        return 1 if self.double_buffer else 0

    def copy_rows(self, cols: int) -> int:
        """Rows of a tile of `cols` columns that one access of every thread covers."""
        return copy_rows(self, cols)
