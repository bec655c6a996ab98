"""Renders a committed result file: a markdown table, a table for the terminal, a plot.

    python -m benchmarks.report benchmarks/results/forward.json                  # markdown on standard output
    python -m benchmarks.report benchmarks/results/forward.json --plot PATH.png
    python -m benchmarks.report benchmarks/results/forward.json --into docs/benchmarks.md

A result has one of five tables, which stand between markers of their own: a forward's on plain inputs; that with 8-bit
operands; if some cells have other inputs, each cell's speed beside that on plain ones, with the error; that of packed
sequences; a backward's, with the memory and with a summary of forward + backward, whose table only the terminal shows.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

from cuteflash.tune.inputs import PLAIN

from .names import DETERMINISTIC, FP8_OURS, OURS, TITLES, base_of, is_fp8
from .plots import plot
from .rates import (
    RATIOS,
    Result,
    has_fp8,
    is_backward,
    kind_of,
    labels_of,
    names_of,
    of_plain,
    parts,
    rate,
    ratio,
    summary,
    types_of,
)


def summaries(result: Result) -> Result:
    """The summary of each list of cells, as entries of the result."""
    return {"summary" if key == "cells" else f"summary_{key}": summary(result[key]) for key in parts(result)}


def has_other_inputs(result: Result) -> bool:
    """Whether some cells have other inputs than plain ones."""
    return any(kind_of(cell) != PLAIN for cell in result["cells"])


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
            cell["label"].removesuffix(f" {kind_of(cell)}"),
            kind_of(cell),
            *_speed_texts(cell, names, labels),
            *map(_ratio_text, ratios),
            *map(_ratio_text, errors),
        ]


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
    if "fp8_matmul_tflops" in result:
        lines.append(f"same run: 8192³ e4m3 matrix product, one level, {result['fp8_matmul_tflops']:.0f} TFLOP/s")
    lines += _roof_lines(result["cells"], "matmul_tflops", OURS, "that matrix product")
    lines += _roof_lines(result["cells"], "fp8_matmul_tflops", FP8_OURS, "the e4m3 matrix product")
    lines += _fp8_error_lines(result["cells"])
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


def _roof_lines(cells: Sequence[Result], key: str, names: Sequence[str], words: str) -> Iterator[str]:
    """What our fastest one of `names` reaches of a matrix product timed beside it, full attention, at the longest
    lengths; `key`: the product's rate in a cell."""
    longest: dict[int, Result] = {}
    for cell in cells:
        head_dim = cell["head_dim"]
        if (
            key in cell
            and cell["mask"] == "full"
            and "seqlen" in cell
            and cell["seqlen"] >= longest.get(head_dim, cell)["seqlen"]
        ):
            longest[head_dim] = cell
    shares = ", ".join(
        f"{cell['label']} {max(rate(cell, name) or 0.0 for name in names) / cell[key]:.3f}" for cell in longest.values()
    )
    if shares:
        yield f"of {words}, timed beside them: {shares}"


def _fp8_error_lines(cells: Sequence[Result]) -> Iterator[str]:
    """The largest error of each implementation with 8-bit operands, in the rms of O."""
    for name in filter(is_fp8, names_of(cells)):
        errors = [
            (entry["relative"], cell["label"]) for cell in cells if "relative" in (entry := cell["results"][name])
        ]
        if errors:
            yield f"{TITLES[name]}: rms error at most {max(errors)[0]:.1%} of O's rms, at {max(errors)[1]}"


def markdown(result: Result) -> str:
    """The table and its notes, in markdown."""
    header, *body = _table(result)
    environment = result["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items())
    lines = [
        f"{environment['gpu']}, {environment['date']} ({versions}). TFLOP/s, {types_of(result)}, "
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
    if has_fp8(result):
        return "fp8 benchmark"
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
        title = f"{words}, TFLOP/s, {types_of(result)}, {result['environment']['gpu']}"
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
