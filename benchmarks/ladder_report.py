"""The ablation ladder as markdown tables and as a plot."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from . import report
from .names import TITLES
from .plots import COLOURS
from .rates import rate

Result = Mapping[str, Any]

_ERROR_WORDS = ", then the rms error in O's rms"
FAMILY_COLOURS = {"sm80": COLOURS["sm80"], "sm90": COLOURS["sm90"]}


def cells_of(result: Result, family: str) -> list[Result]:
    """The cells on which a family's ladder was measured."""
    return [cell for cell in result["cells"] if cell["family"] == family]


def dtype_of(result: Result) -> str:
    """The element types of the operands."""
    return ", ".join(dict.fromkeys(cell.get("dtype", "bf16") for cell in result["cells"]))


def in_bytes(result: Result) -> bool:
    """Whether speeds are those of bytes, as of decoding, not of operations."""
    return any("nbytes" in cell for cell in result["cells"])


def unit(result: Result) -> str:
    """That of all speeds."""
    return "GB/s" if in_bytes(result) else "TFLOP/s"


def speed(cell: Result, name: str) -> float | None:
    """Of a rung, or of the peer, in the result's unit; None if it did not run or was wrong."""
    tflops = rate(dict(cell), name)
    if tflops is None or "nbytes" not in cell:
        return tflops
    return float(cell["nbytes"] / cell["results"][name]["ms"] / 1e6)


def has_errors(result: Result) -> bool:
    """Whether the table shows each rung's error."""
    return any("relative" in entry for cell in result["cells"] for entry in cell["results"].values())


def markdown(result: Result) -> str:
    """A table for each family: the speed of each rung in each cell, with the gain over the rung below."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    size = "" if in_bytes(result) else ", 16k tokens, hidden size 2048"
    copy = f", copy {result['copy_gbps']:.0f} GB/s" if in_bytes(result) else ""
    lines = [
        f"{environment['gpu']}, {environment['date']} ({versions}). {unit(result)}, {dtype_of(result)}{size}; in "
        f"brackets the gain over the rung before{_ERROR_WORDS if has_errors(result) else ''}. Same run: 8192³ bf16 "
        f"matrix product {result['matmul_tflops']:.0f} TFLOP/s{copy}."
    ]
    for family in result["rungs"]:
        cells = cells_of(result, family)
        if cells:
            lines += ["", f"### {family}", "", *_table(result["rungs"][family], cells)]
    return "\n".join(lines) + "\n"


def _table(rungs: Sequence[Result], cells: Sequence[Result]) -> list[str]:
    peer: str | None = cells[0]["peer"]
    header = ["rung", "what it does", *(cell["label"] for cell in cells)]
    lines = [f"| {' | '.join(header)} |", f"|---|---|{'---|' * len(cells)}"]
    before: dict[str, float | None] = {}
    for rung in rungs:
        texts = []
        for cell in cells:
            now = speed(cell, rung["title"])
            texts.append(_gain_text(now, before.get(cell["label"]), cell["results"].get(rung["title"])))
            before[cell["label"]] = now
        lines.append(f"| {rung['title']} | {rung['does']} | {' | '.join(texts)} |")
    rates = [speed(cell, peer) for cell in cells] if peer is not None else []
    if peer is not None and any(rates):
        texts = ["-" if value is None else f"{value:.0f}" for value in rates]
        lines.append(f"| *{TITLES[peer]}* | the peer | {' | '.join(texts)} |")
    return lines


def _gain_text(now: float | None, before: float | None, entry: Result | None) -> str:
    if now is None:
        return "-" if entry is None else "wrong" if "tflops" in entry else "failed"
    error = f", {entry['relative']:.2%}" if entry and "relative" in entry else ""
    return f"{now:.0f}{error}" if before is None else f"{now:.0f} ({now / before - 1:+.0%}){error}"


def insert(text: str, path: pathlib.Path) -> None:
    """Replace the text between the markers in a markdown file; ValueError if the markers are missing."""
    report.insert(text, path, "ladder")


def plot(result: Result, path: pathlib.Path) -> None:
    """Bars of each family's rungs, a group a cell, with the peer as a line, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = [family for family in result["rungs"] if cells_of(result, family)]
    figure, axes = pyplot.subplots(len(families), 1, figsize=(10, 3.4 * len(families)), squeeze=False)
    for axis, family in zip(axes[:, 0], families, strict=True):
        _plot_ladder(axis, family, result["rungs"][family], cells_of(result, family))
        axis.set_ylabel(f"{family}, {unit(result)}")
    figure.suptitle(f"Effect of each optimisation, {dtype_of(result)}, {result['environment']['gpu']}", fontsize=12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_ladder(axis: Any, family: str, rungs: Sequence[Result], cells: Sequence[Result]) -> None:
    width = 0.85 / len(rungs)
    for at, rung in enumerate(rungs):
        share = (at + 1) / len(rungs)  # darker the higher
        for group, cell in enumerate(cells):
            value = speed(cell, rung["title"])
            if value is not None:
                x = group + (at - (len(rungs) - 1) / 2) * width
                colour = FAMILY_COLOURS[family.partition(" ")[0]]  # of a ladder's name
                axis.bar(x, value, width * 0.92, color=colour, alpha=0.25 + 0.75 * share)
                axis.text(x, value, f" {rung['title']} {value:.0f}", rotation=90, ha="center", va="bottom", fontsize=6)
    for group, cell in enumerate(cells):
        value = speed(cell, cell["peer"]) if cell["peer"] is not None else None
        if value is not None:
            label = TITLES[cell["peer"]] if group == 0 else None
            axis.hlines(value, group - 0.46, group + 0.46, color=COLOURS[cell["peer"]], linestyle="--", label=label)
    axis.set_xticks(range(len(cells)), [cell["label"] for cell in cells])
    axis.margins(y=0.45)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", alpha=0.25)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper left", frameon=False, fontsize=8)
