"""What a sweep has found out, in one SQLite file: verdicts on candidates, and their timings.

Every record is its own transaction in a write-ahead log, so a process that is killed at any point loses the record that
it was about to write and nothing else; a power cut may take the last ones, too. Several processes may write.

What makes a record current is its key, the digest of the compile cache's key: with another source, compiler or problem
the same candidate has another key, and only such candidates are compiled, checked and timed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import pathlib
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from cuteflash.files import copy_together
from cuteflash.traits.row import Traits, kind_of

Stage = Literal["prune", "compile", "gate", "time"]
STAGES: tuple[str, ...] = get_args(Stage)

SCHEMA_VERSION = 3
APPLICATION_ID = 0x63666C73  # "cfls" in the file's header: a sweep's database and no other
BUSY_SECONDS = 30.0  # how long a writer waits for another one
BUSY_STEP = 0.01  # between its looks, where SQLite does not wait by itself

SCHEMA = (
    """CREATE TABLE candidates (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, traits TEXT NOT NULL) WITHOUT ROWID""",
    "CREATE TABLE cells (id TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE verdicts (
        candidate TEXT NOT NULL, target TEXT NOT NULL, problem TEXT NOT NULL, stage TEXT NOT NULL, key TEXT NOT NULL,
        ok INTEGER NOT NULL, reason TEXT, details TEXT NOT NULL, at TEXT NOT NULL,
        PRIMARY KEY (candidate, target, problem, stage, key)) WITHOUT ROWID""",
    """CREATE TABLE timings (
        candidate TEXT NOT NULL, cell TEXT NOT NULL, target TEXT NOT NULL, gpu TEXT NOT NULL, driver TEXT NOT NULL,
        key TEXT NOT NULL, race TEXT NOT NULL, versions TEXT NOT NULL, source TEXT NOT NULL, samples TEXT NOT NULL,
        ms REAL, low REAL, high REAL, tflops REAL, error TEXT, at TEXT NOT NULL,
        PRIMARY KEY (candidate, cell, gpu, driver, key, race)) WITHOUT ROWID""",
    "CREATE TABLE runs (at TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)


class StoreError(RuntimeError):
    """The database cannot be used; the message names the file, what is wrong and what to do."""


def candidate_id(traits: Traits) -> str:
    """Identity of a candidate: 16 hex digits over the kind and all fields of its traits."""
    text = json.dumps([kind_of(traits), dataclasses.asdict(traits)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def now() -> str:
    """This moment in UTC, as records carry it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What one stage of the funnel decided about one candidate."""

    candidate: str  # `candidate_id`
    target: str  # compile target, e.g. "sm_90a"
    problem: str  # `problem_id`; empty for "prune", which does not depend on the problem
    stage: Stage  # "prune", "compile", "gate" or "time"
    key: str  # digest of the compile cache's key; empty for "prune", which costs nothing and is always run
    ok: bool  # whether the candidate goes on to the next stage
    reason: str | None = None  # why not, one sentence; None if it goes on
    # numbers behind it, JSON values. Of "compile" the fields of `Resources` and `seconds`.
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at: str = dataclasses.field(default_factory=now)  # when, `now()`

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}; allowed: {', '.join(STAGES)}")
        if self.ok != (self.reason is None):
            raise ValueError(
                f"reason is {self.reason!r} with ok {self.ok}; a rejection, and nothing else, has a reason"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """How long one candidate took on one cell, or why that is not known."""

    candidate: str  # `candidate_id`, or a name such as "peer:cudnn" for what is timed beside the candidates
    cell: str  # `Cell.id`; `Store.add_cell` keeps its fields
    target: str  # compile target
    gpu: str  # as the driver names it
    driver: str  # its version
    key: str  # digest of the compile cache's key
    # name of the interleaved rounds it took part in; only times of one race share the GPU's clock and heat
    race: str = ""
    samples: tuple[float, ...] = ()  # milliseconds per call, one a round
    ms: float | None = None  # their median
    low: float | None = None  # where the median's 95 % confidence interval begins
    high: float | None = None  # and where it ends; may be infinite
    tflops: float | None = None  # TFLOP/s at the median
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # distribution → version
    source: str = ""  # fingerprint of the kernels' sources
    error: str | None = None  # why there are no samples: a crash, a hang, a wrong result. Then the numbers are None.
    at: str = dataclasses.field(default_factory=now)  # when, `now()`

    def __post_init__(self) -> None:
        numbers = (self.ms, self.low, self.high, self.tflops)
        if self.error is None and (not self.samples or None in numbers):
            raise ValueError(f"a timing of {self.candidate} without error lacks samples, ms, low, high or tflops")
        if self.error is not None and (self.samples or numbers != (None,) * 4):
            raise ValueError(f"a timing of {self.candidate} has both numbers and the error {self.error!r}")


class Store:
    """The database at `path`, created if it is absent, with its folder; a context manager that closes it.

    Args:
        path: the file.
        create: False if it is only read: then it has to be there, and may lie in a folder that cannot be written.

    Raises:
        StoreError: here and from every method: no such file, not a sweep's database, another schema version, a full
            disk, a folder that cannot be written.
    """

    def __init__(self, path: str | pathlib.Path, create: bool = True) -> None:
        self.path = pathlib.Path(path)
        if not create and not self.path.is_file():
            raise StoreError(f"{self.path}: no such sweep database; `cuteflash sweep` writes one, --db names it")
        self._cleanup = contextlib.ExitStack()
        try:
            with self._explained("cannot be opened"):
                opened = self.path
                if create:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                elif not all(os.access(one, os.W_OK, effective_ids=True) for one in (self.path, self.path.parent)):
                    # SQLite itself writes beside a database with a write-ahead log, whoever only reads it.
                    folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="cuteflash-"))
                    log = self.path.with_name(f"{self.path.name}-wal")
                    opened, _ = copy_together((self.path, log), pathlib.Path(folder))
                self._connection = sqlite3.connect(opened, timeout=BUSY_SECONDS, isolation_level=None)
                self._cleanup.callback(self._connection.close)
            self._open()
            if not create:
                self._connection.execute("PRAGMA query_only = ON")
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; records are safe without it."""
        self._cleanup.close()

    # Writing: each call is one transaction.

    def add_candidates(self, candidates: Iterable[Traits]) -> list[str]:
        """Keeps the candidates' traits under their ids, which are returned."""
        rows = [(candidate_id(one), kind_of(one), json.dumps(dataclasses.asdict(one))) for one in candidates]
        self._write("INSERT OR IGNORE INTO candidates VALUES (?, ?, ?)", rows)
        return [row[0] for row in rows]

    def add_cell(self, cell_id: str, fields: Mapping[str, Any]) -> None:
        """Keeps what a cell is: the fields of `Cell` by name."""
        self._write("INSERT OR REPLACE INTO cells VALUES (?, ?)", [(cell_id, json.dumps(dict(fields)))])

    def record(self, *records: Verdict | Timing) -> None:
        """Keeps verdicts, or timings, in place of older ones that differ in nothing but what they found and when."""
        rows = [dataclasses.asdict(record) for record in records]
        if rows:
            table, names = "verdicts" if isinstance(records[0], Verdict) else "timings", list(rows[0])
            marks = ", ".join("?" * len(names))
            values = [[_stored(row[name]) for name in names] for row in rows]
            self._write(f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})", values)

    def add_run(self, at: str, run: Mapping[str, Any]) -> None:
        """Keeps what a run of the GPU's stages, begun at a moment, is measured on, as JSON values."""
        self._write("INSERT OR REPLACE INTO runs VALUES (?, ?)", [(at, json.dumps({**run, "at": at}))])

    # Reading.

    def runs(self) -> list[dict[str, Any]]:
        """What each run of the GPU's stages was measured on, oldest first: machine, versions, `matmul_tflops`, `at`."""
        return [json.loads(value) for (value,) in self._read("SELECT value FROM runs ORDER BY at")]

    def candidates(self) -> list[dict[str, Any]]:
        """All candidates: `id`, `kind` and the fields of their `traits`."""
        return [row | {"traits": json.loads(row["traits"])} for row in self._select("candidates", {}, "id")]

    def cells(self) -> dict[str, dict[str, Any]]:
        """All cells: id → fields."""
        return {name: json.loads(fields) for name, fields in self._read("SELECT * FROM cells ORDER BY id")}

    def verdict(self, candidate: str, target: str, problem: str, stage: Stage, key: str) -> Verdict | None:
        """The verdict recorded under exactly these, None if the stage has still to run."""
        wanted = {"candidate": candidate, "target": target, "problem": problem, "stage": stage, "key": key}
        return next(iter(self.verdicts(**wanted)), None)

    def verdicts(self, **wanted: Any) -> list[Verdict]:
        """Verdicts whose columns have the values given by name, oldest first."""
        return [
            Verdict(**row | {"ok": bool(row["ok"]), "details": json.loads(row["details"])})
            for row in self._select("verdicts", wanted, "at, candidate, target, problem")
        ]

    def have_timing(self, candidate: str, cell: str, gpu: str, driver: str, key: str) -> bool:
        """Whether the candidate was timed on the cell, by this GPU and driver, with this key; a failure counts."""
        query = "SELECT 1 FROM timings WHERE candidate = ? AND cell = ? AND gpu = ? AND driver = ? AND key = ? LIMIT 1"
        return bool(list(self._read(query, (candidate, cell, gpu, driver, key))))

    def timings(self, **wanted: Any) -> list[Timing]:
        """Timings whose columns have the values given by name, oldest first."""
        parsed, order = ("samples", "versions"), "at, candidate, target, cell"
        rows = (
            row | {name: json.loads(row[name]) for name in parsed} for row in self._select("timings", wanted, order)
        )
        return [Timing(**row | {"samples": tuple(row["samples"])}) for row in rows]

    def counts(self) -> dict[str, int]:
        """Records of each kind: candidates, cells, verdicts, timings."""
        names = ("candidates", "cells", "verdicts", "timings")
        return {name: next(iter(self._read(f"SELECT count(*) FROM {name}")))[0] for name in names}

    def export(self) -> dict[str, Any]:
        """Everything as JSON values; an infinite `high` is None."""
        timings = [dataclasses.asdict(timing) for timing in self.timings()]
        for timing in timings:
            timing["samples"] = list(timing["samples"])
            if timing["high"] is not None and math.isinf(timing["high"]):
                timing["high"] = None
        return {
            "schema": SCHEMA_VERSION,
            "candidates": self.candidates(),
            "cells": [{"id": name, "fields": fields} for name, fields in self.cells().items()],
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts()],
            "timings": timings,
            "runs": self.runs(),
        }

    # The file.

    def _open(self) -> None:
        with self._explained("cannot be opened"):
            # Records survive the process, not the machine: a sample takes milliseconds, as does a flush to the disk.
            self._connection.execute("PRAGMA synchronous = NORMAL")
            with self._transaction():
                version, owner = (
                    self._connection.execute(f"PRAGMA {name}").fetchone()[0]
                    for name in ("user_version", "application_id")
                )
                tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if not tables and not version:
                    for statement in SCHEMA:
                        self._connection.execute(statement)
                    self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                elif owner != APPLICATION_ID:
                    raise StoreError(f"{self.path}: a SQLite file, but not a sweep database; --db names another file")
                elif version != SCHEMA_VERSION:
                    raise StoreError(
                        f"{self.path}: schema version {version}, this cuteflash reads version {SCHEMA_VERSION}; export "
                        "it with the cuteflash that wrote it (`sweep export --json`), or start anew with another --db"
                    )
            self._use_wal()

    def _use_wal(self) -> None:
        """Keep a write-ahead log; if the file system cannot share memory, SQLite keeps its rollback journal instead,
        which is as safe and slower. For this SQLite does not wait while another process has the file in use."""
        end = time.monotonic() + BUSY_SECONDS
        while self._connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(BUSY_STEP)

    def _write(self, statement: str, rows: Iterable[Iterable[Any]]) -> None:
        try:
            with self._transaction():
                self._connection.executemany(statement, [tuple(row) for row in rows])
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.path}: the sweep database cannot be written ({error}); {self._kept()}, and the same command "
                "goes on from there once the file can be written"
            ) from error

    def _select(self, table: str, wanted: Mapping[str, Any], order: str) -> Iterator[dict[str, Any]]:
        names = [row[1] for row in self._read(f"PRAGMA table_info({table})")]
        for name in wanted:
            if name not in names:
                raise ValueError(f"{name} is not a column of {table}; allowed: {', '.join(names)}")
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        rows = self._read(f"SELECT * FROM {table} WHERE {where} ORDER BY {order}", tuple(wanted.values()))
        return (dict(zip(names, row, strict=True)) for row in rows)

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._explained("cannot be read"):
            return self._connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back by itself if the disk was full
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.path}: the sweep database {what} ({error})") from error

    def _kept(self) -> str:
        """What the file holds, for the message of a write that failed."""
        counts = self.counts()
        return f"{counts['verdicts']} verdicts and {counts['timings']} timings are kept"


def _stored(value: Any) -> Any:
    """A field as a column: containers as JSON text."""
    return json.dumps(value) if isinstance(value, Mapping | tuple) else value
