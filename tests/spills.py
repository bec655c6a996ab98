"""Which kernels that the shipped rows choose may spill, and by how much.

`docs/performance.md`, "Spills that are shipped", says why they do. `python -m tests.asked` and `test_spills.py`
complain of any other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cuteflash.compile import Resources
from cuteflash.problem_names import problem_id

# Bytes a thread that are stored, at most, by `kernel_id`.
SPILLS: dict[str, int] = {
    "FlashBwdSm80 sm_90a bf16 128x128 full": 16,
    "FlashBwdSm80 sm_90a bf16 128x128 full dlse": 16,
    "FlashBwdSm80 sm_90a bf16 128x128 full sink bf16 sink dlse": 16,
    "FlashBwdSm80 sm_90a bf16 128x128 full softcap deterministic dlse": 4,
    "FlashBwdSm80 sm_90a bf16 128x128 full softcap deterministic": 4,
    "FlashBwdSm80 sm_90a bf16 256x256 causal softcap": 16,
    "FlashBwdSm80 sm_90a bf16 256x256 window softcap": 28,
    "FlashBwdSm80 sm_90a fp16 256x256 full deterministic": 92,
    "FlashBwdSm80 sm_90a lone tiles fp16 256x256 window": 4,
    "FlashBwdSm80 sm_90a lone tiles fp16 256x256 window dlse": 4,
    "FlashBwdSm80 sm_90a lone tiles bf16 256x256 causal varlen dlse": 12,
    "FlashBwdSm80 sm_90a lone tiles fp16 256x256 causal varlen dlse": 12,
    "FlashFwdSm80 sm_90a bf16 40x72 causal": 8,
    "FlashFwdSm80 sm_90a bf16 40x72 causal lse": 44,
    "FlashFwdSm80 sm_90a fp16 24x24 full": 20,
    "FlashFwdSm80 sm_90a fp16 24x24 full lse": 8,
    "FlashFwdSm80 sm_90a fp16 96x96 causal lse": 28,
}


def is_allowed(used: Resources, name: str) -> bool:
    """Whether a kernel, named as by `kernel_id`, has no spill and no stack, or is listed and stores no more than that.

    In either case ptxas may warn of nothing.
    """
    most = SPILLS.get(name)
    if most is None:
        is_within = (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)
    else:
        is_within = used.spill_store_bytes <= most
    return is_within and used.warnings == ()


def kernel_id(kernel_cls: type, traits: Any, problem: Any, target: str) -> str:
    """A kernel's name in `SPILLS`: class, target and problem, in words; traits are those that dispatch chooses.

    For short and for long sequences these may differ: in a backward by code for lone tiles.
    """
    if hasattr(problem, "operands"):
        lone = "lone tiles " if getattr(traits, "lone_tiles", False) else ""
        return f"{kernel_cls.__name__} {target} {lone}{problem_id(problem)}"
    fields = ((field.name, getattr(problem, field.name), field.default) for field in dataclasses.fields(problem))
    words = (f"{name}={value}" for name, value, default in fields if value != default)
    return " ".join((kernel_cls.__name__, target, *words))
