"""Why a configuration was rejected, or by how much and where it lost: what a sweep knows about it, in words."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cuteflash.traits.arch import BLOCK_SMEM, FAMILIES, ArchSpec, get_arch
from cuteflash.traits.row import OF_CACHES, TableKey, Traits, kind_of, kinds_of
from cuteflash.traits.sm80 import WARP
from cuteflash.traits.values import field_types, values_of
from cuteflash.tune.operations import DEFAULT, SPECS, Task, task_of_traits
from cuteflash.tune.rank import BEYOND
from cuteflash.tune.results import Run, candidates_of, lead, load_runs, measured_gpu
from cuteflash.tune.store import STAGES, Store, Verdict
from cuteflash.tune.units import Loop, loops

LIMIT = "limit"  # the stage of a candidate that the prune lets through and a limit does not
STAGE_WORDS = {
    "prune": "cannot run",
    LIMIT: "left out before compiling",
    "compile": "rejected by the compiler's report",
    "gate": "rejected by the correctness gate",
    "time": "failed while it was timed",
}
SHOWN = 12  # candidates described one by one; more are counted


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """What a candidate takes of a multiprocessor."""

    threads: int  # of one block
    smem_bytes: int  # of one block
    smem_limit: int  # what one block may ask for
    registers: int  # a thread may use; of a kernel that splits them by role, those of its consumers
    fragment_regs: int  # of those, what the accumulators and operand fragments need at least
    stages: int  # tiles in flight of what the main loop loads
    blocks: int  # that fit on one multiprocessor together
    warps: int  # resident on it then


def explain(
    store: Store,
    table: TableKey,
    head_dims: tuple[int, int],
    fields: Mapping[str, Any] | None = None,
    gpu: str | None = None,
    task: Task | None = None,
) -> str:
    """What the store knows: how many candidates went how far, who won each cell, then each candidate that matches.

    Args:
        store: the database.
        table: operation, compile target and kernel family.
        head_dims: padded (head_dim, head_dim_v).
        fields: trait → value that a candidate must have.
        gpu: whose timings; None takes the only GPU there is.
        task: None is the table's operation on 16-bit operands.

    Raises:
        ValueError: no such target, family or trait, nothing swept for these head dims, no candidate with these values,
            or timings of several GPUs.
    """
    operation, target, family = table
    arch, fields, columns = get_arch(target), fields or {}, f"{head_dims[0]}x{head_dims[1]}"
    task = task or operation
    other = "" if task == DEFAULT else f"{task}, "
    _check_asked(table, task, fields)
    candidates = candidates_of(store, task, family, head_dims)
    if not candidates:
        raise ValueError(f"{store.path} has no {other}{family} candidates for head dims {columns}; sweep them first")
    matching = _matching(candidates, fields)
    verdicts = newest_verdicts(store, target, candidates)
    took = {
        name: footprint(traits, arch, compiled_registers(verdicts.get(name, ()))) for name, traits in candidates.items()
    }
    runs: list[Run] = []
    errors: dict[str, list[str]] = {}
    if store.timings(target=target):
        gpu = measured_gpu(store, target, gpu)
        runs = load_runs(store, target, gpu, candidates)
        for timing in store.timings(target=target, gpu=gpu):
            if timing.error is not None:
                errors.setdefault(timing.candidate, []).append(f"  failed: {timing.cell}: {timing.error}")
    cells = ranked(runs)
    lines = [f"{target}, {other}family {family}, head dims {columns}: {len(candidates)} candidates considered"]
    lines += funnel_lines(candidates, verdicts, {run.candidate for run in runs})
    if cells:
        lines += ["", "winners", *(f"  {_winner_line(group, candidates)}" for group in cells.values())]
    reports = []
    for name in matching:
        rejections = [verdict for verdict in verdicts.get(name, ()) if not verdict.ok]
        reports.append(_report(name, candidates, took, cells.values(), rejections, errors.get(name, ())))
    for _, report in sorted(reports)[:SHOWN]:
        lines += ["", *report]
    if len(reports) > SHOWN:
        lines += ["", f"{len(reports) - SHOWN} more candidates match; more fields in the filter tell them apart"]
    return "\n".join(lines) + "\n"


def _report(
    name: str,
    candidates: Mapping[str, Traits],
    took: Mapping[str, Footprint],
    cells: Iterable[Sequence[Run]],
    rejections: Sequence[Verdict],
    errors: Iterable[str],
) -> tuple[tuple[int, float], list[str]]:
    """(order among all reports: timed ones first, fastest first, then those that came far; lines on a candidate)."""
    places = [(group, place) for group in cells for place, run in enumerate(group) if run.candidate == name]
    behind = [margin(group[place], group[0])[0] for group, place in places]
    lines = [*map(_rejection_line, rejections), *errors]
    lines += [_place_line(group, place, candidates) for group, place in places]
    if any(place for _, place in places):
        best = places[behind.index(max(behind))][0][0].candidate
        apart = differences(candidates[name], took[name], candidates[best], took[best])
        lines.append(f"  differs from the winner of its worst cell: {'; '.join(apart)}")
    lines = lines or ["  not rejected and not timed yet"]
    if behind:
        order = 0, sum(behind) / len(behind)
    else:
        order = 1 + bool(rejections), -float(max((STAGES.index(one.stage) for one in rejections), default=0))
    head = [f"{title(candidates[name])}  [{name}]", _footprint_line(took[name])]
    return order, [*head, *map(_bound_line, loops(candidates[name])), *lines]


def newest_verdicts(store: Store, target: str, names: Collection[str]) -> dict[str, list[Verdict]]:
    """Candidate → its newest verdict of each stage and problem, whatever source it was built from."""
    newest = {
        (verdict.candidate, verdict.problem, verdict.stage): verdict
        for verdict in store.verdicts(target=target)
        if verdict.candidate in names
    }
    found: dict[str, list[Verdict]] = {}
    for verdict in newest.values():
        found.setdefault(verdict.candidate, []).append(verdict)
    return found


def ranked(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Cell → its runs, fastest first."""
    cells: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.cell, run.ms, run.candidate)):
        cells.setdefault(run.cell, []).append(run)
    return cells


def margin(run: Run, winner: Run) -> tuple[float, float, float]:
    """How much slower a run is than another: (at the medians, at least, at most), see `results.lead`."""
    return (0.0, 0.0, 0.0) if run is winner else lead({run.cell: winner}, {run.cell: run})


def title(traits: Traits) -> str:
    """A candidate in few words: its kind if there are several, its tile, and every trait that is not the default."""
    of_cache = isinstance(traits, OF_CACHES)
    several = len(kinds_of(traits.operation, traits.family, traits.dtypes, of_cache)) > 1
    words = [*([kind_of(traits)] if several else []), f"{traits.tile_m}x{traits.tile_n}"]
    for field in dataclasses.fields(traits):
        value = getattr(traits, field.name)
        if field.default is not dataclasses.MISSING and value != field.default:
            words.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(words)


def footprint(traits: Traits, arch: ArchSpec, compiled_regs: int | None = None) -> Footprint:
    """What a candidate takes of a multiprocessor; `compiled_regs` registers a thread, if it was compiled."""
    own: Any = traits
    if traits.family == "sm80":
        registers = share = compiled_regs or own.register_limit(arch)
    else:
        registers, share = own.mma_regs, arch.regs_per_sm // traits.num_threads
    streamed = next(name for name in SPECS[task_of_traits(traits)].streamed if name in traits.smem_plan)
    blocks = min(
        arch.smem_per_sm // (traits.smem_bytes + BLOCK_SMEM),
        arch.max_threads_per_sm // traits.num_threads,
        arch.regs_per_sm // (share * traits.num_threads),
    )
    return Footprint(
        threads=traits.num_threads,
        smem_bytes=traits.smem_bytes,
        smem_limit=arch.smem_per_block,
        registers=registers,
        fragment_regs=traits.accumulator_regs,
        stages=traits.smem_plan[streamed].stages,
        blocks=blocks,
        warps=blocks * traits.num_threads // WARP,
    )


def differences(traits: Traits, own: Footprint, winner: Traits, best: Footprint) -> tuple[str, ...]:
    """In what a candidate differs from the winner, its own value first: traits, then what they cost."""
    mine, others = values_of(traits), values_of(winner)
    words = [
        f"{name} {value} against {others[name]}"
        for name, value in mine.items()
        if name in others and value != others[name]
    ]
    costs = (
        ("bytes of shared memory", own.smem_bytes, best.smem_bytes),
        ("registers a thread", own.registers, best.registers),
        ("of them for fragments", own.fragment_regs, best.fragment_regs),
        ("blocks on an SM", own.blocks, best.blocks),
        ("warps on an SM", own.warps, best.warps),
    )
    return (*words, *(f"{cost} {what} against {other}" for what, cost, other in costs if cost != other))


def funnel_lines(
    candidates: Iterable[str], verdicts: Mapping[str, Sequence[Verdict]], timed: set[str]
) -> tuple[str, ...]:
    """How many candidates each stage rejected everywhere, and how many were timed."""
    lost: collections.Counter[str] = collections.Counter()
    for name in candidates:
        for stage in STAGES:
            of_stage = [verdict for verdict in verdicts.get(name, ()) if verdict.stage == stage]
            if of_stage and not any(verdict.ok for verdict in of_stage):
                lost[where_lost(of_stage[0])] += 1
                break
    lines = [f"  {lost[stage]} {words}" for stage, words in STAGE_WORDS.items() if lost[stage]]
    return (*lines, f"  {len(timed)} timed")


def where_lost(verdict: Verdict) -> str:
    """Of a rejection its stage, or `LIMIT`: a key of `STAGE_WORDS`."""
    beyond = verdict.stage == "prune" and (verdict.reason or "").endswith(BEYOND)
    return LIMIT if beyond else verdict.stage


def compiled_registers(verdicts: Iterable[Verdict]) -> int | None:
    """Registers a thread of the compiled kernels, the most over the problems; None if none was compiled."""
    return max((verdict.details["registers"] for verdict in verdicts if "registers" in verdict.details), default=None)


def _winner_line(group: Sequence[Run], candidates: Mapping[str, Traits]) -> str:
    """The fastest on a cell with its interval, and its margin before the second."""
    best = group[0]
    line = f"{best.cell}: {title(candidates[best.candidate])}, {_time_words(best)}"
    if len(group) < 2:
        return f"{line}, the only one timed"
    before = f"before {title(candidates[group[1].candidate])}"
    return f"{line}; {_margin_words(group[1], best, before)}"


def _place_line(group: Sequence[Run], place: int, candidates: Mapping[str, Traits]) -> str:
    """A candidate's time on one cell, and by how much it lost."""
    run, winner = group[place], group[0]
    line = f"  {run.cell}: {_time_words(run)}, {place + 1} of {len(group)}: "
    if not place:
        return f"{line}the winner"
    slower = f"slower than {title(candidates[winner.candidate])} at {winner.tflops:.1f} TFLOP/s"
    return line + _margin_words(run, winner, slower)


def _margin_words(run: Run, winner: Run, what: str) -> str:
    middle, least, most = margin(run, winner)
    sure = "beyond noise" if least > 0 else "within noise"
    return f"{percent(middle)} {what} ({percent(least)} to {percent(most)}, {sure})"


def _rejection_line(verdict: Verdict) -> str:
    problem = f" ({verdict.problem})" if verdict.problem else ""
    return f"  {STAGE_WORDS[where_lost(verdict)]}{problem}: {verdict.reason}"


def _footprint_line(took: Footprint) -> str:
    return (
        f"  takes  {took.smem_bytes} of {took.smem_limit} bytes of shared memory in {_plural(took.stages, 'stage')}; "
        f"{took.registers} registers a thread, {took.fragment_regs} of them for fragments; "
        f"{_plural(took.blocks, 'block')} of {took.threads} threads on an SM"
    )


def _bound_line(loop: Loop) -> str:
    """What keeps a main loop from being faster, by what its steps ask of each unit."""
    others = [f"{unit} {clocks:.0f}" for unit, clocks in loop.clocks.items() if unit != loop.bound]
    return (
        f"  bound  {loop.title}: {loop.bound}, {loop.clocks[loop.bound]:.0f} clocks a step of {loop.rows} x "
        f"{loop.columns} scores; {', '.join(others)}"
    )


def _time_words(run: Run) -> str:
    """Median, interval and rate."""
    high = f"{run.high:.4f}" if math.isfinite(run.high) else "unknown"
    return f"{run.ms:.4f} ms ({run.low:.4f} to {high}), {run.tflops:.1f} TFLOP/s"


def percent(share: float) -> str:
    """0.0512 as "5.1 %"."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "unknown"


def _check_asked(table: TableKey, task: Task, fields: Mapping[str, Any]) -> None:
    if table.family not in FAMILIES:
        raise ValueError(f"family is {table.family!r}; allowed: {', '.join(FAMILIES)}")
    kinds = kinds_of(table.operation, table.family, SPECS[task].dtypes, of_cache=task == "cache")
    known = dict.fromkeys([*(name for kind in kinds for name in field_types(kind)), "kind"])
    for name in fields:
        if name not in known:
            raise ValueError(f"{name} is not a trait of the {table.family} family; allowed: {', '.join(known)}")


def _matching(candidates: Mapping[str, Traits], fields: Mapping[str, Any]) -> list[str]:
    values = {name: values_of(traits) for name, traits in candidates.items()}
    found = [name for name, own in values.items() if all(own.get(field) == value for field, value in fields.items())]
    if not found:
        wanted = ", ".join(f"{name}={value}" for name, value in fields.items())
        considered = "; ".join(
            f"{name}: {', '.join(map(str, sorted({own[name] for own in values.values() if name in own})))}"
            for name in fields
        )
        raise ValueError(f"no candidate has {wanted}; considered, in other combinations too: {considered}")
    return found


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
