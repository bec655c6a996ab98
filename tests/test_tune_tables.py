"""Measured rows in tables: what is generated is Python that gives the rows back, and only what was measured changes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from cuteflash import usertable
from cuteflash.compile.imports import files_imported_by
from cuteflash.compile.key import PACKAGE
from cuteflash.dispatch import kernel_modules, offers
from cuteflash.problem import DTYPES, FEATURES, FP8_DTYPES, MASK_KINDS, OPERATIONS, Feature, Operation
from cuteflash.traits import row as vocabulary
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import ROW_HEAD_DIMS, Measurement, Row, TableKey, Traits, kinds_of
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import MODULES, TABLES
from cuteflash.traits.values import default_values, field_types, literals, make_traits
from cuteflash.tune import tables
from cuteflash.tune.operations import SPECS, Task, task_of_traits
from cuteflash.tune.tables import (
    own_modules,
    read_shipped,
    render,
    write_shipped,
    write_user,
)
from cuteflash.usertable import TableError, TableWarning
from tests.user_tables import MEASURED, SM80, SM80_HOPPER, SM89, SM90, OwnTables

TRAITS = pathlib.Path(vocabulary.__file__).parent
FILES = {module.__name__: module for modules in MODULES.values() for module in modules}
every_file = pytest.mark.parametrize("module", FILES.values(), ids=lambda module: module.__name__.rpartition(".")[2])
CARD = Measurement("Card", "2026-01-31", 123)
NOTE = '"Card", "2026-01-31", 123'

BWD80, BWD90 = TableKey("bwd", "sm_80", "sm80"), TableKey("bwd", "sm_90a", "sm90")

Key = tuple[int, int, str, str, str]


@functools.cache
def problems(task: Task, features: tuple[Feature, ...]) -> list[tuple[Any, tuple[int, int, str, str]]]:
    """Every problem of a task with these features, and what names it."""
    spec = SPECS[task]
    named = itertools.product(ROW_HEAD_DIMS, ROW_HEAD_DIMS, MASK_KINDS, spec.dtypes)
    return [
        (spec.asking(spec.problem(dtype, *dims, mask), features), (*dims, mask, dtype)) for *dims, mask, dtype in named
    ]


def choices(rows: Any, target: str, features: tuple[Feature, ...] = (), task: Task = "fwd") -> dict[Key, Traits]:
    """What runs every problem of a task with these features on every length class, by these rows alone."""
    found = {}
    for (problem, name), lengths in itertools.product(problems(task, features), LENGTH_CLASSES):
        offered = offers(rows, problem, lengths, get_arch(target))
        found[(*name, lengths)] = next(traits for _, traits, reason in offered if reason is None)
    return found


def all_choices(rows: Any, target: str, tasks: Iterable[Task]) -> list[dict[Key, Traits]]:
    """`choices` of each task without features, with each of them and with all."""
    return [
        choices(rows, target, some, task)
        for task in tasks
        for some in ((), *((name,) for name in SPECS[task].features), SPECS[task].features)
    ]


def tasks_of(module: Any) -> list[Task]:
    """Those that a file's rows are for."""
    return list(dict.fromkeys(task_of_traits(row.traits) for row in module.ROWS))


def heads_of(module: Any) -> list[TableKey]:
    return [table for table in MODULES if module in own_modules(table)]


def random_row(kind: str, choose: random.Random) -> Row:
    """Any row at all: what a row serves, and fields away from their defaults; it need not run."""

    def some(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(choose.sample(names, choose.randint(1, len(names))))

    values: dict[str, Any] = {"tile_m": 64, "tile_n": 64, "head_dim": 64, "head_dim_v": 64, **default_values(kind)}
    for name, type_ in field_types(kind).items():
        if choose.random() < 0.4:
            others = literals(type_) or ((not values[name],) if type_ is bool else range(1, 4))
            values[name] = choose.choice(others)
    without = tuple(name for name in FEATURES if choose.random() < 0.5)
    traits = make_traits(kind, values)
    return Row(traits, some(MASK_KINDS), some(traits.dtypes), some(LENGTH_CLASSES), without)


def test_every_word_is_the_vocabularys() -> None:
    for name in tables.WORDS:
        assert getattr(vocabulary, tables.WORDS[name]) == (name,)


@every_file
def test_a_shipped_file_is_what_would_be_written(module: Any) -> None:
    path = pathlib.Path(module.__file__)
    rows = read_shipped(path)
    assert [(row, row.measurement) for row in rows] == [(row, row.measurement) for row in module.ROWS]
    if "rewrites this file" in module.__doc__:  # otherwise a person wrote it
        assert render(heads_of(module), rows) == path.read_text()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_are_no_part_of_a_kernels_key(operation: Operation) -> None:
    imported = {path.stem for path in files_imported_by(kernel_modules(operation), PACKAGE)}
    for name in (*FILES, "cuteflash.traits.row", "cuteflash.traits.length_class"):
        assert name.rpartition(".")[2] not in imported


def test_what_was_measured_is_no_part_of_what_a_row_is() -> None:
    row = TABLES[SM90][0]
    other = row.measured("another card", "2026-02-01", 1)
    assert other == row and hash(other) == hash(row)
    assert (other.measurement, other.traits) == (("another card", "2026-02-01", 1), row.traits)


@pytest.mark.parametrize("table", [SM80, SM90, BWD80, BWD90], ids=str)
def test_generated_source_gives_the_rows_back_and_is_formatted(table: TableKey, tmp_path: pathlib.Path) -> None:
    choose = random.Random(0)
    kinds = list(kinds_of(table.operation, table.family))
    rows = [random_row(choose.choice(kinds), choose) for _ in range(200)]
    rows = [choose.choice([row, row.measured(*CARD), row.measured("NVIDIA H100", "2026-01-31", 612)]) for row in rows]
    path = tmp_path / "rows.py"
    path.write_text(render([table], rows))
    assert [(row, row.measurement) for row in read_shipped(path)] == [(row, row.measurement) for row in rows]
    assert render([table], read_shipped(path)) == path.read_text()
    for command in (("format", "--check"), ("check",)):
        config = str(TRAITS.parents[1] / "pyproject.toml")
        ruff = [sys.executable, "-m", "ruff", *command, "--config", config, str(path)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_row_says_only_what_its_maker_does_not_know() -> None:
    row = Row(FwdTraitsSm90(128, 96, 128, 64, exp_rows_before_wait=1), ("full", "causal"), lengths=("long",))
    source = render([SM90], [row.measured(*CARD)])
    assert f"    fwd_sm90(128, 128, 96, FULL + CAUSAL, lengths=LONG, head_dim_v=64).measured({NOTE}),\n" in source
    assert "from cuteflash.traits.row import CAUSAL, FULL, LONG, Row, fwd_sm90\n" in source
    plain = Row(FwdTraitsSm90(128, 96, 128, 128))
    assert "fwd_sm90(128, 128, 96, exp_rows_before_wait=0),\n" in render([SM90], [plain])


def test_measured_rows_change_what_they_serve_and_nothing_else(tmp_path: pathlib.Path) -> None:
    traits = FwdTraitsSm90(128, 64, 128, 128, exp_rows_before_wait=1)
    before = choices(TABLES["fwd", "sm_90a", "sm90"], "sm_90a")
    path = write_shipped(SM90, [MEASURED(Row(traits, ("causal",), lengths=("short",)))], tmp_path)
    assert path == tmp_path / "rows_sm90.py"
    after = choices(read_shipped(path), "sm_90a")
    changed = {key for key in before if after[key] != before[key]}
    served = {("causal", dtype, lengths) for dtype in DTYPES for lengths in ("short", "moderate")}  # one, to a forward
    exact = {(128, 128, *some) for some in served}
    lent = {key for key in changed if max(key[:2]) == 128 and key[2:] in served}
    assert exact <= changed == lent
    assert all(after[key].tile_n == 64 for key in changed)
    assert f"CAUSAL, lengths=SHORT).measured({NOTE}),\n" in path.read_text()
    assert "Rows of fwd/sm_90a/sm90." in path.read_text()


@pytest.mark.slow
def test_a_second_sweep_keeps_the_first_ones_rows_and_comments(tmp_path: pathlib.Path) -> None:
    first, second = (Row(FwdTraitsSm80(64, tile_n, 96, 96), lengths=("short",)) for tile_n in (32, 96))
    write_shipped(SM80, [MEASURED(first)], tmp_path)
    path = write_shipped(SM80, [MEASURED(Row(second.traits, ("full",), lengths=("short",)))], tmp_path)
    rows = [row for row in read_shipped(path) if row.traits.head_dim == 96]
    assert [row.measurement for row in rows] == [CARD, CARD, None]
    assert [row.traits.tile_n for row in rows] == [96, 32, 64]
    write_shipped(SM80, [MEASURED(second)], tmp_path)  # all of the first row's, and of the narrow one's
    assert [row for row in read_shipped(path) if row.traits.head_dim == 96 and row.lengths == ("short",)] == [second]


@pytest.mark.slow
def test_the_same_rows_twice_are_the_same_file(tmp_path: pathlib.Path) -> None:
    measured = [MEASURED(Row(FwdTraitsSm80(64, 32, 64, 64), ("window",)))]
    texts = [write_shipped(SM80, measured, tmp_path).read_text() for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_file_of_several_tables_keeps_what_any_of_them_needs(tmp_path: pathlib.Path) -> None:
    everything = [row.traits for row in TABLES["fwd", "sm_90a", "sm80"]]
    path = write_shipped(SM80, [MEASURED(Row(FwdTraitsSm80(64, 32, 32, 32)))], tmp_path)
    widest = [row.traits for row in read_shipped(path) if row.traits.head_dim == 256]  # rows above take them on Hopper
    assert widest == [row.traits for row in TABLES["fwd", "sm_80", "sm80"] if row.traits.head_dim == 256]
    path = write_shipped(SM89, [MEASURED(Row(FwdTraitsSm80(64, 32, 32, 32)))], tmp_path)
    assert path.name == "rows_sm80_small.py" and "fwd/sm_86/sm80, fwd/sm_89/sm80, fwd/sm_120/sm80." in path.read_text()
    path = write_shipped(SM80_HOPPER, [MEASURED(Row(everything[-1]))], tmp_path)
    found = choices([*read_shipped(path), *MODULES["fwd", "sm_90a", "sm80"][1].ROWS], "sm_90a")
    assert {found[256, 256, mask, "bf16", "long"] for mask in MASK_KINDS} == {everything[-1]}
    assert (
        len(read_shipped(path)) <= len(MODULES["fwd", "sm_90a", "sm80"][0].ROWS) + 1
    )  # the other file's are not its own


@pytest.mark.slow
@every_file
def test_what_stands_first_measured_again_changes_nothing_that_runs(module: Any, tmp_path: pathlib.Path) -> None:
    table, tasks = heads_of(module)[0], tasks_of(module)
    path = write_shipped(table, [MEASURED(module.ROWS[0])], tmp_path)
    assert path.name == pathlib.Path(module.__file__).name
    after = [row for other in MODULES[table] for row in (read_shipped(path) if other is module else other.ROWS)]
    assert all_choices(after, table.target, tasks) == all_choices(TABLES[table], table.target, tasks)


def test_a_row_that_the_target_does_not_run_is_refused(own_tables: OwnTables, tmp_path: pathlib.Path) -> None:
    measured = [MEASURED(Row(FwdTraitsSm80(64, 48, 96, 96), ("causal",)))]
    for write in (
        lambda: write_user(SM80, measured),
        lambda: write_shipped(SM80, measured, tmp_path),
    ):
        with pytest.raises(TableError, match=r"row 96x96 \(causal\) is not for fwd/sm_80/sm80: 128 threads"):
            write()
    with pytest.raises(TableError, match=r"row 128x128 is not for fwd/sm_90a/sm80: it is of the sm90 family's fwd"):
        write_user(SM80_HOPPER, [MEASURED(Row(FwdTraitsSm90(128, 96, 128, 128)))])
    with pytest.raises(TableError, match=r"row 128x128 is not for fwd/sm_90a/sm80: it is of the sm80 family's bwd"):
        write_user(SM80_HOPPER, [MEASURED(Row(BwdTraitsSm80(64, 128, 128, 128)))])
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_only_lends_is_kept(tmp_path: pathlib.Path) -> None:
    assert read_shipped(write_shipped(SM90, [], tmp_path)) == MODULES[SM90][0].ROWS


def test_a_users_table_grows_with_each_sweep(own_tables: OwnTables) -> None:
    rows = [Row(FwdTraitsSm80(64, 32, head_dim, head_dim), ("causal",)) for head_dim in (128, 64)]
    for row in rows:
        path = write_user(SM80, [MEASURED(row)])
    assert path == own_tables.root / "fwd-sm_80-sm80.json"
    assert [own.row for own in usertable.load(SM80)] == rows[::-1]
    again = MEASURED(Row(FwdTraitsSm80(64, 64, 64, 64), ("causal",)))
    write_user(SM80, [again])
    assert usertable.load(SM80) == (again, MEASURED(rows[0]))
    newer = MEASURED(again.row, date="2026-02-01")
    write_user(SM80, [newer])
    assert newer in usertable.load(SM80) and again not in usertable.load(SM80)


def test_a_users_table_that_cannot_be_used_is_replaced_and_that_is_said(own_tables: OwnTables) -> None:
    own_tables.put("sm_80", "sm80", "{")
    measured = MEASURED(Row(FwdTraitsSm80(64, 32, 64, 64)))
    with pytest.warns(TableWarning, match="it is not JSON"):
        write_user(SM80, [measured])
    assert usertable.read(SM80) == (measured,)


def test_a_shipped_file_that_is_none_or_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
    measured = [MEASURED(Row(FwdTraitsSm80(64, 32, 64, 64)))]
    path = tmp_path / "rows_sm80.py"
    for content in ("ROWS = (", "", "from cuteflash.traits.row import Row\nROWS: tuple[Row, ...] = tuple([])\n"):
        path.write_text(content)
        with pytest.raises(TableError, match=r"rows_sm80\.py is not a table of rows"):
            write_shipped(SM80, measured, tmp_path)
        assert path.read_text() == content
    with pytest.raises(TableError, match=r"rows_sm80\.py cannot be written: .*No such file"):
        write_shipped(SM80, measured, tmp_path / "missing")


# Softcap and lse.


@pytest.mark.slow
@every_file
def test_whatever_is_measured_every_problem_keeps_a_row(module: Any, tmp_path: pathlib.Path) -> None:
    choose = random.Random(0)
    table, tasks = heads_of(module)[0], tasks_of(module)
    for _ in range(2):  # the second time on top of the first one's rows
        measured = []
        for row in choose.sample(module.ROWS, min(8, len(module.ROWS))):
            without = tuple(name for name in SPECS[tasks[0]].features if choose.random() < 0.6)
            masks = tuple(choose.sample(MASK_KINDS, choose.randint(1, 3)))
            measured.append(MEASURED(dataclasses.replace(row, masks=masks, dtypes=row.traits.dtypes, without=without)))
        path = write_shipped(table, measured, tmp_path)
        for heads, modules in MODULES.items():
            if module in modules:
                runs = [row for one in modules for row in (read_shipped(path) if one is module else one.ROWS)]
                for task in tasks:
                    choices(runs, heads.target, SPECS[task].features, task)  # raises without a row


def test_a_shipped_file_that_leaves_a_problem_without_a_row_is_not_written(tmp_path: pathlib.Path) -> None:
    path = write_shipped(SM80, [], tmp_path)
    rows = [
        dataclasses.replace(row, without=("lse",) if row.traits.head_dim == 160 else ()) for row in read_shipped(path)
    ]
    path.write_text(render([SM80], rows))
    before = path.read_text()
    problem = "fp16 32x160 full softcap lse varlen used_q used_k"
    complaint = rf"rows_sm80\.py has no row of fwd/sm_90a/sm80 for {problem}, lengths decode; add one"
    with pytest.raises(TableError, match=complaint):
        write_shipped(SM80, [MEASURED(Row(FwdTraitsSm80(64, 32, 64, 64)))], tmp_path)
    assert path.read_text() == before


def test_rows_of_two_kinds_make_up_one_file(tmp_path: pathlib.Path) -> None:
    one = Row(BwdTraitsSm90(80, 128, 128, 128, dq="transposed"), ("causal",), without=("softcap", "deterministic"))
    two = Row(BwdTwoPassTraitsSm90(48, 64, 128, 128, k_stage=3), lengths=("short",))
    path = write_shipped(BWD90, [MEASURED(one), MEASURED(two)], tmp_path)
    text = path.read_text()
    assert path.name == "rows_bwd_sm90.py" and "Rows of bwd/sm_90a/sm90." in text
    assert 'bwd_sm90(128, 80, CAUSAL, without=SOFTCAP + DETERMINISTIC, dq="transposed")' in text
    assert f"bwd_two_pass_sm90(128, 48, lengths=SHORT, k_stage=3).measured({NOTE})" in text
    after = read_shipped(path)
    assert {one, two} <= set(after)
    assert {row for row in TABLES[BWD90] if row.traits.head_dim != 128} <= set(after)


def test_rows_of_8_bit_operands_have_a_file_of_their_own(tmp_path: pathlib.Path) -> None:
    row = Row(FwdTraitsFp8Sm90(128, 128, 128, 128, two_level=True, turns_v=True), ("full",), FP8_DTYPES)
    path = write_shipped(SM90, [MEASURED(row)], tmp_path)
    text = path.read_text()
    assert path.name == "rows_fp8_sm90.py" and '"""Rows of fwd/sm_90a/sm90 for 8-bit operands.' in text
    assert f"    fwd_fp8_sm90(128, 128, 128, FULL, two_level=True, turns_v=True).measured({NOTE}),\n" in text
    after = choices([*TABLES[SM90][: len(MODULES[SM90][0].ROWS)], *read_shipped(path)], "sm_90a", (), "fwd e4m3")
    assert after[128, 128, "full", "e4m3", "long"] == row.traits
    given = choices(read_shipped(path), "sm_90a", (), "fwd e4m3 vt")
    assert given == choices(TABLES[SM90], "sm_90a", (), "fwd e4m3 vt")  # calls with V^T keep their rows


def test_softcap_and_lse_are_written_where_a_row_lacks_them() -> None:
    for without in ((), ("softcap",), ("lse",), ("softcap", "lse")):
        row = Row(FwdTraitsSm90(128, 96, 128, 128, exp_rows_before_wait=1), without=without)
        words = f", without={' + '.join(without).upper()}" if without else ""
        assert f"    fwd_sm90(128, 128, 96{words}),\n" in render([SM90], [row])
