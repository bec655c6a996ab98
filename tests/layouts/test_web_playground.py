"""What the playground draws of a text, run in node: where cells stand, what they say, and which belong together."""

from __future__ import annotations

from typing import Any

import pytest

from layouts.text import ThreadValue, evaluate
from tests.layouts.web import BASE_JS, run_js

FILES = (BASE_JS, "core.js", "algebra.js", "text.js", "playmodel.js", "playway.js")
BROWSER = """
const location = { hash: "" };
const history = {};
"""
MODEL = """(() => {
  const model = CF.playmodel.model(CF.text.evaluate(data.text).value, { bytes: data.bytes, cells: data.cells });
  const times = (length, make) => Array.from({ length }, (_, at) => make(at));
  const table = (name) => times(model.rows, (row) => times(model.cols, (col) => model[name](row, col)));
  const fields = Object.fromEntries(data.tables.map((name) => [name, table(name)]));
  const { rows, cols, rowPeriod, colPeriod, names, remark } = model;
  const [row, col] = data.at;
  return { rows, cols, rowPeriod, colPeriod, names, remark, ...fields, at: Object.fromEntries(model.facts(row, col)) };
})()"""


def model(text: str, *tables: str, cells: str = "index", bytes: int = 2, at: tuple[int, int] = (0, 0)) -> Any:
    data = {"text": text, "tables": tables, "cells": cells, "bytes": bytes, "at": at}
    return run_js(FILES, MODEL, data, prelude=BROWSER)


def test_two_modes_are_rows_and_columns() -> None:
    drawn = model("((2,2),3):((1,6),2)", "text", at=(3, 2))
    assert drawn["text"] == [["0", "2", "4"], ["1", "3", "5"], ["6", "8", "10"], ["7", "9", "11"]]
    assert (drawn["rowPeriod"], drawn["colPeriod"]) == (2, 0)
    assert drawn["at"] == {"coordinate": "((1,1),2)", "index": "11", "byte": "22 = 0x0016", "bank": "5"}


def test_one_mode_is_a_strip_which_is_folded_where_it_is_long() -> None:
    assert model("5:3", "text")["text"] == [["0", "3", "6", "9", "12"]]
    folded = model("70:2", "text", "rgb", at=(2, 5))
    assert (folded["rows"], folded["cols"]) == (3, 32)
    assert folded["text"][2][:7] == ["128", "130", "132", "134", "136", "138", ""]
    assert folded["rgb"][2][6] is None
    assert folded["at"]["coordinate"] == "69"


def test_further_modes_stand_beside_the_second() -> None:
    drawn = model("(2,3,2):(1,2,10)", "text")
    assert drawn["text"] == [["0", "2", "4", "10", "12", "14"], ["1", "3", "5", "11", "13", "15"]]
    assert drawn["colPeriod"] == 3


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_cells_of_a_bank_belong_together(element_bytes: int) -> None:
    text = "S<3,3,3> o 32 o (8,64):(64,1)"
    drawn = model(text, "group", "sub", cells="bank", bytes=element_bytes)
    value = evaluate(text).value
    assert not isinstance(value, ThreadValue)
    banks = value.indices() * element_bytes // 4 % 32
    assert [drawn["group"][at % 8][at // 8] for at in range(512)] == banks.tolist()
    assert drawn["sub"][7][63] == f"b{banks[-1]}"


def test_a_swizzled_cell_says_each_stage_of_its_address() -> None:
    drawn = model("S<3,3,3> o 8 o (8,64):(64,1)", "index", bytes=4, at=(1, 0))
    assert drawn["at"] == {
        "coordinate": "(1,0)",
        "index": "64",
        "+ 8": "72",
        "swizzled": "64",
        "byte": "256 = 0x0100",
        "bank": "0",
    }
    assert drawn["index"][1][0] == 72


def test_a_tv_layout_names_the_owner_of_every_element() -> None:
    drawn = model("TV ((4,8),(2,2)):((32,1),(16,8)) on (16,8)", "text", "sub", "group", cells="thread", at=(9, 3))
    for row in range(16):
        for col in range(8):  # PTX's figure of mma.m16n8's C: lane 4 * (row % 8) + col / 2
            thread, value = 4 * (row % 8) + col // 2, col % 2 + 2 * (row // 8)
            assert (drawn["text"][row][col], drawn["sub"][row][col]) == (f"T{thread}", f"V{value}")
            assert drawn["group"][row][col] == thread
    assert drawn["at"] == {"element": "(9,3) = 57", "owner": "T5 V3"}


def test_elements_without_or_with_several_owners_say_so() -> None:
    drawn = model("TV (4,2):(0,1) on (2,2)", "text", "sub", "rgb", cells="thread")
    assert drawn["text"] == [["T0", ""], ["T0", ""]]
    assert drawn["sub"] == [["V0+3", ""], ["V1+3", ""]]
    assert drawn["rgb"][0][1] is None
    assert drawn["at"]["owners"] == "T0 V0, T1 V0, T2 V0, T3 V0"
    assert model("TV (4,2):(0,1) on (2,2)", cells="thread", at=(1, 1))["at"]["owner"] == "none"


def test_what_is_too_large_is_cut_and_said() -> None:
    drawn = model("(1024,600)", cells="index")
    assert (drawn["rows"], drawn["cols"]) == (512, 512)
    assert "512 of 1\u202f024 rows and 512 of 600 columns" in drawn["remark"]
    assert model("(512,512)")["remark"] == ""


def test_neighbouring_lanes_differ_in_colour() -> None:
    drawn = model("TV (32,1) on (32,1)", "rgb", cells="thread")
    assert len({tuple(row[0]) for row in drawn["rgb"]}) == 32


def way(text: str, position: int) -> tuple[dict[int, list[int]], str | None]:
    """The positions, by step, that an element of the last step's result comes from, and the way in words."""
    expression = """(() => {
      const { steps } = CF.text.evaluate(data.text);
      const last = steps.length - 1;
      return [[...CF.playway.trace(steps, last, data.position)], CF.playway.words(steps[last], data.position)];
    })()"""
    found, words = run_js(FILES, expression, {"text": text, "position": position}, prelude=BROWSER)
    return dict(found), words


@pytest.mark.parametrize("position", [0, 13, 63])
def test_an_element_of_a_composition_lights_its_way_through_both_operands(position: int) -> None:
    outer, inner = (evaluate(part).value for part in ("(8,64):(64,1)", "(4,(2,8)):(2,(8,16))"))
    assert not isinstance(outer, ThreadValue) and not isinstance(inner, ThreadValue)
    through = int(inner.indices()[position])
    found, words = way("compose((8,64):(64,1), (4,(2,8)):(2,(8,16)))", position)
    assert found == {2: [position], 1: [position], 0: [through]}
    assert words == f"{position} → {through} → {outer.indices()[through]}"


def test_a_composition_by_modes_goes_through_each_modes_tiler() -> None:
    found, words = way("compose((8,64):(64,1), (4:2, 8:4))", 2 + 4 * 3)  # row 2 * 2, column 3 * 4
    assert found == {3: [14], 1: [2], 2: [3], 0: [4 + 8 * 12]}
    assert words == f"14 → {4 + 8 * 12} → {4 * 64 + 12}"


def test_the_way_leads_through_every_step_of_a_nested_text() -> None:
    found, _ = way("compose(compose(S<3,3,3> o (8,64):(64,1), (8,64):(1,8)), 16:2)", 5)
    assert found == {5: [5], 4: [5], 3: [10], 2: [10], 1: [10], 0: [10]}
