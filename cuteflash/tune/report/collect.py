"""From a sweep's database to the values of its report's page."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cuteflash.problem import MASK_KINDS
from cuteflash.traits.arch import FAMILIES, Family, get_arch
from cuteflash.traits.row import TableKey, Traits, kinds_of
from cuteflash.tune.backend import PEER
from cuteflash.tune.cells import Cell
from cuteflash.tune.explain import STAGE_WORDS, compiled_registers, footprint, newest_verdicts, ranked, where_lost
from cuteflash.tune.funnel import defaults
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.operations import SPECS, SWEPT_DTYPES, TASKS, Task, made_for
from cuteflash.tune.peers import PEERS
from cuteflash.tune.plan import space_title
from cuteflash.tune.rank import estimate
from cuteflash.tune.report.columns import Reasons, short, time_columns, trait_columns
from cuteflash.tune.report.links import LayoutPage
from cuteflash.tune.report.slots import slot_facts
from cuteflash.tune.report.verdict import PEER_WORDS, estimated, headline, measured
from cuteflash.tune.results import Run, Slot, all_candidates, cells_of, load_runs, measured_gpu, swept_target
from cuteflash.tune.select import shipped_defaults
from cuteflash.tune.store import STAGES, Store, Timing, Verdict, candidate_id

SCHEMA = 3
# One letter a candidate and problem: rejected by a stage, timed, neither, or not even compiled.
STATES = {stage: stage[0] for stage in STAGE_WORDS}
TIMED, WAITING, UNTOUCHED = "T", "w", "u"
COSTS = ("threads", "smem_bytes", "registers", "fragment_regs", "blocks")  # of a `Footprint`

Json = dict[str, Any]
Problem = tuple[str, str]  # mask and dtype
Verdicts = Mapping[str, Sequence[Verdict]]
ByPeer = Mapping[str, Run]


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """What a report is about."""

    target: str | None = None  # compile target; None is the only one that was swept
    families: Collection[Family] | None = None  # kernel families; None is all
    head_dims: Collection[tuple[int, int]] | None = None  # padded (head_dim, head_dim_v); None is all
    gpu: str | None = None  # whose timings; None is the only GPU there is. Of these the newest timing's sources count.

    def __post_init__(self) -> None:
        if self.target is not None:
            get_arch(self.target)
        for family in self.families or ():
            if family not in FAMILIES:
                raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """The candidates of one task, family and pair of padded head dims, by id in the page's order."""

    table: TableKey
    task: Task
    head_dims: tuple[int, int]
    candidates: dict[str, Traits]

    @property
    def title(self) -> str:
        return space_title(self.task, self.table.family, self.head_dims)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What the store knows within a scope; without any timing `gpu` is None."""

    target: str
    gpu: str | None
    verdicts: Verdicts
    timings: Sequence[Timing]
    runs: Sequence[Run]
    peers: Mapping[tuple[str, str], ByPeer]  # of a family's races and a cell
    rates: Sequence[tuple[str, float]]  # when, and TFLOP/s of the matrix product


def collect(store: Store, scope: Scope, pages: Sequence[LayoutPage] = ()) -> Json:
    """The page's values.

    Raises:
        ValueError: nothing was swept for the scope, or timings of several GPUs.
    """
    target = swept_target(store, scope.target)
    spaces = _spaces(store, scope, target)
    found = _find(store, scope, target, spaces)
    reasons = Reasons()
    encoded = [_space(store, space, found, reasons, pages) for space in spaces]
    moments = [one.at for one in found.timings] + [one.at for some in found.verdicts.values() for one in some]
    newest = found.timings[-1] if found.timings else None
    return {
        "schema": SCHEMA,
        "title": " · ".join(("cuteflash sweep", target, *([found.gpu] if found.gpu else []))),
        "verdict": headline(encoded),
        "peers": {name: PEER_WORDS[name] for name in PEERS if any(name in some for some in found.peers.values())},
        "target": target,
        "gpu": found.gpu,
        "driver": newest.driver if newest else None,
        "versions": dict(newest.versions) if newest else {},
        "source": newest.source if newest else None,
        "first": min(moments, default=None),
        "last": max(moments, default=None),
        "runs": [{"at": at, "tflops": short(tflops)} for at, tflops in found.rates],
        "stages": STAGE_WORDS,
        "templates": reasons.templates,
        "spaces": encoded,
    }


def _spaces(store: Store, scope: Scope, target: str) -> list[Space]:
    """The scope's candidates that were judged for the target."""
    judged = {verdict.candidate for verdict in store.verdicts(target=target)}
    judged |= {timing.candidate for timing in store.timings(target=target)}
    groups: dict[tuple[Task, Family, tuple[int, int]], dict[str, Traits]] = {}
    for name, traits in all_candidates(store).items():  # by id
        if name in judged:
            groups.setdefault(made_for(traits), {})[name] = traits
    best_first = get_arch(target).families
    order = sorted(groups, key=lambda one: (TASKS.index(one[0]), best_first.index(one[1]), one[2]))
    spaces = [
        Space(TableKey(SPECS[task].operation, target, family), task, head_dims, groups[task, family, head_dims])
        for task, family, head_dims in order
    ]
    there = "; ".join(space.title for space in spaces)
    for pair in scope.head_dims or ():
        if not any(pair == space.head_dims for space in spaces):
            raise ValueError(f"head_dim is {pair[0]}x{pair[1]}, padded; {store.path} has candidates of: {there}")
    families = scope.families or FAMILIES
    wanted = [space for space in spaces if space.table.family in families]
    wanted = [space for space in wanted if space.head_dims in (scope.head_dims or {space.head_dims})]
    if not wanted:
        raise ValueError(f"family is {', '.join(families)}; {store.path} has candidates of: {there}")
    return wanted


def _find(store: Store, scope: Scope, target: str, spaces: Iterable[Space]) -> Found:
    candidates = {name: traits for space in spaces for name, traits in space.candidates.items()}
    verdicts = newest_verdicts(store, target, candidates)
    timings = store.timings(target=target)
    if not timings:
        return Found(target, None, verdicts, (), (), {}, ())
    gpu = measured_gpu(store, target, scope.gpu)
    timings = [timing for timing in timings if timing.gpu == gpu]
    runs = load_runs(store, target, gpu, candidates)
    source = next((one.source for one in reversed(timings) if one.error is None), None)
    timings = [timing for timing in timings if timing.source == source] or timings
    rates = [(run["at"], float(run["matmul_tflops"])) for run in store.runs() if run["gpu"] == gpu]
    peers: dict[tuple[str, str], dict[str, Run]] = {}
    for family in dict.fromkeys(space.table.family for space in spaces):
        for run in load_runs(store, target, gpu, [PEER + name for name in PEERS], raced_with=family):
            peers.setdefault((family, run.cell), {})[run.candidate.removeprefix(PEER)] = run
    return Found(target, gpu, verdicts, timings, runs, peers, rates)


def _rate(rates: Iterable[tuple[str, float]], runs: Iterable[Run]) -> float | None:
    """The matrix product's rate in the run of the GPU's stages to whose clock a cell's times are scaled: its newest."""
    newest = max(run.at for run in runs)
    return next((rate for at, rate in sorted(rates, reverse=True) if at <= newest), None)


def _space(store: Store, space: Space, found: Found, reasons: Reasons, pages: Sequence[LayoutPage]) -> Json:
    """One space as JSON values; candidates are called by their place in `ids`."""
    number, cells = {name: place for place, name in enumerate(space.candidates)}, cells_of(store)
    runs = [run for run in found.runs if run.candidate in number]
    own = ranked(runs)
    peers = {cell: found.peers.get((space.table.family, cell), {}) for cell in own}
    shipped = shipped_defaults(store, space.table, space.head_dims, space.task)
    slots = slot_facts(runs, peers, shipped, number)
    rows = {candidate_id(traits) for traits in defaults((), space.table, space.task, space.head_dims)}
    costs = _costs(space, found)
    base, base_reasons = _states(space, found.verdicts, None, set(), reasons)
    return {
        "title": space.title,
        "verdict": measured(slots) if slots else estimated(space.candidates, costs["clocks"], rows),
        "family": space.table.family,
        "head_dim": space.head_dims[0],
        "head_dim_v": space.head_dims[1],
        "ids": list(number),
        "traits": trait_columns(
            kinds_of(
                space.table.operation, space.table.family, SPECS[space.task].dtypes, of_cache=space.task == "cache"
            ),
            list(space.candidates.values()),
        ),
        "costs": costs,
        "shipped": [number[name] for name in number if name in rows],
        "base": base,
        "reasons": base_reasons,
        "problems": _problems(space, found.verdicts, runs, reasons),
        "cells": [
            _cell(name, cells[name], own[name], found, number)
            | {"peers": {peer: short(run.ms) for peer, run in peers[name].items()}}
            for name in sorted(own, key=lambda name: _cell_order(cells[name]))
        ],
        "slots": sorted(slots, key=lambda slot: _problem_order((slot["mask"], slot["dtype"]))),
        "pages": _pages(space, number, pages),
    }


def _problems(space: Space, verdicts: Verdicts, runs: Iterable[Run], reasons: Reasons) -> list[Json]:
    """For each mask and dtype that was worked on how far every candidate came, and why not further."""
    timed: dict[Problem, set[str]] = {}
    for run in runs:
        timed.setdefault((run.slot.mask, run.slot.dtype), set()).add(run.candidate)
    problems = {_problem(one) for name in space.candidates for one in verdicts.get(name, ()) if one.problem}
    found = []
    for mask, dtype in sorted(problems | timed.keys(), key=_problem_order):
        states, why = _states(space, verdicts, (mask, dtype), timed.get((mask, dtype), set()), reasons)
        found.append({"mask": mask, "dtype": dtype, "states": states, "reasons": why})
    return found


def _states(
    space: Space, verdicts: Verdicts, problem: Problem | None, timed: Collection[str], reasons: Reasons
) -> tuple[str, dict[int, list[Any]]]:
    """(a letter for each candidate, its place → the encoded reason of the first stage that rejected it).

    Without a problem it is the verdict on all of them, the analytic prune's, that counts; with one that is not told
    again.
    """
    letters, why = [], {}
    for place, name in enumerate(space.candidates):
        every = verdicts.get(name, ())
        own = [one for one in every if problem is not None and one.problem and _problem(one) == problem]
        rejected = [one for one in (*own, *(one for one in every if not one.problem)) if not one.ok]
        first = min(rejected, key=lambda one: STAGES.index(one.stage), default=None)
        if name in timed:
            letters.append(TIMED)
        elif first is None:
            letters.append(WAITING if own else UNTOUCHED)
        else:
            letters.append(STATES[where_lost(first)])
        if first is not None and bool(first.problem) == (problem is not None):
            why[place] = reasons.encode(first.reason or "")
    return "".join(letters), why


def _problem(verdict: Verdict) -> Problem:
    """The mask and dtype of a verdict's `problem_id`."""
    dtype, _, mask, *_ = verdict.problem.split()
    return mask, dtype


def _problem_order(problem: Problem) -> tuple[int, int]:
    return MASK_KINDS.index(problem[0]), -SWEPT_DTYPES.index(problem[1])


def _costs(space: Space, found: Found) -> Json:
    """What each candidate that the architecture can run takes of a multiprocessor; None for the others.

    `clocks` is the analytic score, which was never measured, of those that no later stage rejected either.
    """
    arch = get_arch(found.target)
    columns: Json = {name: [] for name in (*COSTS, "clocks")}
    for name, traits in space.candidates.items():
        took = None
        if traits.check(arch) is None:
            took = footprint(traits, arch, compiled_registers(found.verdicts.get(name, ())))
        for cost in COSTS:
            columns[cost].append(None if took is None else getattr(took, cost))
        left = took is not None and _left(found.verdicts.get(name, ()))
        columns["clocks"].append(short(estimate(traits, arch)) if left else None)
    return columns | {"smem_limit": arch.smem_per_block}


def _left(verdicts: Iterable[Verdict]) -> bool:
    """Whether there is a problem on which every stage let a candidate pass; so it is before the first one."""
    passed: dict[str, bool] = {}
    for one in verdicts:
        if one.problem:
            passed[one.problem] = passed.get(one.problem, True) and one.ok
    return not passed or any(passed.values())


def _cell(name: str, cell: Cell, ordered: Sequence[Run], found: Found, number: Mapping[str, int]) -> Json:
    """A cell and its times, fastest first; `work` is TFLOP/s times milliseconds, `gigabytes` are read and written."""
    label = str(cell.seqlen) if cell.seqlen_q == cell.seqlen else f"{cell.seqlen_q}x{cell.seqlen}"
    return {
        "id": name,
        "label": label if cell.inputs == PLAIN else f"{label} {cell.inputs}",
        "mask": cell.mask,
        "dtype": cell.dtype,
        "lengths": Slot.of(cell).shape,
        "matmul": short(_rate(found.rates, ordered)),
        "work": short(ordered[0].tflops * ordered[0].ms),
        "gigabytes": short(cell.nbytes / 1e9),
        "who": [number[run.candidate] for run in ordered],
        "times": time_columns(ordered),
    }


def _cell_order(cell: Cell) -> tuple[Any, ...]:
    return (*_problem_order((cell.mask, cell.dtype)), cell.seqlen_q == cell.seqlen, cell.seqlen, cell.seqlen_q)


def _pages(space: Space, number: Mapping[str, int], pages: Iterable[LayoutPage]) -> list[Json]:
    own = [page for page in pages if (page.target, page.family) == (space.table.target, space.table.family)]
    if not own:
        return []  # making the keys below takes a fifth of a report's time
    places = {frozenset(dataclasses.asdict(traits).items()): number[name] for name, traits in space.candidates.items()}
    who = [(places.get(frozenset(page.traits.items())), page) for page in own]
    return [
        {"who": place, "mask": page.mask, "dtype": page.dtype, "title": page.title, "href": page.href}
        for place, page in who
        if place is not None
    ]
