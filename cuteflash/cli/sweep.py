"""`cuteflash sweep`: find the fastest traits for a GPU as a funnel, then explain, report and apply what was found."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cuteflash import usertable
from cuteflash.cli import info as information
from cuteflash.cli import sweep_apply
from cuteflash.cli import sweep_results as results
from cuteflash.cli.options import Usage, flags, head_dims, names
from cuteflash.compile import cache_dir
from cuteflash.problem import MASK_KINDS
from cuteflash.traits.arch import ARCHS, FAMILIES, Family, get_arch
from cuteflash.traits.length_class import DECODE_QUERIES
from cuteflash.traits.row import Traits
from cuteflash.tune.cells import TOKENS, Cell, parse_cell
from cuteflash.tune.cuda_backend import backend
from cuteflash.tune.funnel import Funnel, Until
from cuteflash.tune.inputs import FORMS, PLAIN
from cuteflash.tune.operations import DEFAULT, SPECS, SWEPT, SWEPT_DTYPES, Form, Spec, swept_kernel, task_of
from cuteflash.tune.operations import FORMS as TASKS_OF_FEW
from cuteflash.tune.peers import PEERS, missing_peer
from cuteflash.tune.plan import SINK, Plan, with_sinks
from cuteflash.tune.progress import Display
from cuteflash.tune.store import Store, StoreError
from cuteflash.tune.timing import Rules
from cuteflash.tune.variants import parse_variants

DECODE_TOKENS = 1 << 17  # of all sequences of a decode cell: enough of them that every multiprocessor has work
KERNELS = [(name, *swept_kernel(name)) for name in SWEPT]  # with operation and form
LIMIT = 64
ROUNDS = 9
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}

app = typer.Typer(
    help="Find the fastest traits for a GPU, prove it, and write the table that dispatch uses.",
    invoke_without_command=True,
    rich_markup_mode=None,
    no_args_is_help=True,
)

Arch = Annotated[str | None, typer.Option(help=f"One of {', '.join(ARCHS)}; default: this GPU's. Dry runs: several.")]
Families = Annotated[str | None, typer.Option("--family", help=f"Of {', '.join(FAMILIES)}; default: the arch's best.")]
HeadDim = Annotated[str | None, typer.Option(help="Comma-separated columns of Q and K, multiples of 8 up to 256.")]
HeadDimV = Annotated[str | None, typer.Option(help="Columns of V and O, one for each --head-dim; default: the same.")]
Mask = Annotated[str | None, typer.Option(help=f"Of {', '.join(MASK_KINDS)}; default: full, causal.")]
Causal = Annotated[str | None, typer.Option(help="0, 1 or 0,1: short for --mask full, causal.")]
Dtype = Annotated[str, typer.Option(help=f"Of {', '.join(SWEPT_DTYPES)}.")]
Seqlen = Annotated[
    str | None,
    typer.Option(
        help="Keys of a sequence, or QUERIESxKEYS; default: "
        + "; ".join(f"{name} {SPECS[task_of(own, 'bf16', form=form)].lengths}" for name, own, form in KERNELS)
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(help=f"Of {', '.join(TASKS_OF_FEW)}: sequences, comma-separated; default: {DECODE_TOKENS} keys."),
]
Heads = Annotated[
    str | None,
    typer.Option(
        help="QUERY_HEADSxKV_HEADS, of latents QUERY_HEADS, comma-separated; default: "
        + "; ".join(f"{name} {SPECS[name].heads}" for name in TASKS_OF_FEW)
    ),
]
InputKinds = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        help=f"Kinds of values, of {', '.join(FORMS)}; default: plain and, of a family in which speed depends on the "
        f"values, {SINK} at the longest sequences of each length class.",
    ),
]
Cells = Annotated[
    str | None, typer.Option(help="HEAD_DIM:SEQLEN:MASK[:INPUTS],.. in place of the product of these options.")
]
TraitsText = Annotated[str | None, typer.Option("--traits", help="JSON|@FILE: candidates in place of the enumerated.")]
Peers = Annotated[str, typer.Option(help=f"Timed beside the candidates, of {', '.join(PEERS)}.")]
Limit = Annotated[int, typer.Option(min=0, help="Candidates per head dim and family, most promising first; 0: all.")]
Budget = Annotated[str | None, typer.Option(help="Time on the GPU, e.g. 10m.")]
Rounds = Annotated[int, typer.Option(min=3, help="Samples of a candidate that stays to a race's end.")]
Resume = Annotated[bool, typer.Option("--resume/--fresh", help="Go on with the database, or move it aside.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="End before the GPU; works anywhere.")]
NoCompile = Annotated[bool, typer.Option("--no-compile", help="With --dry-run: end before the compiler, too.")]
CompileOnly = Annotated[
    bool, typer.Option("--compile-only", help="Compile here what another machine's GPU is to time.")
]
FromCache = Annotated[bool, typer.Option("--from-cache", help="Compile nothing; report what the cache lacks.")]
ShowRejected = Annotated[bool, typer.Option("--show-rejected", help="Every rejected candidate with its reason.")]
AsJson = Annotated[bool, typer.Option("--json", help="The funnel as JSON on stdout.")]
Reset = Annotated[bool, typer.Option("--reset", help="Remove your own tables; dispatch uses the shipped ones again.")]


@app.callback()
def sweep(
    context: typer.Context,
    *,
    kernel: results.Kernel = DEFAULT,
    arch: Arch = None,
    family: Families = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    mask: Mask = None,
    causal: Causal = None,
    dtype: Dtype = "bf16",
    transposed_v: results.TransposedV = False,
    seqlen: Seqlen = None,
    batch: Batch = None,
    heads: Heads = None,
    inputs: InputKinds = None,
    cells: Cells = None,
    traits: TraitsText = None,
    peers: Peers = "",
    limit: Limit = LIMIT,
    budget: Budget = None,
    rounds: Rounds = ROUNDS,
    jobs: results.Jobs = os.cpu_count() or 1,
    database: results.Database = results.DATABASE,
    resume: Resume = True,
    dry_run: DryRun = False,
    no_compile: NoCompile = False,
    compile_only: CompileOnly = False,
    from_cache: FromCache = False,
    show_rejected: ShowRejected = False,
    as_json: AsJson = False,
    reset: Reset = False,
) -> None:
    """Measure every candidate's traits: enumerate, prune, compile, check, time. Stopped at any point, it goes on there.

    With --dry-run or --compile-only it needs no GPU. What it found: sweep explain, sweep report, sweep apply.
    """
    if context.invoked_subcommand is not None:
        return
    with Usage():
        if reset:
            raise typer.Exit(_reset())
        (swept,) = results.one(names("kernel", kernel, SWEPT), "kernel", kernel)
        operation, form = swept_kernel(swept)
        until = _until(dry_run, no_compile, compile_only)
        targets = names("arch", arch, ARCHS) or information.local_target()
        if until == "time":
            _check_gpu(targets)
        spec = SPECS[form] if form else None
        pairs, masks = _pairs(head_dim, head_dim_v, cells, spec), _masks(mask, causal, spec)
        common = {"operation": operation, "transposed_v": transposed_v, "form": form}
        chosen = _cells(cells, pairs, masks, dtype, seqlen, inputs, common, _decode_sizes(batch, heads, form))
        _ = [cell.problem for cell in chosen]  # says what head dims there are
        seconds_of = seconds(budget) if budget is not None else None
        limits: dict[str, Any] = {"limit": limit or None, "budget": seconds_of, "jobs": jobs, "from_cache": from_cache}
        limits |= {"peers": _peers(peers), "rules": Rules(rounds=rounds)}
        plans = []
        for target in targets:
            families = _families(family, target, chosen)
            own = tuple(with_sinks(chosen, families)) if cells is None and inputs is None else chosen
            plans.append(Plan(target, families, own, _traits(traits, chosen, families), **limits))
    if not resume:
        _set_aside(database)
    _run(plans, until, database, show_rejected, as_json)


app.command()(results.explain)
app.command()(results.report)
app.command()(results.export)
app.command()(sweep_apply.apply)


def _run(plans: Sequence[Plan], until: Until, database: pathlib.Path, show_rejected: bool, as_json: bool) -> None:
    """Runs the plans one after the other, and shows what came of each."""
    shown = []
    with results.stopping(lambda: _kept(database)), Store(database) as store:
        for plan in plans:
            with Display() as display:
                funnel = Funnel(plan, store, display, backend(plan.target))
                funnel.run(until)
            if as_json:
                shown.append(results.as_json(funnel, store))
            else:
                results.show(funnel, store, show_rejected)
        if as_json:
            typer.echo(json.dumps(shown, indent=1))
        elif until == "compile":
            typer.echo(
                f"\nTo time these kernels elsewhere: take {cache_dir()} along as CUTEFLASH_CACHE_DIR, and {database}; "
                "run the same command there with --from-cache in place of --dry-run or --compile-only"
            )


def _kept(database: pathlib.Path) -> str:
    """What a sweep that is stopped leaves, in words."""
    counts = {}
    with contextlib.suppress(StoreError), Store(database, create=False) as store:
        counts = store.counts()
    return f"{counts.get('verdicts', 0)} verdicts and {counts.get('timings', 0)} timings are kept in {database}"


def _reset() -> int:
    removed = usertable.remove()
    for path in removed:
        typer.echo(f"removed {path}")
    if not removed:
        typer.echo(f"there are no tables of your own in {usertable.config_dir()}")
    return 0


def _until(dry_run: bool, no_compile: bool, compile_only: bool) -> Until:
    if no_compile and not dry_run:
        raise ValueError("no_compile is given without dry_run; allowed: --dry-run --no-compile")
    if dry_run and compile_only:
        raise ValueError("dry_run and compile_only are both given; allowed: one of them")
    return "prune" if no_compile else "compile" if dry_run or compile_only else "time"


def _pairs(head_dim: str | None, head_dim_v: str | None, cells: str | None, spec: Spec | None) -> list[tuple[int, int]]:
    if head_dim is cells is None and spec is not None and spec.latent_dims is not None:
        return [spec.latent_dims]
    if (head_dim is None) == (cells is None):
        raise ValueError("sweep needs --head-dim, e.g. --head-dim 64,128, or --cells, and not both")
    return head_dims(head_dim, head_dim_v) if head_dim is not None else []


def _masks(mask: str | None, causal: str | None, spec: Spec | None) -> list[Any]:
    if mask is not None and causal is not None:
        raise ValueError("mask and causal are both given; allowed: one of them")
    if causal is not None:
        mask = ",".join("causal" if flag else "full" for flag in flags("causal", causal))
    allowed = MASK_KINDS if spec is None else spec.masks
    return names("mask", mask, allowed) or [name for name in ("full", "causal") if name in allowed]


def _cells(
    cells: str | None,
    pairs: Sequence[tuple[int, int]],
    masks: Sequence[Any],
    dtype: str,
    seqlen: str | None,
    inputs: str | None,
    common: dict[str, Any],
    sizes: Sequence[Size],
) -> tuple[Cell, ...]:
    """The problems to time, without a single query under a causal mask, which takes the kernel of mask full.

    Args:
        common: fields of all cells.
        sizes: of decoding, the batches and heads; else one that leaves them to the cell.
    """
    dtypes, kinds = names("dtype", dtype, SWEPT_DTYPES), (inputs or PLAIN).split(",")
    if cells is not None:
        if inputs is not None:
            raise ValueError("cells and inputs are both given; allowed: inputs of a cell behind its mask")
        plain = (parse_cell(text, kind, **common) for text in cells.split(",") for kind in dtypes)
        return tuple(size.of(cell) for cell in plain for size in sizes)
    found = []
    spec = SPECS[task_of(common["operation"], dtypes[0], common["transposed_v"], common["form"])]
    lengths = (spec.lengths if seqlen is None else seqlen).split(",")
    for (d, d_v), masking, kind, text in itertools.product(pairs, masks, dtypes, lengths):
        first, _, second = text.strip().partition("x")
        if not all(part.isdecimal() for part in (first, second or first)):
            raise ValueError(f"seqlen is {text!r}; allowed: KEYS or QUERIESxKEYS, e.g. 4096 or 1x8192")
        queries, keys = int(first) if second else 0, int(second or first)
        if not (masking == "causal" and queries == 1):
            tokens = DECODE_TOKENS if 0 < queries <= DECODE_QUERIES else TOKENS
            whole = max(1, tokens // max(keys, 1)) * keys
            cell = Cell(d, masking, keys, kind, head_dim_v=d_v, seqlen_q=queries, tokens=whole, **common)
            found += [dataclasses.replace(size.of(cell), inputs=values) for size in sizes for values in kinds]
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Sequences and heads of a cell; None leaves them as they are."""

    batch: int | None = None
    heads: tuple[int, int] | None = None  # of Q, and of K and V

    def of(self, cell: Cell) -> Cell:
        """The cell in this size. ValueError: its heads are not whole groups."""
        changes: dict[str, Any] = {}
        if self.batch is not None:
            changes["tokens"] = self.batch * cell.seqlen
        if self.heads is not None:
            queries, shared = self.heads
            changes |= {"hidden": queries * cell.head_dim, "group": queries // shared}
        return dataclasses.replace(cell, **changes)


def _decode_sizes(batch: str | None, heads: str | None, form: Form) -> list[Size]:
    """Batches times heads. ValueError: they are not what is allowed, or not of a kernel that has them."""
    if not form:
        for name, given in (("batch", batch), ("heads", heads)):
            if given is not None:
                raise ValueError(f"{name} is {given!r}; allowed with --kernel {', '.join(TASKS_OF_FEW)}")
        return [Size()]
    batches: list[int | None] = [None]
    if batch is not None:
        if not all(part.isdecimal() and int(part) for part in batch.split(",")):
            raise ValueError(f"batch is {batch!r}; allowed: comma-separated positive integers")
        batches = [int(part) for part in batch.split(",")]
    pairs = []
    default, is_latent = SPECS[form].heads, SPECS[form].latent_dims is not None
    for text in (heads or default).split(","):
        whole = f"{text.strip()}x1" if is_latent else text.strip()
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", whole)
        if found is None or int(found[1]) % int(found[2]):
            form_of_heads = "QUERY_HEADS" if is_latent else "QUERY_HEADSxKV_HEADS, whole groups"
            raise ValueError(f"heads is {text!r}; allowed: {form_of_heads}, e.g. {default}")
        pairs.append((int(found[1]), int(found[2])))
    return [Size(sequences, pair) for sequences, pair in itertools.product(batches, pairs)]


def _families(text: str | None, target: str, cells: Sequence[Cell]) -> tuple[Family, ...]:
    """The kernel families to sweep. ValueError: the target, or a cell's task, does not have one."""
    runs = get_arch(target).families
    for name in names("family", text, FAMILIES):
        if name not in runs:
            raise ValueError(f"family is {name!r}, which {target} does not run; it runs: {', '.join(runs)}")
    chosen = tuple(names("family", text, FAMILIES)) or runs[:1]
    for cell, name in itertools.product(cells, chosen):
        if name not in cell.spec.candidates:
            raise ValueError(
                f"dtype is {cell.dtype!r}, which the {name} family of {target} does not compute; "
                f"families that do: {', '.join(cell.spec.candidates)}"
            )
    return chosen


def _traits(text: str | None, cells: Sequence[Cell], families: Sequence[Family]) -> tuple[Traits, ...] | None:
    if text is None:
        return None
    variants = parse_variants(text, families[0])
    for variant in variants:
        if variant.mask is not None or variant.family not in families:
            raise ValueError(
                f"traits are of family {variant.family}, mask {variant.mask}; allowed: --family's, no mask"
            )
    return tuple(dict.fromkeys(v.traits(cell) for v in variants for cell in cells if v.applies(cell)))


def _peers(text: str) -> tuple[str, ...]:
    chosen = names("peers", text, PEERS) if text else []
    for name in chosen:
        reason = missing_peer(name)
        if reason:
            raise ValueError(f"peers is {name!r}: {reason}")
    return tuple(chosen)


def seconds(text: str) -> float:
    """`"90"`, `"90s"`, `"1.5m"` or `"1h"` in seconds. ValueError says what the form is."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None:
        raise ValueError(f"budget is {text!r}; allowed: a number with s, m or h, e.g. 90s or 10m")
    return float(found.group(1)) * UNITS[found.group(2)]


def _check_gpu(targets: Sequence[str]) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU to time kernels on; --dry-run and --compile-only work without one")
    here = information.local_target()[0]
    if list(targets) != [here]:
        wanted = ", ".join(targets)
        raise ValueError(f"arch is {wanted}; the GPU here is {here}; --dry-run and --compile-only work for any arch")


def _set_aside(database: pathlib.Path) -> None:
    """Renames a database with its write-ahead log, which a killed sweep leaves behind."""
    if not database.exists():
        return
    number = next(n for n in itertools.count(1) if not database.with_name(f"{database.name}.{n}").exists())
    aside = database.with_name(f"{database.name}.{number}")
    for suffix in ("-wal", "-shm", ""):
        path = database.with_name(database.name + suffix)
        if path.exists():
            path.rename(aside.with_name(aside.name + suffix))
    print(f"cuteflash: the database {database} is now {aside}", file=sys.stderr)
