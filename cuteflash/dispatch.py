"""(problem, target, shape class) → kernel class and traits, from the user's table, then the shipped one.

Importing this imports no compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cuteflash import usertable
from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import FAMILIES, ArchSpec, Family, arch_of_capability, get_arch
from cuteflash.traits.row import ROW_HEAD_DIMS, FwdRow, Traits
from cuteflash.traits.shapes import SHAPES, Shape
from cuteflash.traits.tables import FWD_ROWS
from cuteflash.usertable import MeasuredRow

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
        row: the table's row.
        source: which table and which row the choice comes from, in words.
    """

    family: Family
    traits: Traits
    row: FwdRow
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
def choose_fwd(problem: FwdProblem, target: str, family: Family | None = None, shape: Shape = "long") -> Choice:
    """The kernel and traits for a forward problem.

    Args:
        problem: what is asked for.
        target: compile target, e.g. "sm_90a".
        family: kernel family; None takes the target's best.
        shape: the class of the call's lengths, see `cuteflash.traits.shapes`.

    Raises:
        ValueError: no such target, family or shape class.
        NotImplementedError: the target does not run the family, or no row of its tables can run the problem.
    """
    arch, family = _table(target, family)
    return _choose(problem, arch, family, shape, usertable.load(arch.name, family))


@functools.cache
def choose_shipped_fwd(problem: FwdProblem, target: str, family: Family | None = None, shape: Shape = "long") -> Choice:
    """`choose_fwd` on a machine without tables of the user's own."""
    arch, family = _table(target, family)
    return _choose(problem, arch, family, shape, ())


def offers(
    rows: Iterable[FwdRow], problem: FwdProblem, shape: Shape, arch: ArchSpec
) -> Iterator[tuple[FwdRow, Traits, str | None]]:
    """The rows that may run a problem, best first: row, its traits with the problem's padded head dims, why not.

    Those made for the head dims come first, then those of the square that holds them. The one to take is the first
    with no reason why not.
    """
    head_dim, head_dim_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    square = max(head_dim, head_dim_v)
    for made_for in dict.fromkeys([(head_dim, head_dim_v), (square, square)]):
        for row in rows:
            fits = problem.mask in row.masks and problem.dtype in row.dtypes and shape in row.shapes
            fits = fits and (row.softcap or not problem.has_softcap) and (row.lse or not problem.has_lse)
            if fits and (row.traits.head_dim, row.traits.head_dim_v) == made_for:
                traits = dataclasses.replace(row.traits, head_dim=head_dim, head_dim_v=head_dim_v)
                yield row, traits, traits.check(arch)


def padded_head_dim(head_dim: int) -> int:
    """The smallest head dim of the tables that holds `head_dim`."""
    return next(row for row in ROW_HEAD_DIMS if row >= head_dim)


@functools.cache
def current_target(device_index: int) -> str:
    """The compile target of a CUDA device, e.g. "sm_90a"; NotImplementedError where no kernel runs on it."""
    import torch

    return arch_of_capability(*torch.cuda.get_device_capability(device_index)).name


def _table(target: str, family: Family | None) -> tuple[ArchSpec, Family]:
    arch = get_arch(target)
    if family is None:
        return arch, arch.families[0]
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    if family not in arch.families:
        runs = ", ".join(arch.families)
        raise NotImplementedError(f"family is {family!r}, which {arch.name} does not run; it runs: {runs}")
    return arch, family


def _choose(
    problem: FwdProblem, arch: ArchSpec, family: Family, shape: Shape, own_rows: Sequence[MeasuredRow]
) -> Choice:
    """The choice from the user's rows, then the shipped ones."""
    if shape not in SHAPES:
        raise ValueError(f"shape is {shape!r}; allowed: {', '.join(SHAPES)}")
    rows = (*(own.row for own in own_rows), *FWD_ROWS[arch.name, family])
    reasons = []
    for row, traits, reason in offers(rows, problem, shape, arch):
        if reason is None:
            own = next((own for own in own_rows if own.row is row), None)
            return Choice(family, traits, row, _source(row, traits, arch, own))
        reasons.append(f"{row.traits.tile_m}x{row.traits.tile_n} {reason}")
    raise NotImplementedError(
        f"no {family} row on {arch.name} runs head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}, "
        f"mask {problem.mask}, dtype {problem.dtype}, softcap {_on(problem.has_softcap)}, lse {_on(problem.has_lse)}, "
        f"shape {shape}; head dims with rows: {', '.join(dict.fromkeys(_title(row.traits) for row in rows))}"
        + "".join(f"; {reason}" for reason in reasons)
    )


def _source(row: FwdRow, traits: Traits, arch: ArchSpec, own: MeasuredRow | None) -> str:
    """Where a choice comes from; `own` is the row as the user measured it, if it is the user's."""
    lent = "" if traits == row.traits else f" lent to {_title(traits)}"
    text = f"row of head dims {row.title}{lent}"
    if own is None:
        return f"shipped table {arch.name}/{traits.family}, {text}"
    return f"user's table {usertable.table_path(arch.name, traits.family)}, {text}, measured on {own.note}"


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _title(traits: Traits) -> str:
    return f"{traits.head_dim}x{traits.head_dim_v}"
