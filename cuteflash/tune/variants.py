"""Traits given by hand, as sets of fields: what to try in place of a table's row or of the enumerated candidates."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from cuteflash.dispatch import padded_head_dim
from cuteflash.problem import MASK_KINDS
from cuteflash.traits.arch import FAMILIES, Family
from cuteflash.traits.row import KINDS, Traits, kinds_of
from cuteflash.traits.values import field_types, make_traits
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import task_of_traits


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """Traits to try in place of the shipped row; fields left out keep the traits' defaults."""

    family: Family  # kernel family the traits belong to
    # trait fields; `head_dim` and `head_dim_v` default to the cell's, padded as tables pad them
    fields: Mapping[str, Any]
    mask: str | None = None  # the mask the variant is meant for; None is any
    kind: str | None = None  # of `KINDS`; None is the only one of the operation and family that has the fields

    def applies(self, cell: Cell) -> bool:
        """Whether the variant is meant for `cell`."""
        padded = padded_head_dim(cell.head_dim)
        return self.mask in (None, cell.mask) and self.fields.get("head_dim", padded) == padded

    def traits(self, cell: Cell) -> Traits:
        """The traits for `cell`; ValueError names what is wrong with the fields, or the kinds that have them."""
        padded: dict[str, Any] = {
            "head_dim": padded_head_dim(cell.head_dim),
            "head_dim_v": padded_head_dim(cell.head_dim_v),
        }
        kinds = kinds_of(cell.operation, self.family, cell.spec.dtypes, of_cache=cell.form == "cache")
        if self.kind is not None and self.kind not in kinds:
            raise ValueError(f"kind is {self.kind!r}; allowed for {cell.operation} {self.family}: {', '.join(kinds)}")
        fitting = [kind for kind in kinds if self.fields.keys() <= field_types(kind).keys()]
        if self.kind is None and len(fitting) != 1:
            what = "several kinds have these fields, name one as `kind`" if fitting else "no kind has these fields"
            every = "; ".join(f"fields of {kind}: {', '.join(field_types(kind))}" for kind in kinds)
            raise ValueError(f"traits are {dict(self.fields)}: {what}; {every}")
        try:
            kind = self.kind or fitting[0]
            padded = {name: value for name, value in padded.items() if name in field_types(kind)}
            if cell.form and "splits" in field_types(kind):
                padded["splits"] = True
            if "turns_v" in field_types(kind):
                padded["turns_v"] = not cell.transposed_v
            made = make_traits(kind, padded | dict(self.fields))
            if task_of_traits(made) != cell.task:
                name = "splits" if "splits" in self.fields else "turns_v"
                given = self.fields[name]
                raise ValueError(f"{name} is {given}; allowed for {cell.label}: {not given}")
            return made
        except ValueError as error:
            raise ValueError(f"traits are {dict(self.fields)}: {error}") from error

    @property
    def label(self) -> str:
        """Its fields but for the head dims, short."""
        short = {"tile_m": "m", "tile_n": "n"}
        fields = {name: value for name, value in self.fields.items() if name not in ("head_dim", "head_dim_v")}
        values = {name: int(value) if isinstance(value, bool) else value for name, value in fields.items()}
        return " ".join(f"{short.get(name, name)}={value}" for name, value in values.items()) or "defaults"


def parse_variants(text: str, family: str | None = None) -> list[Variant]:
    """Variants from JSON text, or from the file named after an "@".

    A list of objects of trait fields, with `family` (unless given for all) and optionally `mask` and `kind` among them.
    """
    try:
        rows = json.loads(pathlib.Path(text[1:]).read_text() if text.startswith("@") else text)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"this is a {type(rows).__name__}")
    except (OSError, ValueError) as error:
        form = "a JSON list of objects, or @FILE with one"
        raise ValueError(f"traits are {text!r}; allowed: {form} ({error})") from error
    variants = []
    for row in rows:
        fields = dict(row)
        own_family, mask, kind = fields.pop("family", family), fields.pop("mask", None), fields.pop("kind", None)
        if own_family not in FAMILIES:
            raise ValueError(f"family is {own_family!r} in {row}; allowed: {', '.join(FAMILIES)}")
        if mask not in (None, *MASK_KINDS):
            raise ValueError(f"mask is {mask!r} in {row}; allowed: {', '.join(MASK_KINDS)}")
        if kind not in (None, *KINDS):
            raise ValueError(f"kind is {kind!r} in {row}; allowed: {', '.join(KINDS)}")
        variants.append(Variant(own_family, fields, mask, kind))
    return variants
