"""The user's own tables: rows that a sweep measured on the user's GPU, which dispatch prefers to the shipped ones.

One JSON file a table, ``<operation>-<target>-<family>.json``, in the config directory: $CUTEFLASH_CONFIG_DIR, or
`cuteflash` under $XDG_CONFIG_HOME or ~/.config. A process reads each file once. One that fails its checks or is from
another version of cuteflash is reported and ignored: the shipped table is used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

from cuteflash.files import NoDirectoryError, replace_file, user_directory
from cuteflash.mla_problem import TABLE_OPERATIONS
from cuteflash.traits.arch import get_arch
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, TableKey, kind_of, kinds_of
from cuteflash.traits.values import field_types, make_traits

FORMAT = 5
VARIABLE = "CUTEFLASH_CONFIG_DIR"
MOVES = f"{VARIABLE} moves it"


class TableError(ValueError):
    """A user's table cannot be read or written; the text names its path and says why."""


class TableWarning(UserWarning):
    """A user's table is ignored; the shipped one is used."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A row and what was measured with it.

    Attributes:
        gpu: the GPU's name.
        date: day of the measurement, "2026-01-31".
        tflops: speed over what the row serves, TFLOP/s.
    """

    row: Row
    gpu: str
    date: str
    tflops: float

    @property
    def note(self) -> str:
        """The measurement in a few words, for a comment beside the row."""
        return f"{self.gpu}, {self.date}, {self.tflops:.0f} TFLOP/s"


def config_dir() -> pathlib.Path | None:
    """The directory of the user's tables; None if it is in a home that does not exist. Not created here."""
    try:
        return _directory()
    except TableError:
        return None


def _directory() -> pathlib.Path:
    """`config_dir`, or TableError."""
    try:
        return user_directory(VARIABLE, "XDG_CONFIG_HOME", ".config")
    except NoDirectoryError as error:
        raise TableError(f"there is no directory for the user's tables: {error}; {MOVES}") from error


def _directory_of_tables() -> pathlib.Path | None:
    """`config_dir`, to read tables from: TableError if CUTEFLASH_CONFIG_DIR is set and fails."""
    return _directory() if os.environ.get(VARIABLE) else config_dir()


def table_path(key: TableKey) -> pathlib.Path | None:
    """The path of a table's file, which may not exist; None if there is no config directory."""
    root = config_dir()
    return None if root is None else root / _file_name(key)


def _file_name(key: TableKey) -> str:
    return f"{'-'.join(key)}.json"


@functools.cache
def load(key: TableKey) -> tuple[MeasuredRow, ...]:
    """The user's rows, none if there is no table. TableWarning, once a process, if the table cannot be used."""
    try:
        return read(key)
    except TableError as error:
        warnings.warn(f"the shipped table {key} is used, because {error}", TableWarning, stacklevel=2)
        return ()


def read(key: TableKey) -> tuple[MeasuredRow, ...]:
    """The user's rows as the file has them now, none if there is no file.

    Raises:
        TableError: the file cannot be read, is corrupt or outdated, or has a row that its target does not run; or
            CUTEFLASH_CONFIG_DIR names a home that does not exist.
    """
    root = _directory_of_tables()
    if root is None:
        return ()
    path = root / _file_name(key)
    try:
        return _parse(path.read_bytes(), key)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError) as error:
        raise TableError(
            f"the user's table {path} cannot be used: {error}; sweep again, or remove it: cuteflash sweep --reset"
        ) from error


def check_writable() -> pathlib.Path:
    """The config directory, made if it is missing. TableError if no file can be written into it."""
    root = _directory()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        raise TableError(f"config directory {root} cannot be written: {error}; {MOVES}") from error


def write(key: TableKey, rows: Iterable[MeasuredRow]) -> pathlib.Path:
    """Replaces the user's table, whole or not at all; returns its path. Processes that read it before keep the old one.

    Raises:
        TableError: a row is not one of this table, or the directory cannot be written.
    """
    path = check_writable() / _file_name(key)
    try:
        table = {
            "format": FORMAT,
            "cuteflash": version(),
            **key._asdict(),
            "rows": [_values(measured) for measured in rows],
        }
        content = json.dumps(table, indent=1).encode()
        _parse(content, key)  # never write what cannot be read
        replace_file(path, content)
    except (OSError, TypeError, ValueError) as error:
        raise TableError(f"the user's table {path} is not written: {error}") from error
    load.cache_clear()
    return path


def remove() -> list[pathlib.Path]:
    """Removes every table of the user, readable or not; returns their paths. TableError if one cannot be removed."""
    root = _directory_of_tables()
    paths = (
        sorted(path for operation in TABLE_OPERATIONS for path in root.glob(f"{operation}-*.json"))
        if root is not None
        else []
    )
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise TableError(f"the user's table {path} cannot be removed: {error}") from error
    load.cache_clear()
    return paths


@functools.cache
def version() -> str:
    """This cuteflash's version, "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version("cuteflash")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _values(measured: MeasuredRow) -> dict[str, Any]:
    values = dataclasses.asdict(measured)
    row: dict[str, Any] = values.pop("row")
    del row["measurement"]  # of shipped rows; here gpu, date and tflops say it
    return {"kind": kind_of(measured.row.traits)} | row | values


def _parse(content: bytes, key: TableKey) -> tuple[MeasuredRow, ...]:
    """The rows of a file's content. ValueError says what is wrong with it, and with which row."""
    try:
        table = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise ValueError(f"it holds a {type(table).__name__}, not a table")
    expected = {"format": FORMAT, "cuteflash": version(), **key._asdict()}
    for name, value in expected.items():
        if table.get(name) != value:
            raise ValueError(f"it is outdated or of another table: its {name} is {table.get(name)!r}, not {value!r}")
    parsed = []
    for index, values in enumerate(_field(table, "rows", list), start=1):
        try:
            parsed.append(_measured_row(values, key))
        except (TypeError, ValueError, ArithmeticError) as error:  # checks of absurd numbers may divide by zero
            raise ValueError(f"row {index}: {error}") from error
    return tuple(parsed)


def _measured_row(values: Any, key: TableKey) -> MeasuredRow:
    kind, kinds = _field(values, "kind", str), kinds_of(key.operation, key.family)
    if kind not in kinds:
        raise ValueError(f"its kind is {kind!r}; allowed in {key}: {', '.join(kinds)}")
    traits = make_traits(kind, _field(values, "traits", dict))
    for name in ("head_dim", "head_dim_v"):  # those of latents are no fields
        if name in field_types(kind) and getattr(traits, name) not in ROW_HEAD_DIMS:
            allowed = ", ".join(map(str, ROW_HEAD_DIMS))
            raise ValueError(f"its traits' {name} is {getattr(traits, name)}; allowed: {allowed}")
    reason = traits.check(get_arch(key.target))
    if reason is not None:
        raise ValueError(f"{key.target} does not run it: {reason}")
    served: dict[str, Any] = {
        name: tuple(_field(values, name, list)) for name in ("masks", "dtypes", "lengths", "without", "query_rows")
    }
    served |= {name: _field(values, name, float, int) for name in ("waves", "filled")}
    tflops = _field(values, "tflops", float, int)
    if not 0 < tflops < math.inf:
        raise ValueError(f"its tflops is {tflops}; allowed: a positive number")
    row = Row(traits, **served)
    return MeasuredRow(row, _field(values, "gpu", str), _field(values, "date", str), tflops)


def _field(values: Any, name: str, *kinds: type) -> Any:
    """`values[name]`, checked to be exactly of one of these types: JSON's true is not a number."""
    value = values.get(name) if isinstance(values, dict) else None
    if type(value) not in kinds:
        raise ValueError(f"its {name} is {value!r}; allowed: {' or '.join(kind.__name__ for kind in kinds)}")
    return value
