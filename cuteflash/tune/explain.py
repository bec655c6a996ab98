"""Why a configuration was rejected, or by how much and where it lost: what a sweep knows about it, in words."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cuteflash.traits.arch import BLOCK_SMEM, FAMILIES, ArchSpec, Family, get_arch
from cuteflash.traits.row import TRAITS, Traits
from cuteflash.traits.sm80 import WARP
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.rank import BEYOND
from cuteflash.tune.results import Run, candidates_of, lead, load_runs, measured_gpu
from cuteflash.tune.store import STAGES, Store, Verdict

LIMIT = "limit"  # where a candidate stays that the prune lets through and a limit does not
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
    """What a candidate takes of a multiprocessor.

    Attributes:
        threads: of one block.
        smem_bytes, smem_limit: of one block, and what one block may ask for.
        registers: a thread may use; of a kernel that splits them by role, those of its consumers.
        fragment_regs: of those, what the accumulators and operand fragments need at least.
        stages: K and V tiles in flight.
        blocks: that fit on one multiprocessor together.
        warps: resident on it then.
    """

    threads: int
    smem_bytes: int
    smem_limit: int
    registers: int
    fragment_regs: int
    stages: int
    blocks: int
    warps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate's time on one cell beside the winner's.

    Attributes:
        run: its own.
        winner, winner_title: the fastest one's run, and what it is; its own where it won.
        rank, of: its place among all that were timed on the cell.
    """

    run: Run
    winner: Run
    winner_title: str
    rank: int
    of: int

    @property
    def margin(self) -> tuple[float, float, float]:
        """How much slower than the winner, 0.05 is 5 %: (at the medians, at least, at most)."""
        return margin(self.run, self.winner)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One candidate: what it takes, who rejected it and why, and its times."""

    candidate: str
    title: str
    footprint: Footprint
    rejections: tuple[Verdict, ...]
    errors: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    differences: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The answer for all candidates that a filter leaves.

    Attributes:
        heading: what was asked, and how many candidates went how far.
        winners: one line a cell: the fastest, and its margin before the second.
        reports: of the candidates that match, at most `SHOWN`, the furthest and fastest first.
        left_out: how many more match.
    """

    heading: tuple[str, ...]
    winners: tuple[str, ...]
    reports: tuple[Report, ...]
    left_out: int

    @property
    def text(self) -> str:
        """For reading."""
        lines = [*self.heading]
        if self.winners:
            lines += ["", "winners", *(f"  {line}" for line in self.winners)]
        for report in self.reports:
            lines += ["", *report_lines(report)]
        if self.left_out:
            lines += ["", f"{self.left_out} more candidates match; more fields in the filter tell them apart"]
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What is to be explained.

    Attributes:
        target, family: compile target and kernel family.
        head_dims: padded (head_dim, head_dim_v).
        fields: trait → value that a candidate must have.
        gpu: whose timings; None takes the only GPU there is.
        source: fingerprint of the sources whose timings count; None takes the newest timing's.
    """

    target: str
    family: Family
    head_dims: tuple[int, int]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gpu: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family is {self.family!r}; allowed: {', '.join(FAMILIES)}")
        known = [field.name for field in dataclasses.fields(TRAITS["fwd", self.family])]
        for name in self.fields:
            if name not in known:
                raise ValueError(f"{name} is no trait of the {self.family} family; allowed: {', '.join(known)}")


def explain(store: Store, asked: Asked) -> Explanation:
    """What the store knows about the candidates that match.

    Raises:
        ValueError: no such trait, nothing swept for these head dims, no candidate with these values, or timings of
            several GPUs.
    """
    arch = get_arch(asked.target)
    everybody = candidates_of(store, asked.family, asked.head_dims)
    columns = f"{asked.head_dims[0]}x{asked.head_dims[1]}"
    if not everybody:
        raise ValueError(f"{store.path} has no {asked.family} candidates for head dims {columns}; sweep them first")
    matching = _matching(everybody, asked)
    verdicts = newest_verdicts(store, asked.target, everybody)
    took = {name: footprint(traits, arch, _registers(verdicts.get(name, ()))) for name, traits in everybody.items()}
    runs: list[Run] = []
    errors: dict[str, list[str]] = {}
    if store.timings(target=asked.target):
        gpu = measured_gpu(store, asked.target, asked.gpu)
        runs = load_runs(store, asked.target, gpu, everybody, asked.source)
        for timing in store.timings(target=asked.target, gpu=gpu):
            if timing.error is not None:
                errors.setdefault(timing.candidate, []).append(f"{timing.cell}: {timing.error}")
    cells = ranked(runs)
    reports = []
    for name in matching:
        comparisons = compare(name, cells, everybody)
        worst = max(comparisons, key=lambda one: one.margin[0], default=None)
        apart: tuple[str, ...] = ()
        if worst is not None and worst.rank > 1:
            best = worst.winner.candidate
            apart = differences(everybody[name], took[name], everybody[best], took[best])
        rejections = tuple(verdict for verdict in verdicts.get(name, ()) if not verdict.ok)
        failures = tuple(errors.get(name, ()))
        reports.append(Report(name, title(everybody[name]), took[name], rejections, failures, comparisons, apart))
    reports.sort(key=_most_telling)
    heading = (
        f"{asked.target}, family {asked.family}, head dims {columns}: {len(everybody)} candidates considered",
        *funnel_lines(everybody, verdicts, {run.candidate for run in runs}),
    )
    winners = tuple(winner_line(group, everybody) for group in cells.values())
    return Explanation(heading, winners, tuple(reports[:SHOWN]), max(0, len(reports) - SHOWN))


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


def compare(name: str, cells: Mapping[str, Sequence[Run]], candidates: Mapping[str, Traits]) -> tuple[Comparison, ...]:
    """A candidate's place on every cell that it was timed on."""
    return tuple(
        Comparison(run, group[0], title(candidates[group[0].candidate]), place, len(group))
        for group in cells.values()
        for place, run in enumerate(group, 1)
        if run.candidate == name
    )


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
    """A candidate in few words: its tile, and every trait that is not the default."""
    words = [f"{traits.tile_m}x{traits.tile_n}"]
    for field in dataclasses.fields(traits):
        value = getattr(traits, field.name)
        if field.default is not dataclasses.MISSING and value != field.default:
            words.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(words)


def footprint(traits: Traits, arch: ArchSpec, compiled_regs: int | None = None) -> Footprint:
    """What a candidate takes of a multiprocessor; `compiled_regs` registers a thread, where it was compiled."""
    if isinstance(traits, FwdTraitsSm90):
        registers, share = traits.mma_regs, arch.regs_per_sm // traits.num_threads
    else:
        registers = share = compiled_regs or traits.register_limit(arch)
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
        stages=traits.kv_stage,
        blocks=blocks,
        warps=blocks * traits.num_threads // WARP,
    )


def differences(traits: Traits, own: Footprint, winner: Traits, best: Footprint) -> tuple[str, ...]:
    """In what a candidate differs from the winner, its own value first: traits, then what they cost."""
    words = [
        f"{field.name} {getattr(traits, field.name)} against {getattr(winner, field.name)}"
        for field in dataclasses.fields(traits)
        if getattr(traits, field.name) != getattr(winner, field.name)
    ]
    costs = (
        ("bytes of shared memory", own.smem_bytes, best.smem_bytes),
        ("registers a thread", own.registers, best.registers),
        ("of them for fragments", own.fragment_regs, best.fragment_regs),
        ("blocks on an SM", own.blocks, best.blocks),
        ("warps on an SM", own.warps, best.warps),
    )
    return (*words, *(f"{mine} {what} against {other}" for what, mine, other in costs if mine != other))


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


def winner_line(group: Sequence[Run], candidates: Mapping[str, Traits]) -> str:
    """The fastest on a cell with its interval, and its margin before the second."""
    best = group[0]
    line = f"{best.cell}: {title(candidates[best.candidate])}, {time_words(best)}"
    if len(group) < 2:
        return f"{line}, the only one timed"
    middle, least, most = margin(group[1], best)
    sure = "beyond noise" if least > 0 else "within noise"
    second = title(candidates[group[1].candidate])
    return f"{line}; {percent(middle)} before {second} ({percent(least)} to {percent(most)}, {sure})"


def report_lines(report: Report) -> list[str]:
    """A report, for reading."""
    took = report.footprint
    lines = [
        f"{report.title}  [{report.candidate}]",
        f"  takes  {took.smem_bytes} of {took.smem_limit} bytes of shared memory in {took.stages} "
        f"{_plural('stage', took.stages)}; "
        f"{took.registers} registers a thread, {took.fragment_regs} of them for fragments; "
        f"{took.blocks} {_plural('block', took.blocks)} of {took.threads} threads on an SM",
    ]
    for verdict in report.rejections:
        where = f" ({verdict.problem})" if verdict.problem else ""
        lines.append(f"  {STAGE_WORDS[where_lost(verdict)]}{where}: {verdict.reason}")
    lines += [f"  failed: {error}" for error in report.errors]
    lines += [f"  {comparison_line(comparison)}" for comparison in report.comparisons]
    if report.differences:
        lines.append(f"  differs from the winner of its worst cell: {'; '.join(report.differences)}")
    if len(lines) == 2:
        lines.append("  not rejected and not timed yet")
    return lines


def comparison_line(comparison: Comparison) -> str:
    """A candidate's time on one cell, and by how much it lost."""
    run, (middle, least, most) = comparison.run, comparison.margin
    line = f"{run.cell}: {time_words(run)}, {comparison.rank} of {comparison.of}"
    if comparison.rank == 1:
        return f"{line}: the winner"
    sure = "beyond noise" if least > 0 else "within noise"
    behind = f"{percent(middle)} slower than {comparison.winner_title} at {comparison.winner.tflops:.1f} TFLOP/s"
    return f"{line}: {behind} ({percent(least)} to {percent(most)}, {sure})"


def time_words(run: Run) -> str:
    """Median, interval and rate."""
    high = f"{run.high:.4f}" if math.isfinite(run.high) else "unknown"
    return f"{run.ms:.4f} ms ({run.low:.4f} to {high}), {run.tflops:.1f} TFLOP/s"


def percent(share: float) -> str:
    """0.0512 as "5.1 %"."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "unknown"


def _matching(candidates: Mapping[str, Traits], asked: Asked) -> list[str]:
    found = [
        name
        for name, traits in candidates.items()
        if all(getattr(traits, field) == value for field, value in asked.fields.items())
    ]
    if not found:
        wanted = ", ".join(f"{name}={value}" for name, value in asked.fields.items())
        considered = "; ".join(
            f"{name}: {', '.join(map(str, sorted({getattr(traits, name) for traits in candidates.values()})))}"
            for name in asked.fields
        )
        raise ValueError(f"no candidate has {wanted}; considered, in other combinations too: {considered}")
    return found


def _registers(verdicts: Iterable[Verdict]) -> int | None:
    """Registers a thread of the compiled kernels, the most over the problems."""
    return max((verdict.details["registers"] for verdict in verdicts if "registers" in verdict.details), default=None)


def _most_telling(report: Report) -> tuple[int, float, str]:
    """Timed ones first, fastest first, then those that came far."""
    if report.comparisons:
        return 0, sum(one.margin[0] for one in report.comparisons) / len(report.comparisons), report.title
    if not report.rejections:
        return 1, 0.0, report.title
    return 2, -max(STAGES.index(verdict.stage) for verdict in report.rejections), report.title


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
