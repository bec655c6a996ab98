"""What a candidate's main loop asks of each unit of a multiprocessor, in clocks, from its traits alone.

A step's products keep the tensor cores busy, and the shared-memory port that feeds them. An m64nNk16 product takes the
port for N / 4 clocks, for 16 more if A lies in shared memory, too; see docs/backward.md for what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import CONSUMERS, FwdTraitsFewSm90
from cuteflash.traits.fp8_sm90 import TURNED_COLUMNS, TURNED_KEYS, TURNING_WARPS, FwdTraitsFp8Sm90
from cuteflash.traits.mla_mma import ELEMENT_BYTES
from cuteflash.traits.mla_sm80 import STEP, MlaTraitsSm80
from cuteflash.traits.mla_sm90 import CONSUMERS as LATENT_CONSUMERS
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import WGMMA_K, WGMMA_M, FwdTraitsSm90

# Of one multiprocessor, a clock.
WGMMA_FLOPS, MMA_FLOPS = 4096, 2048  # dense 16-bit: Hopper's wgmma, Ampere's mma.sync
SMEM_BYTES, L2_BYTES = 128, 64
EXPONENTIALS = 16
SCORES = 21  # by all other instructions of the softmax: six a score on 128 lanes
FP8_FLOPS = 2 * WGMMA_FLOPS
CONVERSIONS = 64  # instructions that round two fp32 values to 8 bits each
LANES = 128  # of fp32
ADDED_BYTES = 18  # of fp32 sums in memory, if all multiprocessors add: 3.9 TB/s of an H200
TURN_CLOCKS = 40  # of a warp that turns one part of V: half the latency of a load, permutes and a store, in pairs

MEMORY_BYTES = 20  # of the 4.8 TB/s of an H200, that all multiprocessors share
# In flight, of one multiprocessor, that keep its share of memory busy: of the 96 kB of docs/performance.md, "Decoding",
# one of three stages is being read.
BUSY_BYTES = 64 * 1024
CONVERTED_BYTES = 64  # of e4m3, that a warpgroup makes into fp16: 16 bytes a lane in some 32 instructions

TENSOR, SMEM, POINTWISE, L2 = "tensor cores", "shared memory", "exponentials and what belongs to them", "loads from L2"
SUMS = "fp32 sums of dQ in memory"
MEMORY, CONVERTING = "loads from memory", "conversions of the cache"
ROUNDING, TURNING = "conversions to 8 bits", "the producer's turning of V"


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A kernel's main loop.

    Attributes:
        title: what it computes.
        rows, columns: the scores of one step.
        clocks: of one step, by unit.
    """

    title: str
    rows: int
    columns: int
    clocks: dict[str, float]

    @property
    def scores(self) -> int:
        """How many scores a step has."""
        return self.rows * self.columns

    @property
    def bound(self) -> str:
        """The unit that takes longest."""
        return max(self.clocks, key=lambda unit: self.clocks[unit])


def loops(traits: Traits) -> tuple[Loop, ...]:
    """The main loops of the kernels that traits are for, one after the other."""
    return LOOPS[type(traits)](traits)


def bytes_in_flight(traits: Traits) -> int:
    """Of K and V, by all blocks of a multiprocessor, of a row that splits keys; each block reads one of its stages."""
    plan, blocks = traits.smem_plan, getattr(traits, "blocks_per_sm", 1)
    stored = "stored_" if "stored_k" in plan else ""
    names = ("pages",) if "pages" in plan else (f"{stored}k", f"{stored}v")
    regions = [plan[name] for name in names]
    return int(blocks * sum(region.nbytes * (region.stages - 1) // region.stages for region in regions))


def _from_memory(traits: Traits, nbytes: float) -> dict[str, float]:
    """Clocks of a step's bytes of K and V, which come from memory: too few in flight leave it idle."""
    return {MEMORY: nbytes / (MEMORY_BYTES * min(1.0, bytes_in_flight(traits) / BUSY_BYTES))}


def _fwd_cache_sm90(traits: FwdTraitsCacheSm90) -> tuple[Loop, ...]:
    m, n, columns = traits.tile_m, traits.tile_n, traits.head_dim + traits.head_dim_v
    read = traits.mma_warpgroups * 2 * n * columns  # warpgroups that share rows read half of the keys each
    operands = read + 4 * n * columns + (0 if traits.q_in_regs else 2 * m * traits.head_dim)  # loaded, read, stored
    clocks = _units(m * n, 2 * m * n * columns / WGMMA_FLOPS, operands / SMEM_BYTES, n * columns)
    clocks |= _from_memory(traits, n * columns)
    clocks[CONVERTING] = n * columns / (CONVERTED_BYTES * traits.converting_warpgroups)
    return (Loop("O", m, n, clocks),)


def _fwd_few_sm90(traits: FwdTraitsFewSm90) -> tuple[Loop, ...]:
    """Warps convert what they multiply: shared memory is written by TMA and read once."""
    m, n, columns = traits.tile_m, traits.tile_n, traits.head_dim + traits.head_dim_v
    clocks = _units(m * n, 2 * m * n * columns / MMA_FLOPS, 2 * n * columns / SMEM_BYTES, n * columns)
    clocks |= _from_memory(traits, n * columns)
    clocks[CONVERTING] = n * columns / (CONVERTED_BYTES * CONSUMERS)
    return (Loop("O", m, n, clocks),)


def _mla_sm90(traits: MlaTraitsSm90) -> tuple[Loop, ...]:
    """Each consumer multiplies Q with a page of its own, and both pages' P with its half of V."""
    m, n, d, d_v = traits.tile_m, traits.tile_n, traits.head_dim, traits.head_dim_v
    port = _wgmma_port(m, n, d, True) + LATENT_CONSUMERS * _wgmma_port(m, d_v // LATENT_CONSUMERS, n, True)
    return (Loop("O", m, n, _latent_units(traits, 2 * m * n * (d + d_v) / WGMMA_FLOPS, port)),)


def _mla_sm80(traits: MlaTraitsSm80) -> tuple[Loop, ...]:
    m, n, d, d_v = traits.tile_m, traits.tile_n, traits.head_dim, traits.head_dim_v
    q = (traits.steps - traits.q_kept) * traits.k_parts * STEP * m * traits.warps_n  # what is not in registers
    p = m * n * traits.num_warps  # every warp reads all of it
    read = ELEMENT_BYTES * (traits.warps_m * n * d + n * d_v + q + p)
    port = (read + ELEMENT_BYTES * n * d) / SMEM_BYTES  # cp.async writes the keys
    return (Loop("O", m, n, _latent_units(traits, 2 * m * n * (d + d_v) / MMA_FLOPS, port)),)


def _latent_units(traits: MlaTraitsSm80 | MlaTraitsSm90, products: float, port: float) -> dict[str, float]:
    """Clocks by unit of a step, whose keys come from memory once, V being a part of them."""
    nbytes = ELEMENT_BYTES * traits.tile_n * traits.head_dim
    return _units(traits.tile_m * traits.tile_n, products, port, nbytes) | _from_memory(traits, nbytes)


def _fwd_sm90(traits: FwdTraitsSm90) -> tuple[Loop, ...]:
    m, n, columns = traits.tile_m, traits.tile_n, traits.head_dim + traits.head_dim_v
    operands = traits.mma_warpgroups * 2 * n * columns  # all read K and V, and what is not in registers
    operands += 0 if traits.q_in_regs else 2 * m * traits.head_dim
    operands += 0 if traits.p_in_regs else 4 * m * n
    clocks = _units(m * n, 2 * m * n * columns / WGMMA_FLOPS, operands / SMEM_BYTES, 2 * n * columns)
    clocks |= _from_memory(traits, 2 * n * columns) if traits.splits else {}
    return (Loop("O", m, n, clocks),)


def _fwd_fp8_sm90(traits: FwdTraitsFp8Sm90) -> tuple[Loop, ...]:
    m, n, d, d_v = traits.tile_m, traits.tile_n, traits.head_dim, traits.head_dim_v
    loaded = n * (d + d_v)
    operands = traits.mma_warpgroups * loaded + m * d
    if traits.turns_v:
        operands += (2 if traits.mixes_columns else 3) * n * d_v  # stmatrix may write V^T with conflicts of two ways
    clocks = _units(m * n, 2 * m * n * (d + d_v) / FP8_FLOPS, operands / SMEM_BYTES, loaded)
    if traits.two_level:
        clocks[POINTWISE] += m * d_v / LANES  # the product beside O is added to it
    clocks[ROUNDING] = m * n / 2 / CONVERSIONS
    if traits.turns_v:
        clocks[TURNING] = n * d_v / (TURNING_WARPS * TURNED_KEYS * TURNED_COLUMNS) * TURN_CLOCKS
    return (Loop("O", m, n, clocks),)


def _fwd_sm80(traits: FwdTraitsSm80) -> tuple[Loop, ...]:
    m, n, columns = traits.tile_m, traits.tile_n, traits.head_dim + traits.head_dim_v
    operands = traits.num_warps * 2 * n * columns + 2 * n * columns  # every warp reads K and V; cp.async writes them
    operands += 0 if traits.q_in_regs else 2 * m * traits.head_dim
    clocks = _units(m * n, 2 * m * n * columns / MMA_FLOPS, operands / SMEM_BYTES, 2 * n * columns)
    clocks |= _from_memory(traits, 2 * n * columns) if traits.splits else {}
    return (Loop("O", m, n, clocks),)


def _bwd_sm90(traits: BwdTraitsSm90) -> tuple[Loop, ...]:
    m, n, d, d_v = traits.tile_m, traits.tile_n, traits.head_dim, traits.head_dim_v
    port = _wgmma_port(n, m, d, not traits.k_in_regs) + _wgmma_port(n, m, d_v, not traits.v_in_regs)  # S^T, dP^T
    port += _wgmma_port(n, d_v, m, False) + _wgmma_port(n, d, m, False)  # dV, dK
    rows, columns = traits.dq_part
    parts = m * d // (rows * columns)
    own = (columns, rows) if traits.is_dq_transposed else (rows, columns)
    port += parts * _wgmma_port(*own, n, True)
    port += (2 * m * n + 4 * m * d) / SMEM_BYTES  # dS and dQ are stored
    clocks = _units(m * n, 2 * m * n * (3 * d + 2 * d_v) / WGMMA_FLOPS, port, 2 * m * (d + d_v))
    return (Loop("dQ, dK and dV", m, n, clocks | {SUMS: 4 * m * d / ADDED_BYTES}),)


def _bwd_two_pass_sm90(traits: BwdTwoPassTraitsSm90) -> tuple[Loop, ...]:
    m, n, d, d_v = traits.tile_m, traits.tile_n, traits.head_dim, traits.head_dim_v
    port = _wgmma_port(n, m, d, True) + _wgmma_port(n, m, d_v, True)  # S^T, dP^T
    port += _wgmma_port(n, d_v, m, False) + _wgmma_port(n, d, m, False)  # dV, dK
    port += 2 * 2 * m * n / SMEM_BYTES  # P is stored and loaded
    clocks = _units(m * n, 2 * m * n * (2 * d + 2 * d_v) / WGMMA_FLOPS, port, 2 * m * (d + d_v))
    first = Loop("dK and dV", m, n, clocks)
    m, n = traits.dq_tile_m, traits.dq_tile_n
    port = _wgmma_port(m, n, d, True) + _wgmma_port(m, n, d_v, True) + _wgmma_port(m, d, n, False)  # S, dP, dQ
    clocks = _units(m * n, 2 * m * n * (2 * d + d_v) / WGMMA_FLOPS, port, 2 * n * (d + d_v))
    return first, Loop("dQ", m, n, clocks)


def _bwd_sm80(traits: BwdTraitsSm80) -> tuple[Loop, ...]:
    m, n, d, d_v = traits.tile_m, traits.tile_n, traits.head_dim, traits.head_dim_v
    p_from = 0 if traits.p_in_regs else 1  # shared memory that P and dS are read from, and P is written to

    def fragments(rows: int, columns: int, k: int, warps: int, a: int = 1) -> int:
        """Bytes of a product's operands that the warps load, `warps` of them along its rows."""
        return 2 * k * (a * rows * traits.num_warps // warps + columns * warps)

    loaded = fragments(n, m, d, traits.s_warps) + fragments(n, m, d_v, traits.s_warps)
    loaded += fragments(n, d_v, m, traits.dkv_warps, p_from) + fragments(n, d, m, traits.dkv_warps, p_from)
    loaded += fragments(m, d, n, traits.dq_warps)
    stored = 2 * m * (d + d_v) + 2 * m * n * (1 + p_from)  # Q and dO by cp.async, dS and P
    flops = 2 * m * n * (3 * d + 2 * d_v)
    clocks = _units(m * n, flops / MMA_FLOPS, (loaded + stored) / SMEM_BYTES, 2 * m * (d + d_v))
    return (Loop("dQ, dK and dV", m, n, clocks | {SUMS: 4 * m * d / ADDED_BYTES}),)


def _units(scores: int, products: float, port: float, loaded: int) -> dict[str, float]:
    """Clocks by unit; `products` and `port` in clocks, `loaded` in bytes."""
    return {
        TENSOR: products,
        SMEM: port,
        POINTWISE: scores / EXPONENTIALS + scores / SCORES,
        L2: loaded / L2_BYTES,
    }


def _wgmma_port(rows: int, columns: int, k: int, a_in_smem: bool) -> float:
    """Clocks for which a (rows, columns) product over `k` takes the shared-memory port."""
    return rows / WGMMA_M * k / WGMMA_K * ((16 if a_in_smem else 0) + columns / 4)


LOOPS: dict[type[Any], Callable[[Any], tuple[Loop, ...]]] = {
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
