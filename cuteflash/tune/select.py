"""From timings to table rows: the fewest that stay within 2 % of the best in every cell, against the default's.

A slot (mask, dtype, lengths, query rows) is what dispatch can tell apart, so one candidate runs all cells of a slot. In
it:

    a default that no candidate beats beyond noise stays
    otherwise any candidate that beats it, or the default itself, may run the slot if it is within 2 % of the best
    time of every cell; if none is, the one whose largest distance is smallest

Of all ways to run every slot the one with the fewest candidates is taken, ties by the geometric mean of the times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DTYPES, MASK_KINDS
from cuteflash.traits.fp8_sm90 import is_two_level
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import Row, TableKey, Traits
from cuteflash.tune.operations import SWEPT_DTYPES, Rows, Task
from cuteflash.tune.plan import padded
from cuteflash.tune.results import Run, Slot, candidates_of, cells_of, lead, load_runs
from cuteflash.tune.store import Store, candidate_id

TOLERANCE = 0.02  # a row may be this much slower than a cell's best
MIN_GAIN = 0.01  # a default is worth replacing only for more than this

Names = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # masks, dtypes, lengths
# The same and, one after the other, classes of query rows.
Box = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[Rows, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """A candidate in a slot that it was timed on completely."""

    candidate: str  # id
    worst: float  # its largest distance from a cell's best time, 0.05 is 5 % slower
    cost: float  # mean over the cells of log(time / best time)
    gain: float | None = None  # over the slot's default, by geometric mean, 0.05 is 5 % faster; None without a default
    surely: float | None = None  # the least it may be, by the 95 % intervals of both (`results.lead`)

    @property
    def beats_default(self) -> bool:
        """It is faster than the default by more than noise and by more than is worth a change; so is anything that
        has no default to beat."""
        return self.gain is None or self.surely is None or (self.gain > MIN_GAIN and self.surely > 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What one slot comes to."""

    slot: Slot
    default: str | None  # id of the row it has now, if that was timed
    standings: tuple[Standing, ...]  # all candidates timed on all cells, fastest first
    allowed: tuple[str, ...]  # ids of those that may run the slot; empty if none was timed on all of its cells

    def standing(self, candidate: str) -> Standing | None:
        """The standing of a candidate, None if it was not timed on all cells."""
        return next((one for one in self.standings if one.candidate == candidate), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Pick:
    """A row of the new table."""

    candidate: str  # id
    # its traits, with the masks, dtypes and length classes that it serves if no row above it does. It was timed without
    # softcap and lse; `feature_checks.settle` says whether it serves them.
    row: Row
    tflops: float  # geometric mean of TFLOP/s over the cells it is chosen for
    gain: float | None  # over the defaults of those, by geometric mean; None if one of them has no timed default
    kept: bool  # it is the default of all of them
    at: str  # when the newest of its timings was taken
    # "softcap" and "lse", if it is known not to serve them, with a problem and why
    lacking: Mapping[str, str] = dataclasses.field(default_factory=dict)


def decide(runs: Iterable[Run], defaults: Mapping[Slot, str]) -> list[Decision]:
    """What each slot that was timed comes to.

    Args:
        runs: of one target, family and pair of head dims.
        defaults: slot → id of the candidate that the table has for it now.
    """
    slots: dict[Slot, dict[str, dict[str, Run]]] = {}  # slot → candidate → cell → run
    for run in runs:
        slots.setdefault(run.slot, {}).setdefault(run.candidate, {})[run.cell] = run
    return [_decide(slot, slots[slot], defaults.get(slot)) for slot in sorted(slots, key=_order)]


def select(runs: Iterable[Run], defaults: Mapping[Slot, str], traits: Mapping[str, Traits]) -> list[Pick]:
    """The rows of a table, in an order in which the first that fits is the right one.

    Args:
        runs, defaults: as `decide` takes them.
        traits: by candidate id.
    """
    runs = list(runs)
    decisions = decide(runs, defaults)
    served: dict[str, list[Slot]] = {}
    for slot, candidate in cover(decisions).items():
        served.setdefault(candidate, []).append(slot)
    picks, above = [], set[Slot]()
    for candidate, slots in sorted(served.items(), key=lambda item: (len(item[1]), item[0])):
        one = traits[candidate]
        for (masks, dtypes, lengths, rows), own in boxes(slots, above, one.dtypes):
            # Element types of 8 bits run alike: what is timed stands for all of them.
            dtypes = dtypes if one.dtypes == DTYPES else one.dtypes
            row = Row(one, masks, dtypes, lengths, query_rows=(rows[0][0], rows[-1][1]))
            picks.append(_pick(candidate, row, own, runs, decisions))
        above.update(slots)
    return picks


def swept_head_dims(store: Store, task: Task) -> list[tuple[int, int]]:
    """The padded (head_dim, head_dim_v) of all cells of a task, in order."""
    return sorted({padded(cell) for cell in cells_of(store).values() if cell.task == task})


def proposed(
    store: Store, table: TableKey, head_dims: tuple[int, int], gpu: str, task: Task | None = None
) -> list[Pick]:
    """The rows that these timings speak for, in place of the shipped table's; none if nothing was timed.

    Of 8-bit operands, rows that accumulate in two levels are proposed if any was timed: one level is faster, and loses
    a mean of V over many keys.

    Args:
        head_dims: padded (head_dim, head_dim_v).
        gpu: whose timings.
        task: None is the table's operation on 16-bit operands.
    """
    task = task or table.operation
    traits = candidates_of(store, task, table.family, head_dims)
    runs = load_runs(store, table.target, gpu, traits)
    accurate = [run for run in runs if is_two_level(traits[run.candidate])]
    return select(accurate or runs, shipped_defaults(store, table, head_dims, task), traits) if runs else []


def shipped_defaults(
    store: Store, table: TableKey, head_dims: tuple[int, int], task: Task | None = None
) -> dict[Slot, str]:
    """Slot → candidate id of the shipped row that runs the slot's cells; `task` as of `proposed`."""
    found = {}
    for cell in cells_of(store).values():
        if cell.task == (task or table.operation) and padded(cell) == head_dims:
            with contextlib.suppress(NotImplementedError):  # the table has no row for it: anything is a gain
                choice = choose_shipped(cell.problem, table.target, table.family, cell.lengths, cell.query_rows)
                found[Slot.of(cell)] = candidate_id(choice.traits)
    return found


def cover(decisions: Sequence[Decision]) -> dict[Slot, str]:
    """Slot → candidate, with the fewest different candidates there can be; ties by the sum of the slots' costs.

    Exact: the first slot that is still open takes each of its allowed candidates in turn, which then also runs every
    other open slot that allows it.
    """
    decisions = [decision for decision in decisions if decision.allowed]
    costs = {
        (index, standing.candidate): standing.cost
        for index, decision in enumerate(decisions)
        for standing in decision.standings
    }
    runs_on: dict[str, int] = {}  # candidate → bit set of the slots that allow it
    for index, decision in enumerate(decisions):
        for name in decision.allowed:
            runs_on[name] = runs_on.get(name, 0) | 1 << index

    @functools.cache
    def best(open_slots: int) -> tuple[int, float, tuple[str, ...]]:
        if not open_slots:
            return 0, 0.0, ()
        first = (open_slots & -open_slots).bit_length() - 1
        options = []
        for name in decisions[first].allowed:
            taken = runs_on[name] & open_slots
            count, cost, names = best(open_slots & ~taken)
            own = sum(costs[index, name] for index in range(len(decisions)) if taken >> index & 1)
            options.append((count + 1, cost + own, (name, *names)))
        return min(options)

    names = best((1 << len(decisions)) - 1)[2]
    return {
        decision.slot: min(
            (name for name in names if runs_on[name] >> index & 1), key=lambda name: (costs[index, name], name)
        )
        for index, decision in enumerate(decisions)
    }


def boxes(
    slots: Collection[Slot], above: Collection[Slot], dtypes: Sequence[str] = DTYPES
) -> list[tuple[Box, set[Slot]]]:
    """Slots as few products (masks, dtypes, lengths, query rows), which is what a row serves, each with what it adds.

    Products may reach over the slots `above`, which rows that come before have taken. `dtypes`: all that a row may
    serve.
    """
    found: list[tuple[Box, set[Slot]]] = []
    for rows in sorted({slot.query_rows for slot in slots}):
        own, others = ({slot for slot in some if slot.query_rows == rows} for some in (slots, above))
        for (*served, _), added in _boxes_of_rows(own, others, dtypes, rows):
            for place, ((*same, before), so_far) in enumerate(found):
                if same == served and before[-1][1] + 1 == rows[0]:  # the same for fewer rows
                    found[place] = (same[0], same[1], same[2], (*before, rows)), so_far | added
                    break
            else:
                found.append(((served[0], served[1], served[2], (rows,)), added))
    return found


def _boxes_of_rows(
    slots: set[Slot], above: set[Slot], dtypes: Sequence[str], rows: Rows
) -> list[tuple[Box, set[Slot]]]:
    """`boxes` of slots with these query rows."""
    places, products = _products(tuple(dtypes))
    left = sum(places[slot[:3]] for slot in slots)
    reach = left | sum(places.get(slot[:3], 0) for slot in above - slots)
    fitting = {box: held for box, held in products.items() if not held & ~reach}
    found: list[tuple[Box, set[Slot]]] = []
    while left:
        # Most slots added, then fewest of others': a row says no more than it has to.
        box, held = max(fitting.items(), key=lambda item: ((item[1] & left).bit_count(), -item[1].bit_count()))
        added = {Slot(*names, rows) for names, place in places.items() if place & held & left}
        found.append(((*box, (rows,)), added))
        left &= ~held
    return found


@functools.cache
def _products(dtypes: tuple[str, ...]) -> tuple[dict[tuple[str, str, str], int], dict[Names, int]]:
    """A bit for each mask, dtype and length class, and the bits of each product of some of them."""
    names: Iterable[tuple[str, str, str]] = itertools.product(MASK_KINDS, dtypes, LENGTH_CLASSES)
    places = {one: 1 << n for n, one in enumerate(names)}
    subsets = itertools.product(_subsets(MASK_KINDS), _subsets(dtypes), _subsets(LENGTH_CLASSES))
    products: dict[Names, int] = {}
    for masks, some, lengths in subsets:
        products[masks, some, lengths] = sum(places[one] for one in itertools.product(masks, some, lengths))
    return places, products


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [part for size in range(len(names), 0, -1) for part in itertools.combinations(names, size)]


def _decide(slot: Slot, timed: Mapping[str, Mapping[str, Run]], default: str | None) -> Decision:
    cells = {cell for runs in timed.values() for cell in runs}
    best = {cell: min(runs[cell].ms for runs in timed.values() if cell in runs) for cell in cells}
    complete = {name: runs for name, runs in timed.items() if runs.keys() == cells}
    against = complete.get(default) if default is not None else None
    standings = sorted(
        (_standing(name, runs, best, against) for name, runs in complete.items()),
        key=lambda one: (one.cost, one.candidate),
    )
    if against is None or default is None:
        pool, default = standings, None
    elif any(one.beats_default for one in standings if one.candidate != default):
        pool = [one for one in standings if one.beats_default or one.candidate == default]
    else:
        return Decision(slot, default, tuple(standings), (default,))
    within = [one.candidate for one in pool if one.worst <= TOLERANCE]
    if within or not pool:
        return Decision(slot, default, tuple(standings), tuple(within))
    closest = min(pool, key=lambda one: (one.worst, one.cost, one.candidate))
    return Decision(slot, default, tuple(standings), (closest.candidate,))


def _standing(
    name: str, runs: Mapping[str, Run], best: Mapping[str, float], default: Mapping[str, Run] | None
) -> Standing:
    ratios = [run.ms / best[cell] for cell, run in runs.items()]
    gain = surely = None
    if default is not None:
        gain, surely, _ = lead(runs, default)
    return Standing(name, max(ratios) - 1, math.log(statistics.geometric_mean(ratios)), gain, surely)


def _pick(
    candidate: str, row: Row, slots: Collection[Slot], runs: Sequence[Run], decisions: Sequence[Decision]
) -> Pick:
    mine = [run for run in runs if run.candidate == candidate and run.slot in slots]
    defaults = {decision.slot: decision.default for decision in decisions}
    before = {run.cell: run.ms for run in runs if run.candidate == defaults[run.slot]}
    timed = all(run.cell in before for run in mine)
    return Pick(
        candidate,
        row,
        tflops=statistics.geometric_mean(run.tflops for run in mine),
        gain=statistics.geometric_mean(before[run.cell] / run.ms for run in mine) - 1 if timed else None,
        kept=all(defaults[slot] == candidate for slot in slots),
        at=max(run.at for run in mine),
    )


def _order(slot: Slot) -> tuple[int, int, int, Rows]:
    mask, dtype = MASK_KINDS.index(slot.mask), SWEPT_DTYPES.index(slot.dtype)
    return mask, dtype, LENGTH_CLASSES.index(slot.lengths), slot.query_rows
