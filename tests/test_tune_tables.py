"""Measured rows in tables: what is generated is Python that gives the rows back, and only what was measured changes."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest

from cuteflash import usertable
from cuteflash.compile.key import FINGERPRINTED
from cuteflash.dispatch import offers
from cuteflash.problem import DTYPES, MASK_KINDS, FwdProblem
from cuteflash.traits import row as vocabulary
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, TableKey, Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import MODULES, TABLES
from cuteflash.tune import tables
from cuteflash.tune.tables import (
    EXTRAS,
    NotedRow,
    Stack,
    merged,
    read_shipped,
    rejudged,
    render,
    simplified,
    write_shipped,
    write_user,
)
from cuteflash.usertable import TableError, TableWarning
from tests.user_tables import MEASURED, SM80, SM80_HOPPER, SM89, SM90, OwnTables

TRAITS = pathlib.Path(vocabulary.__file__).parent
FILES = {module.__name__: module for modules in MODULES.values() for module in modules}
every_file = pytest.mark.parametrize("module", FILES.values(), ids=lambda module: module.__name__.rpartition(".")[2])
NOTE = "Card, 2026-01-31, 123 TFLOP/s"

SOURCE = """
from cuteflash.traits.row import Row, fwd_sm90

ROWS: tuple[Row, ...] = (
    fwd_sm90(64, 128, 96),
    fwd_sm90(96, 128, 96),  # one line
    fwd_sm90(
        160, 128, 96
    ),  # by # hand
    fwd_sm90(
        192,
        128,
        96,
    ),  # one each
)
"""

Key = tuple[int, int, str, str, str]


def choices(rows: Any, target: str, softcap: bool = False, lse: bool = False) -> dict[Key, Traits]:
    """What runs every problem with these extras on every length class, by these rows alone."""
    found = {}
    for head_dims in itertools.product(ROW_HEAD_DIMS, repeat=2):
        for mask, dtype, lengths in itertools.product(MASK_KINDS, DTYPES, LENGTH_CLASSES):
            problem = FwdProblem.dense(dtype, *head_dims, mask, softcap=softcap, lse=lse)
            offered = offers(rows, problem, lengths, get_arch(target))
            found[(*head_dims, mask, dtype, lengths)] = next(traits for _, traits, reason in offered if reason is None)
    return found


def all_choices(rows: Any, target: str) -> list[dict[Key, Traits]]:
    """`choices` without and with softcap and lse."""
    return [choices(rows, target, *extras) for extras in itertools.product((False, True), repeat=2)]


def rows_of(path: pathlib.Path) -> list[Row]:
    return [noted.row for noted in read_shipped(path)]


def heads_of(module: Any) -> list[TableKey]:
    return [table for table, modules in MODULES.items() if modules[0] is module]


def random_row(family: Family, choose: random.Random) -> Row:
    """Any row at all: what a row serves, and fields away from their defaults; it need not run."""

    def some(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(choose.sample(names, choose.randint(1, len(names))))

    traits: Any = FwdTraitsSm80(64, 64, 64, 64) if family == "sm80" else FwdTraitsSm90(128, 64, 64, 64)
    changes = {}
    names = [field.name for field in dataclasses.fields(traits)]
    for name in names:
        value = getattr(traits, name)
        if choose.random() < 0.4:
            changes[name] = not value if isinstance(value, bool) else value + choose.randint(1, 3)
    return Row(type(traits)(**{**{n: getattr(traits, n) for n in names}, **changes}),
                  some(MASK_KINDS), some(DTYPES), some(LENGTH_CLASSES),
                  tuple(name for name in EXTRAS if choose.random() < 0.5))  # fmt: skip


def test_every_word_is_the_vocabularys() -> None:
    assert set(tables.WORDS) == {*MASK_KINDS, *DTYPES, *LENGTH_CLASSES, *EXTRAS}
    for name, word in tables.WORDS.items():
        assert getattr(vocabulary, word) == (name,)


@every_file
def test_a_shipped_file_is_what_would_be_written(module: Any) -> None:
    path = pathlib.Path(module.__file__)
    noted = read_shipped(path)
    assert tuple(entry.row for entry in noted) == module.ROWS
    assert render(heads_of(module), noted) == path.read_text()


def test_rows_are_no_part_of_a_kernels_key() -> None:
    for name in (*FILES, "cuteflash.traits.row", "cuteflash.traits.length_class"):
        assert f"{name.removeprefix('cuteflash.').replace('.', '/')}.py" not in FINGERPRINTED
    assert "traits" not in FINGERPRINTED


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_generated_source_gives_the_rows_back_and_is_formatted(family: Family, tmp_path: pathlib.Path) -> None:
    choose = random.Random(0)
    notes = ["", NOTE, "NVIDIA H100 80GB HBM3, 2026-01-31, 612 TFLOP/s"]
    noted = [NotedRow(random_row(family, choose), choose.choice(notes)) for _ in range(200)]
    target = {"sm80": "sm_80", "sm90": "sm_90a"}[family]
    path = tmp_path / "rows.py"
    path.write_text(render([TableKey("fwd", target, family)], noted))
    assert read_shipped(path) == noted
    assert render([TableKey("fwd", target, family)], read_shipped(path)) == path.read_text()
    for command in (("format", "--check"), ("check",)):
        config = str(TRAITS.parents[1] / "pyproject.toml")
        ruff = [sys.executable, "-m", "ruff", *command, "--config", config, str(path)]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_row_says_only_what_its_maker_does_not_know() -> None:
    row = Row(FwdTraitsSm90(128, 96, 128, 64, exp_rows_before_wait=1), ("full", "causal"), lengths=("long",))
    source = render([SM90], [NotedRow(row, NOTE)])
    assert f"    fwd_sm90(128, 128, 96, FULL + CAUSAL, lengths=LONG, head_dim_v=64),  # {NOTE}\n" in source
    assert "from cuteflash.traits.row import CAUSAL, FULL, LONG, Row, fwd_sm90\n" in source
    plain = Row(FwdTraitsSm90(128, 96, 128, 128))
    assert "fwd_sm90(128, 128, 96, exp_rows_before_wait=0),\n" in render([SM90], [NotedRow(plain)])


def test_measured_rows_change_what_they_serve_and_nothing_else(tmp_path: pathlib.Path) -> None:
    traits = FwdTraitsSm90(128, 64, 128, 128, exp_rows_before_wait=1)
    before = choices(TABLES["fwd", "sm_90a", "sm90"], "sm_90a")
    path = write_shipped(SM90, [MEASURED(Row(traits, ("causal",), lengths=("short",)))], tmp_path)
    assert path == tmp_path / "rows_sm90.py"
    after = choices(rows_of(path), "sm_90a")
    changed = {key for key in before if after[key] != before[key]}
    exact = {(128, 128, "causal", dtype, "short") for dtype in DTYPES}
    lent = {key for key in changed if max(key[:2]) == 128 and key[2:] in {("causal", d, "short") for d in DTYPES}}
    assert exact <= changed == lent
    assert all(after[key].tile_n == 64 for key in changed)
    assert f"CAUSAL, lengths=SHORT),  # {NOTE}\n" in path.read_text()
    assert "Forward rows of sm_90a/sm90." in path.read_text()


@pytest.mark.slow
def test_a_second_sweep_keeps_the_first_ones_rows_and_comments(tmp_path: pathlib.Path) -> None:
    first, second = (Row(FwdTraitsSm80(64, tile_n, 96, 96), lengths=("short",)) for tile_n in (32, 96))
    write_shipped(SM80, [MEASURED(first)], tmp_path)
    path = write_shipped(SM80, [MEASURED(Row(second.traits, ("full",), lengths=("short",)))], tmp_path)
    noted = [entry for entry in read_shipped(path) if entry.row.traits.head_dim == 96]
    assert [entry.note for entry in noted] == [NOTE, NOTE, ""]
    assert [entry.row.traits.tile_n for entry in noted] == [96, 32, 64]
    write_shipped(SM80, [MEASURED(second)], tmp_path)  # all of the first row's, and of the narrow one's
    assert [row for row in rows_of(path) if row.traits.head_dim == 96 and row.lengths == ("short",)] == [second]


@pytest.mark.slow
def test_the_same_rows_twice_are_the_same_file(tmp_path: pathlib.Path) -> None:
    measured = [MEASURED(Row(FwdTraitsSm80(64, 32, 64, 64), ("window",)))]
    texts = [write_shipped(SM80, measured, tmp_path).read_text() for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_file_of_several_tables_keeps_what_any_of_them_needs(tmp_path: pathlib.Path) -> None:
    everything = [row.traits for row in TABLES["fwd", "sm_90a", "sm80"]]
    path = write_shipped(SM80, [MEASURED(Row(FwdTraitsSm80(64, 32, 32, 32)))], tmp_path)
    widest = [row.traits for row in rows_of(path) if row.traits.head_dim == 256]  # rows above take them on Hopper
    assert widest == [row.traits for row in TABLES["fwd", "sm_80", "sm80"] if row.traits.head_dim == 256]
    path = write_shipped(SM89, [MEASURED(Row(FwdTraitsSm80(64, 32, 32, 32)))], tmp_path)
    assert path.name == "rows_sm80_small.py" and "sm_86/sm80, sm_89/sm80, sm_120/sm80." in path.read_text()
    path = write_shipped(SM80_HOPPER, [MEASURED(Row(everything[-1]))], tmp_path)
    found = choices([*rows_of(path), *MODULES["fwd", "sm_90a", "sm80"][1].ROWS], "sm_90a")
    assert {found[256, 256, mask, "bf16", "long"] for mask in MASK_KINDS} == {everything[-1]}
    assert len(rows_of(path)) <= len(MODULES["fwd", "sm_90a", "sm80"][0].ROWS) + 1  # the other file's are not its own


@pytest.mark.slow
@every_file
def test_nothing_measured_changes_nothing_that_runs(module: Any, tmp_path: pathlib.Path) -> None:
    table = heads_of(module)[0]
    path = write_shipped(table, [], tmp_path)
    others = [row for other in MODULES[table][1:] for row in other.ROWS]
    assert all_choices([*rows_of(path), *others], table.target) == all_choices(TABLES[table], table.target)


def test_a_row_that_the_target_does_not_run_is_refused(own_tables: OwnTables, tmp_path: pathlib.Path) -> None:
    measured = [MEASURED(Row(FwdTraitsSm80(64, 48, 96, 96), ("causal",)))]
    for write in (
        lambda: write_user(SM80, measured),
        lambda: write_shipped(SM80, measured, tmp_path),
    ):
        with pytest.raises(TableError, match=r"row 96x96 \(causal\) is not for fwd/sm_80/sm80: 128 threads"):
            write()
    with pytest.raises(TableError, match=r"row 128x128 is not for fwd/sm_90a/sm80: it is of the sm90 family"):
        write_user(SM80_HOPPER, [MEASURED(Row(FwdTraitsSm90(128, 96, 128, 128)))])
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_only_lends_is_kept() -> None:
    rows = [NotedRow(row) for row in TABLES["fwd", "sm_90a", "sm90"]]
    assert merged(rows, [Stack(TableKey("fwd", "sm_90a", "sm90"))]) == rows


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
    with pytest.warns(TableWarning, match="it is no JSON"):
        write_user(SM80, [measured])
    assert usertable.read(SM80) == (measured,)


def test_a_shipped_file_that_is_none_or_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
    measured = [MEASURED(Row(FwdTraitsSm80(64, 32, 64, 64)))]
    path = tmp_path / "rows_sm80.py"
    for content in ("ROWS = (", "", "from cuteflash.traits.row import Row\nROWS: tuple[Row, ...] = tuple([])\n"):
        path.write_text(content)
        with pytest.raises(TableError, match=r"rows_sm80\.py is no table of rows"):
            write_shipped(SM80, measured, tmp_path)
        assert path.read_text() == content
    with pytest.raises(TableError, match=r"rows_sm80\.py cannot be written: .*No such file"):
        write_shipped(SM80, measured, tmp_path / "missing")


def test_comments_are_read_behind_any_form_of_a_row(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows_sm90.py"
    path.write_text(SOURCE)
    notes = {entry.row.title: entry.note for entry in read_shipped(path)}
    assert notes == {"64x64": "", "96x96": "one line", "160x160": "by # hand", "192x192": "one each"}


# Rows that change nothing.

BELOW = [Row(FwdTraitsSm80(64, 64, head_dim, head_dim)) for head_dim in ROW_HEAD_DIMS]
STACK = Stack(SM80, below=BELOW)
FAST, SLOW = FwdTraitsSm80(64, 32, 64, 64), FwdTraitsSm80(64, 48, 64, 64)


def noted(traits: Traits, note: str = "", **serves: Any) -> NotedRow:
    return NotedRow(Row(traits, **serves), note)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_simpler_rows_choose_the_same_and_cannot_be_simpler_still(seed: int) -> None:
    choose = random.Random(seed)
    rows = []
    for place in range(10):
        boxes = (choose.sample(names, choose.randint(1, len(names))) for names in (MASK_KINDS, DTYPES, LENGTH_CLASSES))
        head_dims = choose.choice([(64, 64), (96, 96), (96, 64)])
        traits = FwdTraitsSm80(64, choose.choice([32, 64]), *head_dims)
        without = tuple(name for name in EXTRAS if choose.random() < 0.4)
        rows.append(NotedRow(Row(traits, *map(tuple, boxes), without), f"note {place}"))
    rows = merged(rows, [STACK])
    found = simplified(rows, [STACK])
    order = [one.row for one in rows]
    before = all_choices([*order, *BELOW], "sm_80")
    assert all_choices([*(one.row for one in found), *BELOW], "sm_80") == before
    assert [order.index(one.row) for one in found] == sorted(order.index(one.row) for one in found)
    assert simplified(found, [STACK]) == found
    for left in found:
        fewer = [one.row for one in found if one is not left]
        assert all_choices([*fewer, *BELOW], "sm_80") != before


def test_a_row_that_the_next_one_makes_needless_leaves_it_its_note() -> None:
    rows = [noted(FAST, "new", masks=("causal",)), noted(FAST, "old")]
    assert simplified(rows, [STACK]) == [noted(FAST, "new")]
    assert simplified([noted(FAST, "", masks=("causal",)), noted(FAST, "old")], [STACK]) == [noted(FAST, "old")]


def test_a_note_goes_on_from_heir_to_heir_and_the_newest_stays() -> None:
    rows = [
        noted(FAST, "newest", masks=("causal",), lengths=("long",)),
        noted(FAST, "newer", masks=("causal",)),
        noted(FAST, "older", masks=("full",)),
        noted(FAST),
    ]
    assert simplified(rows, [STACK]) == [noted(FAST, "newest")]


def test_a_row_stays_where_another_one_would_take_its_place() -> None:
    rows = [noted(FAST, "1", masks=("causal",)), noted(SLOW, "2", masks=("causal", "full")), noted(FAST, "3")]
    assert simplified(rows, [STACK]) == rows
    needless = [noted(FAST, "0", masks=("window",)), *rows]
    assert simplified(needless, [STACK]) == [*rows[:2], noted(FAST, "0")]


def test_a_row_that_goes_may_make_one_above_it_needless() -> None:
    exact = {"masks": ("causal",)}
    rows = [
        noted(FAST, "1", **exact, dtypes=("bf16",)),
        noted(SLOW, "2", **exact),  # the same as the last but one, where the first does not hide it
        noted(SLOW, "3", **exact, dtypes=("fp16",)),
        noted(FAST, "4"),
    ]
    assert simplified(rows, [STACK]) == [noted(SLOW, "2", **exact, dtypes=("fp16",)), noted(FAST, "1")]


def test_a_note_says_nothing_of_other_head_dims() -> None:
    lent, square = FwdTraitsSm80(64, 32, 96, 64), FwdTraitsSm80(64, 32, 96, 96)
    assert simplified([noted(lent, "of 96x64"), noted(square, "of 96x96")], [STACK]) == [noted(square, "of 96x96")]


def test_a_row_that_one_of_several_tables_needs_stays() -> None:
    row = noted(FwdTraitsSm80(64, 64, 64, 64), "the same as below", masks=("causal",))
    slower = [Row(SLOW), *BELOW]
    assert simplified([row], [STACK]) == []
    assert simplified([row], [STACK, Stack(TableKey("fwd", "sm_86", "sm80"), below=slower)]) == [row]


def test_a_row_that_another_file_has_too_is_needless() -> None:
    assert simplified([noted(BELOW[1].traits, "the same")], [STACK]) == []


def test_what_is_written_is_simplified(tmp_path: pathlib.Path) -> None:
    rows = [MEASURED(Row(FAST, masks)) for masks in (("causal",), ("full", "causal"))]
    path = write_shipped(SM80, rows, tmp_path)
    assert [row for row in rows_of(path) if row.traits == FAST] == [rows[1].row]


# Rows that serve no softcap or no lse.

PLAIN = {"without": EXTRAS}


def test_rows_that_differ_in_what_else_they_serve_stay_and_the_same_twice_is_one() -> None:
    rows = [noted(FAST, "1", without=("softcap",)), noted(SLOW, "2", without=("lse",))]
    assert merged([*rows, rows[0]], [STACK]) == rows
    assert simplified(rows, [STACK]) == rows


@pytest.mark.parametrize("lacks", ["softcap", "lse"])
def test_a_row_that_only_problems_with_one_of_them_reach_stays(lacks: str) -> None:
    rows = [noted(FwdTraitsSm80(64, 128, 64, 64), "plain", **PLAIN), noted(FAST, "1", without=(lacks,))]
    assert merged(rows, [STACK]) == simplified(rows, [STACK]) == rows


def test_a_row_goes_only_where_the_next_one_serves_all_that_it_did() -> None:
    rows = [noted(FAST, "new", masks=("causal",)), noted(FAST, "old", without=("lse",))]
    assert simplified(rows, [STACK]) == rows
    rows = [noted(FAST, "new", masks=("causal",), without=("lse",)), noted(FAST, "old", without=("lse",))]
    assert simplified(rows, [STACK]) == [noted(FAST, "new", without=("lse",))]


def test_a_measurement_is_no_word_for_what_its_row_does_not_serve() -> None:
    by_hand = noted(FAST)
    assert simplified([noted(FAST, "new", masks=("causal",), without=("lse",)), by_hand], [STACK]) == [by_hand]
    assert simplified([noted(FAST, "new", masks=("causal",)), by_hand], [STACK]) == [noted(FAST, "new")]
    plain = noted(FAST, masks=("causal",), **PLAIN)
    assert simplified([noted(FAST, "new", masks=("causal",), without=("lse",)), plain, by_hand], [STACK]) == [by_hand]


def test_what_the_newest_rows_do_not_serve_older_measured_ones_do_not_either() -> None:
    old, elsewhere = noted(FAST, "old"), noted(FAST, "old", masks=("full", "causal"), dtypes=("fp16",))
    new = [noted(FAST, "new", masks=("causal",), dtypes=("bf16",), lengths=("long",), without=("lse",))]
    assert rejudged(new, [old, elsewhere], [STACK]) == [*new, noted(FAST, "old", without=("lse",)), elsewhere]
    new = [noted(FAST, "new", masks=("causal",), **PLAIN)]
    assert rejudged(new, [old], [STACK]) == [*new, noted(FAST, "old", **PLAIN)]
    assert rejudged(new, [noted(SLOW, "old")], [STACK]) == [*new, noted(SLOW, "old")]
    less = noted(FAST, "old", without=("softcap",))
    assert rejudged([noted(FAST, "new", without=("lse",))], [less], [STACK])[1:] == [noted(FAST, "old", **PLAIN)]
    assert rejudged([noted(FAST, "new")], [less], [STACK])[1:] == [less]  # nothing is added to what a row says


def test_what_another_of_the_newest_rows_serves_an_older_one_keeps() -> None:
    long, short = ({"masks": ("causal",), "lengths": (lengths,)} for lengths in ("long", "short"))
    new = [noted(FAST, "new", **long, without=("lse",)), noted(FAST, "new", **short)]
    assert rejudged(new, [noted(FAST, "old", **short)], [STACK]) == [*new, noted(FAST, "old", **short)]
    new = [noted(FAST, "new", **long, **PLAIN), noted(FAST, "new", **short, without=("softcap",))]
    assert rejudged(new, [noted(FAST, "old", **short)], [STACK])[2:] == [
        noted(FAST, "old", **short, without=("softcap",))
    ]


def test_a_row_by_hand_keeps_what_it_says() -> None:
    new = [noted(FAST, "new", **PLAIN)]
    assert rejudged(new, [noted(FAST)], [STACK]) == [*new, noted(FAST)]


def test_an_older_row_keeps_what_nobody_else_serves() -> None:
    below = [row for row in BELOW if row.traits.head_dim != 64] + [Row(SLOW, without=("lse",))]
    new = [noted(FAST, "new", **PLAIN)]
    stack = Stack(SM80, below=below)
    assert rejudged(new, [noted(FAST, "old")], [STACK])[1:] == [noted(FAST, "old", **PLAIN)]
    assert rejudged(new, [noted(FAST, "old")], [stack])[1:] == [noted(FAST, "old")]  # both together: nobody else
    assert rejudged(new, [noted(FAST, "old")], [STACK, stack])[1:] == [noted(FAST, "old")]


@pytest.mark.slow
@every_file
def test_whatever_is_measured_every_problem_keeps_a_row(module: Any, tmp_path: pathlib.Path) -> None:
    choose = random.Random(0)
    table = heads_of(module)[0]
    for _ in range(2):  # the second time on top of the first one's rows
        measured = []
        for row in choose.sample(module.ROWS, min(8, len(module.ROWS))):
            without = tuple(name for name in EXTRAS if choose.random() < 0.6)
            masks = tuple(choose.sample(MASK_KINDS, choose.randint(1, 3)))
            measured.append(MEASURED(dataclasses.replace(row, masks=masks, dtypes=DTYPES, without=without)))
        path = write_shipped(table, measured, tmp_path)
        for heads, modules in MODULES.items():
            if module in modules:
                runs = [row for one in modules for row in (rows_of(path) if one is module else one.ROWS)]
                choices(runs, heads.target, softcap=True, lse=True)  # raises where there is no row


def test_a_shipped_file_that_leaves_a_problem_without_a_row_is_not_written(tmp_path: pathlib.Path) -> None:
    path = write_shipped(SM80, [], tmp_path)
    rows = [
        NotedRow(dataclasses.replace(row, without=("lse",) if row.traits.head_dim == 160 else ()))
        for row in rows_of(path)
    ]
    path.write_text(render([SM80], rows))
    before = path.read_text()
    complaint = r"rows_sm80\.py has no row of fwd/sm_90a/sm80 for fp16 32x160 full softcap lse, lengths decode; add one"
    with pytest.raises(TableError, match=complaint):
        write_shipped(SM80, [MEASURED(Row(FAST))], tmp_path)
    assert path.read_text() == before


def test_a_users_older_row_loses_what_its_kernels_are_now_found_to_spill_with(own_tables: OwnTables) -> None:
    old = MEASURED(Row(FAST, ("full", "causal")))
    write_user(SM80, [old])
    new = MEASURED(Row(FAST, ("causal",), without=("lse",)), date="2026-02-01")
    write_user(SM80, [new])
    assert usertable.load(SM80) == (
        new,
        dataclasses.replace(old, row=Row(FAST, ("full", "causal"), without=("lse",))),
    )
    runs = [*(own.row for own in usertable.load(SM80)), *TABLES["fwd", "sm_80", "sm80"]]
    assert FAST not in choices(runs, "sm_80", lse=True).values()
    assert choices(runs, "sm_80")[64, 64, "causal", "bf16", "long"] == FAST


@pytest.mark.slow
def test_a_shipped_measured_row_loses_it_too_and_one_by_hand_does_not(tmp_path: pathlib.Path) -> None:
    by_hand = read_shipped(write_shipped(SM80, [], tmp_path))
    old = [Row(FAST, ("causal",)), *(one.row for one in by_hand if one.row.traits.head_dim == 128)]
    write_shipped(SM80, [MEASURED(old[0])], tmp_path)
    new = [MEASURED(dataclasses.replace(row, masks=("causal",), without=("lse",))) for row in old]
    path = write_shipped(SM80, new, tmp_path)
    rows = rows_of(path)
    assert [row for row in rows if row.traits == FAST] == [new[0].row]
    assert [row for row in rows if row.traits.head_dim == 128] == old[1:]
    assert path.read_text() == write_shipped(SM80, new, tmp_path).read_text()


def test_softcap_and_lse_are_written_where_a_row_lacks_them() -> None:
    for without in ((), ("softcap",), ("lse",), ("softcap", "lse")):
        row = Row(FwdTraitsSm90(128, 96, 128, 128, exp_rows_before_wait=1), without=without)
        words = f", without={' + '.join(without).upper()}" if without else ""
        assert f"    fwd_sm90(128, 128, 96{words}),\n" in render([SM90], [NotedRow(row)])
