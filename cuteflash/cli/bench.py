"""`cuteflash bench`: the forward, or the backward, against its peers on this GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import torch
import typer

from cuteflash.cli.bar import progress_bar
from cuteflash.cli.options import Usage, integers, names
from cuteflash.companions import companion
from cuteflash.problem import DTYPES, MASK_KINDS
from cuteflash.traits.arch import FAMILIES
from cuteflash.tune.inputs import FORMS, PLAIN, parse_kind
from cuteflash.tune.peers import PEERS
from cuteflash.tune.variants import parse_variants

INTERRUPTED = 130  # exit status

Set = Annotated[
    str,
    typer.Option(
        "--set",
        help="What to measure; the other options change it. grid: the published cells (D64 to D256, full and causal, "
        "512 to 16384, bf16). real, of the forward: inputs like language models' (D64 and D128, causal, 8192, bf16 and "
        "fp16). brief: many short sequences (D32 to D128, 64 to 256; of the backward from 16 on). fp8, of the "
        "forward: 8-bit operands beside bf16 (from 1024). more, of the backward: D96 and D192.",
    ),
]
HeadDim = Annotated[str | None, typer.Option(help="Comma-separated columns of Q, K and V.")]
Mask = Annotated[str | None, typer.Option(help=f"Comma-separated kinds of {', '.join(MASK_KINDS)}.")]
Seqlen = Annotated[str | None, typer.Option(help="Comma-separated lengths; they divide 16384 tokens.")]
Dtype = Annotated[str | None, typer.Option(help=f"Comma-separated element types of {', '.join(DTYPES)}.")]
InputKinds = Annotated[
    str | None, typer.Option("--inputs", help=f"Comma-separated kinds of values, {', '.join(FORMS)}.")
]
Impls = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated implementations of {', '.join((*FAMILIES, *PEERS))}; of the forward also sm90-fp8-vt, "
        "sm90-fp8 and cudnn-fp8, which have 8-bit operands; of the backward sm90-det, sm80-det and fa4-det, which are "
        "deterministic."
    ),
]
Rounds = Annotated[int | None, typer.Option(min=1, help="Samples of each implementation in a cell.")]
Quick = Annotated[bool, typer.Option("--quick", help="Lengths 1024 and 8192 and three rounds, if not given.")]
TraitsText = Annotated[
    str, typer.Option("--traits", help="JSON|@FILE: traits that our families run in place of their tables' rows.")
]
Backward = Annotated[
    bool, typer.Option("--backward", help="Measure gradients of a saved forward, and forward + backward.")
]
Json = Annotated[pathlib.Path | None, typer.Option("--json", help="Write the results here after every cell.")]
Plot = Annotated[pathlib.Path | None, typer.Option(help="Draw them as PNG; needs matplotlib.")]


def bench(
    *,
    backward: Backward = False,
    which: Set = "grid",
    head_dim: HeadDim = None,
    mask: Mask = None,
    seqlen: Seqlen = None,
    dtype: Dtype = None,
    inputs: InputKinds = None,
    impls: Impls = None,
    rounds: Rounds = None,
    quick: Quick = False,
    traits: TraitsText = "[]",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure attention against its peers on this GPU: results are checked, then timed side by side.

    Exits with 1 if a result was wrong or an implementation failed.
    """
    benchmark = companion(f"benchmarks.{'backward' if backward else 'forward'}")
    running = companion("benchmarks.running")
    with Usage():
        given: dict[str, Sequence[Any]] = {
            "head_dims": integers("head_dim", head_dim),
            "masks": names("mask", mask, MASK_KINDS),
            "seqlens": integers("seqlen", seqlen) or (benchmark.QUICK_SEQLENS if quick else ()),
            "dtypes": names("dtype", dtype, DTYPES),
            "inputs": [str(parse_kind(kind)) for kind in inputs.split(",")] if inputs is not None else [],
            "names": sorted(names("impls", impls, benchmark.ALLOWED), key=benchmark.ALLOWED.index),  # references last
        }
        chosen = benchmark.SETS[names("set", which, benchmark.SETS)[0]]
        chosen = dataclasses.replace(chosen, **{name: tuple(values) for name, values in given.items() if values})
        cells = chosen.cells
        _ = [cell.problem for cell in cells]  # raises for a head dim that is not supported
        overrides = parse_variants(traits)
        if overrides and backward:
            raise ValueError("traits is given with --backward; allowed: with the forward alone")
        if plot is not None:
            _check_plot(chosen.inputs)
        if not torch.cuda.is_available():
            raise ValueError("torch finds no GPU to measure on; the benchmark needs one")
        device = torch.device("cuda", torch.cuda.current_device())
        plan = running.Plan(
            cells,
            running.available(chosen.names, device),
            rounds or (benchmark.QUICK_ROUNDS if quick else benchmark.FULL_ROUNDS),
            overrides,
        )
    raise typer.Exit(measure(benchmark.run, plan, device, json, plot))


def _check_plot(inputs: Sequence[str]) -> None:
    """ValueError, before anything is measured, if nothing could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot is given, but matplotlib, which draws it, is not installed")
    if PLAIN not in inputs:
        raise ValueError(f"plot is given, but shows only plain inputs; inputs is {','.join(inputs)}")


def measure(
    run: Callable[..., Any],
    plan: Any,
    device: torch.device,
    path: pathlib.Path | None,
    plot: pathlib.Path | None = None,
) -> int:
    """Runs a plan with a progress bar and prints its results, also after Ctrl-C; returns the exit status.

    `run`: of the benchmark, see `benchmarks.running.run`.
    """
    contest, report, running = (companion(f"benchmarks.{name}") for name in ("contest", "report", "running"))
    with progress_bar() as bar:
        task = bar.add_task("", total=len(plan.cells))

        def end(measured: Any) -> None:
            bar.console.print(contest.progress(measured), soft_wrap=True, highlight=False, markup=False)
            bar.advance(task)

        watch = running.Watch(lambda cell: bar.update(task, description=cell.label), end)
        result = run(plan, device, path, watch)
    if result["cells"]:
        report.print_table(result)
        if plot is not None:
            report.plot(result, plot)
    if path is not None:
        print(f"cuteflash: the results are in {path}", file=sys.stderr)
    if result.get("interrupted"):
        return INTERRUPTED
    return 1 if report.problem_lines(result) else 0


def run_alone(argv: Sequence[str] | None, name: str) -> NoReturn:
    """This command as a program called `name`."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command()(bench)
    alone(args=argv, prog_name=name)
    raise SystemExit(0)
