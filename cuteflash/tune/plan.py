"""What a sweep is asked for, and what it works on: spaces, groups and their candidates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from cuteflash.dispatch import choose, choose_shipped, padded_head_dim
from cuteflash.mla_problem import AnyProblem
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import LengthClass
from cuteflash.traits.row import TableKey, Traits, kinds_of
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import DEFAULT, Task
from cuteflash.tune.timing import Rules

# Traits by which a kernel's speed depends on the values that it is given.
VALUE_DEPENDENT = {"fixed_max"}
# A key that outgrows the maxima of fixed-maximum rows in a block that their tiles do not begin with: repairing it costs
# them time. Tiles begin with the block of the first key, so that a sink there would cost nothing.
SINK = "sink:12:middle"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which a request to a worker process counts as hanging."""

    compile: float = 300.0
    gate: float = 90.0
    sample: float = 90.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one sweep is asked for."""

    target: str  # compile target
    families: tuple[Family, ...]  # kernel families
    cells: tuple[Cell, ...]  # the problems to time
    # candidates in place of the enumerated ones; of each family and head dims those made for them
    traits: tuple[Traits, ...] | None = None
    # candidates per family and head dims that are compiled, beside those that always are; None is all
    limit: int | None = None
    budget: float | None = None  # seconds that the GPU's stages may take; None is as long as they need
    jobs: int = 1  # compiling processes
    from_cache: bool = False  # compile nothing; what the disk cache lacks is reported
    peers: tuple[str, ...] = ()  # implementations to time beside the candidates, see `peers`
    rules: Rules = dataclasses.field(default_factory=Rules)  # how a race is run
    limits: Limits = dataclasses.field(default_factory=Limits)  # when a request hangs


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """The candidates of one task, family and pair of padded head dims, and what became of them before compiling."""

    table: TableKey  # operation, target and kernel family
    task: Task
    head_dims: tuple[int, int]  # padded (head_dim, head_dim_v)
    refused: tuple[tuple[Traits, str], ...]  # (traits, reason) of those that left
    chosen: tuple[Traits, ...]  # the others, those that always take part first, then the most promising
    always: frozenset[Traits]  # those that always take part

    @property
    def title(self) -> str:
        """Its family and head dims, behind the task if that is not the default."""
        return space_title(self.task, self.table.family, self.head_dims)


def space_title(task: Task, family: Family, head_dims: tuple[int, int]) -> str:
    """`"sm90 128x128"`, or `"bwd sm90 128x128"` if the task is not the default."""
    words = f"{family} {head_dims[0]}x{head_dims[1]}"
    return words if task == DEFAULT else f"{task} {words}"


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """Traits on one problem."""

    traits: Traits
    problem: AnyProblem
    id: str  # `store.candidate_id`
    key: str  # digest of the compile cache's key; what was found with another one does not count any more
    always: bool  # takes part whatever the limit, and also if ptxas complains


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The candidates of one family on one problem, most promising first, and the cells that stand for the problem."""

    family: Family
    problem: AnyProblem
    cells: tuple[Cell, ...]
    candidates: tuple[Candidate, ...]


def with_sinks(cells: Sequence[Cell], families: Iterable[Family]) -> list[Cell]:
    """The cells and, if speed depends on the values in one of the families, the longest of each slot with a sink, too.

    A slot, which is all that tables tell apart, is a problem and a length class: a row that is picked for it has to be
    fast on both.
    """
    specs = {cell.task: cell.spec for cell in cells if not cell.form}.values()  # no row that splits has fixed maxima
    kinds = [
        kind
        for family in families
        for spec in specs
        for kind in kinds_of(spec.operation, family, spec.dtypes, of_cache=False).values()
    ]
    if VALUE_DEPENDENT.isdisjoint(field.name for kind in kinds for field in dataclasses.fields(kind)):
        return list(cells)
    longest: dict[tuple[AnyProblem, LengthClass], Cell] = {}
    for cell in cells:
        slot = cell.problem, cell.lengths
        if slot not in longest or cell.seqlen > longest[slot].seqlen:
            longest[slot] = cell
    sinks = {cell: dataclasses.replace(cell, inputs=SINK) for cell in longest.values()}
    return [one for cell in cells for one in (cell, sinks.get(cell)) if one is not None]


def default_traits(cell: Cell, target: str, family: Family) -> Iterator[Traits]:
    """What dispatch runs a cell with, and what it would without a table of the user's."""
    for chosen in (choose, choose_shipped):
        with contextlib.suppress(NotImplementedError):  # a problem without a row is one more reason to sweep it
            yield chosen(cell.problem, target, family, cell.lengths, cell.query_rows).traits


def padded(cell: Cell) -> tuple[int, int]:
    """The head dims (of Q and K, of V) that a cell's kernel is made for."""
    return padded_head_dim(cell.head_dim), padded_head_dim(cell.head_dim_v)
