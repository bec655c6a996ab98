"""Traits of the kernel that schedules launches which split keys."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleTraits:
    """One way to run the kernel.

    Attributes:
        num_warps: warps of a block; each finds where the share of one block of the scheduled launches begins.
        smem_bytes: shared memory of a block.
    """

    num_warps: int = 4
    smem_bytes: int = 0
