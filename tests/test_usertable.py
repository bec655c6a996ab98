"""The user's own tables: what is written can be read, whatever else is there is reported, and nothing is half done."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any, ClassVar

import pytest

from cuteflash import usertable
from cuteflash.dispatch import choose
from cuteflash.problem import DTYPES, BwdProblem
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.row import Row, TableKey
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.usertable import MeasuredRow, TableError, TableWarning
from tests.user_tables import MEASURED, SM80, SM80_HOPPER, SM86, SM90, OwnTables

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS80 = (
    MEASURED(Row(FwdTraitsSm80(128, 64, 64, 64, q_in_regs=True), ("causal",), ("bf16",), ("decode", "short"))),
    MeasuredRow(Row(FwdTraitsSm80(64, 32, 128, 96, num_warps=4)), "NVIDIA A100-SXM4-80GB", "2026-02-28", 201),
)
TWO_PASS = BwdTwoPassTraitsSm90(64, 64, 64, 64, k_stage=3, v_stage=3)
ROWS90 = (MEASURED(Row(FwdTraitsSm90(128, 128, 128, 128, q_in_regs=True, exp_rows_before_wait=1))),)


def test_what_is_written_is_read(own_tables: OwnTables) -> None:
    assert usertable.load(SM80) == ()
    path = usertable.write(SM80, ROWS80)
    assert path == own_tables.root / "fwd-sm_80-sm80.json" and os.listdir(own_tables.root) == [path.name]
    usertable.write(SM90, ROWS90)
    assert usertable.read(SM80) == usertable.load(SM80) == ROWS80
    assert usertable.read(SM90) == ROWS90
    assert usertable.read(SM86) == usertable.read(SM80_HOPPER) == ()


def test_a_table_is_read_once_a_process_and_again_after_writing(own_tables: OwnTables) -> None:
    path = usertable.write(SM80, ROWS80)
    assert usertable.load(SM80) == ROWS80
    path.write_text("{")
    assert usertable.load(SM80) == ROWS80
    usertable.write(SM80, ROWS80[:1])
    assert usertable.load(SM80) == ROWS80[:1]


def test_a_table_of_the_backward_holds_rows_of_several_kinds(own_tables: OwnTables) -> None:
    table, rows = (
        TableKey("bwd", "sm_90a", "sm90"),
        (MEASURED(Row(BwdTraitsSm90(80, 128, 128, 128, dq="transposed"))), MEASURED(Row(TWO_PASS))),
    )
    path = usertable.write(table, rows)
    assert path.name == "bwd-sm_90a-sm90.json"
    assert usertable.read(table) == rows
    problem = BwdProblem.dense("bf16", 128, 128, softcap=True)
    choice = choose(problem, "sm_90a")
    assert choice.traits == rows[0].row.traits and "user's table" in choice.source
    written = json.loads(path.read_text())
    for field, value, complaint in (
        ("dq", "sideways", "row 1: dq is 'sideways'; allowed: 'rows', 'columns'"),
        ("dq_tile_n", 64, "row 1: bwd_sm90 does not have dq_tile_n; fields of bwd_sm90: tile_m, tile_n"),
    ):
        changed = copy.deepcopy(written)
        changed["rows"][0]["traits"][field] = value
        path.write_text(json.dumps(changed))
        with pytest.raises(TableError, match=complaint):
            usertable.read(table)


@dataclasses.dataclass(frozen=True)
class UnknownTraits:
    """Of a kernel that nobody registered."""

    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    tile_m: int = 64
    tile_n: int = 64
    head_dim: int = 64
    head_dim_v: int = 64


def test_traits_of_an_unknown_class_are_refused_by_name(own_tables: OwnTables) -> None:
    row: Any = Row(UnknownTraits())  # type: ignore[arg-type]
    with pytest.raises(TableError, match=r"is not written: traits are UnknownTraits, .*; kinds: fwd_sm80, fwd_sm90"):
        usertable.write(SM80, [MEASURED(row)])
    assert not own_tables.root.exists() or os.listdir(own_tables.root) == []


def test_removing_takes_every_table_and_nothing_else(own_tables: OwnTables) -> None:
    paths = [usertable.write(SM80, ROWS80), own_tables.put("sm_90a", "sm90", "not JSON")]
    other = own_tables.root / "mine.json"
    other.write_text("{}")
    assert usertable.load(SM80) == ROWS80
    assert usertable.remove() == paths
    assert list(own_tables.root.iterdir()) == [other]
    assert usertable.load(SM80) == ()
    assert usertable.remove() == []


def changed(**changes: Any) -> str:
    """A good sm_80 table with other values; `row__name` changes the first row, `traits__name` its traits."""
    table = json.loads((usertable.config_dir() / "fwd-sm_80-sm80.json").read_text())
    for name, value in changes.items():
        where, _, field = name.rpartition("__")
        place = {"": table, "row": table["rows"][0], "traits": table["rows"][0]["traits"]}[where]
        place[field] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 0}, "its format is 0, not 5"),
        ({"cuteflash": "0.0.9"}, "its cuteflash is '0.0.9', not"),
        ({"target": "sm_86"}, "its target is 'sm_86', not 'sm_80'"),
        ({"family": "sm90"}, "its family is 'sm90', not 'sm80'"),
        ({"rows": {}}, r"its rows is \{\}; allowed: list"),
        ({"rows": [7]}, "row 1: its kind is None; allowed: str"),
        ({"row__kind": "bwd_sm80"}, "row 1: its kind is 'bwd_sm80'; allowed in fwd/sm_80/sm80: fwd_sm80"),
        ({"row__traits": []}, r"row 1: its traits is \[\]; allowed: dict"),
        ({"row__masks": []}, r"row 1: masks is \(\); allowed: one or more of full, causal, window"),
        ({"row__masks": [["full"]]}, "row 1: "),
        ({"row__dtypes": "bf16"}, "row 1: its dtypes is 'bf16'; allowed: list"),
        ({"row__lengths": ["middling"]}, r"row 1: lengths is \('middling',\); allowed: one or more of decode, tiny"),
        ({"row__waves": "some"}, "row 1: its waves is 'some'; allowed: float or int"),
        ({"row__waves": -1}, "row 1: waves is -1; allowed: a number from 0 on"),
        ({"row__waves": float("inf")}, "row 1: waves is inf; allowed: a number from 0 on"),
        ({"row__waves": 2}, "row 1: waves is 2, but the row is of a fwd, not of a backward"),
        ({"row__filled": 1.5}, "row 1: filled is 1.5; allowed: a number from 0 to 1"),
        ({"row__gpu": None}, "row 1: its gpu is None; allowed: str"),
        ({"row__tflops": "fast"}, "row 1: its tflops is 'fast'; allowed: float or int"),
        ({"row__tflops": float("nan")}, "row 1: its tflops is nan; allowed: a positive number"),
        ({"traits__tile_m": "128"}, "row 1: tile_m is '128'; allowed: int"),
        ({"traits__q_in_regs": 1}, "row 1: q_in_regs is 1; allowed: bool"),
        ({"traits__kv_stage": True}, "row 1: kv_stage is True; allowed: int"),
        ({"traits__warp_speed": 9}, "row 1: fwd_sm80 does not have warp_speed; fields of fwd_sm80: tile_m"),
        ({"traits__head_dim": 48}, "row 1: its traits' head_dim is 48; allowed: 32, 64, 96"),
        ({"traits__kv_stage": 40}, r"row 1: sm_80 does not run it: needs \d+ bytes of shared memory"),
        ({"traits__num_warps": 0}, "row 1: "),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_believed_says_why(own_tables: OwnTables, changes: dict[str, Any], reason: str) -> None:
    own_tables.write("sm_80", "sm80", list(ROWS80))
    path = own_tables.put("sm_80", "sm80", changed(**changes))
    with pytest.raises(TableError, match=reason) as caught:
        usertable.read(SM80)
    assert f"the user's table {path} cannot be used: " in str(caught.value)
    assert "cuteflash sweep --reset" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is not JSON"),
        ("[1, 2", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it holds a list, not a table"),
        ("{}", "its format is None, not 5"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_file_that_is_no_table_says_so(own_tables: OwnTables, content: str | bytes, reason: str) -> None:
    own_tables.put("sm_80", "sm80", content)
    with pytest.raises(TableError, match=reason):
        usertable.read(SM80)
    with pytest.warns(TableWarning, match=reason):
        assert usertable.load(SM80) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usertable.load(SM80) == ()  # said once


def test_a_directory_in_a_tables_place_is_reported(own_tables: OwnTables) -> None:
    (own_tables.root / "fwd-sm_80-sm80.json").mkdir(parents=True)
    with pytest.raises(TableError, match=r"cannot be used: .*directory"):
        usertable.read(SM80)
    with pytest.raises(TableError, match="is not written"):
        usertable.write(SM80, ROWS80)
    assert len(os.listdir(own_tables.root)) == 1
    with pytest.raises(TableError, match="cannot be removed"):
        usertable.remove()


def test_fields_that_a_table_lacks_are_at_their_defaults(own_tables: OwnTables) -> None:
    own_tables.write("sm_80", "sm80", list(ROWS80))
    table = json.loads(changed())
    del table["rows"][0]["traits"]["double_buffer"]
    own_tables.put("sm_80", "sm80", json.dumps(table))
    assert usertable.read(SM80) == ROWS80
    del table["rows"][0]["traits"]["tile_m"]
    own_tables.put("sm_80", "sm80", json.dumps(table))
    with pytest.raises(TableError, match="row 1: tile_m is missing; fields of fwd_sm80: tile_m"):
        usertable.read(SM80)


def test_rows_of_another_table_are_not_written(own_tables: OwnTables) -> None:
    usertable.write(SM80, ROWS80)
    with pytest.raises(TableError, match="is not written: row 1: "):
        usertable.write(SM80, ROWS90)
    with pytest.raises(TableError, match="is not written: row 1: its tflops is 0"):
        usertable.write(SM80, [MeasuredRow(ROWS80[0].row, "Card", "2026-01-31", 0)])
    assert usertable.read(SM80) == ROWS80


def test_a_full_disk_keeps_the_old_table(own_tables: OwnTables, monkeypatch: pytest.MonkeyPatch) -> None:
    usertable.write(SM80, ROWS80)

    def full(source: str, target: pathlib.Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TableError, match=r"fwd-sm_80-sm80\.json is not written: .*No space left"):
        usertable.write(SM80, ROWS80[:1])
    assert usertable.read(SM80) == ROWS80
    assert len(os.listdir(own_tables.root)) == 1


def test_an_unwritable_config_directory_is_known_before_the_work(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("CUTEFLASH_CONFIG_DIR", str(tmp_path / "file" / "config"))
    for work in (usertable.check_writable, lambda: usertable.write(SM80, ROWS80)):
        with pytest.raises(TableError, match=r"config directory .* cannot be written: .*CUTEFLASH_CONFIG_DIR moves it"):
            work()
    assert usertable.read(SM80) == ()
    assert usertable.remove() == []
    assert (tmp_path / "file").read_text() == "mine"


def test_a_writable_one_is_made_and_left_empty(own_tables: OwnTables) -> None:
    assert usertable.check_writable() == own_tables.root
    assert os.listdir(own_tables.root) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CUTEFLASH_CONFIG_DIR": "/a/b", "XDG_CONFIG_HOME": "/c", "HOME": "/d"}, "/a/b"),
        ({"CUTEFLASH_CONFIG_DIR": "~/b", "HOME": "/d"}, "/d/b"),
        ({"XDG_CONFIG_HOME": "/c", "HOME": "/d"}, "/c/cuteflash"),
        ({"XDG_CONFIG_HOME": "c", "HOME": "/d"}, "/d/.config/cuteflash"),
        ({"HOME": "/d"}, "/d/.config/cuteflash"),
    ],
    ids=str,
)
def test_where_tables_lie(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("CUTEFLASH_CONFIG_DIR", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert usertable.config_dir() == pathlib.Path(expected)


def test_without_a_home_there_are_no_tables_and_none_can_be_written(homeless: None) -> None:
    assert usertable.config_dir() is None and usertable.table_path(SM80) is None
    assert usertable.read(SM80) == () and usertable.remove() == []
    with pytest.raises(TableError, match=r"user \d+ has no home directory; CUTEFLASH_CONFIG_DIR moves it"):
        usertable.check_writable()


def test_a_directory_in_nobodys_home_is_reported(own_tables: OwnTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFLASH_CONFIG_DIR", "~no-such-user/tables")
    assert usertable.config_dir() is None
    reason = "CUTEFLASH_CONFIG_DIR is '~no-such-user/tables', and that has no home directory"
    for work in (usertable.check_writable, usertable.remove, lambda: usertable.read(SM80)):
        with pytest.raises(TableError, match=reason):
            work()
    with pytest.warns(TableWarning, match=f"the shipped table fwd/sm_80/sm80 is used, because .*{reason}"):
        assert usertable.load(SM80) == ()


@pytest.mark.slow
def test_another_process_chooses_by_the_table(own_tables: OwnTables) -> None:
    usertable.write(SM80, ROWS80)
    code = (
        "from cuteflash.dispatch import choose; from cuteflash.problem import FwdProblem; "
        "print(choose(FwdProblem.dense('bf16', 64, 64, 'causal'), 'sm_80', None, 'short').source)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"user's table {own_tables.root}") and done.stderr == ""
