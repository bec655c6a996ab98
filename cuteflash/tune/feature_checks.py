"""Whether a picked row also serves softcap and log-sum-exp: its kernels are compiled with them, and ptxas decides.

A sweep times the plain kernel. Either feature takes registers, and a tile that only just has enough without spills with
it; such problems are left to the next row of the table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from cuteflash.problem import problem_id
from cuteflash.traits.row import Row, fwd_traits
from cuteflash.tune.building import Kernel
from cuteflash.tune.operations import SPECS
from cuteflash.tune.results import Slot
from cuteflash.tune.select import Pick, boxes

Complaints = Mapping[Kernel, str | None]
# (kernels, what they are built for) → what speaks against each; `building.complaints`.
Judge = Callable[[Sequence[Kernel], str], Complaints]


def settle(picks: Sequence[Pick], judge: Judge) -> list[Pick]:
    """The picks with what their rows serve beside the plain problems, which a sweep has proven, and what they lack.

    A mask and dtype whose kernel with both features is clean has both: no other needs more registers. Of the rest the
    kernels with one feature each decide; if those are clean, and only both together are too much, the lse is served,
    which training asks for. A row is split if its masks and dtypes differ in that.
    """
    together = list(dict.fromkeys(kernel for pick in picks for kernel in _kernels(pick.row).values()))
    found = dict(judge(together, "with softcap and lse"))
    doubtful = [kernel for kernel in together if found[kernel] is not None]
    if doubtful:
        found |= judge([alone for kernel in doubtful for alone in _apart(kernel)], "with softcap or lse")
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
        for (masks, dtypes, _), _ in boxes(part, ()):
            served = dataclasses.replace(row, masks=masks, dtypes=dtypes, without=lacks)
            settled.append(dataclasses.replace(pick, row=served, lacking=lacking[masks[0], dtypes[0]]))
    return settled


def _lacking(kernel: Kernel, found: Complaints) -> dict[str, str]:
    """Of the features of a kernel that has both, those that the row does not serve, with the reasons."""

    def complaint(one: Kernel) -> str | None:
        return None if found[one] is None else f"{problem_id(one[1])}: {found[one]}"

    both = complaint(kernel)
    if both is None:
        return {}
    softcap, lse = map(complaint, _apart(kernel))
    if softcap is None and lse is None:
        softcap = both
    return {name: text for name, text in (("softcap", softcap), ("lse", lse)) if text is not None}


def _kernels(row: Row) -> dict[tuple[str, str], Kernel]:
    """(mask, dtype) of a row → its kernel with softcap and lse, at the row's own head dims."""
    traits = fwd_traits(row.traits)
    spec = SPECS[traits.operation]
    make = functools.partial(spec.problem, **dict.fromkeys(spec.features, True))
    return {
        (mask, dtype): (traits, make(dtype, traits.head_dim, traits.head_dim_v, mask))
        for mask, dtype in itertools.product(row.masks, row.dtypes)
    }


def _apart(kernel: Kernel) -> tuple[Kernel, Kernel]:
    """Of a kernel with both features the one with softcap, and the one with lse."""
    traits, problem = kernel
    softcap, lse = problem.asking(softcap=True, lse=False), problem.asking(softcap=False, lse=True)
    return (traits, softcap), (traits, lse)
