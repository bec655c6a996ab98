"""(problem, target) → kernel class and traits, from the shipped tables. Importing this imports no compiler."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import FAMILIES, ArchSpec, Family, arch_of_capability, get_arch
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import FWD_ROWS, ROW_HEAD_DIMS, FwdRow

Traits = FwdTraitsSm80 | FwdTraitsSm90

FWD_KERNELS: dict[Family, tuple[str, str]] = {
    "sm80": ("cuteflash.kernels.sm80.fwd", "FlashFwdSm80"),
    "sm90": ("cuteflash.kernels.sm90.fwd", "FlashFwdSm90"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """How one problem runs on one target.

    Attributes:
        family: the kernel family.
        traits: the row's traits, with the problem's padded head dims.
        source: where the choice comes from, in words.
    """

    family: Family
    traits: Traits
    source: str

    @property
    def kernel_cls(self) -> type[Any]:
        """The kernel's class; the first access imports the compiler."""
        return forward_kernel(self.family)


@functools.cache
def forward_kernel(family: Family) -> type[Any]:
    """The forward kernel's class of a family."""
    module, name = FWD_KERNELS[family]
    kernel: type[Any] = getattr(importlib.import_module(module), name)
    return kernel


@functools.cache
def choose_fwd(problem: FwdProblem, target: str, family: Family | None = None) -> Choice:
    """The kernel and traits for a forward problem.

    Args:
        problem: what is asked for.
        target: compile target, e.g. "sm_90a".
        family: kernel family; None takes the target's best.

    Raises:
        ValueError: no such target or family.
        NotImplementedError: the target does not run the family, or no row of its table can run the problem.
    """
    arch = get_arch(target)
    family = _checked_family(family, arch)
    rows = FWD_ROWS[arch.name, family]
    reasons = []
    for row, traits in _candidates(rows, problem):
        reason = traits.check(arch)
        if reason is None:
            source = f"shipped table {arch.name}/{family}, row of head dims {_title(row.traits)}"
            return Choice(family, traits, source if traits == row.traits else f"{source} lent to {_title(traits)}")
        reasons.append(f"{row.traits.tile_m}x{row.traits.tile_n} {reason}")
    raise NotImplementedError(
        f"no {family} row on {arch.name} runs head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}, "
        f"mask {problem.mask}, dtype {problem.dtype}; head dims with rows: "
        f"{', '.join(dict.fromkeys(_title(row.traits) for row in rows))}" + "".join(f"; {reason}" for reason in reasons)
    )


def padded_head_dim(head_dim: int) -> int:
    """The smallest head dim of the tables that holds `head_dim`."""
    return next(row for row in ROW_HEAD_DIMS if row >= head_dim)


@functools.cache
def current_target(device_index: int) -> str:
    """The compile target of a CUDA device, e.g. "sm_90a"; NotImplementedError where no kernel runs on it."""
    import torch

    return arch_of_capability(*torch.cuda.get_device_capability(device_index)).name


def _checked_family(family: Family | None, arch: ArchSpec) -> Family:
    if family is None:
        return arch.families[0]
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    if family not in arch.families:
        runs = ", ".join(arch.families)
        raise NotImplementedError(f"family is {family!r}, which {arch.name} does not run; it runs: {runs}")
    return family


def _candidates(rows: tuple[FwdRow, ...], problem: FwdProblem) -> Iterator[tuple[FwdRow, Traits]]:
    """Rows made for the padded head dims, then those of the square that holds them, each with traits so padded."""
    head_dim, head_dim_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    square = max(head_dim, head_dim_v)
    for made_for in dict.fromkeys([(head_dim, head_dim_v), (square, square)]):
        for row in rows:
            fits = problem.mask in row.masks and problem.dtype in row.dtypes
            if fits and (row.traits.head_dim, row.traits.head_dim_v) == made_for:
                yield row, dataclasses.replace(row.traits, head_dim=head_dim, head_dim_v=head_dim_v)


def _title(traits: Traits) -> str:
    return f"{traits.head_dim}x{traits.head_dim_v}"
