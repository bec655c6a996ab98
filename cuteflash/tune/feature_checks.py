"""Which features a picked row also serves: its kernels are compiled with them, and ptxas decides.

A sweep times the plain kernel. Each feature takes registers, and a tile that only just has enough without spills with
it; such problems are left to the next row of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from cuteflash.problem import FEATURES, Feature
from cuteflash.problem_names import problem_id
from cuteflash.traits.row import Row
from cuteflash.tune.building import Kernel
from cuteflash.tune.operations import SPECS, task_of_traits
from cuteflash.tune.results import Slot
from cuteflash.tune.select import Pick, boxes

Complaints = Mapping[Kernel, str | None]
# (kernels, what they are built for) → what speaks against each; `building.complaints`.
Judge = Callable[[Sequence[Kernel], str], Complaints]
Features = tuple[Feature, ...]  # in the order of `Spec.features`


def settle(picks: Sequence[Pick], judge: Judge) -> list[Pick]:
    """The picks with what their rows serve beside the plain problems, which a sweep has proven, and what they lack.

    A mask and dtype whose kernel with all features is clean has all: no other needs more registers. Of the rest the
    kernels with one feature less decide, and so on; if several are clean, the one counts whose features come last in
    `Spec.features`. A row is split if its masks and dtypes differ in that.
    """
    found: dict[Kernel, str | None] = {}
    doubtful = list(dict.fromkeys(kernel for pick in picks for kernel in _kernels(pick.row).values()))
    for fewer in range(len(FEATURES)):
        asked = [_asking(kernel, some) for kernel in doubtful for some in _combinations(kernel, fewer)]
        if asked:
            found |= judge(asked, f"with all features but {fewer}" if fewer else "with all features")
        doubtful = [kernel for kernel in doubtful if not _served(kernel, found)]
    return [part for pick in picks for part in _parts(pick, found)]


def _parts(pick: Pick, found: Complaints) -> list[Pick]:
    """A pick by what it lacks."""
    row = pick.row
    lacking = {pair: _lacking(kernel, found) for pair, kernel in _kernels(row).items()}
    slots: dict[tuple[str, ...], set[Slot]] = {}
    for pair, reasons in lacking.items():
        slots.setdefault(tuple(reasons), set()).update(Slot(*pair, lengths) for lengths in row.lengths)
    settled = []
    for lacks, part in slots.items():
        for (masks, dtypes, *_), _ in boxes(part, (), row.traits.dtypes):
            served = dataclasses.replace(row, masks=masks, dtypes=dtypes, without=lacks)
            settled.append(dataclasses.replace(pick, row=served, lacking=lacking[masks[0], dtypes[0]]))
    return settled


def _served(kernel: Kernel, found: Complaints) -> Features:
    """The most features that were compiled clean together, of several the last ones."""
    for fewer in range(len(FEATURES)):
        for some in reversed(_combinations(kernel, fewer)):
            if found.get(_asking(kernel, some), "not compiled") is None:
                return some
    return ()


def _lacking(kernel: Kernel, found: Complaints) -> dict[str, str]:
    """The features that a row does not serve, each with what the smallest kernel says that has it and served ones."""
    served = _served(kernel, found)
    reasons: dict[str, str] = {}
    for name in _features(kernel):
        if name not in served:
            # With all that is served it was compiled, and was not clean: else it would be served, too.
            every = (some for size in range(len(served) + 1) for some in itertools.combinations(served, size))
            asked = (_asking(kernel, (name, *some)) for some in every)
            one = next(one for one in asked if found.get(one) is not None)
            reasons[name] = f"{problem_id(one[1])}: {found[one]}"
    return reasons


def _kernels(row: Row) -> dict[tuple[str, str], Kernel]:
    """(mask, dtype) of a row → its plain kernel, at the row's own head dims."""
    traits = row.traits
    make = SPECS[task_of_traits(traits)].problem
    return {
        (mask, dtype): (traits, make(dtype, traits.head_dim, traits.head_dim_v, mask))
        for mask, dtype in itertools.product(row.masks, row.dtypes)
    }


def _features(kernel: Kernel) -> Features:
    """What a kernel may be compiled with."""
    traits, _ = kernel
    spec = SPECS[task_of_traits(traits)]
    return tuple(name for name in (*spec.spare, *spec.features) if name in traits.features)


def _combinations(kernel: Kernel, fewer: int) -> list[Features]:
    """One or more of its features, all but so many, in their order: the last combination has the last ones."""
    features = _features(kernel)
    return list(itertools.combinations(features, len(features) - fewer)) if fewer < len(features) else []


def _asking(kernel: Kernel, features: Features) -> Kernel:
    """A kernel with just these features."""
    traits, problem = kernel
    return traits, SPECS[task_of_traits(traits)].asking(problem, features)
