"""The timings of one target and GPU, made comparable: what the choice of rows and the explanations start from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cuteflash.traits.arch import Family
from cuteflash.traits.row import Traits
from cuteflash.traits.shapes import shape_of
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.store import Store, Timing

TRAITS: dict[Family, type[Traits]] = {"sm80": FwdTraitsSm80, "sm90": FwdTraitsSm90}


class Slot(NamedTuple):
    """What a row of a table is chosen for, beside the head dims."""

    mask: str
    dtype: str
    shape: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One candidate's time on one cell.

    Attributes:
        candidate, cell: ids.
        slot: what the cell stands for.
        ms, low, high: median and its 95 % confidence interval, in the clock of the cell's newest race.
        tflops: TFLOP/s at the median.
        at: when it was measured.
    """

    candidate: str
    cell: str
    slot: Slot
    ms: float
    low: float
    high: float
    tflops: float
    at: str = ""


def slot_of(fields: Mapping[str, Any]) -> Slot:
    """The slot of a cell's fields."""
    return Slot(fields["mask"], fields["dtype"], shape_of(fields["seqlen_q"], fields["seqlen"]))


def make_traits(family: Family, fields: Mapping[str, Any]) -> Traits | None:
    """The traits with these fields; None where they come from a version whose traits had others."""
    kind = TRAITS[family]
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**fields) if set(fields) <= known else None


def candidates_of(store: Store, family: Family, head_dims: tuple[int, int]) -> dict[str, Traits]:
    """The store's candidates of a family that are made for padded (head_dim, head_dim_v)."""
    found = {}
    for name, (made_for, fields) in store.candidates().items():
        if made_for == family and (fields["head_dim"], fields["head_dim_v"]) == head_dims:
            traits = make_traits(family, fields)
            if traits is not None:
                found[name] = traits
    return found


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


def load_runs(store: Store, target: str, gpu: str, names: Iterable[str], source: str | None = None) -> list[Run]:
    """The newest successful timing of each candidate and cell, by one clock a cell.

    Args:
        store: the database.
        target: compile target.
        gpu: whose timings.
        names: candidate ids.
        source: fingerprint of the kernels' sources, whose timings alone count; None takes the newest timing's.
    """
    timings = [timing for timing in store.timings(target=target, gpu=gpu) if timing.error is None]
    if source is None and timings:
        source = timings[-1].source
    wanted, cells = set(names), store.cells()
    groups: dict[tuple[str, str, str], list[Timing]] = {}  # a family's races, "sm90 1" and so on, share yardsticks
    for timing in timings:
        if timing.source == source:
            family = timing.race.rpartition(" ")[0]
            groups.setdefault((timing.cell, timing.driver, family), []).append(timing)
    newest: dict[tuple[str, str], Run] = {}
    for (cell, _, _), group in groups.items():
        slot, scales = slot_of(cells[cell]), race_scales(group)
        for timing in group:
            if timing.candidate in wanted:
                newest[timing.candidate, cell] = _run(timing, slot, scales[timing.race])
    return list(newest.values())


def race_scales(timings: Iterable[Timing]) -> dict[str, float]:
    """What the times of each race of one cell are multiplied with, so that all read as if taken in the newest.

    A GPU's clock moves by percents between races. Whatever took part in several of them, a default row or a peer, says
    by how much; the geometric mean of all such. A race that shares nobody with the newest is taken as it is.
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
    ms, low, high, tflops = timing.ms, timing.low, timing.high, timing.tflops
    if ms is None or low is None or high is None or tflops is None:
        raise ValueError(f"the timing of {timing.candidate} on {timing.cell} has no numbers")
    return Run(timing.candidate, timing.cell, slot, ms * scale, low * scale, high * scale, tflops / scale, timing.at)
