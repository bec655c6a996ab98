"""The GPU receipt: what makes it stale, what makes it unsound, and that a run's outcomes are counted once."""

from __future__ import annotations

import json
import pathlib
import types

import pytest

from tests import receipt


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    root = tmp_path / "package"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("x = 1\n")
    (root / "sub" / "b.py").write_text("y = 2\n")
    return root


def stored(tmp_path: pathlib.Path, package: pathlib.Path, **counts: int) -> pathlib.Path:
    path = tmp_path / "receipt.json"
    content = receipt.make_receipt(counts, 1.0) | {"fingerprint": receipt.fingerprint(package), "gpu": {"name": "G"}}
    path.write_text(json.dumps(content))
    return path


def test_receipt_is_fresh_until_a_source_changes(tmp_path: pathlib.Path, package: pathlib.Path) -> None:
    path = stored(tmp_path, package, passed=3)
    assert "fresh" in receipt.describe(path, package)[0]
    (package / "sub" / "b.py").write_text("y = 3\n")
    line, sound = receipt.describe(path, package)
    assert "STALE" in line
    assert sound


@pytest.mark.parametrize("change", ["rename", "add", "move_bytes"])
def test_fingerprint_sees_names_and_boundaries(package: pathlib.Path, change: str) -> None:
    before = receipt.fingerprint(package)
    if change == "rename":
        (package / "a.py").rename(package / "c.py")
    elif change == "add":
        (package / "empty.py").write_text("")
    else:
        (package / "a.py").write_text("x = 1\nb.py")
        (package / "sub" / "b.py").write_text("")
    assert receipt.fingerprint(package) != before


def test_failures_and_garbage_are_unsound_and_absence_is_not(tmp_path: pathlib.Path, package: pathlib.Path) -> None:
    assert receipt.describe(tmp_path / "absent.json", package)[1]
    assert not receipt.describe(stored(tmp_path, package, passed=3, failed=1), package)[1]
    assert not receipt.describe(stored(tmp_path, package, skipped=3), package)[1]
    for garbage in ("{", "[]", '{"counts": {}}'):
        path = tmp_path / "garbage.json"
        path.write_text(garbage)
        line, sound = receipt.describe(path, package)
        assert "cannot be read" in line
        assert not sound


def test_worst_outcome_of_a_test_counts_once(tmp_path: pathlib.Path) -> None:
    plugin = receipt.ReceiptPlugin(tmp_path / "receipt.json")
    for nodeid, when, outcome in (
        ("passes", "setup", "passed"),
        ("passes", "call", "passed"),
        ("passes", "teardown", "passed"),
        ("fails late", "call", "passed"),
        ("fails late", "teardown", "failed"),
        ("is skipped", "setup", "skipped"),
        ("is skipped", "teardown", "passed"),
    ):
        flags = {"failed": outcome == "failed", "skipped": outcome == "skipped"}
        report = types.SimpleNamespace(nodeid=nodeid, when=when, duration=0.5, **flags)
        plugin.pytest_runtest_logreport(report)
    assert plugin.counts() == {"passed": 1, "failed": 1, "skipped": 1}
    plugin.pytest_sessionfinish()
    assert json.loads((tmp_path / "receipt.json").read_text())["counts"]["passed"] == 1


def test_command_line_reports_and_returns(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert receipt.main(["check", str(tmp_path / "absent.json")]) == 0
    assert "none" in capsys.readouterr().out


def test_a_run_in_parts_has_one_receipt(tmp_path: pathlib.Path) -> None:
    parts = []
    for i, counts in enumerate(({"passed": 3, "skipped": 1}, {"passed": 4, "failed": 1})):
        parts.append(tmp_path / f"part{i}.json")
        parts[-1].write_text(json.dumps(receipt.make_receipt(counts, 2.0)))
    path = tmp_path / "whole.json"
    assert receipt.main(["join", str(path), *map(str, parts)]) == 1  # one failed
    whole = json.loads(path.read_text())
    assert whole["counts"] == {"passed": 7, "failed": 1, "skipped": 1} and whole["seconds"] == 4.0
    other = json.loads(parts[1].read_text()) | {"fingerprint": "of other sources"}
    with pytest.raises(ValueError, match="differ in fingerprint"):
        receipt.join([whole, other])
    with pytest.raises(SystemExit):
        receipt.main(["join", str(path)])
