"""Which candidates race on a cell, by what was measured there before: interrupted races go on, then come new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from cuteflash.traits.arch import Family
from cuteflash.tune.cells import Cell
from cuteflash.tune.store import Timing
from cuteflash.tune.timing import Roles, Rules, losers, race

Samples = dict[str, list[float]]  # milliseconds per call, one a round, by candidate id or peer's name


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What may race on a cell."""

    family: Family
    cell: Cell
    keys: Mapping[str, str]  # by candidate id or peer's name the key with which its timings count
    roles: Roles  # the cell's defaults stay, peers are guests


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """What is known of a field on one GPU."""

    races: Mapping[int, Samples]  # by number, oldest first, all samples that still count
    failed: frozenset[str]  # names that failed in one of them
    newest: int  # number of the last race, also of one in which nothing counts any more; 0 if there was none

    @property
    def raced(self) -> set[str]:
        """All names that have samples."""
        return {name for samples in self.races.values() for name in samples}

    def fastest(self, guests: Collection[str]) -> str | None:
        """The name of the smallest median, None if there is none."""
        medians = [
            (sorted(values)[len(values) // 2], name)
            for samples in self.races.values()
            for name, values in samples.items()
            if name not in guests
        ]
        return min(medians)[1] if medians else None

    def far_behind(self, field: Field, margin: float) -> set[str]:
        """Candidates whose interval lies above the best one's of their race by more than `margin` of it."""
        found: set[str] = set()
        for samples in self.races.values():
            found |= losers({n: s for n, s in samples.items() if n not in field.roles.guests}, margin)
        return found - set(field.roles.stays)


class Race(NamedTuple):
    """One race to run or to go on with: its name in the store, e.g. "sm90 1", and all samples so far."""

    name: str
    samples: Samples


def past_of(field: Field, timings: Iterable[Timing]) -> Past:
    """What the timings of the field's cell, of one GPU and driver, say about it."""
    races: dict[int, Samples] = {}
    failed, newest = set(), 0
    for timing in timings:
        family, _, number = timing.race.rpartition(" ")
        if family != field.family:
            continue
        newest = max(newest, int(number))
        if field.keys.get(timing.candidate) != timing.key:
            continue
        if timing.error is not None:
            failed.add(timing.candidate)
        else:
            races.setdefault(int(number), {})[timing.candidate] = list(timing.samples)
    return Past(dict(sorted(races.items())), frozenset(failed), newest)


def arrange(field: Field, wanted: Collection[str], past: Past, rules: Rules) -> Race | None:
    """The next race of a field, None if all that is wanted has been measured.

    The last race goes on if it was interrupted; as long as it is in its first round, others may still join. After it
    those that took part in none run one of their own, with the cell's defaults and the fastest so far as yardsticks.
    """
    wanted = [name for name in wanted if name not in past.failed]
    new = [name for name in wanted if name not in past.raced]
    if past.races:
        number, last = max(past.races.items())
        samples = {name: list(values) for name, values in last.items() if name in wanted}
        if samples and max(map(len, samples.values())) == 1 < rules.rounds:
            samples |= {name: [] for name in new}
        if not _is_over(samples, rules, field.roles):
            return Race(f"{field.family} {number}", samples)
    if not new:
        return None
    fastest = past.fastest(field.roles.guests)
    yardsticks = [name for name in (*field.roles.stays, fastest) if name in wanted]
    names = dict.fromkeys([*yardsticks, *new]) if past.races else dict.fromkeys(wanted)
    return Race(f"{field.family} {past.newest + 1}", {name: [] for name in names})


def _is_over(samples: Samples, rules: Rules, roles: Roles) -> bool:
    asked: list[str] = []
    race({name: list(values) for name, values in samples.items()}, asked.append, rules, roles)
    return not asked
