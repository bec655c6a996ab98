"""From a sweep's database to the rows that it proposes for a table."""

from __future__ import annotations

import contextlib

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import Operation
from cuteflash.traits.row import TableKey
from cuteflash.tune.plan import padded
from cuteflash.tune.results import Slot, candidates_of, cells_of, load_runs
from cuteflash.tune.select import Pick, select
from cuteflash.tune.store import Store, candidate_id


def swept_head_dims(store: Store, operation: Operation) -> list[tuple[int, int]]:
    """The padded (head_dim, head_dim_v) of all cells of an operation, in order."""
    return sorted({padded(cell) for cell in cells_of(store).values() if cell.operation == operation})


def proposed(store: Store, table: TableKey, head_dims: tuple[int, int], gpu: str) -> list[Pick]:
    """The rows that these timings speak for, in place of the shipped table's; none if nothing was timed.

    Args:
        head_dims: padded (head_dim, head_dim_v).
        gpu: whose timings.
    """
    traits = candidates_of(store, table.operation, table.family, head_dims)
    runs = load_runs(store, table.target, gpu, traits)
    return select(runs, shipped_defaults(store, table, head_dims), traits) if runs else []


def shipped_defaults(store: Store, table: TableKey, head_dims: tuple[int, int]) -> dict[Slot, str]:
    """Slot → candidate id of the shipped row that runs the slot's cells."""
    found = {}
    for cell in cells_of(store).values():
        if cell.operation == table.operation and padded(cell) == head_dims:
            with contextlib.suppress(NotImplementedError):  # the table has no row for it: anything is a gain
                choice = choose_shipped(cell.problem, table.target, table.family, cell.lengths)
                found[Slot.of(cell)] = candidate_id(choice.traits)
    return found
