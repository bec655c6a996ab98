"""A row's use of a multiprocessor against the arch's limits: shared memory, registers, resident blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuteflash.compile import BuildReport
from cuteflash.compile.resources import Resources
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.base import SmemRegion
from cuteflash.traits.bwd_sm80 import TURN_REGS, BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import CONSUMERS, BwdTwoPassTraitsSm90
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.mla_mma import MlaTraitsMma
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import Traits
from cuteflash.traits.sm80 import MMA_K, FwdTraitsSm80, registers_a_thread
from cuteflash.traits.sm90 import WARPGROUP, FwdTraitsSm90

from .scene import Fragment

WARP = 32
# What a tensor's region of the shared-memory plan is called on a page, beside "s" and its name in capitals.
NAMES = {
    "barriers": "barriers",
    "delta": "sDelta",
    "do": "sdO",
    "ds": "sdS",
    "dq": "sdQ",
    "sums": "sums",
    "stored_v": "sV_stored",
    "handout": "handout",
    "stored_k": "sK_stored",
    "found": "sO",
    "handed": "handed",
    "statistics": "statistics",
    "arrival": "arrival",
    "pages": "sK",
    "halves": "sS",
    "maxima": "maxima",
    "factors": "factors",
    "scales": "scales",
    "p0": "sP, warpgroup 0",
    "p1": "sP, warpgroup 1",
}
REGISTER_STEP = 8  # the hardware allocates registers to a warp in units of 8 a thread


def budget(
    traits: Traits,
    arch: ArchSpec,
    fragments: tuple[Fragment, ...],
    report: BuildReport | None,
    plan: Mapping[str, SmemRegion],
    turn_threads: int = 0,
) -> dict[str, Any]:
    """The budgets of a row as JSON values.

    Args:
        report: the compiler's, if the row has been compiled.
        plan: of the shared memory that the fragments' kernel uses.
        turn_threads: of the kernel, beside those of the traits: they keep the turns of a deterministic call.
    """
    used = report.resources if report else None
    registers = _registers(traits, arch, fragments, used, turn_threads)
    return {
        "smem": _shared_memory(traits, arch, plan),
        "registers": registers,
        "occupancy": _occupancy(traits, arch, used.registers if used else registers["launch"], turn_threads),
    }


def launch_registers(traits: Traits, arch: ArchSpec, turn_threads: int = 0) -> int:
    """Registers a thread may have at most for the block, or all blocks that must be resident, to be launched."""
    blocks: int = getattr(traits, "blocks_per_sm", 1)
    return registers_a_thread((traits.num_threads + turn_threads) * blocks, arch)


def _shared_memory(traits: Traits, arch: ArchSpec, regions_of: Mapping[str, SmemRegion]) -> dict[str, Any]:
    plan = {NAMES.get(name, f"s{name.upper()}"): region for name, region in regions_of.items() if region.nbytes}
    regions = []
    for name, region in plan.items():
        shared = [other for other, r in plan.items() if other != name and r.start < region.end and region.start < r.end]
        regions.append(
            {
                "id": name,
                "start": region.start,
                "bytes": region.nbytes,
                "stages": region.stages,
                "note": f"over {', '.join(shared)}" if shared else "",
            }
        )
    return {
        "regions": regions,
        "total": traits.smem_bytes,
        "limit": arch.smem_per_block,
        "per_sm": arch.smem_per_sm,
        "reserved": arch.smem_per_sm - arch.smem_per_block,  # the system's share of each block
    }


def _registers(
    traits: Traits, arch: ArchSpec, fragments: tuple[Fragment, ...], used: Resources | None, turn_threads: int
) -> dict[str, Any]:
    launch = launch_registers(traits, arch, turn_threads)
    roles: list[dict[str, Any]]
    if isinstance(traits, BwdTraitsSm80) and turn_threads:
        parts = _live_parts(traits, fragments)
        computing = traits.num_threads // WARPGROUP
        roles = [
            _role("warpgroups that compute", computing, traits.num_threads, traits.mma_regs(arch), parts),
            _role("warpgroup apart", turn_threads // WARPGROUP, turn_threads, TURN_REGS, []),
        ]
    elif isinstance(traits, FwdTraitsSm80 | BwdTraitsSm80 | MlaTraitsMma):
        roles = [_role("all warps", 0, traits.num_threads, launch, _live_parts(traits, fragments))]
    else:
        own: Any = traits  # of the sm90 family
        consumers = _consumers(traits)
        # Warpgroups that compute different things have fragments of their own.
        dq_regs = traits.dq_regs if isinstance(traits, BwdTraitsSm90) else 0
        of_dq = tuple(fragment for fragment in fragments if dq_regs and fragment.tensor == "dQ")
        first_consumer = traits.first_consumer if isinstance(traits, FwdTraitsSm90) else 0
        turned = tuple(fragment for fragment in fragments if fragment.first_thread < first_consumer)
        shared = tuple(fragment for fragment in fragments if fragment not in (*of_dq, *turned))
        first_threads = list(dict.fromkeys(fragment.first_thread for fragment in shared))
        alike = consumers // len(first_threads)
        roles = []
        for number, first in enumerate(first_threads):
            parts = _live_parts(traits, tuple(fragment for fragment in shared if fragment.first_thread == first))
            name = "consumer warpgroup" if len(first_threads) == 1 else f"consumer warpgroup {number}"
            roles.append(_role(name, alike, alike * WARPGROUP, own.mma_regs, parts))
        if of_dq:
            roles.insert(0, _role("dQ warpgroup", 1, WARPGROUP, dq_regs, _live_parts(traits, of_dq)))
        if isinstance(traits, FwdTraitsCacheSm90):
            for first in sorted({fragment.first_thread for fragment in turned}, reverse=True):
                parts = _live_parts(traits, tuple(fragment for fragment in turned if fragment.first_thread == first))
                words = " and ".join(fragment.tensor for fragment in turned if fragment.first_thread == first)
                roles.insert(0, _role(f"warpgroup that converts {words}", 1, WARPGROUP, traits.converter_regs, parts))
            turned = ()
        if traits.num_threads > consumers * WARPGROUP:
            parts = _live_parts(traits, turned)
            roles.insert(0, _role("producer warpgroup", 1, WARPGROUP, own.producer_regs, parts))
    compiled = None
    if used is not None:
        compiled = {
            "registers": used.registers,
            "stack_bytes": used.stack_bytes,
            "spill_store_bytes": used.spill_store_bytes,
            "spill_load_bytes": used.spill_load_bytes,
            "warnings": list(used.warnings),
        }
    return {"file": arch.regs_per_sm, "launch": launch, "roles": roles, "compiled": compiled}


def _consumers(traits: Any) -> int:
    """Warpgroups that compute products of keys."""
    if isinstance(traits, BwdTwoPassTraitsSm90 | MlaTraitsSm90 | FwdTraitsFewSm90):
        return CONSUMERS  # two of each
    found: int = traits.consumer_warpgroups if isinstance(traits, FwdTraitsSm90) else traits.mma_warpgroups
    return found


def _role(name: str, warpgroups: int, threads: int, limit: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "warpgroups": warpgroups, "threads": threads, "limit": limit, "parts": parts}


def _live_parts(traits: Traits, fragments: tuple[Fragment, ...]) -> list[dict[str, Any]]:
    """Registers of each fragment that has its own; of those that take turns in one place, of the largest."""
    live = {item.id: live_registers(traits, item) for item in fragments}
    parts = []
    for owner in (item for item in fragments if not item.place_of):
        sharing = [owner.id, *(item.id for item in fragments if item.place_of == owner.id)]
        largest = max(sharing, key=lambda id: live[id])
        parts.append({"name": largest, "registers": live[largest]})
    return parts


def live_registers(traits: Traits, fragment: Fragment) -> int:
    """Registers of a fragment that are live at a time.

    In the sm80 forward the operands that come by ldmatrix live for as many k-blocks as are fetched ahead, and one more.
    """
    if fragment.live:
        return fragment.live
    if not isinstance(traits, FwdTraitsSm80) or fragment.id not in ("rQ", "rK", "rV"):
        return fragment.registers
    if fragment.id == "rQ" and traits.q_in_regs:
        return fragment.registers
    extent = traits.tile_n if fragment.id == "rV" else traits.head_dim
    k_blocks = extent // MMA_K
    return fragment.registers * min(1 + traits.ahead, k_blocks) // k_blocks


def _occupancy(traits: Traits, arch: ArchSpec, registers: int, turn_threads: int) -> dict[str, Any]:
    reserved = arch.smem_per_sm - arch.smem_per_block
    per_warp = -(-registers // REGISTER_STEP) * REGISTER_STEP * WARP
    threads = traits.num_threads + turn_threads
    warps = threads // WARP
    limits = {
        "shared memory": arch.smem_per_sm // (traits.smem_bytes + reserved),
        "registers": arch.regs_per_sm // (per_warp * warps),
        "threads": arch.max_threads_per_sm // threads,
    }
    blocks = min(limits.values())
    return {
        "blocks": blocks,
        "warps": blocks * warps,
        "max_warps": arch.max_threads_per_sm // WARP,
        "limits": limits,
    }
