"""The commands and their options; the modules beside this one do the work."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from cuteflash.cli import build as building
from cuteflash.cli import info as information
from cuteflash.cli.bench import bench
from cuteflash.cli.layouts import layouts
from cuteflash.cli.options import Usage, flags, head_dims, names, problem_of
from cuteflash.cli.sweep import app as sweep
from cuteflash.problem import DTYPES, MASK_KINDS, OPERATIONS
from cuteflash.traits.arch import ARCHS, FAMILIES
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.version import VERSION

app = typer.Typer(
    name="cuteflash",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback can be pasted into a report
    rich_markup_mode=None,
)
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Arch = Annotated[str | None, typer.Option(help=f"Comma-separated compile targets of {', '.join(ARCHS)}.")]
Family = Annotated[str | None, typer.Option(help=f"Kernel family, {' or '.join(FAMILIES)}; default: the best.")]
Mask = Annotated[str | None, typer.Option(help=f"Comma-separated kinds of {', '.join(MASK_KINDS)}.")]
Dtype = Annotated[str | None, typer.Option(help=f"Comma-separated element types of {', '.join(DTYPES)}.")]
Lengths = Annotated[
    str | None,
    typer.Option(help=f"Comma-separated classes of sequence lengths, {', '.join(LENGTH_CLASSES)}; default: all."),
]
HeadDim = Annotated[str | None, typer.Option(help="Comma-separated columns of Q and K, multiples of 8 up to 256.")]
HeadDimV = Annotated[str | None, typer.Option(help="Columns of V and O, one for each --head-dim; default: the same.")]
Kernel = Annotated[str, typer.Option(help=f"Comma-separated operations of {', '.join(OPERATIONS)}.")]
WHOLE_TABLE = (
    "The whole tables: the head dims of every row with every mask, dtype and length class, each for the row's own "
    "target (some 300 forwards, ten minutes on two cores). --kernel, --lse, --softcap and --deterministic add kernels; "
    "the other options select."
)
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cuteflash {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Exact attention for Ampere and Hopper GPUs."""


@app.command()
def info(
    *,
    head_dim: HeadDim = "128",
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    dtype: Dtype = "bf16",
    mask: Mask = None,
    causal: Annotated[bool, typer.Option("--causal", help="Short for --mask causal.")] = False,
    kernel: Kernel = "fwd",
    lse: Annotated[bool, typer.Option("--lse", help="With the log-sum-exp; bwd: with a gradient into it.")] = False,
    softcap: Annotated[bool, typer.Option("--softcap", help="With softcap.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="bwd: with the same bits in every run.")
    ] = False,
    family: Family = None,
    lengths: Lengths = None,
    as_json: AsJson = False,
) -> None:
    """Show the environment, and which kernel and traits run a problem. --arch defaults to the GPU or to all."""
    with Usage():
        if mask is not None and causal:
            raise ValueError("mask and causal are both given; allowed: one of them")
        problems = [
            problem_of(operation, kind, dims, masking, softcap=softcap, lse=lse, deterministic=deterministic)
            for operation in names("kernel", kernel, OPERATIONS)
            for dims in head_dims(head_dim, head_dim_v)
            for masking in names("mask", mask, MASK_KINDS) or ["causal" if causal else "full"]
            for kind in names("dtype", dtype, DTYPES)
        ]
        targets = names("arch", arch, ARCHS) or information.default_targets()
        checked_family = (names("family", family, FAMILIES) or [None])[0]
        classes = names("lengths", lengths, LENGTH_CLASSES) or list(LENGTH_CLASSES)
        choices = [
            choice
            for target in targets
            for problem in problems
            for choice in information.describe(problem, target, checked_family, classes)
        ]
    result = {"environment": information.environment(), "choices": choices}
    typer.echo(json.dumps(result, indent=2) if as_json else information.text(result), nl=as_json)


@app.command("compile")
def compile_(
    *,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    dtype: Dtype = None,
    mask: Mask = None,
    causal: Annotated[str | None, typer.Option(help="0, 1 or 0,1: short for --mask full, causal.")] = None,
    kernel: Kernel = "fwd",
    lse: Annotated[
        str, typer.Option(help="0, 1 or 0,1: without and with the log-sum-exp; bwd: with a gradient into it.")
    ] = "0",
    softcap: Annotated[str, typer.Option(help="0, 1 or 0,1: without and with softcap.")] = "0",
    deterministic: Annotated[
        str, typer.Option(help="0, 1 or 0,1: bwd without and with the same bits in every run.")
    ] = "0",
    family: Family = None,
    lengths: Lengths = None,
    everything: Annotated[bool, typer.Option("--all", help=WHOLE_TABLE)] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Parallel processes.")] = os.cpu_count() or 1,
    as_json: AsJson = False,
) -> None:
    """Compile kernels into the disk cache, for any target, and report their registers, spills and shared memory.

    Exits with 1 if a kernel does not compile, spills, or draws a warning from ptxas.
    """
    with Usage():
        if head_dim is None and not everything:
            raise ValueError("compile needs --head-dim, e.g. --head-dim 64,128, or --all")
        if mask is not None and causal is not None:
            raise ValueError("mask and causal are both given; allowed: one of them")
        if causal is not None:
            mask = ",".join("causal" if flag else "full" for flag in flags("causal", causal))
        selection = building.Selection(
            targets=names("arch", arch, ARCHS) or (list(ARCHS) if everything else information.local_target()),
            families=names("family", family, FAMILIES) or (list(FAMILIES) if everything else [None]),
            head_dims=head_dims(head_dim, head_dim_v) if head_dim is not None else None,
            masks=names("mask", mask, MASK_KINDS) or (list(MASK_KINDS) if everything else ["full"]),
            dtypes=names("dtype", dtype, DTYPES) or (list(DTYPES) if everything else ["bf16"]),
            lse=flags("lse", lse),
            softcap=flags("softcap", softcap),
            lengths=names("lengths", lengths, LENGTH_CLASSES) or LENGTH_CLASSES,
            operations=names("kernel", kernel, OPERATIONS),
            deterministic=flags("deterministic", deterministic),
        )
        tasks = building.table_tasks(selection) if everything else building.grid_tasks(selection)
    outcomes = building.run(tasks, jobs)
    if as_json:
        typer.echo(json.dumps([outcome.as_dict() for outcome in outcomes], indent=2))
    else:
        building.print_table(outcomes)
    raise typer.Exit(0 if all(outcome.good for outcome in outcomes) else 1)


app.command()(bench)
app.command()(layouts)
app.add_typer(sweep, name="sweep")


@app.command(context_settings=PASS_THROUGH)
def demo(context: typer.Context) -> None:
    """Run real sentences through a real model with our attention."""
    from cuteflash.cli import demo as module

    raise typer.Exit(module.main(context.args))
