"""Long lists, written small: a trait's column as indices into its values, reasons as templates and their numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cuteflash.traits.docs import attribute_docs
from cuteflash.traits.row import FwdRowTraits
from cuteflash.tune.results import Run
from cuteflash.tune.worker import plain

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")
DIGITS = 5  # of a time: a hundredth of what two runs of one kernel differ by
FINE = 10_000  # parts of a time in which the ends of its interval are counted


class Reasons:
    """Sentences that differ in their numbers alone share a template, in which # stands for a number.

    Attributes:
        templates: in the order in which they came up.
    """

    def __init__(self) -> None:
        self.templates: list[str] = []
        self._numbers: dict[str, int] = {}

    def encode(self, text: str) -> list[Any]:
        """[number of the template, its numbers ...]; numbers whose digits JSON would not keep are texts."""
        text = " ".join(plain(text).split()).replace("#", "no. ")
        template = NUMBER.sub("#", text)
        if template not in self._numbers:
            self._numbers[template] = len(self.templates)
            self.templates.append(template)
        found = (int(one) if one == str(int(float(one))) else one for one in NUMBER.findall(text))
        return [self._numbers[template], *found]


def trait_columns(kind: type[FwdRowTraits], candidates: Sequence[FwdRowTraits]) -> list[dict[str, Any]]:
    """For each field of a family's traits: name, doc, default (if it has one), sorted values, and `column`.

    That has a character for each candidate: the index of its value, from "0" on. It is empty if all have one value.
    """
    words = attribute_docs(kind)
    columns = []
    for field in dataclasses.fields(kind):
        own = [getattr(one, field.name) for one in candidates]
        values = sorted(set(own))
        index = {value: number for number, value in enumerate(values)}
        column: dict[str, Any] = {"name": field.name, "doc": words.get(field.name, ""), "values": values}
        if field.default is not dataclasses.MISSING:
            column["default"] = field.default
        letters = "".join(chr(ord("0") + index[value]) for value in own)
        columns.append(column | {"column": letters if len(values) > 1 else ""})
    return columns


def short(value: float | None) -> float | None:
    """`DIGITS` significant digits; None for what is not finite, which JSON does not have."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def time_columns(runs: Iterable[Run]) -> dict[str, list[float | int | None]]:
    """`ms` of each run, and how far below and above it its interval reaches, in 1/FINE of it; None is without end."""
    columns: dict[str, list[float | int | None]] = {"ms": [], "below": [], "above": []}
    for run in runs:
        columns["ms"].append(short(run.ms))
        columns["below"].append(round((1 - run.low / run.ms) * FINE))
        columns["above"].append(round((run.high / run.ms - 1) * FINE) if math.isfinite(run.high) else None)
    return columns
