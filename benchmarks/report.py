"""Renders a committed result file: a markdown table for the README, a table for the terminal, a plot.

python -m benchmarks.report benchmarks/results/forward.json                  # markdown on standard output
python -m benchmarks.report benchmarks/results/forward.json --plot PATH.png
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

Result = dict[str, Any]

# label → (ours, the peers of which the fastest counts)
RATIOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sm90/FA4": ("sm90", ("fa4",)),
    "sm90/cuDNN": ("sm90", ("cudnn",)),
    "sm90/best": ("sm90", ("fa4", "cudnn")),
    "sm80/FA2": ("sm80", ("fa2",)),
}
OURS = ("sm90", "sm80")
TITLES = {"sm90": "ours sm90", "sm80": "ours sm80", "fa4": "FA4", "cudnn": "cuDNN", "fa2": "FA2"}
COLOURS = {"sm90": "#0b6e4f", "sm80": "#7cb518", "fa4": "#d1495b", "cudnn": "#3066be", "fa2": "#8d99ae"}


def ratio(cell: Result, label: str) -> float | None:
    """Our speed over the peer's in one cell; None where one of them has no right result."""
    ours, peers = RATIOS[label]
    rates = [rate(cell, peer) for peer in peers]
    mine = rate(cell, ours)
    if mine is None or any(value is None for value in rates):
        return None
    return mine / max(value for value in rates if value is not None)


def rate(cell: Result, name: str) -> float | None:
    """TFLOP/s of an implementation in one cell; None where it did not run or was wrong."""
    entry = cell["results"].get(name)
    if entry is None or entry.get("problem"):
        return None
    return float(entry["tflops"])


def summary(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """For each ratio: geometric mean, worst cell and number of cells."""
    found: dict[str, dict[str, Any]] = {}
    for label in RATIOS:
        values = [(value, cell["label"]) for cell in cells if (value := ratio(cell, label)) is not None]
        if values:
            mean = math.exp(sum(math.log(value) for value, _ in values) / len(values))
            worst, where = min(values)
            found[label] = {"geomean": mean, "worst": worst, "worst_cell": where, "cells": len(values)}
    return found


def names_of(cells: Sequence[Result]) -> list[str]:
    """The implementations that appear, in the order of TITLES."""
    return [name for name in TITLES if any(name in cell["results"] for cell in cells)]


def labels_of(cells: Sequence[Result]) -> list[str]:
    """The ratios that can be formed in at least one cell."""
    return [label for label in RATIOS if any(ratio(cell, label) is not None for cell in cells)]


def rows(cells: Sequence[Result]) -> Iterator[list[str]]:
    """Header, then one row of texts per cell."""
    names, labels = names_of(cells), labels_of(cells)
    yield ["cell", *(TITLES[name] for name in names), *labels]
    for cell in cells:
        rates = [_rate_text(cell, name) for name in names]
        ratios = [ratio(cell, label) for label in labels]
        yield [cell["label"], *rates, *("-" if value is None else f"{value:.2f}" for value in ratios)]


def _rate_text(cell: Result, name: str) -> str:
    value = rate(cell, name)
    if value is not None:
        return f"{value:.0f}"
    return "-" if name not in cell["results"] else "wrong" if "tflops" in cell["results"][name] else "failed"


def summary_lines(result: Result) -> list[str]:
    """Geometric means and worst cells, the run's own ceilings, host times, and every problem."""
    lines = [
        f"{label}: geometric mean {entry['geomean']:.3f}, worst {entry['worst']:.3f} at {entry['worst_cell']} "
        f"({entry['cells']} cells)"
        for label, entry in summary(result["cells"]).items()
    ]
    device = result["device"]
    if "matmul_tflops" in device:
        lines.append(
            f"same run: 8192³ bf16 matrix product {device['matmul_tflops']:.0f} TFLOP/s, "
            f"copy {device['copy_gbps']:.0f} GB/s"
        )
    lines += _roof_lines(result["cells"])
    if result.get("host_us"):
        times = ", ".join(f"{TITLES[name]} {value:.1f}" for name, value in result["host_us"].items())
        lines.append(f"host time per call, µs: {times}")
    for cell in result["cells"]:
        for name, entry in cell["results"].items():
            if entry.get("problem"):
                lines.append(f"{cell['label']}, {TITLES[name]}: {entry['problem']}")
    return lines


def _roof_lines(cells: Sequence[Result]) -> Iterator[str]:
    """What our fastest family reaches of the matrix product timed beside it, full attention, at the longest lengths."""
    longest: dict[int, Result] = {}
    for cell in cells:
        head_dim = cell["head_dim"]
        if (
            "matmul_tflops" in cell
            and cell["mask"] == "full"
            and cell["seqlen"] >= longest.get(head_dim, cell)["seqlen"]
        ):
            longest[head_dim] = cell
    shares = ", ".join(
        f"{cell['label']} {max(rate(cell, name) or 0.0 for name in OURS) / cell['matmul_tflops']:.3f}"
        for cell in longest.values()
    )
    if shares:
        yield f"of that matrix product, timed beside them: {shares}"


def markdown(result: Result) -> str:
    """The table and its notes, in markdown."""
    header, *body = rows(result["cells"])
    environment = result["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    lines = [
        f"{environment['gpu']}, {environment['date']} ({versions}). TFLOP/s, {result['dtype']}, forward; "
        "16k tokens, hidden size 2048.",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in body),
        "",
        *(f"- {line}" for line in summary_lines(result)),
    ]
    return "\n".join(lines) + "\n"


def insert(text: str, path: pathlib.Path, marker: str = "benchmark") -> None:
    """Replace what stands between the markers in a markdown file; ValueError where it does not have them."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    content = path.read_text()
    before, found_begin, rest = content.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}{end}{after}")


def print_table(result: Result) -> None:
    """The table on the terminal, ratios below 1 in red."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    header, *body = rows(result["cells"])
    table = Table(title=f"forward, TFLOP/s, {result['dtype']}, {result['environment']['gpu']}", box=box.SIMPLE_HEAD)
    for title in header:
        table.add_column(title, justify="left" if title == "cell" else "right", no_wrap=True)
    for row in body:
        table.add_row(*(f"[red]{text}[/]" if text[:2] == "0." else text for text in row))
    console.print(table)
    for line in summary_lines(result):
        console.print(line, highlight=False, markup=False)


def plot(result: Result, path: pathlib.Path) -> None:
    """TFLOP/s over sequence length, one panel per head dim and mask, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = result["cells"]
    head_dims = sorted({cell["head_dim"] for cell in cells})
    masks = [mask for mask in ("full", "causal") if any(cell["mask"] == mask for cell in cells)]
    size = (4.2 * len(head_dims) + 0.6, 3.2 * len(masks) + 0.6)
    figure, axes = pyplot.subplots(len(masks), len(head_dims), figsize=size, squeeze=False, sharex=True)
    for row, mask in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            panel = [cell for cell in cells if cell["mask"] == mask and cell["head_dim"] == head_dim]
            _plot_panel(axes[row][column], sorted(panel, key=lambda cell: int(cell["seqlen"])))
            axes[row][column].set_title(f"head dim {head_dim}, {mask}", fontsize=10)
        axes[row][0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"Attention forward, {result['dtype']}, {result['environment']['gpu']}", fontsize=12)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_panel(axis: Any, cells: Sequence[Result]) -> None:
    for name in names_of(cells):
        points = [(cell["seqlen"], value) for cell in cells if (value := rate(cell, name)) is not None]
        ours = name.startswith("sm")
        style = {"color": COLOURS[name], "linewidth": 2.2 if ours else 1.4, "linestyle": "-" if ours else "--"}
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=TITLES[name], **style)
    lengths = sorted({cell["seqlen"] for cell in cells})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a result file as markdown; with --plot, draw it too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="render a benchmark result")
    parser.add_argument("json", type=pathlib.Path, help="a file written by benchmarks.forward")
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="also write the plot")
    parser.add_argument("--into", type=pathlib.Path, metavar="MARKDOWN", help="write the table between its markers")
    arguments = parser.parse_args(argv)
    result = json.loads(arguments.json.read_text())
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.into:
        insert(markdown(result), arguments.into)
    else:
        print(markdown(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
