"""What a sweep found: shown, explained, exported and reported as a page."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from cuteflash.cli.options import Usage, head_dims, names
from cuteflash.dispatch import padded_head_dim
from cuteflash.output import check_file, write_file
from cuteflash.problem import Operands
from cuteflash.problem_names import problem_id
from cuteflash.traits.arch import ARCHS, FAMILIES, get_arch
from cuteflash.traits.row import TableKey
from cuteflash.tune.backend import PEER
from cuteflash.tune.cells import Cell
from cuteflash.tune.explain import explain as explanation_of
from cuteflash.tune.explain import newest_verdicts, ranked, title
from cuteflash.tune.funnel import Funnel
from cuteflash.tune.operations import DEFAULT, SPECS, SWEPT, SWEPT_DTYPES, swept_kernel, task_of
from cuteflash.tune.plan import Plan, default_traits
from cuteflash.tune.progress import summary
from cuteflash.tune.report import Scope, make_report
from cuteflash.tune.results import Run, all_candidates, load_runs, swept_target
from cuteflash.tune.store import Store, StoreError, candidate_id
from cuteflash.tune.worker import StartFailed

PLAIN_WIDTH = 160  # columns of a table if stdout is not a terminal
DATABASE = pathlib.Path("sweep.sqlite")
INTERRUPTED = 130  # exit status

Database = Annotated[pathlib.Path, typer.Option("--db", help="The sweep's database.")]
Arch = Annotated[str | None, typer.Option(help=f"One of {', '.join(ARCHS)}; default: the one that was swept.")]
FamilyName = Annotated[
    str | None, typer.Option("--family", help=f"Of {', '.join(FAMILIES)}; default: the arch's best.")
]
Families = Annotated[str | None, typer.Option("--family", help="Comma-separated families; default: those swept.")]
HeadDims = Annotated[str | None, typer.Option("--head-dim", help="Comma-separated; default: those swept.")]
Jobs = Annotated[int, typer.Option(min=1, help="Compiling processes.")]
Kernel = Annotated[str, typer.Option("--kernel", "--operation", help=f"One of {', '.join(SWEPT)}.")]
TransposedV = Annotated[bool, typer.Option("--transposed-v", help="V of 8 bits is given as V^T, not as its rows.")]
Gpu = Annotated[str | None, typer.Option(help="Whose timings, if there are several GPUs'.")]


def explain(
    *,
    arch: Arch = None,
    family: FamilyName = None,
    head_dim: Annotated[str | None, typer.Option(help="Columns of Q and K; not needed for latents.")] = None,
    head_dim_v: Annotated[str | None, typer.Option(help="Columns of V and O; default: the same.")] = None,
    where: Annotated[str | None, typer.Option(help="Traits to look for, e.g. tile_m=128,q_in_regs=true.")] = None,
    gpu: Gpu = None,
    kernel: Kernel = DEFAULT,
    dtype: Annotated[str, typer.Option(help=f"Of the operands, one of {', '.join(SWEPT_DTYPES)}.")] = "bf16",
    transposed_v: TransposedV = False,
    database: Database = DATABASE,
) -> None:
    """Say why a configuration was rejected, or by how much and where it lost, and by what margin the winner won."""
    with opened(database) as store, Usage():
        (swept_name,) = one(names("kernel", kernel, SWEPT), "kernel", kernel)
        operation, form = swept_kernel(swept_name)
        target = swept(store, arch)
        (dtype,) = one(names("dtype", dtype, SWEPT_DTYPES), "dtype", dtype)
        task = task_of(operation, dtype, transposed_v, form)
        dims = SPECS[task].latent_dims
        if head_dim is not None:
            (dims,) = one(head_dims(head_dim, head_dim_v), "head_dim", head_dim)
        if dims is None:
            raise ValueError("sweep explain needs --head-dim, e.g. --head-dim 128")
        chosen = (names("family", family, FAMILIES) or get_arch(target).families)[0]
        table = TableKey(operation, target, chosen)
        typer.echo(explanation_of(store, table, padded(dims), _fields(where), gpu, task), nl=False)


def export(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The form, and the only one.")] = True,
    output: Annotated[pathlib.Path | None, typer.Option("-o", "--output", help="File; default: stdout.")] = None,
    database: Database = DATABASE,
) -> None:
    """Write everything that the database holds as JSON."""
    with opened(database) as store, Usage():
        if output is not None:
            _check_output(output, database)
        text = json.dumps(store.export(), indent=1, allow_nan=False)
        if output is None:
            typer.echo(text)
        else:
            write_file(output, text + "\n")


def report(
    *,
    arch: Arch = None,
    family: Families = None,
    head_dim: HeadDims = None,
    head_dim_v: Annotated[
        str | None, typer.Option(help="Columns of V and O, one for each --head-dim; default: the same.")
    ] = None,
    gpu: Gpu = None,
    layouts: Annotated[
        pathlib.Path | None, typer.Option(help="A gallery of `cuteflash layouts --all`; rows link to their pages.")
    ] = None,
    output: Annotated[pathlib.Path | None, typer.Option("-o", "--output", help="File to write.")] = None,
    database: Database = DATABASE,
) -> None:
    """Write what was found as one HTML page without network: winners, what traits are worth, every candidate."""
    with opened(database) as store, Usage():
        if output is None:
            raise ValueError("sweep report needs -o, e.g. -o report.html")
        if head_dim_v is not None and head_dim is None:
            raise ValueError("head_dim_v is given without head_dim; allowed: both, or --head-dim alone")
        _check_output(output, database)
        target = swept(store, arch)
        pairs = tuple(map(padded, head_dims(head_dim, head_dim_v))) if head_dim is not None else None
        scope = Scope(target, tuple(names("family", family, FAMILIES)) or None, pairs, gpu)
        size = write_file(output, make_report(store, scope, layouts, output.parent))
        typer.echo(f"{output}: {size / 1e6:.2f} MB")


def show(funnel: Funnel, store: Store, show_rejected: bool) -> None:
    """The funnel's counts, why candidates left and, if there are times, who won."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(_spaces(funnel))
    for stage, counts in funnel.watch.counts.items():
        console.print(f"{stage}: {summary(counts)}", highlight=False, markup=False)
    left = list(_rejected(funnel, store))
    for line in (
        [f"{stage}  {space}  {what}: {why}" for stage, space, what, why in left] if show_rejected else _kinds(left)
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if funnel.gpu:
        console.print(_times(funnel.plan, store, funnel.gpu))
        console.print(
            "sweep explain says why a configuration lost, sweep apply writes the table that dispatch uses",
            highlight=False,
        )


def as_json(funnel: Funnel, store: Store) -> dict[str, Any]:
    """The funnel as JSON values; the database has the rest."""
    return {
        "target": funnel.plan.target,
        "spaces": [
            {
                "operation": space.table.operation,
                "task": space.task,
                "family": space.table.family,
                "head_dim": space.head_dims[0],
                "head_dim_v": space.head_dims[1],
                "considered": len(space.chosen) + len(space.refused),
                "kept": len(space.chosen),
            }
            for space in funnel.spaces
        ],
        "stages": {stage: dict(counts) for stage, counts in funnel.watch.counts.items()},
        "rejected": [
            {"stage": stage, "problem": space, "candidate": what, "reason": reason}
            for stage, space, what, reason in _rejected(funnel, store)
        ],
        "said": funnel.watch.said,
    }


def _spaces(funnel: Funnel) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title=funnel.plan.target, title_justify="left")
    for name in ("family", "head dims"):
        table.add_column(name)
    for name in ("considered", "rejected", "left"):
        table.add_column(name, justify="right")
    for space in funnel.spaces:
        considered = len(space.chosen) + len(space.refused)
        numbers = (considered, len(space.refused), len(space.chosen))
        family, columns = space.title.rsplit(" ", 1)
        table.add_row(family, columns, *map(str, numbers))
    return table


def _rejected(funnel: Funnel, store: Store) -> Iterator[tuple[str, str, str, str]]:
    """(stage, problem, candidate, reason) of all candidates that left."""
    problems = {problem_id(cell.problem) for cell in funnel.plan.cells}
    chosen: dict[str, str] = {}
    for space in funnel.spaces:
        for traits, reason in space.refused:
            yield "prune", space.title, title(traits), reason
        chosen |= {candidate_id(traits): f"{traits.family} {title(traits)}" for traits in space.chosen}
    for name, verdicts in newest_verdicts(store, funnel.plan.target, chosen).items():
        for verdict in verdicts:
            if not verdict.ok and verdict.problem in problems:
                yield verdict.stage, verdict.problem, chosen[name], str(verdict.reason)


def _kinds(left: Iterable[tuple[str, str, str, str]]) -> list[str]:
    """How often each kind of reason, whatever its numbers, with one of them."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for stage, _, _, reason in left:
        kinds.setdefault((stage, re.sub(r"\d+", "0", reason)), []).append(reason)
    ordered = sorted(kinds.items(), key=lambda item: (item[0][0] != "prune", -len(item[1])))
    lines = [f"  {len(reasons):5}  {stage}: {reasons[0]}" for (stage, _), reasons in ordered]
    return ["rejected, by kind of reason, with one of each (--show-rejected has all):", *lines] if lines else []


def _times(plan: Plan, store: Store, gpu: str) -> Table:
    """Of each cell and family the fastest, the default and the peers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("cell", "family", "fastest"):
        table.add_column(name)
    rated = "rate" if any(cell.form for cell in plan.cells) else "TFLOP/s"
    for name in (rated, "default", "gain", *plan.peers, "of matmul"):
        table.add_column(name, justify="right")
    rate = next((run["matmul_tflops"] for run in reversed(store.runs()) if run["gpu"] == gpu), None)
    traits = all_candidates(store)
    cells = ranked(load_runs(store, plan.target, gpu, traits))
    peers = load_runs(store, plan.target, gpu, [PEER + name for name in plan.peers])
    beside = {(run.cell, run.candidate): run for run in peers}
    for cell, family in itertools.product(plan.cells, plan.families):
        runs = [run for run in cells.get(cell.id, ()) if traits[run.candidate].family == family]
        if runs:
            defaults = set(default_traits(cell, plan.target, family))
            default = next((run for run in runs if traits[run.candidate] in defaults), None)
            best = runs[0]
            gain = f"{default.ms / best.ms - 1:+.1%}" if default is not None else "-"
            share = f"{best.tflops / rate:.2f}" if rate and not cell.form else "-"
            others = [_rate(cell, beside.get((cell.id, PEER + name))) for name in plan.peers]
            fastest = title(traits[best.candidate])
            table.add_row(cell.label, family, fastest, _rate(cell, best), _rate(cell, default), gain, *others, share)
    return table


def _rate(cell: Cell, run: Run | None) -> str:
    """TFLOP/s; of a form of few queries, whose time is that of reading K and V, what it reads and writes."""
    if run is None:
        return "-"
    return f"{cell.nbytes / (run.ms * 1e9):.2f} TB/s" if cell.form else f"{run.tflops:.0f}"


@contextlib.contextmanager
def stopping(kept: Callable[[], str]) -> Iterator[None]:
    """Turns what may stop a command into a message that says what is kept, and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        complain(f"stopped; {kept()}, and the same command goes on from there", INTERRUPTED)
    except StoreError as error:
        complain(str(error), 1)
    except (StartFailed, OSError) as error:
        complain(f"{error}; {kept()}, and the same command goes on from there", 1)


@contextlib.contextmanager
def opened(database: pathlib.Path) -> Iterator[Store]:
    """A database that has to be there; what is wrong with it is a message and exit status 1."""
    try:
        with Store(database, create=False) as store:
            yield store
    except (StoreError, OSError) as error:
        complain(str(error), 1)


def complain(text: str, status: int) -> NoReturn:
    """Ends the command with a line on stderr and an exit status."""
    print(f"cuteflash: {text}", file=sys.stderr)
    raise typer.Exit(status)


def _check_output(output: pathlib.Path, database: pathlib.Path) -> None:
    """ValueError if nothing can be written at `output`, or the database is there."""
    check_file(output)
    if output.exists() and output.samefile(database):
        raise ValueError(f"output {output} is the database itself; another file is needed")


def swept(store: Store, arch: str | None) -> str:
    """The arch that was asked for, or the only one in the database."""
    asked = one(names("arch", arch, ARCHS), "arch", arch) if arch is not None else [None]
    return swept_target(store, asked[0])


def one(items: list[Any], option: str, text: str) -> list[Any]:
    """`items`, of which there must be one. ValueError names the option."""
    if len(items) != 1:
        raise ValueError(f"{option} is {text!r}; allowed: one")
    return items


def padded(pair: tuple[int, int]) -> tuple[int, int]:
    """A pair of head dims as tables have them. ValueError says what head dims there are."""
    if any(pair == spec.latent_dims for spec in SPECS.values()):
        return pair
    Operands("bf16", "bf16", "bf16", *pair)
    return padded_head_dim(pair[0]), padded_head_dim(pair[1])


def _fields(where: str | None) -> dict[str, Any]:
    """`"tile_m=128,q_in_regs=true"` as fields; `explain` checks the names."""
    found: dict[str, Any] = {}
    for item in where.split(",") if where else ():
        name, _, value = (part.strip().lower() for part in item.partition("="))
        try:
            found[name] = value if value.isidentifier() and value not in ("true", "false") else json.loads(value)
        except ValueError:
            raise ValueError(
                f"where is {where!r}; allowed: TRAIT=NUMBER, TRAIT=true|false or TRAIT=WORD, comma-separated"
            ) from None
    return found
