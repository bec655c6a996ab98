"""What a sweep is asked for, and what it works on: spaces, groups and their candidates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from cuteflash.dispatch import choose, choose_shipped, padded_head_dim
from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import ArchSpec, Family
from cuteflash.traits.length_class import LengthClass, length_class_of
from cuteflash.traits.row import TRAITS, Traits
from cuteflash.tune.cells import Cell
from cuteflash.tune.timing import Rules

# Traits by which a kernel's speed depends on the values that it is given.
VALUE_DEPENDENT = ("fixed_max",)
SINK = "sink:12"  # beyond what any such row takes without more work


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which a request to a worker process counts as hanging."""

    compile: float = 300.0
    gate: float = 90.0
    sample: float = 90.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one sweep is asked for.

    Attributes:
        target: compile target.
        families: kernel families.
        cells: the problems to time.
        traits: candidates in place of the enumerated ones; of each family and head dims those made for them.
        limit: candidates per family and head dims that are compiled, beside those that always are; None is all.
        budget: seconds that the GPU's stages may take; None is as long as they need.
        jobs: compiling processes.
        from_cache: compile nothing; what the disk cache lacks is reported.
        peers: implementations to time beside the candidates, see `peers`.
        rules: how a race is run.
        limits: when a request hangs.
    """

    target: str
    families: tuple[Family, ...]
    cells: tuple[Cell, ...]
    traits: tuple[Traits, ...] | None = None
    limit: int | None = None
    budget: float | None = None
    jobs: int = 1
    from_cache: bool = False
    peers: tuple[str, ...] = ()
    rules: Rules = dataclasses.field(default_factory=Rules)
    limits: Limits = dataclasses.field(default_factory=Limits)


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """The candidates of one family for one pair of padded head dims, and what became of them before compiling.

    Attributes:
        refused: (traits, reason) of those that left.
        chosen: the others, those that always take part first, then the most promising.
        always: those.
    """

    family: Family
    head_dim: int
    head_dim_v: int
    refused: tuple[tuple[Traits, str], ...]
    chosen: tuple[Traits, ...]
    always: frozenset[Traits]


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """Traits on one problem.

    Attributes:
        id: `store.candidate_id`.
        key: digest of the compile cache's key; what was found with another one does not count any more.
        always: takes part whatever the limit, and also where ptxas complains.
    """

    traits: Traits
    problem: FwdProblem
    id: str
    key: str
    always: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The candidates of one family on one problem, most promising first, and the cells that stand for the problem."""

    family: Family
    problem: FwdProblem
    cells: tuple[Cell, ...]
    candidates: tuple[Candidate, ...]


def with_sinks(cells: Sequence[Cell], families: Iterable[Family]) -> list[Cell]:
    """The cells and, if speed depends on the values in one of the families, the longest of each slot with a sink, too.

    A slot, which is all that tables tell apart, is a problem and a length class: a row that is picked for it has to be
    fast on both.
    """
    traits = {field.name for family in families for field in dataclasses.fields(TRAITS["fwd", family])}
    if traits.isdisjoint(VALUE_DEPENDENT):
        return list(cells)
    longest: dict[tuple[FwdProblem, LengthClass], Cell] = {}
    for cell in cells:
        slot = cell.problem, length_class_of(cell.seqlen_q, cell.seqlen)
        if slot not in longest or cell.seqlen > longest[slot].seqlen:
            longest[slot] = cell
    sinks = {cell: dataclasses.replace(cell, inputs=SINK) for cell in longest.values()}
    return [one for cell in cells for one in (cell, sinks.get(cell)) if one is not None]


def default_traits(cell: Cell, family: Family, arch: ArchSpec) -> Iterator[Traits]:
    """What dispatch runs a cell with, and what it would without a table of the user's."""
    for chosen in (choose, choose_shipped):
        with contextlib.suppress(NotImplementedError):  # a problem without a row is one more reason to sweep it
            yield chosen(cell.problem, arch.name, family, length_class_of(cell.seqlen_q, cell.seqlen)).traits


def padded(cell: Cell) -> tuple[int, int]:
    """The head dims (of Q and K, of V) that a cell's kernel is made for."""
    return padded_head_dim(cell.head_dim), padded_head_dim(cell.head_dim_v)
