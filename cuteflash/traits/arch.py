"""GPU architectures as data: what a compile target offers, and which kernel families run on it."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

Family = Literal["sm80", "sm90"]
FAMILIES: tuple[str, ...] = get_args(Family)

KIB = 1024
BLOCK_SMEM = 1 * KIB  # that the system reserves for each resident block, since compute capability 8.0


@dataclasses.dataclass(frozen=True, slots=True)
class ArchSpec:
    """Limits of one compile target.

    Attributes:
        name: compile target as the compiler spells it, e.g. ``"sm_90a"``.
        capability: CUDA compute capability (major, minor).
        families: kernel families that compile for it, best first.
        smem_per_block: bytes of shared memory one block may ask for (opt-in limit).
        smem_per_sm: bytes of shared memory of one multiprocessor.
        max_threads_per_sm: resident threads of one multiprocessor.
        regs_per_sm: 32-bit registers of one multiprocessor.
        max_regs_per_thread: registers the compiler may give one thread.
    """

    name: str
    capability: tuple[int, int]
    families: tuple[Family, ...]
    smem_per_block: int
    smem_per_sm: int
    max_threads_per_sm: int
    regs_per_sm: int = 65536
    max_regs_per_thread: int = 255


# Limits: CUDA C++ Programming Guide, "Technical specifications per compute capability".
ARCHS: dict[str, ArchSpec] = {
    spec.name: spec
    for spec in (
        ArchSpec("sm_80", (8, 0), ("sm80",), 163 * KIB, 164 * KIB, 2048),
        ArchSpec("sm_86", (8, 6), ("sm80",), 99 * KIB, 100 * KIB, 1536),
        ArchSpec("sm_89", (8, 9), ("sm80",), 99 * KIB, 100 * KIB, 1536),
        ArchSpec("sm_90a", (9, 0), ("sm90", "sm80"), 227 * KIB, 228 * KIB, 2048),
        ArchSpec("sm_120", (12, 0), ("sm80",), 99 * KIB, 100 * KIB, 1536),
    )
}


def get_arch(name: str) -> ArchSpec:
    """The ArchSpec called `name`; the ValueError for an unknown name lists those that exist."""
    try:
        return ARCHS[name]
    except KeyError:
        raise ValueError(f"arch is {name!r}; allowed: {', '.join(ARCHS)}") from None


def arch_of_capability(major: int, minor: int) -> ArchSpec:
    """The ArchSpec of a device's compute capability; NotImplementedError if no kernel runs on it."""
    for spec in ARCHS.values():
        if spec.capability == (major, minor):
            return spec
    known = ", ".join(f"{a}.{b}" for a, b in (s.capability for s in ARCHS.values()))
    raise NotImplementedError(f"the GPU's compute capability is {major}.{minor}; supported: {known}")
