"""A row's use of a multiprocessor against the arch's limits: shared memory, registers, resident blocks."""

from __future__ import annotations

from typing import Any

from cuteflash.compile import BuildReport
from cuteflash.compile.resources import Resources
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.row import FwdRowTraits
from cuteflash.traits.sm80 import MMA_K
from cuteflash.traits.sm90 import WARPGROUP, FwdTraitsSm90

from .scene import Fragment

WARP = 32
REGISTER_STEP = 8  # the hardware allocates registers to a warp in units of 8 a thread


def budget(
    traits: FwdRowTraits, arch: ArchSpec, fragments: tuple[Fragment, ...], report: BuildReport | None
) -> dict[str, Any]:
    """The budgets of a row as JSON values; `report` is the compiler's, if the row has been compiled."""
    used = report.resources if report else None
    registers = _registers(traits, arch, fragments, used)
    return {
        "smem": _shared_memory(traits, arch),
        "registers": registers,
        "occupancy": _occupancy(traits, arch, used.registers if used else registers["launch"]),
    }


def launch_registers(traits: FwdRowTraits, arch: ArchSpec) -> int:
    """Registers a thread may have at most for the block, or all blocks that must be resident, to be launched."""
    blocks = 1 if isinstance(traits, FwdTraitsSm90) else traits.blocks_per_sm
    share = arch.regs_per_sm // (traits.num_threads * blocks)
    return min(arch.max_regs_per_thread, share // REGISTER_STEP * REGISTER_STEP)


def _shared_memory(traits: FwdRowTraits, arch: ArchSpec) -> dict[str, Any]:
    plan = traits.smem_plan
    regions = []
    for name, region in plan.items():
        shared = [other for other, r in plan.items() if other != name and r.start < region.end and region.start < r.end]
        regions.append(
            {
                "id": name if name == "barriers" else f"s{name.upper()}",
                "start": region.start,
                "bytes": region.nbytes,
                "stages": region.stages,
                "note": f"over {', '.join(f's{other.upper()}' for other in shared)}" if shared else "",
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
    traits: FwdRowTraits, arch: ArchSpec, fragments: tuple[Fragment, ...], used: Resources | None
) -> dict[str, Any]:
    launch = launch_registers(traits, arch)
    parts = [{"name": item.id, "registers": live_registers(traits, item)} for item in fragments]
    roles: list[dict[str, Any]]
    if isinstance(traits, FwdTraitsSm90):
        consumers = traits.mma_warpgroups
        roles = [_role("consumer warpgroup", consumers, consumers * WARPGROUP, traits.mma_regs, parts)]
        if traits.warp_specialized:
            roles.insert(0, _role("producer warpgroup", 1, WARPGROUP, traits.producer_regs, []))
    else:
        roles = [_role("all warps", 0, traits.num_threads, launch, parts)]
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


def _role(name: str, warpgroups: int, threads: int, limit: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "warpgroups": warpgroups, "threads": threads, "limit": limit, "parts": parts}


def live_registers(traits: FwdRowTraits, fragment: Fragment) -> int:
    """Registers of a fragment that are live at a time.

    On sm80 the operands that come by ldmatrix live for as many k-blocks as are fetched ahead, and one more.
    """
    if isinstance(traits, FwdTraitsSm90) or fragment.id not in ("rQ", "rK", "rV"):
        return fragment.registers
    if fragment.id == "rQ" and traits.q_in_regs:
        return fragment.registers
    extent = traits.tile_n if fragment.id == "rV" else traits.head_dim
    k_blocks = extent // MMA_K
    return fragment.registers * min(1 + traits.ahead, k_blocks) // k_blocks


def _occupancy(traits: FwdRowTraits, arch: ArchSpec, registers: int) -> dict[str, Any]:
    reserved = arch.smem_per_sm - arch.smem_per_block
    per_warp = -(-registers // REGISTER_STEP) * REGISTER_STEP * WARP
    warps = traits.num_threads // WARP
    limits = {
        "shared memory": arch.smem_per_sm // (traits.smem_bytes + reserved),
        "registers": arch.regs_per_sm // (per_warp * warps),
        "threads": arch.max_threads_per_sm // traits.num_threads,
    }
    blocks = min(limits.values())
    return {
        "blocks": blocks,
        "warps": blocks * warps,
        "max_warps": arch.max_threads_per_sm // WARP,
        "limits": limits,
    }
