"""Speeds of a result, their ratios and means: what its table and its plot are made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cuteflash.tune.inputs import PLAIN

from .names import DENSE, TITLES, UNNAMED, is_fp8

Result = dict[str, Any]

# label → (ours, the peers of which the fastest counts)
RATIOS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours/FA4": (UNNAMED, ("fa4",)),
    "ours/best": (UNNAMED, ("fa4", "cudnn", "fa2")),
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
    "fp8 Vᵀ/bf16": ("sm90-fp8-vt", ("sm90",)),
    "fp8 V/Vᵀ": ("sm90-fp8", ("sm90-fp8-vt",)),
    "fp8 Vᵀ/cuDNN": ("sm90-fp8-vt", ("cudnn-fp8",)),
    "fp8 V/cuDNN": ("sm90-fp8", ("cudnn-fp8",)),
}


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


def summary(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """For each ratio: geometric mean, worst cell and number of cells."""
    found: dict[str, dict[str, Any]] = {}
    for label in RATIOS:
        values = [(value, cell["label"]) for cell in cells if (value := ratio(cell, label)) is not None]
        if values:
            found[label] = extent(values)
    return found


def extent(ratios: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Geometric mean, worst cell and number of some ratios, each with its cell's label."""
    worst, where = min(ratios)
    mean = statistics.geometric_mean(value for value, _ in ratios)
    return {"geomean": mean, "worst": worst, "worst_cell": where, "cells": len(ratios)}


def in_words(label: str, ratios: Sequence[tuple[float, str]]) -> str:
    """What `extent` finds, as a line."""
    all_of = extent(ratios)
    worst = f"worst {all_of['worst']:.3f} at {all_of['worst_cell']}"
    return f"{label}: geometric mean {all_of['geomean']:.3f}, {worst}"


def names_of(cells: Sequence[Result]) -> list[str]:
    """The implementations that appear, in the order of TITLES."""
    return [name for name in TITLES if any(name in cell["results"] for cell in cells)]


def labels_of(cells: Sequence[Result]) -> list[str]:
    """The ratios that can be formed in at least one cell."""
    return [label for label in RATIOS if any(ratio(cell, label) is not None for cell in cells)]


def of_plain(cell: Result, cells: Sequence[Result], name: str) -> float | None:
    """An implementation's speed in a cell over that in the same cell with plain inputs; None if one is missing."""
    same = ("head_dim", "mask", "seqlen", "dtype")
    plain = next((one for one in cells if kind_of(one) == PLAIN and all(one[key] == cell[key] for key in same)), None)
    base, here = plain and rate(plain, name), rate(cell, name)
    return here / base if base and here else None


def kind_of(cell: Result) -> str:
    """The cell's inputs; results that do not name them have plain ones."""
    return str(cell.get("inputs", PLAIN))


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


def types_of(result: Result) -> str:
    """The element types of Q, K and V, in words."""
    dtype = str(result["dtype"])
    return f"e4m3 beside {dtype}" if has_fp8(result) else dtype


def has_fp8(result: Result) -> bool:
    """Whether some implementations of a result have 8-bit operands."""
    return any(map(is_fp8, names_of(result["cells"])))
