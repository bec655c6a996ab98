"""Renders a committed result file: a markdown table, a table for the terminal, a plot.

    python -m benchmarks.report benchmarks/results/forward.json                  # markdown on standard output
    python -m benchmarks.report benchmarks/results/forward.json --plot PATH.png
    python -m benchmarks.report benchmarks/results/forward.json --into README.md

A result has one of four tables, which stand between markers of their own: a forward's on plain inputs; if some cells
have others, each cell's speed beside that on plain inputs, with the error; that of packed sequences; a backward's, with
the memory and with a summary of forward + backward, whose table only the terminal shows.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cuteflash.tune.inputs import PLAIN

from .names import DENSE, DETERMINISTIC, OURS, TITLES, UNNAMED, base_of

Result = dict[str, Any]

# label → (ours, the peers of which the fastest counts)
RATIOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours/FA4": (UNNAMED, ("fa4",)),
    "sm90/FA4": ("sm90", ("fa4",)),
    "sm90/cuDNN": ("sm90", ("cudnn",)),
    "sm90/best": ("sm90", ("fa4", "cudnn")),
    "sm80/FA2": ("sm80", ("fa2",)),
    "sm90 det./sm90": ("sm90-det", ("sm90",)),
    "sm80 det./sm80": ("sm80-det", ("sm80",)),
    "sm90 det./FA4 det.": ("sm90-det", ("fa4-det",)),
    "ours/dense": (UNNAMED, (UNNAMED + DENSE,)),
    "sm90/dense": ("sm90", ("sm90-dense",)),
    "sm80/dense": ("sm80", ("sm80-dense",)),
}
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
    if entry is None or entry.get("problem") or "tflops" not in entry:
        return None
    return float(entry["tflops"])


def parts(result: Result) -> dict[str, str]:
    """The lists of cells that a result has, each with the words for what was timed."""
    if "packed" in result:
        return {"cells": f"{result['packed']} of packed sequences"}
    if not is_backward(result):
        return {"cells": "forward"}
    return {"cells": "backward", "both": "forward + backward"}


def is_backward(result: Result) -> bool:
    """Whether a result is that of `benchmarks.backward`."""
    return "both" in result


def summaries(result: Result) -> Result:
    """The summary of each list of cells, as entries of the result."""
    return {"summary" if key == "cells" else f"summary_{key}": summary(result[key]) for key in parts(result)}


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


def has_other_inputs(result: Result) -> bool:
    """Whether some cells have other inputs than plain ones."""
    return any(_kind(cell) != PLAIN for cell in result["cells"])


def rows(cells: Sequence[Result]) -> Iterator[list[str]]:
    """Header, then one row of texts per cell."""
    names, labels = names_of(cells), labels_of(cells)
    yield ["cell", *(TITLES[name] for name in names), *labels]
    for cell in cells:
        yield [cell["label"], *_speed_texts(cell, names, labels)]


def rows_by_inputs(cells: Sequence[Result]) -> Iterator[list[str]]:
    """Header, then one row of texts per cell, with the speed in that on plain inputs, and rms errors in torch's own."""
    names, labels = names_of(cells), labels_of(cells)
    yield [
        "cell",
        "inputs",
        *(TITLES[name] for name in names),
        *labels,
        *(f"{name}/plain" for name in names if name in OURS),
        *(f"rms {TITLES[name].removeprefix('ours ')}" for name in names),
    ]
    for cell in cells:
        ratios = [of_plain(cell, cells, name) for name in names if name in OURS]
        errors = [cell["results"].get(name, {}).get("rms_ratio") for name in names]
        yield [
            cell["label"].removesuffix(f" {_kind(cell)}"),
            _kind(cell),
            *_speed_texts(cell, names, labels),
            *map(_ratio_text, ratios),
            *map(_ratio_text, errors),
        ]


def of_plain(cell: Result, cells: Sequence[Result], name: str) -> float | None:
    """An implementation's speed in a cell over that in the same cell with plain inputs; None if one is missing."""
    same = ("head_dim", "mask", "seqlen", "dtype")
    plain = next((one for one in cells if _kind(one) == PLAIN and all(one[key] == cell[key] for key in same)), None)
    base, here = plain and rate(plain, name), rate(cell, name)
    return here / base if base and here else None


def _kind(cell: Result) -> str:
    """The cell's inputs; results that do not name them have plain ones."""
    return str(cell.get("inputs", PLAIN))


def _speed_texts(cell: Result, names: Sequence[str], labels: Sequence[str]) -> list[str]:
    return [*(_rate_text(cell, name) for name in names), *(_ratio_text(ratio(cell, label)) for label in labels)]


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rate_text(cell: Result, name: str) -> str:
    value, entry = rate(cell, name), cell["results"].get(name, {})
    if value is not None:
        return f"{value:.0f}"
    return "-" if "problem" not in entry else "wrong" if "tflops" in entry else "failed"


def summary_lines(result: Result) -> list[str]:
    """Geometric means and worst cells, the run's own ceilings, host times, and every problem."""
    lines: list[str] = []
    for key, words in parts(result).items():
        lines += _ratio_lines(result[key], f"{words}, " if is_backward(result) else "")
    device = result["device"]
    if "matmul_tflops" in device:
        lines.append(
            f"same run: 8192³ bf16 matrix product {device['matmul_tflops']:.0f} TFLOP/s, "
            f"copy {device['copy_gbps']:.0f} GB/s"
        )
    lines += _roof_lines(result["cells"])
    if has_other_inputs(result):
        lines += _inputs_lines(result["cells"])
    call = "forward + backward under autograd" if is_backward(result) else "call"
    for key, shape in (("host_us", "of a known shape"), ("host_new_us", "of a shape not seen before")):
        if result.get(key):
            times = ", ".join(f"{TITLES[name]} {value:.1f}" for name, value in result[key].items())
            lines.append(f"host time per {call}, µs, {shape}: {times}")
    return [*lines, *_memory_lines(result), *problem_lines(result)]


def _ratio_lines(cells: Sequence[Result], words: str) -> Iterator[str]:
    """Geometric means and worst cells; of what determinism costs by mask, since its price differs."""
    for label in labels_of(cells):
        ours, peers = RATIOS[label]
        of_itself = ours.endswith(DETERMINISTIC) and base_of(ours) in peers
        masks = dict.fromkeys(cell["mask"] for cell in cells) if of_itself else [""]
        for mask in masks:
            entry = summary([cell for cell in cells if mask in ("", cell["mask"])]).get(label)
            if entry:
                yield (
                    f"{words}{mask}{mask and ', '}{label}: geometric mean {entry['geomean']:.3f}, "
                    f"worst {entry['worst']:.3f} at {entry['worst_cell']} ({entry['cells']} cells)"
                )


def _memory_lines(result: Result) -> Iterator[str]:
    """Of each length the peak memory by implementation."""
    for entry in result.get("memory", []):
        used = ", ".join(f"{TITLES[name]} {mib:,.0f}" for name, mib in entry["mib"].items())
        failed = "".join(f"; {TITLES[name]} failed: {why}" for name, why in entry["problems"].items())
        where = f"{entry['label']}, batch {entry['batch']}, {entry['heads']} heads"
        yield f"peak memory of forward + backward beside Q, K, V and dO, MiB, {where}: {used}{failed}"


def problem_lines(result: Result) -> list[str]:
    """Everything that was wrong or failed, in words."""
    return [
        f"{cell['label']}, {words}{TITLES[name]}: {entry['problem']}"
        for key, words in (
            {"cells": "", "both": "forward + backward, "} if is_backward(result) else {"cells": ""}
        ).items()
        for cell in result[key]
        for name, entry in cell["results"].items()
        if entry.get("problem")
    ]


def _inputs_lines(cells: Sequence[Result]) -> Iterator[str]:
    """The slowest of our cells against plain inputs, and the least precise."""
    for name in names_of(cells):
        speeds = [(value, cell["label"]) for cell in cells if (value := of_plain(cell, cells, name)) is not None]
        if speeds:
            yield f"{TITLES[name]}: slowest against plain inputs {min(speeds)[0]:.3f} at {min(speeds)[1]}"
        ratios = [
            (entry["rms_ratio"], cell["label"])
            for cell in cells
            if "rms_ratio" in (entry := cell["results"].get(name, {}))
        ]
        if ratios:
            yield f"{TITLES[name]}: rms error at most {max(ratios)[0]:.2f} times torch's own, at {max(ratios)[1]}"


def _roof_lines(cells: Sequence[Result]) -> Iterator[str]:
    """What our fastest family reaches of the matrix product timed beside it, full attention, at the longest lengths."""
    longest: dict[int, Result] = {}
    for cell in cells:
        head_dim = cell["head_dim"]
        if (
            "matmul_tflops" in cell
            and cell["mask"] == "full"
            and "seqlen" in cell
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
    header, *body = _table(result)
    environment = result["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    lines = [
        f"{environment['gpu']}, {environment['date']} ({versions}). TFLOP/s, {result['dtype']}, "
        f"{parts(result)['cells']}; {'64k' if 'packed' in result else '16k'} tokens, hidden size 2048.",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in body),
        "",
        *(f"- {line}" for line in summary_lines(result)),
    ]
    return "\n".join(lines) + "\n"


def _table(result: Result, key: str = "cells") -> Iterator[list[str]]:
    return (rows_by_inputs if has_other_inputs(result) else rows)(result[key])


def marker(result: Result) -> str:
    """What a result's table stands between in a markdown file."""
    if "packed" in result:
        return f"varlen {result['packed']} benchmark"
    if is_backward(result):
        return "backward benchmark"
    return "real inputs" if has_other_inputs(result) else "benchmark"


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
    for key, words in parts(result).items():
        header, *body = _table(result, key)
        title = f"{words}, TFLOP/s, {result['dtype']}, {result['environment']['gpu']}"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for name in header:
            table.add_column(name, justify="left" if name in ("cell", "inputs") else "right", no_wrap=True)
        against_peers = [name in RATIOS for name in header]
        for row in body:
            table.add_row(
                *(
                    f"[red]{text}[/]" if mark and text[:2] == "0." else text
                    for mark, text in zip(against_peers, row, strict=True)
                )
            )
        console.print(table)
    for line in summary_lines(result):
        console.print(line, highlight=False, markup=False)


def plot(result: Result, path: pathlib.Path) -> None:
    """TFLOP/s over sequence length on plain inputs, one panel per head dim, mask and element type, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for cell in result["cells"] if _kind(cell) == PLAIN]
    head_dims = sorted({cell["head_dim"] for cell in cells})
    kinds = list(dict.fromkeys((cell["mask"], cell.get("dtype", result["dtype"])) for cell in cells))
    size = (4.2 * len(head_dims) + 0.6, 3.2 * len(kinds) + 0.6)
    figure, axes = pyplot.subplots(len(kinds), len(head_dims), figsize=size, squeeze=False, sharex=True)
    for row, (mask, dtype) in enumerate(kinds):
        for column, head_dim in enumerate(head_dims):
            same = {"mask": mask, "head_dim": head_dim, "dtype": dtype}
            panel = [cell for cell in cells if all(cell.get(name, dtype) == value for name, value in same.items())]
            _plot_panel(axes[row][column], sorted(panel, key=lambda cell: int(cell["seqlen"])))
            title = f"head dim {head_dim}, {mask}"
            axes[row][column].set_title(title if dtype == result["dtype"] else f"{title}, {dtype}", fontsize=10)
        axes[row][0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"Attention {parts(result)['cells']}, {result['dtype']}, {result['environment']['gpu']}", fontsize=12
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_panel(axis: Any, cells: Sequence[Result]) -> None:
    for name in names_of(cells):
        if name.endswith(DETERMINISTIC):
            continue  # a point of a table, and one line too many in a panel
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
    parser.add_argument("json", type=pathlib.Path, help="a file written by benchmarks.forward, .backward or .varlen")
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="also write the plot")
    parser.add_argument("--into", type=pathlib.Path, metavar="MARKDOWN", help="write the table between its markers")
    arguments = parser.parse_args(argv)
    result = json.loads(arguments.json.read_text())
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.into:
        insert(markdown(result), arguments.into, marker(result))
    else:
        print(markdown(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
