"""Which candidates to measure first if time is short: a rough estimate of each one's speed, from its traits alone.

The estimate counts the clocks of a main loop's step by unit (tensor cores, shared memory, exponentials, L2), lets the
slowest hide most of the others, and multiplies by what the switches were measured to cost (docs/performance.md). It
orders tiles rightly enough to keep the winner among the first dozens, and is never used to judge.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence

from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.row import FwdRowTraits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

# Of one multiprocessor, a clock.
WGMMA_FLOPS, MMA_FLOPS = 4096, 2048  # dense 16-bit: Hopper's wgmma, Ampere's mma.sync
SMEM_BYTES, L2_BYTES = 128, 64
EXPONENTIALS = 16
SCORES = 21  # by all other instructions of the softmax: six a score on 128 lanes

STEP_CLOCKS = 150  # barriers and address arithmetic of a step
EXPOSED = {2: 0.1, 3: 0.05}  # of the units that are not the slowest, by warpgroups that take turns
Q_GAP = 1.03  # until the next tile's Q is there, if its memory is only free once this tile's products have ended
SCRATCH_SM90, SCRATCH_SM80 = 28, 56  # registers beside S, P, O and Q; mma.sync also has K and V fragments in flight
SPILL_PENALTY = 0.01  # for each register that is not there
VARIETY = 0.03  # what each candidate with the same tile adds to the next one's estimate

SWITCHES_SM90: dict[tuple[str, object], float] = {
    ("warp_specialized", False): 1.2,
    ("overlap", False): 1.15,
    ("persistent", False): 1.05,
    ("longest_first", False): 1.03,
    ("share_q_o", True): 1.02,
    ("fixed_max", True): 0.95,
}
SWITCHES_SM80: dict[tuple[str, object], float] = {
    ("double_buffer", False): 1.1,
    ("async_copy", False): 1.4,
    ("eager_loads", False): 1.3,
    ("fused_softmax", False): 1.1,
    ("longest_first", False): 1.02,
    ("cutlass_symbol", True): 1.02,
}
BEYOND = "beyond the limit"  # how the reason of a candidate ends that could run but was not promising enough
WIDE = 192  # head dims from which rescaling O inside the product pays
UNPINNED_BELOW = 128  # head dims below which fixed maxima want the wait for PV where ptxas puts it


def estimate(traits: FwdRowTraits, arch: ArchSpec) -> float:
    """Clocks of a multiprocessor for 1000 scores and their share of both products; the smaller the better."""
    return _sm90(traits) if isinstance(traits, FwdTraitsSm90) else _sm80(traits, arch)


def shortlist(
    candidates: Iterable[FwdRowTraits], arch: ArchSpec, always: Sequence[FwdRowTraits] = ()
) -> list[FwdRowTraits]:
    """`always` as it is, then the other candidates, most promising first.

    Candidates of one tile are much alike, so each one makes the next of its tile a little less promising.
    """
    clocks = {traits: estimate(traits, arch) for traits in candidates if traits not in always}
    before: collections.Counter[tuple[int, int, int]] = collections.Counter()
    for traits in sorted(clocks, key=lambda one: clocks[one]):
        tile = traits.tile_m, traits.tile_n, traits.num_threads
        clocks[traits] *= 1 + VARIETY * before[tile]
        before[tile] += 1
    return [*always, *sorted(clocks, key=lambda one: clocks[one])]


def beyond(place: int, total: int) -> str:
    """Why a candidate is not compiled that a limit leaves out."""
    return f"number {place} of {total} by the analytic score, {BEYOND}"


def _sm90(traits: FwdTraitsSm90) -> float:
    m, n, columns = traits.tile_m, traits.tile_n, traits.head_dim + traits.head_dim_v
    warpgroups = traits.mma_warpgroups
    product = 2 * m * n * columns / WGMMA_FLOPS
    operands = warpgroups * 2 * n * columns  # every warpgroup reads K and V, and what it does not hold in registers
    operands += 0 if traits.q_in_regs else 2 * m * traits.head_dim
    operands += 0 if traits.p_in_regs else 4 * m * n
    units = (product, operands / SMEM_BYTES, m * n / EXPONENTIALS + m * n / SCORES, 2 * n * columns / L2_BYTES)
    hidden = EXPOSED[warpgroups] if traits.pingpong else 0.14
    clocks = max(units) + hidden * (sum(units) - max(units)) + STEP_CLOCKS * warpgroups / 2
    clocks *= _switches(traits, SWITCHES_SM90)
    clocks *= Q_GAP if traits.q_stage == 1 and not traits.q_in_regs else 1.0
    if not traits.fixed_max:
        clocks *= 1.03 if traits.rescale_in_product != (traits.head_dim_v >= WIDE) else 1.0
    unpinned = traits.fixed_max and traits.head_dim_v < UNPINNED_BELOW
    clocks *= 1.05 if traits.exp_rows_before_wait != (0 if unpinned else 1) else 1.0
    return clocks * _spill_factor(traits.accumulator_regs + SCRATCH_SM90, traits.mma_regs) * 1000 / (m * n)


def _sm80(traits: FwdTraitsSm80, arch: ArchSpec) -> float:
    m, n, columns = traits.tile_m, traits.tile_n, traits.head_dim + traits.head_dim_v
    product = 2 * m * n * columns / MMA_FLOPS
    operands = traits.num_warps * 2 * n * columns + 2 * n * columns  # every warp reads K and V; cp.async writes them
    operands += 0 if traits.q_in_regs else 2 * m * traits.head_dim
    units = (product, operands / SMEM_BYTES, m * n / EXPONENTIALS + m * n / SCORES, 2 * n * columns / L2_BYTES)
    warps = traits.blocks_per_sm * traits.num_warps
    # A block's warps run in step, so it is other blocks, or loads further ahead, that fill its gaps.
    hidden = 1.2 / (math.sqrt(warps) * (1 + 0.25 * (traits.blocks_per_sm > 1)) * (1 + 0.1 * (traits.kv_stage > 1)))
    clocks = max(units) + hidden * (sum(units) - max(units)) + STEP_CLOCKS / traits.blocks_per_sm
    clocks *= _switches(traits, SWITCHES_SM80)
    clocks *= 1 + 0.5 * max(0, min(3, traits.head_dim.bit_length() - 5) - traits.swizzle_bits)
    clocks *= _spill_factor(traits.accumulator_regs + SCRATCH_SM80, traits.register_limit(arch))
    return clocks * 1000 / (m * n)


def _switches(traits: FwdRowTraits, costs: dict[tuple[str, object], float]) -> float:
    return math.prod(cost for (name, value), cost in costs.items() if getattr(traits, name) == value)


def _spill_factor(wanted: int, available: int) -> float:
    return 1 + SPILL_PENALTY * max(0, wanted - available)
