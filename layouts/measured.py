"""Facts on the shipped rows for the index: measured speed, unusual traits, equal rows of several targets."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
import zlib
from typing import Any, Final

from cuteflash.traits.row import Row, TableKey, Traits
from cuteflash.traits.tables import MODULES, TABLES
from cuteflash.tune.tables import read_shipped

NOTE: Final = re.compile(r"(.+), (\d{4}-\d{2}-\d{2}), (\d+) TFLOP/s")  # as `usertable.MeasuredRow.note` has it
SHOWN_ELSEWHERE: Final = ("tile_m", "tile_n", "head_dim", "head_dim_v")


@functools.cache
def _notes(table: TableKey) -> dict[Row, str]:
    """The comment beside each row of a table, as the files of its modules have it."""
    paths = [pathlib.Path(str(module.__file__)) for module in MODULES[table]]
    return {noted.row: noted.note for path in reversed(paths) for noted in reversed(read_shipped(path))}


def speed(table: TableKey, row: Row) -> dict[str, Any] | None:
    """{"gpu", "date", "tflops"} of a shipped row; None if it was not measured."""
    found = NOTE.fullmatch(_notes(table)[row])
    return {"gpu": found[1], "date": found[2], "tflops": int(found[3])} if found else None


def apart(table: TableKey, traits: Traits) -> dict[str, Any]:
    """The traits, other than the tile, in which a row differs from most rows of its table."""
    usual = _usual(table)
    own = dataclasses.asdict(traits)
    return {name: value for name, value in own.items() if name not in SHOWN_ELSEWHERE and value != usual[name]}


def kin(table: TableKey, row: Row) -> str:
    """A key that is equal for the same row of all targets that share a table."""
    names = [module.__name__ for module in MODULES[table]]
    return f"{zlib.crc32(repr((names, row)).encode()):08x}"


@functools.cache
def _usual(table: TableKey) -> dict[str, Any]:
    rows = [dataclasses.asdict(row.traits) for row in TABLES[table]]
    return {name: collections.Counter(row[name] for row in rows).most_common(1)[0][0] for name in rows[0]}
