"""`cuteflash layouts`: a kernel's tiles, fragments and instructions as a page or pictures, or a gallery of all rows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

import typer

from cuteflash.cli import build as building
from cuteflash.cli import info as information
from cuteflash.cli.bar import progress_bar
from cuteflash.cli.options import Usage, head_dims, names
from cuteflash.companions import companion
from cuteflash.dispatch import Choice, choose
from cuteflash.install import how_to_install
from cuteflash.mla_problem import HEADS_MAX
from cuteflash.output import check_directory, check_file, write_file
from cuteflash.problem import DTYPES, FP8_DTYPES, MASK_KINDS, BwdProblem, Feature, FwdProblem, Problem
from cuteflash.traits.arch import ARCHS, FAMILIES
from cuteflash.traits.length_class import LENGTH_CLASSES

OPERATIONS = ("fwd", "bwd", "mla")
PICTURES = ("svg", "png", "ascii")
FORMATS = ("html", "json", *PICTURES)
COLORS = ("owner", "bank", "value", "address", "core", "plain")
PACKAGES = {"numpy": "numpy", "PIL": "pillow"}  # module -> its package; both are part of the extra

Item = TypeVar("Item")
Shown = tuple[Any, str, Choice, bool, str | None]  # arguments of `layouts.command.read_scene`
Kernel = Annotated[
    str, typer.Option(help=f"One of {', '.join(OPERATIONS)} (decoding of latent attention); also the rows of --all.")
]
Arch = Annotated[str | None, typer.Option(help=f"One of {', '.join(ARCHS)}; default: this GPU's. With --all, several.")]
HeadDim = Annotated[
    str | None, typer.Option(help="Columns of Q and K, a multiple of 8 up to 256. With --all, several.")
]
HeadDimV = Annotated[str | None, typer.Option(help="Columns of V and O; default: the same.")]
Mask = Annotated[str | None, typer.Option(help=f"One of {', '.join(MASK_KINDS)}; default: full.")]
Causal = Annotated[bool, typer.Option("--causal", help="Short for --mask causal.")]
Dtype = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join((*DTYPES, *FP8_DTYPES))}; default: bf16. 8 bits: of a forward on Hopper."),
]
TransposedV = Annotated[bool, typer.Option("--transposed-v", help="V of 8 bits is given as V^T, not as its rows.")]
Split = Annotated[bool, typer.Option("--split", help="Of a forward: a row that splits keys, as decoding does.")]
E4m3Cache = Annotated[bool, typer.Option("--e4m3-cache", help="Of a forward, of mla: a row of e4m3 caches.")]
QueryRows = Annotated[
    int | None,
    typer.Option(min=1, help="Of a forward: query rows of a tile, if they are few; default: as many as a tile has."),
]
Heads = Annotated[
    int | None,
    typer.Option(min=1, max=HEADS_MAX, help="Of mla: query heads, which choose the row; default: 128."),
]
Family = Annotated[str | None, typer.Option(help=f"Kernel family, {' or '.join(FAMILIES)}; default: the best.")]
Lengths = Annotated[
    str | None, typer.Option(help=f"Class of sequence lengths, one of {', '.join(LENGTH_CLASSES)}; default: long.")
]
Part = Annotated[
    str | None, typer.Option(help="Of a backward in two passes, dkv or dq; default: dkv. Other kernels have no parts.")
]
Format = Annotated[str, typer.Option("--format", help="html: the page; json: its data; svg, png, ascii: its panels.")]
Panel = Annotated[
    str | None, typer.Option(help="Tile or fragment to draw, e.g. sK or acc_S; default: all, into -o DIR.")
]
Color = Annotated[str | None, typer.Option(help=f"Colour of a picture's cells, one of {', '.join(COLORS)}.")]
Swizzle = Annotated[bool, typer.Option("--swizzle/--no-swizzle", help="Shared-memory addresses of a picture.")]
Stage = Annotated[int | None, typer.Option(min=0, help="Which buffer to draw, of a tile with several.")]
Output = Annotated[pathlib.Path | None, typer.Option("-o", "--output", help="File, or directory, to write.")]
All = Annotated[bool, typer.Option("--all", help="A page for every shipped row, with an index, into -o DIR.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the kernels that are not in the cache, for their registers.")
]


def layouts(
    *,
    kernel: Kernel = "fwd",
    arch: Arch = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    mask: Mask = None,
    causal: Causal = False,
    dtype: Dtype = None,
    transposed_v: TransposedV = False,
    split: Split = False,
    e4m3_cache: E4m3Cache = False,
    query_rows: QueryRows = None,
    heads: Heads = None,
    family: Family = None,
    lengths: Lengths = None,
    part: Part = None,
    form: Format = "html",
    panel: Panel = None,
    color: Color = None,
    swizzle: Swizzle = True,
    stage: Stage = None,
    output: Output = None,
    everything: All = False,
    compile_now: Compile = False,
) -> None:
    """Show a kernel's layouts: tiles, fragments, instructions, banks and budgets of a row, on one page without network.

    --arch and --head-dim choose the row. JSON, and one panel as ascii, go to stdout without -o.
    """
    with Usage(), _extra():
        operation = _one("kernel", kernel, OPERATIONS)
        _one("format", form, FORMATS)
        if color is not None:
            _one("color", color, COLORS)
        of_pictures = {"panel": panel, "color": color, "stage": stage, "no-swizzle": None if swizzle else True}
        if form not in PICTURES:
            _refuse(f"with format {form}; it is for: {', '.join(PICTURES)}", of_pictures)
        if mask is not None and causal:
            raise ValueError("mask and causal are both given; allowed: one of them")
        mask = "causal" if causal else mask
        flags = {"transposed-v": transposed_v, "split": split, "e4m3-cache": e4m3_cache}
        features = {name: given or None for name, given in flags.items()} | {"query-rows": query_rows}
        of_problem = {"head-dim-v": head_dim_v, "mask": mask, "lengths": lengths, "part": part, **features}
        _refuse_of_others(operation, everything, features, heads)
        if everything:
            if form != "html":
                raise ValueError(f"format is {form!r}; with --all allowed: html")
            _refuse("with --all, which shows every row", of_problem | {"dtype": dtype})
            good = _gallery(operation, (arch, head_dim, family), _needed(output, "site/"), compile_now)
            raise typer.Exit(0 if good else 1)
        where, of_values = (arch, head_dim, family), (dtype or "bf16", transposed_v, split, e4m3_cache)
        if operation == "mla":
            _refuse("with kernel mla, whose sizes are one", of_problem | {"e4m3-cache": None, "head-dim": head_dim})
            row = _latent_row(arch, family, dtype or "bf16", heads or HEADS_MAX, e4m3_cache)
        else:
            words = mask or "full", lengths or "long"
            row = _row(operation, where, head_dim_v, words, of_values, query_rows)
        if form in PICTURES:
            _pictures((*row, compile_now, part), form, panel, (color, stage, swizzle), output)
        else:
            _whole((*row, compile_now, part), form, output)


def _refuse_of_others(operation: str, everything: bool, features: dict[str, Any], heads: int | None) -> None:
    """Refuse what only other operations have."""
    if operation != "fwd":
        served = ("e4m3-cache",) if operation == "mla" and not everything else ()
        _refuse(f"with kernel {operation}", {name: features[name] for name in features if name not in served})
    if operation != "mla" or everything:
        _refuse("without kernel mla, or with --all", {"heads": heads})


def _latent_row(arch: str | None, family: str | None, dtype: str, heads: int, e4m3: bool) -> tuple[Any, str, Choice]:
    """(problem, target, choice) of decoding latent attention."""
    target = information.local_target()[0] if arch is None else _one("arch", arch, ARCHS)
    chosen = None if family is None else _one("family", family, FAMILIES)
    latent_row = companion("layouts.rows").latent_row
    found: tuple[Any, str, Choice] = latent_row(heads, _one("dtype", dtype, DTYPES), target, chosen, e4m3)
    return found


def _row(
    operation: str,
    where: tuple[str | None, str | None, str | None],
    head_dim_v: str | None,
    words: tuple[str, str],
    values: tuple[str, bool, bool, bool],
    query_rows: int | None,
) -> tuple[Any, str, Choice]:
    """(problem, target, choice) of a forward or backward.

    Args:
        where: the texts of --arch, --head-dim and --family.
        words: mask and lengths.
        values: dtype, transposed_v, split, e4m3_cache.
        query_rows: of a tile; None is as many as it has.
    """
    (arch, head_dim, family), (mask, lengths), (dtype, transposed_v, *features) = where, words, values
    problem, target = _problem(operation, arch, (head_dim, head_dim_v), mask, (dtype, transposed_v))
    problem = _asking(problem, *features)
    chosen = None if family is None else _one("family", family, FAMILIES)
    return problem, target, choose(problem, target, chosen, _one("lengths", lengths, LENGTH_CLASSES), query_rows)


def _asking(problem: Problem, split: bool, e4m3_cache: bool) -> Problem:
    """The problem with split keys, or an e4m3 cache, if these are asked for. ValueError: it cannot have them."""
    wanted: dict[Feature, bool] = {"split": split, "e4m3_cache": e4m3_cache}
    asked = {name for name, wants in wanted.items() if wants}
    return problem.asking(problem.features | asked) if asked else problem


def _problem(
    operation: str,
    arch: str | None,
    dims: tuple[str | None, str | None],
    mask: str,
    values: tuple[str, bool],
) -> tuple[Problem, str]:
    """(problem, target) of one row, checked; `dims` are head_dim and head_dim_v, `values` dtype and transposed_v."""
    (head_dim, head_dim_v), (dtype, transposed_v) = dims, values
    if head_dim is None:
        raise ValueError("layouts needs --head-dim, e.g. --head-dim 128, or --all")
    pairs = head_dims(head_dim, head_dim_v)
    if len(pairs) > 1:
        raise ValueError(f"head_dim is {head_dim!r}; allowed: one, or --all")
    dense = FwdProblem.dense if operation == "fwd" else BwdProblem.dense
    dtypes = (*DTYPES, *FP8_DTYPES) if operation == "fwd" else DTYPES
    problem: Problem = dense(_one("dtype", dtype, dtypes), *pairs[0], _one("mask", mask, MASK_KINDS))
    if transposed_v:
        operands = dataclasses.replace(problem.operands, transposed_v=True)  # says that only 8 bits are transposed
        problem = dataclasses.replace(problem, operands=operands)
    return problem, information.local_target()[0] if arch is None else _one("arch", arch, ARCHS)


def _whole(shown: Shown, form: str, output: pathlib.Path | None) -> None:
    """The page, or the scene as JSON, to `output`; JSON without it to stdout."""
    command = companion("layouts.command")
    if form == "html":
        output = _needed(output, "page.html")
    if output is not None:
        check_file(output)
    scene = command.scene_json(command.read_scene(*shown))
    text = command.page_text(scene) if form == "html" else command.scene_text(scene)
    if output is None:
        typer.echo(text, nl=False)
    else:
        size = write_file(output, text)
        typer.echo(f"{output}: {scene['title']}, {size / 1e6:.2f} MB")


def _pictures(
    shown: Shown,
    form: str,
    panel: str | None,
    look: tuple[str | None, int | None, bool],
    output: pathlib.Path | None,
) -> None:
    """One panel to `output`, all panels into the directory `output`, or one panel as text to stdout."""
    command = companion("layouts.command")
    if form != "ascii":
        output = _needed(output, f"panel.{form}" if panel else "pictures/")
    if output is not None:
        (check_file if panel else check_directory)(output)
    command.require(form)
    scene = command.scene_json(command.read_scene(*shown))
    view = command.View(*look)
    if output is None:
        width = shutil.get_terminal_size().columns
        typer.echo(command.panel_text(scene, panel, view, width, cropped=sys.stdout.isatty()), nl=False)
    elif panel is None:
        written = list(command.write_panels(scene, form, view, output))
        typer.echo(f"{output}: {len(written)} panels of {scene['title']}")
    else:
        command.write_panel(scene, panel, form, view, output)
        typer.echo(f"{output}: {panel} of {scene['title']}")


def _gallery(
    operation: str, selected: tuple[str | None, str | None, str | None], output: pathlib.Path, compile_now: bool
) -> bool:
    """Writes the gallery of the selected rows; False if a kernel that should be compiled was not.

    `selected` are the texts of --arch, --head-dim and --family.
    """
    site = companion("layouts.site")
    arch, head_dim, family = selected
    rows = site.chosen_rows(
        operation,
        targets=names("arch", arch, ARCHS) or list(ARCHS),
        families=names("family", family, FAMILIES) or list(FAMILIES),
        head_dims=[columns for columns, _ in head_dims(head_dim, None)] if head_dim is not None else None,
    )
    check_directory(output)
    failed: list[building.Outcome] = []
    kernels: dict[building.Task, str] = {}
    if compile_now:
        for row in rows:  # the parts of a kernel are compiled together
            kernels.setdefault(building.Task(row.target, row.family, row.problem, row.choice.traits), row.name)
        failed = [outcome for outcome in building.run(list(kernels), os.cpu_count() or 1) if outcome.error]
    entries = list(_tracked("reading", map(site.make_entry, rows), len(rows)))
    pages = list(_tracked("writing", site.write_site(output, entries), site.page_count(len(rows))))
    for outcome in failed:
        print(f"cuteflash: {kernels[outcome.task]}: {outcome.error}", file=sys.stderr)
    count = len({(row.peers.table, row.choice.row) for row in rows})
    typer.echo(f"{len(pages)} pages of {count} rows; open {output / 'index.html'}")
    return not failed


def _tracked(title: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """`items` with a progress bar on stderr."""
    with progress_bar() as bar:
        yield from bar.track(items, total=total, description=title)


def _one(option: str, text: str, allowed: Iterable[str]) -> Any:
    """The value of an option that takes exactly one of `allowed`."""
    values = names(option, text, allowed)
    if len(values) != 1:
        raise ValueError(f"{option} is {text!r}; allowed: one of {', '.join(allowed)}")
    return values[0]


def _refuse(why: str, options: dict[str, Any]) -> None:
    """ValueError for the first of these options that is given."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"--{option} is given {why}")


def _needed(output: pathlib.Path | None, example: str) -> pathlib.Path:
    if output is None:
        raise ValueError(f"layouts needs -o, e.g. -o {example}")
    return output


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    """Exits with a line that says what to install if a package of the extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        sys.exit(f"cuteflash: layouts needs {PACKAGES[error.name]}; {how_to_install('layouts')}")
