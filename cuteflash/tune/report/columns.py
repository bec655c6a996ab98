"""Long lists, written small: a trait's column as indices into its values, reasons as templates and their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from cuteflash.traits.docs import attribute_docs
from cuteflash.traits.row import KINDS, Traits
from cuteflash.traits.values import default_values, field_types, values_of
from cuteflash.tune.results import Run
from cuteflash.tune.worker import plain

KIND_DOC = "the kernel, as the function is called that makes its rows."
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


def trait_columns(kinds: Collection[str], candidates: Sequence[Traits]) -> list[dict[str, Any]]:
    """For `kind` and each field of the traits of some kinds: name, doc, defaults by kind, sorted values, and `column`.

    That has a character for each candidate: the index of its value, from "0" on. It is empty if all have one value.
    Traits whose kind does not have a field have the value None, which comes last.
    """
    every = [values_of(one) for one in candidates]
    columns = []
    for name in dict.fromkeys(["kind", *(field for kind in kinds for field in field_types(kind))]):
        own = [values.get(name) for values in every]
        values = sorted(set(own), key=lambda value: (value is None, value))
        index = {value: number for number, value in enumerate(values)}
        letters = "".join(chr(ord("0") + index[value]) for value in own)
        defaults = {kind: default_values(kind) for kind in kinds}
        columns.append(
            {
                "name": name,
                "doc": KIND_DOC if name == "kind" else _doc(name, kinds),
                "defaults": {kind: known[name] for kind, known in defaults.items() if name in known},
                "values": values,
                "column": letters if len(values) > 1 else "",
            }
        )
    return columns


def _doc(name: str, kinds: Iterable[str]) -> str:
    """What the kinds that have a field say of it, each text once."""
    texts = (attribute_docs(KINDS[kind]).get(name, "") for kind in kinds)
    return " / ".join(dict.fromkeys(text for text in texts if text))


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
