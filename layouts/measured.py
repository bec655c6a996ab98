"""Facts on the shipped rows for the index: measured speed, unusual traits, equal rows of several targets."""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from typing import Any, Final

from cuteflash.traits.row import Row, Traits
from cuteflash.traits.tables import RowSet

SHOWN_ELSEWHERE: Final = ("tile_m", "tile_n", "head_dim", "head_dim_v")


def speed(row: Row) -> dict[str, Any] | None:
    """{"gpu", "date", "tflops"} of a shipped row; None if it was not measured."""
    return row.measurement._asdict() if row.measurement is not None else None


def apart(peers: RowSet, traits: Traits) -> dict[str, Any]:
    """The traits, other than the tile, in which a row differs from most of its peers for the same kernel."""
    kind: Any = type(traits)
    usual = _usual(peers.rows, kind)
    own = dataclasses.asdict(traits)
    return {name: value for name, value in own.items() if name not in SHOWN_ELSEWHERE and value != usual[name]}


def kin(peers: RowSet, row: Row, part: str) -> str:
    """A key that is equal for the same row, and part of its kernel, of all targets that share its modules."""
    names = [module.__name__ for module in peers.modules]
    return f"{zlib.crc32(repr((names, row, part)).encode()):08x}"


@functools.cache
def _usual(peers: tuple[Row, ...], kind: type[Any]) -> dict[str, Any]:
    rows = [dataclasses.asdict(row.traits) for row in peers if type(row.traits) is kind]
    return {name: collections.Counter(row[name] for row in rows).most_common(1)[0][0] for name in rows[0]}
