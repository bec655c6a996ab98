"""Traits of the sm90 family (TMA, WGMMA, warp-specialised)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.problem import DTYPES, Feature, Operation
from cuteflash.traits.arch import BLOCK_SMEM, ArchSpec, Family
from cuteflash.traits.base import MERGE_LOADS, SmemRegion, head_dims_complaint, memory_complaint, plan_bytes

WARPGROUP = 128
WGMMA_M, WGMMA_K = 64, 16  # k of 16-bit operands
WGMMA_MAX_N = 256  # columns of one instruction
MBARRIER_BYTES = 8
OUT_BYTES = 2  # of an element of O
SWIZZLE_ALIGN = 1024  # bytes: the period of the 128-byte swizzle
HANDED_TILES = 4  # tiles of packed sequences that are handed out ahead
ARRIVAL_BYTES = 16
HANDED_BYTES = 32  # of each: what it is
ADDRESS_REGS = 24  # registers a thread needs at least beside its fragments
# Registers a thread may hold after setmaxnreg, by number of consumer warpgroups: (producer, consumer).
# The sum over all warpgroups is at most the 65536 / threads that the block was launched with.
MAX_REGS, REGISTER_FILE = 255, 65536  # a thread's at most, a multiprocessor's
PLAIN_FEATURES: frozenset[Feature] = frozenset({"softcap", "lse", "sink"})  # of every kernel
REGISTER_SPLIT = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
PAGED_SPLIT = {1: (152, 256), 2: (40, 232)}  # of a resident block whose producer looks up where rows lie
RESIDENT_SPLIT = {2: (40, 216), 3: (24, 136), 4: (24, 104)}  # of so many blocks with one consumer warpgroup each


def handout_regions(start: int) -> tuple[SmemRegion, SmemRegion]:
    """Barriers and words of the tiles that are handed out, from byte `start` on."""
    barriers = SmemRegion(start, 2 * HANDED_TILES * MBARRIER_BYTES)
    return barriers, SmemRegion(barriers.end, HANDED_TILES * HANDED_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsSm90:
    """One way to run the sm90 forward kernel: 1-3 consumer warpgroups and, as a rule, a producer warpgroup.

    Attributes:
        tile_m: query rows of one block, 64 for each consumer warpgroup.
        tile_n: key rows of one step of the main loop.
        head_dim: columns of the Q and K tiles, the problem's head dim padded up to a multiple of 16.
        head_dim_v: columns of the V and O tiles, padded likewise.
        kv_stage: K and V tiles in flight, each.
        q_stage: Q tiles in flight; with 2 the next tile's Q loads while this one's is still read from shared memory.
        warp_specialized: a warpgroup of its own issues the TMA loads; otherwise a consumer's warp does, step by step.
        pingpong: named barriers let one warpgroup's products run while another does its softmax.
        overlap: inside a warpgroup, the next QK product is issued before this step's PV product.
        q_in_regs: Q is loaded from shared memory to registers once a tile, not read by every product.
        p_in_regs: P feeds the PV product from registers; otherwise through shared memory.
        share_q_o: O is staged in Q's memory; saves shared memory, but the next tile's Q has to wait for the store.
        rescale_in_product: O is rescaled between issuing the QK and the PV product, not after the softmax.
        fixed_max: row maxima are those of the first scores and of masked blocks; other blocks are not searched for
            larger scores, and O is not rescaled. A block whose scores exceed the maxima by too much is repaired: its
            softmax is redone with updated maxima.
        repair_apart: the repair is outside of the main loop, which is then shorter but takes some more registers.
        exp_rows_before_wait: of a thread's two rows, how many have their exponentials taken before the wait for the PV
            product that runs beside the softmax. 0 leaves the order to the compiler, which waits early.
        persistent: as many blocks as multiprocessors, each looping over tiles.
        longest_first: the long tiles of a causal or windowed problem start first, waves run forwards and backwards.
        splits: the keys of a tile may be dealt to several blocks (`cuteflash.core.split`); such rows run nothing else.
        blocks_per_sm: resident blocks.
    """

    operation: ClassVar[Operation] = "fwd"
    family: ClassVar[Family] = "sm90"
    element_bytes: ClassVar[int] = 2
    merge_loads: ClassVar[int] = MERGE_LOADS
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    max_head_dim: ClassVar[int] = 256
    address_regs: ClassVar[int] = ADDRESS_REGS

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    kv_stage: int = 2
    q_stage: int = 1
    warp_specialized: bool = True
    pingpong: bool = True
    overlap: bool = True
    q_in_regs: bool = False
    p_in_regs: bool = True
    share_q_o: bool = False
    rescale_in_product: bool = False
    fixed_max: bool = False
    repair_apart: bool = False
    exp_rows_before_wait: int = 0
    persistent: bool = True
    longest_first: bool = True
    splits: bool = False
    blocks_per_sm: int = 1

    # What only kernels of 8-bit operands or caches have, see `FwdTraitsFp8Sm90` and `FwdTraitsCacheSm90`.

    @property
    def two_level(self) -> bool:
        return False

    @property
    def masked_by_fixed_max(self) -> bool:
        return False

    @property
    def turns_v(self) -> bool:
        return False

    @property
    def stages_o(self) -> bool:
        return True

    @property
    def stored_v_stage(self) -> int:
        return 0

    @property
    def key_warpgroups(self) -> int:
        return 1

    # What kernels have that make other tiles of K and V of those that are loaded.

    @property
    def stored_tiles(self) -> dict[str, tuple[int, int]]:
        """(bytes, stages) of tiles as they are loaded, by their names in the plan."""
        return {}

    @property
    def p_offset(self) -> float:
        return 0.0

    @property
    def mma_warpgroups(self) -> int:
        return self.tile_m // WGMMA_M

    def warpgroup_tokens(self, packed_heads: int) -> int:
        """Queries in a warpgroup's 64 rows. Rows hold whole tokens: heads that do not divide 64 leave some unused."""
        return WGMMA_M // packed_heads

    def tile_tokens(self, packed_heads: int) -> int:
        """Queries of a tile."""
        return self.warpgroup_tokens(packed_heads) * self.mma_warpgroups

    @property
    def consumer_warpgroups(self) -> int:
        """One for each 64 rows, and for each part of a key block."""
        return self.mma_warpgroups * self.key_warpgroups

    @property
    def step_keys(self) -> int:
        """Keys of a block that a consumer warpgroup reads."""
        return self.tile_n // self.key_warpgroups

    @property
    def producer_warpgroups(self) -> int:
        """Warpgroups in front of the consumers, 0 or 1."""
        return int(self.warp_specialized)

    @property
    def first_consumer(self) -> int:
        """The first thread of the first consumer warpgroup."""
        return self.producer_warpgroups * WARPGROUP

    @property
    def num_threads(self) -> int:
        return (self.producer_warpgroups + self.consumer_warpgroups) * WARPGROUP

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements; packed sequences need a warp of the producer that hands out tiles."""
        if not self.warp_specialized:
            return PLAIN_FEATURES
        return PLAIN_FEATURES | ({"varlen", "split", "tree"} if self.splits else {"varlen"})

    @property
    def k_step(self) -> int:
        """Columns of Q and K, or keys, in one instruction."""
        return WGMMA_K * 2 // self.element_bytes

    @property
    def producer_regs(self) -> int:
        """Registers a thread of the producer warpgroup, if there is one."""
        return self._register_split[0]

    @property
    def mma_regs(self) -> int:
        """Registers a thread of a consumer warpgroup."""
        if not self.warp_specialized:
            return min(MAX_REGS, REGISTER_FILE // self.num_threads // 8 * 8)
        return self._register_split[1]

    @property
    def _register_split(self) -> tuple[int, int]:
        if self.blocks_per_sm > 1:
            return RESIDENT_SPLIT[self.blocks_per_sm]
        return REGISTER_SPLIT[self.mma_warpgroups]

    @property
    def packed_regs(self) -> tuple[int, int]:
        """`producer_regs` and `mma_regs` of kernels of packed sequences."""
        return self.producer_regs, self.mma_regs

    @property
    def paged_regs(self) -> tuple[int, int]:
        """`producer_regs` and `mma_regs` of kernels that look up where K and V lie."""
        usual = self.producer_regs, self.mma_regs
        return PAGED_SPLIT.get(self.mma_warpgroups, usual) if self.blocks_per_sm == 1 else usual

    @property
    def smem_plan(self) -> dict[str, SmemRegion]:
        """Barriers, Q, K, V, `stored_tiles`, O (over Q with `share_q_o`) if it is staged, P without `p_in_regs`."""
        return self.plan_of_tiles()

    def plan_of_tiles(self) -> dict[str, SmemRegion]:
        """See `smem_plan`."""
        wgs, kv, stored = self.mma_warpgroups, self.kv_stage, self.stored_tiles
        # Each stage has a barrier for full and one for empty.
        stages = self.q_stage + 2 * kv + sum(count for _, count in stored.values())
        plan = {"barriers": SmemRegion(0, 2 * stages * MBARRIER_BYTES)}

        def append(name: str, elements: int, stages: int, nbytes: int = self.element_bytes) -> None:
            start = -(-plan_bytes(plan) // SWIZZLE_ALIGN) * SWIZZLE_ALIGN
            plan[name] = SmemRegion(start, elements * nbytes, stages)

        append("q", self.q_stage * self.tile_m * self.head_dim, self.q_stage * wgs)
        append("k", kv * self.tile_n * self.head_dim, kv)
        append("v", kv * self.tile_n * self.head_dim_v, kv)
        for name, (nbytes, count) in stored.items():
            append(name, count * nbytes, count, 1)
        if self.share_q_o:
            plan["o"] = SmemRegion(plan["q"].start, self.tile_m * self.head_dim_v * OUT_BYTES, wgs)
        elif self.stages_o:
            append("o", self.tile_m * self.head_dim_v, wgs, OUT_BYTES)
        if not self.p_in_regs:
            append("p", self.tile_m * self.tile_n, wgs)
        return plan

    @property
    def smem_handout(self) -> tuple[SmemRegion, SmemRegion]:
        """Barriers and words of the tiles that are handed out, in the room that the plan leaves before Q."""
        return handout_regions(self.smem_plan["barriers"].end)

    @property
    def smem_arrival(self) -> SmemRegion:
        """A word of kernels that split keys, in the room that the plan leaves before Q."""
        return SmemRegion(self.smem_plan["barriers"].end, ARRIVAL_BYTES)

    @property
    def smem_bytes(self) -> int:
        return plan_bytes(self.smem_plan)

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        complaint = head_dims_complaint(self, arch, self.k_step)
        if complaint is not None:
            return complaint
        if self.tile_m % WGMMA_M or self.mma_warpgroups not in REGISTER_SPLIT:
            return f"tile_m {self.tile_m} is not {WGMMA_M} rows for each of 1 to 3 warpgroups"
        if self.tile_n % self.k_step or not 0 < self.tile_n <= WGMMA_MAX_N:
            return f"tile_n {self.tile_n} is not a multiple of {self.k_step} up to {WGMMA_MAX_N}"
        if self.pingpong and self.mma_warpgroups == 1:
            return "pingpong needs a second consumer warpgroup"
        if (self.pingpong or self.overlap) and not self.warp_specialized:
            return "pingpong and overlap need warp_specialized: only a producer loads far enough ahead"
        if self.fixed_max and (self.rescale_in_product or not self.overlap):
            return "fixed_max needs overlap, and leaves nothing to rescale in the product"
        if self.repair_apart and not self.fixed_max:
            return "repair_apart needs fixed_max: maxima that move need no repair"
        if self.fixed_max and not self.p_in_regs:
            return "fixed_max needs p_in_regs: P is rounded into its registers while S stays in its own"
        if self.kv_stage < 2:
            return f"kv_stage {self.kv_stage} is below 2: nothing would be loaded ahead"
        if self.q_stage not in (1, 2):
            return f"q_stage {self.q_stage} is not 1 or 2"
        if self.q_stage == 2 and (self.q_in_regs or self.share_q_o or not self.warp_specialized):
            return "q_stage 2 needs a producer that waits for Q's memory: no q_in_regs, no share_q_o, warp_specialized"
        if self.share_q_o and self.q_in_regs:
            return "share_q_o with q_in_regs: Q has left its memory for the next tile's when O is staged"
        if self.share_q_o and self.head_dim != self.head_dim_v:
            return (
                f"share_q_o takes O as wide as Q, not {self.head_dim_v} and {self.head_dim} columns: the rows coincide"
            )
        if self.splits and (self.mma_warpgroups > 1 or self.fixed_max or not self.warp_specialized):
            return "splits needs one consumer warpgroup and a producer, and no fixed_max: a share may be masked wholly"
        if self.blocks_per_sm > 1 and (self.mma_warpgroups > 1 or self.blocks_per_sm not in RESIDENT_SPLIT):
            allowed = ", ".join(str(blocks) for blocks in RESIDENT_SPLIT)
            return f"blocks_per_sm {self.blocks_per_sm} is not 1, or one of {allowed} with one consumer warpgroup each"
        resident = self.blocks_per_sm * (self.smem_bytes + BLOCK_SMEM)
        if self.blocks_per_sm > 1 and resident > arch.smem_per_sm:
            return f"{self.blocks_per_sm} blocks need {resident} bytes of shared memory, there are {arch.smem_per_sm}"
        if self.exp_rows_before_wait not in (0, 1, 2):
            return f"exp_rows_before_wait {self.exp_rows_before_wait} is not 0, 1 or 2"
        if self.accumulator_regs > self.mma_regs - self.address_regs:
            return (
                f"Q, S, P and O fragments take {self.accumulator_regs} registers a thread, "
                f"{self.mma_regs} less {self.address_regs} for addresses are there"
            )
        return memory_complaint(self, arch)

    @property
    def accumulator_regs(self) -> int:
        """Registers a thread needs for the S and O accumulators and, if they stay there, for Q and P.

        Under fixed maxima S stays beside P; rows that do not wait for the PV product to read the last P are rounded
        into registers of their own.
        """
        s = self.step_keys // 2
        o = self.head_dim_v // 2 * (2 if self.two_level else 1)  # a product of 8 bits beside their sum
        a_row = self.step_keys * self.element_bytes // 16  # of P
        p = 2 * a_row if self.p_in_regs else 0
        q = self.head_dim * self.element_bytes // 8 if self.q_in_regs else 0
        ahead = a_row * self.exp_rows_before_wait if self.fixed_max else 0
        return q + s + o + p + ahead
