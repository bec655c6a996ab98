"""The sweep's database: what goes in comes out, survives any death of its writer, and says what is wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import pathlib
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuteflash.problem import FwdProblem
from cuteflash.problem_names import problem_id
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.store import SCHEMA_VERSION, STAGES, Store, StoreError, Timing, Verdict, candidate_id
from tests import forked

TRAITS = FwdTraitsSm80(128, 64, 128, 128)
CANDIDATE = {"kind": "fwd_sm80", "traits": dataclasses.asdict(TRAITS)}
NUMBERS: dict[str, Any] = {"samples": (1.0, 1.5, 2.0), "ms": 1.5, "low": 1.25, "high": 1.75, "tflops": 300.0}


def timing(**fields: Any) -> Timing:
    """A timing; its numbers are there unless it has an error."""
    names = {"candidate": "c", "cell": "cell", "target": "sm_90a", "gpu": "g", "driver": "d", "key": "k"}
    return Timing(**names | ({} if "error" in fields else NUMBERS) | fields)


def verdict(**fields: Any) -> Verdict:
    names: dict[str, Any] = {"candidate": "c", "target": "sm_80", "problem": "p", "stage": "compile", "key": "k"}
    return Verdict(**names | {"ok": True} | fields)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "folder" / "sweep.db"


def test_what_is_recorded_is_read_again(path: pathlib.Path) -> None:
    rejected = verdict(stage="gate", ok=False, reason="error 0.1, allowed 0.01", details={"error": 0.1})
    failed = timing(cell="other", error="the kernel did not finish within 20 s")
    with Store(path) as store:
        name = store.add_candidates([TRAITS])[0]
        store.add_cell("cell", {"mask": "full"})
        store.record(verdict())
        store.record(rejected)
        store.record(timing())
        store.record(failed)
    with Store(path, create=False) as store:
        assert store.candidates() == [CANDIDATE | {"id": name}]
        assert store.cells() == {"cell": {"mask": "full"}}
        assert store.verdict("c", "sm_80", "p", "gate", "k") == rejected
        assert store.verdicts(ok=True) == [verdict(at=store.verdicts(ok=True)[0].at)]
        assert store.timings(cell="other") == [failed]
        assert store.counts() == {"candidates": 1, "cells": 1, "verdicts": 2, "timings": 2}


@given(
    samples=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20),
    high=st.floats(1e-6, allow_infinity=True, allow_nan=False),
    text=st.text(max_size=40),
    versions=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
)
def test_numbers_and_texts_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    samples: list[float],
    high: float,
    text: str,
    versions: dict[str, str],
) -> None:
    one = timing(samples=tuple(samples), high=high, gpu=text, versions=versions)
    with Store(tmp_path_factory.mktemp("store") / "a.db") as store:
        store.record(one)
        assert store.timings() == [one]
        json.dumps(store.export(), allow_nan=False)


def test_identity_is_operation_family_and_every_trait() -> None:
    changed = [dataclasses.replace(TRAITS, **change) for change in ({"tile_n": 32}, {"q_in_regs": True})]
    names = {candidate_id(TRAITS), candidate_id(FwdTraitsSm90(128, 64, 128, 128)), *(candidate_id(t) for t in changed)}
    assert len(names) == 4
    assert candidate_id(dataclasses.replace(TRAITS)) in names


def test_problems_read_as_what_they_are() -> None:
    assert problem_id(FwdProblem.dense("bf16", 128, 64, "causal")) == "bf16 128x64 causal"
    extras = FwdProblem.dense("fp16", 64, 64, softcap=True, lse=True, packed_heads=4)
    assert problem_id(extras) == "fp16 64x64 full softcap lse packed 4"


def test_only_the_same_thing_again_is_replaced(path: pathlib.Path) -> None:
    with Store(path) as store:
        for one in (verdict(), verdict(ok=False, reason="spills"), verdict(key="k2"), verdict(problem="p2")):
            store.record(one)
        assert len(store.verdicts()) == 3
        assert store.verdict("c", "sm_80", "p", "compile", "k").reason == "spills"
        store.record(timing())
        store.record(timing(ms=1.6))
        store.record(timing(race="second"))
        assert sorted(one.ms for one in store.timings()) == [1.5, 1.6]


@pytest.mark.parametrize("changed", ["candidate", "cell", "gpu", "driver", "key"])
def test_what_was_not_timed_under_just_this_is_still_to_do(path: pathlib.Path, changed: str) -> None:
    done = {"candidate": "c", "cell": "cell", "gpu": "g", "driver": "d", "key": "k"}
    with Store(path) as store:
        assert not store.have_timing(**done)
        store.record(timing())
        assert store.have_timing(**done)
        assert not store.have_timing(**done | {changed: "another"})


def test_a_failure_counts_as_timed(path: pathlib.Path) -> None:
    with Store(path) as store:
        store.record(timing(error="hangs"))
        assert store.have_timing("c", "cell", "g", "d", "k")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: verdict(stage="luck"), f"stage is 'luck'; allowed: {', '.join(STAGES)}"),
        (lambda: verdict(ok=False), "reason is None with ok False"),
        (lambda: verdict(reason="because"), "reason is 'because' with ok True"),
        (lambda: timing(ms=None), "without error lacks"),
        (lambda: timing(samples=()), "without error lacks"),
        (lambda: timing(error="hangs", ms=1.0), "both numbers and the error 'hangs'"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_export_holds_everything_and_is_strict_json(path: pathlib.Path) -> None:
    with Store(path) as store:
        name = store.add_candidates([TRAITS])[0]
        store.add_cell("cell", {"mask": "full"})
        store.record(verdict())
        store.record(timing(samples=(1.0,), low=0.0, high=math.inf))
        exported = json.loads(json.dumps(store.export(), allow_nan=False))
    assert exported["schema"] == SCHEMA_VERSION
    assert exported["candidates"] == [CANDIDATE | {"id": name}]
    assert exported["cells"] == [{"id": "cell", "fields": {"mask": "full"}}]
    assert Verdict(**exported["verdicts"][0]).key == "k"
    assert exported["timings"][0]["samples"] == [1.0] and exported["timings"][0]["high"] is None


def test_runs_come_back_oldest_first_with_their_moment(path: pathlib.Path) -> None:
    with Store(path) as store:
        assert store.runs() == []
        store.add_run("2026-02-01", {"gpu": "b"})
        store.add_run("2026-01-31", {"gpu": "a"})
        assert store.runs() == [{"gpu": "a", "at": "2026-01-31"}, {"gpu": "b", "at": "2026-02-01"}]


# What goes wrong.


def test_another_schema_version_is_named_with_the_way_out(path: pathlib.Path) -> None:
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError) as caught:
        Store(path)
    for part in (str(path), "version 99", f"version {SCHEMA_VERSION}", "export", "--db"):
        assert part in str(caught.value)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == 99


def test_other_files_are_left_alone(tmp_path: pathlib.Path) -> None:
    text, other = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("nothing that SQLite knows " * 100)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    for path, complaint in ((text, "not a database"), (other, "not a sweep database")):
        before = path.read_bytes()
        with pytest.raises(StoreError, match=complaint) as caught:
            Store(path)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == before


def test_a_place_that_cannot_hold_it_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"sweep\.db: the sweep database cannot be opened"):
        Store(tmp_path / "file" / "sweep.db")
    with pytest.raises(StoreError, match=r"absent\.db: no such sweep database"):
        Store(tmp_path / "absent.db", create=False)
    assert not (tmp_path / "absent.db").exists()


def test_a_full_disk_keeps_what_was_recorded_and_says_so(path: pathlib.Path) -> None:
    with Store(path) as store:
        store.record(timing())
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite then fails as it does on a full disk
        with pytest.raises(StoreError) as caught:
            for index in range(1000):
                store.record(verdict(key=str(index), ok=False, reason="because " * 20))
        assert "full" in str(caught.value) and str(path) in str(caught.value)
        assert f"{index} verdicts and 1 timings are kept" in str(caught.value)
        store._connection.execute("PRAGMA max_page_count = 100000")
        store.record(verdict(key="after"))
        assert store.counts()["verdicts"] == index + 1


def test_unknown_columns_are_named(path: pathlib.Path) -> None:
    with Store(path) as store, pytest.raises(ValueError, match="colour is not a column of timings; allowed: candidate"):
        store.timings(colour="red")


# Death at any point. The writer times what is still to do and says so before and after it has been recorded.


@contextlib.contextmanager
def writer(path: pathlib.Path, first: int, last: int) -> Iterator[tuple[BaseProcess, Connection]]:
    """The process, and what it says."""
    heard, said = multiprocessing.Pipe(duplex=False)
    with forked.started(forked.write_timings, path, first, last, said) as process:
        said.close()
        yield process, heard


def rest_of(heard: Connection) -> Iterator[int]:
    """What the writer said until its end."""
    with contextlib.suppress(EOFError):
        while True:
            yield heard.recv()


def recorded(path: pathlib.Path) -> set[int]:
    with Store(path, create=False) as store:
        assert store._connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        for one in store.timings():
            assert len(one.samples) == 7 and one.error is None
        return {int(one.candidate.split()[1]) for one in store.timings()}


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_and_nothing_is_timed_twice(path: pathlib.Path) -> None:
    generator, count = random.Random(0), 10**9  # it never ends by itself, however late the signal comes
    acknowledged: list[int] = []
    for _ in range(4):
        with writer(path, 0, count) as (process, heard):
            acknowledged.append(heard.recv())
            time.sleep(generator.uniform(0, 0.15))
            process.kill()
            acknowledged += rest_of(heard)
            process.join()
            assert process.exitcode == -signal.SIGKILL
        done = recorded(path)
        assert set(acknowledged) <= done  # a record may be on disk before its writer could say so
        assert done == set(range(len(done)))
    assert len(acknowledged) == len(set(acknowledged))


@pytest.mark.slow
def test_a_writer_killed_inside_a_transaction_leaves_the_state_before_it(path: pathlib.Path) -> None:
    with Store(path) as store:
        store.record(timing(candidate="candidate 0", samples=(1.0,) * 7))
    with forked.started(forked.die_inside_a_transaction, path) as process:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert recorded(path) == {0}


@pytest.mark.slow
def test_several_processes_create_and_write_one_database(path: pathlib.Path) -> None:
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writer(path, first, first + 40)) for first in (0, 40, 80)]
        assert [list(rest_of(heard)) for _, heard in writers] == [list(range(n, n + 40)) for n in (0, 40, 80)]
        for process, _ in writers:
            process.join()
            assert process.exitcode == 0
    assert recorded(path) == set(range(120))
