"""The timings of one target and GPU, made comparable: what the choice of rows and the explanations start from."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from cuteflash.problem_names import problem_id
from cuteflash.traits.arch import ARCHS, Family
from cuteflash.traits.row import ANY_ROWS, Traits, rows_title
from cuteflash.traits.values import make_traits
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import Rows, Task, made_for
from cuteflash.tune.store import Store, Timing
from cuteflash.tune.timing import interval

POLISHES = 4  # of rounds and candidates in turn; the medians hardly move after the second


class Slot(NamedTuple):
    """What a row of a table is chosen for, beside the head dims."""

    mask: str
    dtype: str
    lengths: str
    query_rows: Rows = ANY_ROWS

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The slot that a cell stands for."""
        return cls(cell.mask, cell.dtype, cell.lengths, cell.class_of_rows)

    @property
    def shape(self) -> str:
        """The class of its lengths and, if tables tell them apart, its query rows: `"decode, up to 8 rows"`."""
        return self.lengths if self.query_rows == ANY_ROWS else f"{self.lengths}, {rows_title(self.query_rows)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One candidate's time on one cell."""

    candidate: str  # id
    cell: str  # id
    slot: Slot  # what the cell stands for
    ms: float  # median, in the clock of the cell's newest race
    low: float  # where the median's 95 % confidence interval begins
    high: float  # and where it ends
    tflops: float  # TFLOP/s at the median
    at: str = ""  # when it was measured


def cells_of(store: Store) -> dict[str, Cell]:
    """The store's cells by id."""
    return {name: Cell(**fields) for name, fields in store.cells().items()}


def all_candidates(store: Store) -> dict[str, Traits]:
    """The store's candidates by id, without those of a version whose traits had kinds, fields or values that these do
    not have."""
    found = {}
    for one in store.candidates():
        with contextlib.suppress(ValueError):
            found[one["id"]] = make_traits(one["kind"], one["traits"])
    return found


def candidates_of(store: Store, task: Task, family: Family, head_dims: tuple[int, int]) -> dict[str, Traits]:
    """Those of a task's kernel family that are made for padded (head_dim, head_dim_v)."""
    wanted = task, family, head_dims
    return {name: traits for name, traits in all_candidates(store).items() if made_for(traits) == wanted}


def swept_target(store: Store, target: str | None = None) -> str:
    """`target`, or the only one that was swept. ValueError: the store has no candidates for it, or for several."""
    found = {verdict.target for verdict in store.verdicts()} | {timing.target for timing in store.timings()}
    swept = [name for name in ARCHS if name in found]
    if not swept:
        raise ValueError(f"{store.path} holds no candidates yet; `cuteflash sweep` makes them")
    if target is None and len(swept) > 1:
        raise ValueError(f"arch is not given and {store.path} has candidates for several; allowed: {', '.join(swept)}")
    if target is not None and target not in swept:
        raise ValueError(f"arch is {target!r}; {store.path} has candidates for: {', '.join(swept)}")
    return target or swept[0]


def measured_gpu(store: Store, target: str, gpu: str | None = None) -> str:
    """`gpu`, or the one GPU that `target` was timed on.

    Raises:
        ValueError: the store has no timings of it, or `gpu` is None and there are several GPUs.
    """
    found = sorted({timing.gpu for timing in store.timings(target=target)})
    if not found:
        raise ValueError(f"{store.path} has no timings for {target}; `cuteflash sweep` without --dry-run makes them")
    if gpu is None and len(found) > 1:
        raise ValueError(f"gpu is not given and {store.path} has timings of several; allowed: {', '.join(found)}")
    if gpu is not None and gpu not in found:
        raise ValueError(f"gpu is {gpu!r}; {store.path} has timings of: {', '.join(found)}")
    return gpu or found[0]


def load_runs(
    store: Store, target: str, gpu: str, names: Collection[str], raced_with: Family | None = None
) -> list[Run]:
    """The newest timing of each candidate and cell, by one clock a cell; of each operation's newest sources.

    Those of a candidate that failed later on the same problem do not count: while it was timed, or in the gate, which
    may ask more than it did when the candidate was timed.

    Args:
        store: the database.
        target: compile target.
        gpu: whose timings.
        names: candidate ids.
        raced_with: the family whose races alone count; peers take part in those of each family.
    """
    timings = [timing for timing in store.timings(target=target, gpu=gpu) if timing.error is None]
    gate = {(one.candidate, one.problem): one.ok for one in store.verdicts(target=target, stage="gate")}  # the newest
    failed = {pair for pair, passed in gate.items() if not passed}
    failed |= {(one.candidate, one.problem) for one in store.verdicts(target=target, stage="time", ok=0)}
    cells = cells_of(store)
    problems = {name: problem_id(cell.problem) for name, cell in cells.items()}
    sources = {cells[timing.cell].operation: timing.source for timing in timings}  # the newest of each
    groups: dict[tuple[str, str, str], list[Timing]] = {}  # a family's races, "sm90 1" and so on, share yardsticks
    for timing in timings:
        family = timing.race.rpartition(" ")[0]
        if timing.source == sources[cells[timing.cell].operation] and raced_with in (None, family):
            groups.setdefault((timing.cell, timing.driver, family), []).append(timing)
    newest: dict[tuple[str, str], Run] = {}
    for (cell, _, _), group in groups.items():
        group = remove_drift(group)
        slot, scales = Slot.of(cells[cell]), race_scales(group)
        for timing in group:
            if timing.candidate in names and (timing.candidate, problems[cell]) not in failed:
                newest[timing.candidate, cell] = _run(timing, slot, scales[timing.race])
    return list(newest.values())


def lead(run: Mapping[str, Run], other: Mapping[str, Run]) -> tuple[float, float, float]:
    """How much faster a candidate is than another over the cells of both: (at the medians, at least, at most).

    0.05 is 5 %; geometric means. The ends are a 95 % interval: errors of medians are independent, so that distances of
    the interval's ends add in squares, as logarithms. An unknown end is -1 or infinite.
    """
    cells = [cell for cell in run if cell in other]
    middle = [math.log(other[cell].ms / run[cell].ms) for cell in cells]
    down = [math.hypot(_below(other[cell]), _above(run[cell])) for cell in cells]
    up = [math.hypot(_above(other[cell]), _below(run[cell])) for cell in cells]
    mean = sum(middle) / len(cells)
    least, most = mean - math.hypot(*down) / len(cells), mean + math.hypot(*up) / len(cells)
    return math.expm1(mean), math.expm1(least), math.inf if math.isinf(most) else math.expm1(most)


def _below(run: Run) -> float:
    return math.log(run.ms / run.low) if run.low > 0 else math.inf


def _above(run: Run) -> float:
    return math.log(run.high / run.ms)


def remove_drift(timings: Sequence[Timing]) -> list[Timing]:
    """The timings of one cell without the drift that all candidates of a round have in common.

    A GPU near its power limit changes its clock from round to round by more than candidates differ. The rounds of a
    race are interleaved, so that its samples are a candidate's time times the round's factor times noise; medians
    taken in turn separate the two (Tukey's median polish, of logarithms). A race's own clock stays as it is.
    """
    races: dict[str, list[Timing]] = {}
    for timing in timings:
        races.setdefault(timing.race, []).append(timing)
    factors = {name: round_factors([timing.samples for timing in race]) for name, race in races.items()}
    company = {name: runners([timing.samples for timing in race]) for name, race in races.items()}
    return [_without_drift(timing, factors[timing.race], company[timing.race]) for timing in timings]


def round_factors(samples: Sequence[Sequence[float]]) -> list[float]:
    """What each round of a race multiplied times with; 1 in the middle. Those that left early lack the last rounds.

    A round that only one ran in says nothing of its factor, which is taken for 1.
    """
    company = runners(samples)
    shared = sum(count > 1 for count in company)
    logs = [[math.log(value) for value in own[:shared]] for own in samples if own]
    stayed = [own for own in logs if len(own) == shared]
    effects = [0.0] * shared
    # Candidates that left early say nothing about the later rounds: the factors of the others put all on one level.
    for field in (stayed, logs):
        for _ in range(POLISHES if shared else 0):
            levels = [statistics.median([x - e for x, e in zip(own, effects, strict=False)]) for own in field]
            effects = [
                statistics.median([own[i] - base for own, base in zip(field, levels, strict=True) if len(own) > i])
                for i in range(shared)
            ]
            middle = statistics.median(effects)
            effects = [effect - middle for effect in effects]
    return [math.exp(effect) for effect in effects] + [1.0] * (len(company) - shared)


def runners(samples: Sequence[Sequence[float]]) -> list[int]:
    """How many took part in each round of a race."""
    return [sum(len(own) > i for own in samples) for i in range(max(map(len, samples), default=0))]


def _without_drift(timing: Timing, factors: Sequence[float], company: Sequence[int]) -> Timing:
    """A timing whose samples are divided by their rounds' factors.

    Of n runners' noise a factor has taken one part in n along, which the interval gives back: two that share a round
    agree on its factor whatever their noise.
    """
    if timing.ms is None or timing.tflops is None or all(factor == 1 for factor in factors[: len(timing.samples)]):
        return timing
    samples = tuple(value / factor for value, factor in zip(timing.samples, factors, strict=False))
    ms = statistics.median(samples)
    low, high = interval(samples)
    left = statistics.mean(1 - 1 / count if count > 1 else 1.0 for count in company[: len(samples)])
    low, high = max(0.0, ms - (ms - low) / math.sqrt(left)), ms + (high - ms) / math.sqrt(left)
    tflops = timing.tflops * timing.ms / ms
    return dataclasses.replace(timing, samples=samples, ms=ms, low=low, high=high, tflops=tflops)


def race_scales(timings: Iterable[Timing]) -> dict[str, float]:
    """What the times of each race of one cell are multiplied with, so that all read as if taken in the newest.

    A GPU's clock moves by percents between races. Whatever took part in several of them, a default row or a peer, says
    by how much; the geometric mean of all such. A race that shares no candidate with the newest is taken as it is.
    """
    races: dict[str, dict[str, float]] = {}
    for timing in timings:
        if timing.ms is not None:
            races.setdefault(timing.race, {})[timing.candidate] = timing.ms
    anchor = next(reversed(races.values()), {})
    scales = {}
    for race, times in races.items():
        logs = [math.log(anchor[name] / ms) for name, ms in times.items() if name in anchor]
        scales[race] = math.exp(sum(logs) / len(logs)) if logs else 1.0
    return scales


def _run(timing: Timing, slot: Slot, scale: float) -> Run:
    ms, low, high, tflops = (value or 0.0 for value in (timing.ms, timing.low, timing.high, timing.tflops))
    return Run(timing.candidate, timing.cell, slot, ms * scale, low * scale, high * scale, tflops / scale, timing.at)
