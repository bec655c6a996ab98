"""The backward's ladders without a GPU: their rungs lead from a plain kernel to the shipped row, and their report."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from benchmarks import ladder, ladder_report
from benchmarks.backward_ladder import LADDERS, SHIPPED, TWO_PASSES, BackwardLadder
from cuteflash.dispatch import choose_shipped
from cuteflash.problem import BwdProblem
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.tune.cells import Cell, parse_cell

CELLS = [parse_cell(text) for text in (*ladder.CELLS.split(","), "96:4096:full", "192:1024:causal")]
TARGETS = {"sm80": ("sm_80", "sm_90a"), "sm90": ("sm_90a",)}
CASES = [
    pytest.param(item, target, cell, id=f"{item.name} on {target}, {cell.label}")
    for item in LADDERS
    for target in TARGETS[item.family]
    for cell in CELLS
    if item.serves(cell, target)
]


def test_every_ladder_climbs_somewhere_and_one_alone_serves_an_sm90_cell() -> None:
    for item in LADDERS:
        assert any(item.serves(cell, target) for cell in CELLS for target in TARGETS[item.family])
    for cell in CELLS:
        assert sum(item.serves(cell, "sm_90a") for item in LADDERS if item.family == "sm90") == 1


@pytest.mark.parametrize(("steps", "target", "cell"), CASES)
def test_every_rung_can_run_and_the_shipped_row_stands_above_them(
    steps: BackwardLadder, target: str, cell: Cell
) -> None:
    found = steps.traits(cell, target)
    assert all(traits.check(get_arch(target)) is None for traits in found.values())
    problem = BwdProblem.dense(cell.dtype, cell.head_dim, cell.head_dim_v, cell.mask)
    assert found[SHIPPED.title] == choose_shipped(problem, target, steps.family, cell.lengths).traits
    assert [told["title"] for told in steps.told()][: len(found)] == list(found)


@pytest.mark.parametrize(("steps", "target", "cell"), CASES)
def test_a_rung_gives_its_traits_the_shipped_values_and_no_others(
    steps: BackwardLadder, target: str, cell: Cell
) -> None:
    found = {title: dataclasses.asdict(traits) for title, traits in steps.traits(cell, target).items()}
    shipped = found[SHIPPED.title]
    below = found[steps.rungs[0].title]
    assert any(plain.items() <= below.items() for plain in steps.plain)
    for rung in steps.rungs[1:-1]:
        changed = {name for name, value in found[rung.title].items() if value != below[name]}
        assert changed <= set(rung.traits)
        assert all(found[rung.title][name] == shipped[name] for name in rung.traits)
        below = found[rung.title]
    assert below == shipped  # every switch is a rung's
    for plain in steps.plain:
        assert {name for rung in steps.rungs for name in rung.traits} == set(plain)


def test_one_pass_is_compared_with_two_where_the_table_has_both() -> None:
    (one_pass,) = (item for item in LADDERS if item.name == "sm90")
    found = one_pass.traits(parse_cell("128:4096:causal"), "sm_90a")
    assert isinstance(found[TWO_PASSES.title], BwdTwoPassTraitsSm90)
    assert list(found)[-2:] == [SHIPPED.title, TWO_PASSES.title]


def test_a_cell_of_another_kernel_is_refused() -> None:
    (one_pass,) = (item for item in LADDERS if item.name == "sm90")
    with pytest.raises(ValueError, match="is not one of BwdTraitsSm90"):
        one_pass.traits(parse_cell("256:4096:causal"), "sm_90a")


def test_the_command_line_chooses_the_operation() -> None:
    assert ladder.parse(["--json", "x"]).ladders == list(ladder.LADDERS)
    assert ladder.parse(["--json", "x", "--backward"]).ladders == list(LADDERS)
    chosen = ladder.parse(["--json", "x", "--backward", "--family", "sm90"]).ladders
    assert [item.name for item in chosen] == ["sm90", "sm90 two passes"]


def test_a_result_has_a_table_and_a_drawing_for_each_ladder(tmp_path: pathlib.Path) -> None:
    def cell(item: BackwardLadder) -> dict[str, Any]:
        results = {told["title"]: {"tflops": 400.0 + 50 * at} for at, told in enumerate(item.told())}
        return {"label": "D128 full 4096", "family": item.name, "peer": item.peer, "results": results}

    result = {
        "environment": {"gpu": "a GPU", "date": "2026-01-01", "versions": {"torch": "2"}},
        "matmul_tflops": 700.0,
        "rungs": {item.name: item.told() for item in LADDERS},
        "cells": [cell(item) for item in LADDERS],
    }
    text = ladder_report.markdown(result)
    assert all(f"### {item.name}\n" in text for item in LADDERS)
    assert "| ping-pong |" in text and "| 450 (+12%) |" in text
    ladder_report.plot(result, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
