"""From a sweep's database to the rows that it proposes for a table."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import problem_id
from cuteflash.traits.arch import Family
from cuteflash.traits.length_class import length_class_of
from cuteflash.traits.row import Traits
from cuteflash.tune.cells import Cell
from cuteflash.tune.feature_checks import Settled
from cuteflash.tune.plan import padded
from cuteflash.tune.results import Run, Slot, candidates_of, load_runs, slot_of
from cuteflash.tune.select import Pick, select
from cuteflash.tune.store import Store, candidate_id
from cuteflash.usertable import MeasuredRow


def swept_head_dims(store: Store) -> list[tuple[int, int]]:
    """The padded (head_dim, head_dim_v) of all cells of a store, in order."""
    return sorted({padded(Cell(**fields)) for fields in store.cells().values()})


def sound_runs(store: Store, target: str, gpu: str, names: Mapping[str, Traits]) -> list[Run]:
    """The runs of candidates, without those of one that failed later on the same problem.

    That is while it was timed, or by the gate, which may ask more than it did when the candidate was timed.
    """
    failed = {(v.candidate, v.problem) for v in store.verdicts(target=target, stage="time", ok=0)}
    gate = {(v.candidate, v.problem): v.ok for v in store.verdicts(target=target, stage="gate")}  # the newest of each
    failed |= {names for names, passed in gate.items() if not passed}
    problems = {name: problem_id(Cell(**fields).problem) for name, fields in store.cells().items()}
    runs = load_runs(store, target, gpu, names)
    return [run for run in runs if (run.candidate, problems[run.cell]) not in failed]


def proposed(store: Store, target: str, family: Family, head_dims: tuple[int, int], gpu: str) -> list[Pick]:
    """The rows that these timings speak for, beside the shipped table's; none where nothing was timed.

    Args:
        head_dims: padded (head_dim, head_dim_v).
        gpu: whose timings.
    """
    traits = candidates_of(store, family, head_dims)
    runs = sound_runs(store, target, gpu, traits)
    return select(runs, shipped_defaults(store, target, family, head_dims), traits) if runs else []


def shipped_defaults(store: Store, target: str, family: Family, head_dims: tuple[int, int]) -> dict[Slot, str]:
    """Slot → candidate id of the shipped row that runs the slot's cells."""
    found = {}
    for fields in store.cells().values():
        cell = Cell(**fields)
        if padded(cell) == head_dims:
            with contextlib.suppress(NotImplementedError):  # the table has no row for it: anything is a gain
                lengths = length_class_of(cell.seqlen_q, cell.seqlen)
                choice = choose_shipped(cell.problem, target, family, lengths)
                found[slot_of(fields)] = candidate_id(family, choice.traits)
    return found


def measured_row(settled: Settled, gpu: str) -> MeasuredRow:
    """A pick as tables keep it."""
    pick = settled.pick
    return MeasuredRow(settled.row, gpu, pick.at[:10], pick.tflops)
