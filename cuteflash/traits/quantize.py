"""Traits of the quantising kernels: how many tokens a block works on."""

from __future__ import annotations

import dataclasses
from typing import Any

from cuteflash.core.tile_numbers import count_tiles
from cuteflash.quantize_problem import BLOCK_TOKENS, HADAMARD_OF_MMA, QuantizeProblem
from cuteflash.traits.arch import BLOCK_SMEM, get_arch

COLUMNS = 16  # of one thread: 16 bytes of 8-bit elements
ROWS = 4  # of one thread: 4 neighbouring bytes of a row of V^T
ANGLES_BYTES = 4 * ROWS * COLUMNS  # of a thread: a cosine and a sine in fp32 for two elements
MEAN_BYTES = 4 * COLUMNS  # likewise
WARP = 32
MULTIPROCESSORS = 132  # of the GPU whose waves blocks that share heads fill
SHARED_VISITS = 16  # heads of Q and K that such a block has, about
TARGET = "sm_90a"  # FP8 attention needs Hopper
SMEM_PER_SM = get_arch(TARGET).smem_per_sm
THREADS, SOME_THREADS, FEW_THREADS, LEAST_THREADS = 1024, 768, 512, 384  # of a multiprocessor: 64 to 168 registers


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeTraits:
    """One way to run the quantising kernels.

    Attributes:
        head_dim: columns of the widest rows, those of Q and K or those of V.
        tokens: rows of a tile.
        visits: heads of Q or K whose tiles a block converts; of those that share a scale which it finds alone, all.
            More than one pays if they share something, as the cosines and sines of a rotary embedding.
        shared_visits: about how many heads of Q and K a block converts that has some of all batch entries, or, in a
            cluster, of how many KV heads.
        visits_k: in clusters, heads of K of a block that has no others; 0 if Q's blocks have them.
        measured: heads of Q or K of which a block measures the same part.
        tiles_of_part: tiles of Q or K that a block measures.
        tiles_of_v_part: the same of V. The order of its columns' sums follows from it.
        resident: blocks of the converting kernel that a multiprocessor must have registers for.
        measuring: likewise of the kernel that measures.
        centres_v: V minus its mean is fp32 until it is rounded, which takes 64 of a thread's registers.
        tiles_of_v: tiles of V that a block converts, if `centres_v`: each is loaded ahead.
        loads_ahead: with scales that are there, rows of the next head of Q or K are loaded before those of a head are
            written, not after, which takes fewer registers.
        mixes: blocks of V, which wait for memory, run beside those of Q and K, which may have more to compute; without
            it after them.
        backwards: tiles are converted in the reverse of the order in which they are measured, so that those measured
            last are still in L2.
    """

    head_dim: int
    tokens: int = BLOCK_TOKENS
    visits: int = 1
    shared_visits: int = SHARED_VISITS
    visits_k: int = 0
    measured: int = 1
    tiles_of_part: int = 4
    tiles_of_v_part: int = 4
    resident: int = 1
    measuring: int = 1
    centres_v: bool = False
    tiles_of_v: int = 1
    loads_ahead: bool = True
    mixes: bool = False
    backwards: bool = False

    def __post_init__(self) -> None:
        if self.tokens not in (32, 64, BLOCK_TOKENS):
            raise ValueError(f"tokens is {self.tokens}; allowed: 32, 64, {BLOCK_TOKENS}")

    @property
    def quads(self) -> int:
        """Groups of 4 rows in a tile."""
        return self.tokens // ROWS

    @property
    def num_threads(self) -> int:
        """Threads of a block, whole warps: each thread has 16 columns of 4 rows."""
        return -(-self.quads * (self.head_dim // COLUMNS) // WARP) * WARP

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: a tile of V^T or the sums of a tile's columns, and a number for each warp."""
        return max(self.head_dim * self.tokens, 4 * self.quads * self.head_dim) + 4 * WARP

    def shared_bytes(self, problem: QuantizeProblem) -> int:
        """Shared memory that blocks of Q and K have for cosines and sines, and blocks of V for a tile and its mean."""
        of_v = self.tokens * problem.head_dim_v + self.num_threads * MEAN_BYTES if self.centres_v else 0
        return max(self.angles_bytes(problem), of_v)

    def measuring_bytes(self, problem: QuantizeProblem) -> int:
        """The same of the kernel that measures: beside those the largest magnitudes of heads, and statistics of V."""
        if not (problem.rotary_dim and problem.measures_heads):
            return 0
        warps = self.num_threads // WARP
        peaks = warps * 2 * SHARED_VISITS if problem.shares_angles else self.num_threads * self.measured
        of_qk = self.angles_bytes(problem) + 4 * peaks
        return max(of_qk, 4 * self.quads * problem.head_dim_v)

    def angles_bytes(self, problem: QuantizeProblem) -> int:
        """Shared memory for cosines and sines of a block of Q or K."""
        return self.num_threads * ANGLES_BYTES if problem.keeps_angles else 0

    def carveout(self, columns: int, nbytes: int = 0) -> int:
        """Percent of a multiprocessor's memory that its blocks share; the rest caches what they load.

        Args:
            columns: of a tile of V^T, 0 if there is none.
            nbytes: that a block has beside it.
        """
        of_numbers = 2 * 4 * WARP
        return percent_of_smem(self.resident * (self.tokens * columns + nbytes + BLOCK_SMEM + of_numbers))

    def measuring_carveout(self, problem: QuantizeProblem) -> int:
        """The same of the kernel that measures."""
        return percent_of_smem(self.measuring * (max(self.smem_bytes, self.measuring_bytes(problem)) + BLOCK_SMEM))

    def parts(self, seqlen: Any, is_v: bool = False) -> Any:
        """How many parts a head of `seqlen` tokens has, at least one, for a Python int or a traced value."""
        return seqlen // self.part_rows(is_v) + 1

    def part_rows(self, is_v: bool = False) -> int:
        """Rows of a part of Q or K, or of V: those that a block measures."""
        return self.tokens * (self.tiles_of_v_part if is_v else self.tiles_of_part)

    def packed_parts(self, rows: Any, sequences: Any, is_v: bool = False) -> Any:
        """How many parts a head of packed sequences has in a tensor of `rows` rows, likewise."""
        return count_tiles(rows, sequences, self.part_rows(is_v))

    def workspace_size(self, problem: QuantizeProblem, heads: int, kv_heads: int, parts: tuple[int, int, int]) -> int:
        """Elements of the workspace.

        Args:
            problem: what is measured.
            heads, kv_heads: of all batch entries.
            parts: of a head of Q, of K and of V.
        """
        of_q, of_k, of_v = parts
        of_part = problem.statistics * problem.head_dim_v if problem.smooths_v else 1
        magnitudes = heads * of_q + kv_heads * of_k if problem.measures_heads else 0
        return magnitudes + kv_heads * of_v * of_part


def percent_of_smem(nbytes: int) -> int:
    """What a multiprocessor's blocks share, in percent of the largest such part of its memory."""
    return min(-(-100 * nbytes // SMEM_PER_SM), 100)


def traits_of(problem: QuantizeProblem) -> QuantizeTraits:
    """The traits that a problem runs with."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    # Blocks of 512 threads are few in a multiprocessor, and what one loads overlaps less with what others store.
    tokens = BLOCK_TOKENS if problem.scales_by_block or head_dim <= 128 else BLOCK_TOKENS // 2
    traits = QuantizeTraits(head_dim, tokens, mixes=True, backwards=problem.measures)
    if problem.smooths_v and not problem.measures_heads:  # little to measure: more blocks; and what of V is in L2 first
        traits = dataclasses.replace(traits, tiles_of_v_part=2, mixes=False)
    if problem.rotary_dim:
        # Heads of a tile one after the other, and those of Q before all else. If heads are measured, V's tiles first.
        visits = 4 if problem.measures_heads else 8
        traits = dataclasses.replace(
            traits, visits=visits, measured=visits, mixes=False, backwards=problem.measures_heads
        )
        if problem.shares_angles or problem.measures_shared:  # blocks are few, and a part of a wave would be left
            measured = visits if problem.shares_angles else 8
            traits = dataclasses.replace(traits, measured=measured, tiles_of_part=1)
        if centres_v(problem):
            traits = dataclasses.replace(traits, centres_v=True, tiles_of_v=4)
        elif problem.is_packed or problem.hadamard or problem.measures_heads or problem.smooths_v:  # these spilled
            traits = dataclasses.replace(traits, loads_ahead=False)
    if problem.shares_heads:
        if problem.cluster > 2:  # a wave may have no place for some of its clusters
            traits = dataclasses.replace(traits, shared_visits=4)
            if problem.cluster <= 4 and problem.head_dim == 128:
                traits = dataclasses.replace(traits, shared_visits=8, visits_k=8)
        elif problem.cluster == 1 and centres_v(problem) and head_dim <= 128:
            traits = dataclasses.replace(traits, tiles_of_v=2)
    if problem.cluster > 1:  # whose blocks have heads that follow each other
        traits = dataclasses.replace(traits, mixes=False)
    threads = converting_threads(problem), measuring_threads(problem)
    resident, measuring = (max(count // traits.num_threads, 1) for count in threads)
    return dataclasses.replace(traits, resident=resident, measuring=measuring)


def centres_v(problem: QuantizeProblem) -> bool:
    """Whether V minus its mean is fp32 until it is rounded."""
    return bool(problem.rotary_dim) and problem.smooths_v and problem.transposes_v and not problem.is_packed


def is_narrow(problem: QuantizeProblem) -> bool:
    """Whether rows are short and have both rotations, beside a V that is not centred: 128 registers do not suffice."""
    has_both = bool(problem.rotary_dim and problem.hadamard) and problem.head_dim <= 64
    return has_both and not (problem.scales_by_block or centres_v(problem))


def converting_threads(problem: QuantizeProblem) -> int:
    """Threads of a multiprocessor that convert."""
    if problem.rotary_dim and problem.hadamard:
        multiplies = problem.scales_by_block and problem.hadamard == HADAMARD_OF_MMA
        loads_again = (problem.is_grouped or problem.cluster > 1 or multiplies) and not problem.keeps_angles
        # With 128 registers each those spilled.
        return LEAST_THREADS if is_narrow(problem) or loads_again else FEW_THREADS
    if problem.rotary_dim or problem.is_grouped:
        return FEW_THREADS
    if problem.hadamard not in (0, HADAMARD_OF_MMA):
        return FEW_THREADS if problem.cluster > 1 else SOME_THREADS  # with 80 registers each clusters' blocks spilled
    is_short = max(problem.head_dim, problem.head_dim_v) <= 64
    spills = problem.smooths_v and (problem.is_packed or problem.scales_by_block or is_short)
    return SOME_THREADS if spills or (problem.is_packed and is_short) else THREADS  # with 64 registers each those did


def measuring_threads(problem: QuantizeProblem) -> int:
    """Threads of a multiprocessor that measure."""
    if not problem.measures_heads:
        return SOME_THREADS if problem.is_packed else THREADS  # with 64 registers each those spilled
    if problem.rotary_dim and problem.hadamard and not (centres_v(problem) and problem.keeps_angles):
        return LEAST_THREADS  # with 128 registers each those spilled
    return FEW_THREADS if problem.rotary_dim else SOME_THREADS


def transpose_traits(head_dim_v: int) -> QuantizeTraits:
    """The traits that `TransposeV` runs with."""
    traits = QuantizeTraits(head_dim_v, BLOCK_TOKENS if head_dim_v <= 128 else BLOCK_TOKENS // 2)
    return dataclasses.replace(traits, resident=max(THREADS // traits.num_threads, 1))
