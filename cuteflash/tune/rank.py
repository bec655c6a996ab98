"""Which candidates to measure first if time is short: a rough estimate of each one's speed, from its traits alone.

The estimate takes the clocks of a main loop's step by unit (`units`), lets the slowest hide most of the others, and
multiplies by what the switches were measured to cost (docs/performance.md, docs/backward.md). It orders tiles rightly
enough to keep the winner among the first dozens, and is never used to judge.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BWD_ADDRESS_REGS, BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90, is_two_level
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import ADDRESS_REGS, FwdTraitsSm90
from cuteflash.tune.units import BUSY_BYTES, MEMORY, POINTWISE, SMEM, TENSOR, Loop, bytes_in_flight, loops

STEP_CLOCKS = 150  # barriers and address arithmetic of a step
EXPOSED = {2: 0.1, 3: 0.05}  # of the units that are not the slowest, by warpgroups that take turns
EXPOSED_ALONE = 0.14  # by warpgroups that do not
# Of a tile of 64 rows: a warpgroup that has a multiprocessor to itself mostly waits for one unit after the other.
EXPOSED_LONE, EXPOSED_PAIR = 0.8, 0.3
EXPOSED_SPLIT = 0.02  # of rows that split keys: of their own work or of the loads, which run far ahead of it
DRIFT = 1.03  # by each `BUSY_BYTES` in flight beyond those: heads drift out of step
PARTS = 1.01  # of two blocks a multiprocessor, which have twice as many parts to merge
Q_GAP = 1.03  # until the next tile's Q is there, if its memory is only free once this tile's products have ended
SCRATCH_SM90, SCRATCH_SM80 = 28, 56  # registers beside S, P, O and Q; mma.sync also has K and V fragments in flight
SPILL_PENALTY = 0.01  # for each register that is not there
VARIETY = 0.03  # what each candidate with the same tile adds to the next one's estimate
FEW_STEPS_TURN = 3  # after how many others one of those for few steps comes, which win at few lengths

SWITCHES_SM90: dict[tuple[str, object], float] = {
    ("warp_specialized", False): 1.2,
    ("overlap", False): 1.15,
    ("persistent", False): 1.05,
    ("longest_first", False): 1.03,
    ("share_q_o", True): 1.02,
    ("fixed_max", True): 0.95,
}
# Of several resident blocks, whose loops have few steps: 64 keys, and as many blocks as registers allow, were best.
FEW_KEYS, FEW_STEPS = 64, 0.1
MOVING_FP8 = 1.1  # maxima that move, of 8-bit operands: the softmax takes the larger share of a step
SWITCHES_SM80: dict[tuple[str, object], float] = {
    ("double_buffer", False): 1.1,
    ("async_copy", False): 1.4,
    ("eager_loads", False): 1.3,
    ("fused_softmax", False): 1.1,
    ("longest_first", False): 1.02,
    ("cutlass_symbol", True): 1.02,
}
# Of the sm90 backward in one pass.
EXPOSED_BWD = {True: 0.15, False: 0.17}  # by whether warpgroups take turns
EXPOSED_APART = 0.08  # if a warpgroup of its own computes dQ: those with the keys do not wait for each other
DEPTH_BWD = {1: 1.1, 2: 1.0}  # by Q tiles, and by dO tiles in flight
# In two passes.
EXPOSED_DKV = 0.16
DEPTH_DKV = {2: 1.15, 3: 1.0}  # by Q tiles, and by dO tiles: the warpgroups share each, and wait for one another
DEPTH_DQ = {1: 1.05, 2: 1.0}  # by K tiles, and by V tiles
SWITCHES_BWD_SM80: dict[tuple[str, object], float] = {
    ("double_buffer", False): 1.03,
    ("fresh_addresses", True): 1.05,
}
SCALAR_ADDS = 1.05  # if 16 bytes could be added at once
TURNS_APART = 1.1  # a fence each step of a deterministic call, which a sweep does not time
BEYOND = "beyond the limit"  # how the reason of a candidate ends that could run but was not promising enough
WIDE = 192  # head dims from which rescaling O inside the product pays
UNPINNED_BELOW = 128  # head dims below which fixed maxima want the wait for PV where ptxas puts it


def estimate(traits: Traits, arch: ArchSpec) -> float:
    """Clocks of a multiprocessor for 1000 scores and their share of all products; the smaller the better."""
    return ESTIMATES[type(traits)](traits, arch)


def shortlist(candidates: Iterable[Traits], arch: ArchSpec, always: Sequence[Traits] = ()) -> list[Traits]:
    """`always` as it is, then the other candidates, most promising first.

    Candidates of one tile are much alike, so each one makes the next of its tile a little less promising. Those with
    the same estimate stay in their order. Those that an estimate does not tell apart come in turn, so that a limit
    leaves some of each: of 8-bit operands, those that accumulate in two levels and the others, which are faster and
    less accurate; tiles for other numbers of query rows; and those for loops of a few steps, every fourth.
    """
    clocks = {traits: estimate(traits, arch) for traits in candidates if traits not in always}
    before: collections.Counter[tuple[int, int, int, bool]] = collections.Counter()
    for traits in sorted(clocks, key=lambda one: clocks[one]):
        tile = traits.tile_m, traits.tile_n, traits.num_threads, is_two_level(traits)
        clocks[traits] *= 1 + VARIETY * before[tile]
        before[tile] += 1
    dealt: collections.Counter[tuple[bool, int]] = collections.Counter()
    turns: dict[tuple[int, bool, int], list[Traits]] = {}
    for traits in sorted(clocks, key=lambda one: clocks[one]):
        kind = not is_two_level(traits), traits.tile_m if hasattr(traits, "serves") else 0
        turn = FEW_STEPS_TURN
        if not _is_for_few_steps(traits):
            turn = dealt[kind] % FEW_STEPS_TURN
            dealt[kind] += 1
        turns.setdefault((turn, *kind), []).append(traits)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*(turns[one] for one in sorted(turns))))
    return [*always, *(one for one in in_turn if one is not None)]


def _is_for_few_steps(traits: Traits) -> bool:
    """Whether traits are for loops of a few steps, of which the estimate, made of a long loop's, says little.

    One block stores and loads while others compute, or a block stores what others would add to memory, or round.
    """
    if getattr(traits, "lone_tiles", False) or getattr(traits, "last_rounds", False):
        return True
    return isinstance(traits, FwdTraitsSm90) and not traits.splits and traits.blocks_per_sm > 1


def beyond(place: int, total: int) -> str:
    """Why a candidate is not compiled that a limit leaves out."""
    return f"number {place} of {total} by the analytic score, {BEYOND}"


def _fwd_sm90(traits: FwdTraitsSm90, arch: ArchSpec) -> float:
    if traits.splits:
        return _split(traits, (traits.accumulator_regs + SCRATCH_SM90, traits.mma_regs))
    (loop,) = loops(traits)
    warpgroups = traits.mma_warpgroups
    clocks = _step(loop, EXPOSED[warpgroups] if traits.pingpong else EXPOSED_ALONE, STEP_CLOCKS * warpgroups / 2)
    clocks *= _switches(traits, SWITCHES_SM90)
    clocks *= Q_GAP if traits.q_stage == 1 and not traits.q_in_regs else 1.0
    if not traits.fixed_max:
        clocks *= 1.03 if traits.rescale_in_product != (traits.head_dim_v >= WIDE) else 1.0
    unpinned = traits.fixed_max and traits.head_dim_v < UNPINNED_BELOW
    clocks *= 1.05 if traits.exp_rows_before_wait != (0 if unpinned else 1) else 1.0
    if _is_for_few_steps(traits):
        clocks *= math.sqrt(max(1, traits.tile_n / FEW_KEYS)) / traits.blocks_per_sm**FEW_STEPS
    return clocks * _spill_factor(traits.accumulator_regs + SCRATCH_SM90, traits.mma_regs)


def _split(traits: Any, registers: tuple[int, int]) -> float:
    """Of a row that splits keys: time is that of reading, if enough is in flight; (wanted, available) registers."""
    (loop,) = loops(traits)
    own = {unit: loop.clocks[unit] for unit in (TENSOR, SMEM, POINTWISE)}  # the others are other warps' work
    shared = traits.blocks_per_sm * getattr(traits, "key_warpgroups", 1)
    exposed = EXPOSED_PAIR if shared > 1 else EXPOSED_LONE
    work = _step(dataclasses.replace(loop, clocks=own), exposed, STEP_CLOCKS / traits.blocks_per_sm)
    memory = loop.clocks[MEMORY] * 1000 / loop.scores
    clocks: float = max(memory, work) + EXPOSED_SPLIT * min(memory, work)
    clocks *= DRIFT ** max(0.0, bytes_in_flight(traits) / BUSY_BYTES - 1)
    clocks *= PARTS if traits.blocks_per_sm > 1 else 1.0
    return clocks * _spill_factor(*registers)


def _fwd_cache_sm90(traits: FwdTraitsCacheSm90, arch: ArchSpec) -> float:
    return _split(traits, (traits.accumulator_regs + SCRATCH_SM90, traits.mma_regs))


def _fwd_few_sm90(traits: FwdTraitsFewSm90, arch: ArchSpec) -> float:
    return _split(traits, (traits.accumulator_regs + ADDRESS_REGS, traits.mma_regs))


def _mla_sm90(traits: MlaTraitsSm90, arch: ArchSpec) -> float:
    return _split(traits, (traits.accumulator_regs + SCRATCH_SM90, traits.mma_regs))


def _mla_sm80(traits: MlaTraitsSm80, arch: ArchSpec) -> float:
    return _split(traits, (traits.accumulator_regs + SCRATCH_SM80, traits.register_limit(arch)))


def _fwd_fp8_sm90(traits: FwdTraitsFp8Sm90, arch: ArchSpec) -> float:
    return _fwd_sm90(traits, arch) * (1.0 if traits.fixed_max else MOVING_FP8)


def _fwd_sm80(traits: FwdTraitsSm80, arch: ArchSpec) -> float:
    if traits.splits:
        return _split(traits, (traits.accumulator_regs + SCRATCH_SM80, traits.register_limit(arch)))
    (loop,) = loops(traits)
    clocks = _step(loop, _exposed_sm80(traits, traits.kv_stage), STEP_CLOCKS / traits.blocks_per_sm)
    clocks *= _switches(traits, SWITCHES_SM80)
    clocks *= 1 + 0.5 * max(0, min(3, traits.head_dim.bit_length() - 5) - traits.swizzle_bits)
    return clocks * _spill_factor(traits.accumulator_regs + SCRATCH_SM80, traits.register_limit(arch))


def _bwd_sm90(traits: BwdTraitsSm90, arch: ArchSpec) -> float:
    (loop,) = loops(traits)
    clocks = _step(loop, EXPOSED_APART if traits.is_dq_apart else EXPOSED_BWD[traits.pingpong], STEP_CLOCKS)
    clocks *= _depth(DEPTH_BWD, traits.q_stage, traits.do_stage)
    return clocks * _spill_factor(traits.accumulator_regs + BWD_ADDRESS_REGS, traits.mma_regs)


def _bwd_two_pass_sm90(traits: BwdTwoPassTraitsSm90, arch: ArchSpec) -> float:
    dkv, dq = loops(traits)
    clocks = _step(dkv, EXPOSED_DKV, STEP_CLOCKS) * _depth(DEPTH_DKV, traits.q_stage, traits.do_stage)
    exposed = EXPOSED[2] if traits.pingpong else EXPOSED_ALONE
    clocks += _step(dq, exposed, STEP_CLOCKS) * _depth(DEPTH_DQ, traits.k_stage, traits.v_stage)
    return clocks * _spill_factor(traits.accumulator_regs + ADDRESS_REGS, traits.mma_regs)


def _bwd_sm80(traits: BwdTraitsSm80, arch: ArchSpec) -> float:
    (loop,) = loops(traits)
    clocks = _step(loop, _exposed_sm80(traits, traits.stages), STEP_CLOCKS / traits.blocks_per_sm)
    clocks *= _switches(traits, SWITCHES_BWD_SM80)
    clocks *= SCALAR_ADDS if arch.capability >= (9, 0) and not traits.vector_add else 1.0
    clocks *= 1.0 if traits.turn_warpgroup or traits.turn_steps > 1 else TURNS_APART
    return clocks * _spill_factor(traits.accumulator_regs + SCRATCH_SM80, traits.register_limit(arch))


ESTIMATES: dict[type[Any], Callable[[Any, ArchSpec], float]] = {
    FwdTraitsSm80: _fwd_sm80,
    FwdTraitsSm90: _fwd_sm90,
    FwdTraitsFp8Sm90: _fwd_fp8_sm90,
    FwdTraitsCacheSm90: _fwd_cache_sm90,
    FwdTraitsFewSm90: _fwd_few_sm90,
    MlaTraitsSm80: _mla_sm80,
    MlaTraitsSm90: _mla_sm90,
    BwdTraitsSm80: _bwd_sm80,
    BwdTraitsSm90: _bwd_sm90,
    BwdTwoPassTraitsSm90: _bwd_two_pass_sm90,
}


def _step(loop: Loop, exposed: float, overhead: float) -> float:
    """Clocks for 1000 scores, if that share of the units that are not the slowest is not hidden behind it."""
    units = loop.clocks.values()
    return (max(units) + exposed * (sum(units) - max(units)) + overhead) * 1000 / loop.scores


def _exposed_sm80(traits: FwdTraitsSm80 | BwdTraitsSm80, stages: int) -> float:
    """A block's warps run in step, so it is other blocks, or loads further ahead, that fill its gaps."""
    warps = traits.blocks_per_sm * traits.num_warps
    return 1.2 / (math.sqrt(warps) * (1 + 0.25 * (traits.blocks_per_sm > 1)) * (1 + 0.1 * (stages > 1)))


def _depth(costs: Mapping[int, float], *stages: int) -> float:
    """What tiles in flight cost, by the fewest and the most that `costs` knows."""
    return math.prod(costs[min(max(costs), max(min(costs), count))] for count in stages)


def _switches(traits: Traits, costs: dict[tuple[str, object], float]) -> float:
    return math.prod(cost for (name, value), cost in costs.items() if getattr(traits, name) == value)


def _spill_factor(wanted: int, available: int) -> float:
    return 1 + SPILL_PENALTY * max(0, wanted - available)
