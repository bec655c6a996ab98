"""(problem, target, length class) → kernel class and traits, from the user's table, then the shipped one.

Importing this imports no compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from cuteflash import usertable
from cuteflash.mla_problem import AnyOperation, AnyProblem, MlaProblem
from cuteflash.problem import FEATURES, UNBOUNDED
from cuteflash.traits import rows_mla_e4m3, rows_mla_sm80, rows_mla_sm90
from cuteflash.traits.arch import FAMILIES, ArchSpec, Family, arch_of_capability, get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.length_class import LENGTH_CLASSES, LengthClass
from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import DECODE, FULL, ROW_HEAD_DIMS, Row, TableKey, Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import BEST_FAMILIES, CACHE_ROWS, FEW_ROWS, SPLIT_ROWS, TABLES
from cuteflash.usertable import MeasuredRow

FITTED_MAX = 4096  # traits with head dims, for a target
KERNELS: dict[type[Any], tuple[str, str]] = {
    FwdTraitsSm80: ("cuteflash.kernels.sm80.fwd", "FlashFwdSm80"),
    FwdTraitsCacheSm80: ("cuteflash.kernels.sm80.fwd", "FlashFwdSm80"),
    FwdTraitsSm90: ("cuteflash.kernels.sm90.fwd", "FlashFwdSm90"),
    FwdTraitsFp8Sm90: ("cuteflash.kernels.sm90.fwd", "FlashFwdSm90"),
    FwdTraitsCacheSm90: ("cuteflash.kernels.sm90.fwd", "FlashFwdSm90"),
    FwdTraitsFewSm90: ("cuteflash.kernels.sm90.few", "FlashFewSm90"),
    BwdTraitsSm80: ("cuteflash.kernels.sm80.bwd", "FlashBwdSm80"),
    BwdTraitsSm90: ("cuteflash.kernels.sm90.bwd", "FlashBwdSm90"),
    BwdTwoPassTraitsSm90: ("cuteflash.kernels.sm90.bwd_two_pass", "FlashBwdTwoPassSm90"),
    MlaTraitsSm80: ("cuteflash.kernels.sm80.mla_decode", "FlashMlaDecodeSm80"),
    MlaTraitsSm90: ("cuteflash.kernels.sm90.mla_decode", "FlashMlaDecodeSm90"),
    MlaTraitsE4m3: ("cuteflash.kernels.sm80.mla_e4m3", "FlashMlaDecodeE4m3"),
}
MlaTraits = MlaTraitsSm80 | MlaTraitsSm90 | MlaTraitsE4m3
MLA_ROWS: dict[Family, tuple[MlaTraits, ...]] = {"sm80": rows_mla_sm80.ROWS, "sm90": rows_mla_sm90.ROWS}
MLA_E4M3_ROWS: dict[Family, tuple[MlaTraits, ...]] = {"sm80": rows_mla_e4m3.ROWS, "sm90": ()}  # of e4m3 caches


def kernel_modules(operation: AnyOperation) -> tuple[str, ...]:
    """The modules of an operation's kernels."""
    return tuple(dict.fromkeys(module for kind, (module, _) in KERNELS.items() if kind.operation == operation))


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
    row: Row
    source: str

    @property
    def kernel_cls(self) -> type[Any]:
        """The kernel's class; the first access imports the compiler."""
        return kernel_class(self.traits)


def kernel_class(traits: Traits | MlaTraits) -> type[Any]:
    """The class of the kernel that traits are for; the first call imports the compiler."""
    return _kernel_class(*KERNELS[type(traits)])


@functools.cache
def _kernel_class(module: str, name: str) -> type[Any]:
    kernel: type[Any] = getattr(importlib.import_module(module), name)
    return kernel


@functools.cache
def choose(
    problem: AnyProblem,
    target: str,
    family: Family | None = None,
    lengths: LengthClass = "long",
    tile_rows: int | None = None,
) -> Choice:
    """The kernel and traits for a problem.

    Args:
        problem: what is asked for.
        target: compile target, e.g. "sm_90a".
        family: kernel family; None takes the best of the target, which may depend on operation and lengths.
        lengths: the class of the call's lengths, see `cuteflash.traits.length_class`.
        tile_rows: query rows of the call's tiles, or of a sequence of latent attention, if these are known to be few;
            None is as many as a tile has.

    Raises:
        ValueError: no such target, family or length class.
        NotImplementedError: the target does not run the family, or no row of its tables can run the problem.
    """
    query_rows = UNBOUNDED if tile_rows is None else tile_rows
    key = table_key(problem.operation, target, family, lengths, query_rows)
    return _choices(problem, key, lengths, usertable.load(key), query_rows)[0]


@functools.cache
def choices(
    problem: AnyProblem, target: str, family: Family | None = None, lengths: LengthClass = "long"
) -> tuple[Choice, ...]:
    """What `choose` chooses, and what calls with too few blocks for it take instead.

    A call takes the first that `Row.is_filled`; the last one serves any. Arguments and errors are those of `choose`.
    """
    key = table_key(problem.operation, target, family, lengths, UNBOUNDED)
    return _choices(problem, key, lengths, usertable.load(key), UNBOUNDED)


@functools.cache
def choose_shipped(
    problem: AnyProblem,
    target: str,
    family: Family | None = None,
    lengths: LengthClass = "long",
    tile_rows: int | None = None,
) -> Choice:
    """`choose` on a machine without tables of the user's own."""
    query_rows = UNBOUNDED if tile_rows is None else tile_rows
    key = table_key(problem.operation, target, family, lengths, query_rows)
    return _choices(problem, key, lengths, (), query_rows)[0]


def offers(
    rows: Iterable[Row], problem: AnyProblem, lengths: LengthClass, arch: ArchSpec, query_rows: int = UNBOUNDED
) -> Iterator[tuple[Row, Traits, str | None]]:
    """The rows that may run a problem, best first: row, its traits with the problem's padded head dims, why not.

    Those made for the head dims come first, then those of the square that holds them. The one to take is the first
    with no reason why not, which ends them if it serves any number of blocks. `query_rows`: see `Row.serves`.
    """
    pairs = pairs_of(problem)
    for made_for in pairs:
        for row in rows:
            if (row.traits.head_dim, row.traits.head_dim_v) == made_for and row.serves(problem, lengths, query_rows):
                traits, reason = _fitted(row.traits, *pairs[0], arch)
                yield row, traits, reason
                if reason is None and row.serves_any_number:
                    return


def pairs_of(problem: AnyProblem) -> tuple[tuple[int, int], ...]:
    """The head dims that rows are made for which may run a problem, best first: its own, padded, and their square."""
    head_dim, head_dim_v = padded_head_dim(problem.operands.head_dim), padded_head_dim(problem.operands.head_dim_v)
    square = max(head_dim, head_dim_v)
    return tuple(dict.fromkeys([(head_dim, head_dim_v), (square, square)]))


@functools.lru_cache(FITTED_MAX)
def _fitted(traits: Traits, head_dim: int, head_dim_v: int, arch: ArchSpec) -> tuple[Traits, str | None]:
    """Traits with these padded head dims, and why they cannot run. A sweep's tables ask the same for many problems."""
    is_own = (traits.head_dim, traits.head_dim_v) == (head_dim, head_dim_v)
    changed: dict[str, Any] = {} if is_own else {"head_dim": head_dim, "head_dim_v": head_dim_v}
    fitted = dataclasses.replace(traits, **changed)
    return fitted, fitted.check(arch)


def padded_head_dim(head_dim: int) -> int:
    """The smallest head dim of the tables that holds `head_dim`; what is wider, as latents are, has rows of its own."""
    return next((row for row in ROW_HEAD_DIMS if row >= head_dim), head_dim)


@functools.cache
def current_target(device_index: int) -> str:
    """The compile target of a CUDA device, e.g. "sm_90a"; NotImplementedError if no kernel runs on it."""
    import torch

    return arch_of_capability(*torch.cuda.get_device_capability(device_index)).name


def choose_mla(problem: MlaProblem, rows: int, target: str, family: Family | None = None) -> MlaTraits:
    """The traits of the kernel that decodes latent attention with `rows` query rows, tokens times heads, a sequence.

    Those of the user's table come first, as in `choose`.

    Args:
        problem: what is asked for.
        rows: tokens times heads of a sequence.
        target: compile target, e.g. "sm_90a".
        family: kernel family; None is the best of the target.

    Raises:
        ValueError: no such target or family.
        NotImplementedError: the target does not run the family, or no row of it.
    """
    key = table_key(problem.operation, target, family or ("sm80" if problem.is_e4m3 else None), "decode", rows)
    return cast(MlaTraits, _choices(problem, key, "decode", usertable.load(key), rows)[0].traits)


def check_family(target: str, family: Family | None) -> None:
    """Raise if a target does not run a family; None is the best that it runs.

    Raises:
        ValueError: no such target or family.
        NotImplementedError: the target does not run the family.
    """
    arch = get_arch(target)
    if family is None:
        return
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    if family not in arch.families:
        runs = ", ".join(arch.families)
        raise NotImplementedError(f"family is {family!r}, which {arch.name} does not run; it runs: {runs}")


def table_key(
    operation: AnyOperation, target: str, family: Family | None, lengths: LengthClass, query_rows: int
) -> TableKey:
    """The table of an operation on a target; `family` None is the best for these lengths and query rows.

    Errors as `check_family`.
    """
    check_family(target, family)
    if family is None:
        family, most_rows = BEST_FAMILIES.get((operation, target, lengths), (None, 0))
        if family is None or query_rows > most_rows:
            family = get_arch(target).families[0]
    return TableKey(operation, target, family)


def _choices(
    problem: AnyProblem, key: TableKey, lengths: LengthClass, own_rows: Sequence[MeasuredRow], query_rows: int
) -> tuple[Choice, ...]:
    """The choices from the user's rows, then the shipped ones; see `choices`."""
    if lengths not in LENGTH_CLASSES:
        raise ValueError(f"lengths is {lengths!r}; allowed: {', '.join(LENGTH_CLASSES)}")
    rows = (*(own.row for own in own_rows), *shipped_rows(problem, key))
    reasons, found = [], []
    for row, traits, reason in offers(rows, problem, lengths, get_arch(key.target), query_rows):
        if reason is not None:
            reasons.append(f"{row.traits.tile_m}x{row.traits.tile_n} {reason}")
        else:
            own = next((own for own in own_rows if own.row is row), None)
            found.append(Choice(key.family, traits, row, _source(row, traits, key, own)))
    if found:
        return tuple(found)
    if isinstance(problem, MlaProblem):
        cache = "an e4m3 cache" if problem.is_e4m3 else problem.dtype
        raise NotImplementedError(
            f"no row of the {key.family} family decodes latent attention on {key.target} in {cache}: "
            + ("; ".join(reasons) or "it has none")
        )
    fitting = (row for row in rows if problem.operands.row_dtype in row.dtypes)
    operands, asked = problem.operands, ", ".join(name for name in FEATURES if name in problem.features)
    raise NotImplementedError(
        f"no row of {key} runs head_dim {operands.head_dim}, head_dim_v {operands.head_dim_v}, "
        f"mask {problem.scores.mask}, dtype {operands.qk_dtype}, features {asked or 'none'}, lengths {lengths}; "
        f"head dims with rows: {', '.join(dict.fromkeys(_title(row.traits) for row in fitting)) or 'none'}"
        + "".join(f"; {reason}" for reason in reasons)
    )


def shipped_rows(problem: AnyProblem, key: TableKey) -> tuple[Row, ...]:
    """The shipped rows that are looked through for a problem, in order."""
    if isinstance(problem, MlaProblem):
        return latent_rows((MLA_E4M3_ROWS if problem.is_e4m3 else MLA_ROWS)[key.family])
    if "e4m3_cache" in problem.features:
        return (*FEW_ROWS[key.family], *CACHE_ROWS[key.family])
    return SPLIT_ROWS[key.family] if problem.takes_split_rows else TABLES[key]


@functools.cache
def latent_rows(every: tuple[MlaTraits, ...]) -> tuple[Row, ...]:
    """Traits of latent attention as rows of a table."""
    return tuple(Row(traits, FULL, lengths=DECODE) for traits in every)  # type: ignore[arg-type]


def _source(row: Row, traits: Traits, key: TableKey, own: MeasuredRow | None) -> str:
    """Which table and row a choice comes from; `own` is the row as the user measured it, if it is the user's."""
    lent = "" if traits == row.traits else f" lent to {_title(traits)}"
    text = f"row of head dims {row.title}{lent}"
    if own is None:
        return f"shipped table {key}, {text}"
    return f"user's table {usertable.table_path(key)}, {text}, measured on {own.note}"


def _title(traits: Traits) -> str:
    return f"{traits.head_dim}x{traits.head_dim_v}"
