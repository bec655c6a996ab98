"""The ablation ladder without a GPU: its rungs lead from a plain kernel to the shipped row, and its report."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from benchmarks import ladder, ladder_report
from benchmarks.ladder import FIXED, LADDERS, SHIPPED, Ladder
from cuteflash.dispatch import choose_shipped
from cuteflash.traits.arch import get_arch
from cuteflash.tune.cells import Cell, parse_cell

CELLS = [parse_cell(text) for text in ladder.CELLS.split(",")]
TARGETS = {"sm80": ("sm_80", "sm_90a"), "sm90": ("sm_90a",)}
CASES = [
    pytest.param(item, target, cell, id=f"{item.family} on {target}, {cell.label}")
    for item in LADDERS
    for target in TARGETS[item.family]
    for cell in CELLS
]


@pytest.mark.parametrize(("steps", "target", "cell"), CASES)
def test_every_rung_can_run_and_the_last_is_the_shipped_row(steps: Ladder, target: str, cell: Cell) -> None:
    variants = steps.variants(cell, target)
    for variant in variants.values():
        assert variant.traits(cell).check(get_arch(target)) is None
    shipped = choose_shipped(cell.problem, target, steps.family).traits
    assert variants[SHIPPED.title].traits(cell) == shipped


@pytest.mark.parametrize(("steps", "target", "cell"), CASES)
def test_a_rung_switches_on_exactly_what_it_names(steps: Ladder, target: str, cell: Cell) -> None:
    traits = [dataclasses.asdict(variant.traits(cell)) for variant in steps.variants(cell, target).values()]
    for rung, before, after in zip(steps.rungs[1:-1], traits, traits[1:], strict=False):
        assert {name for name in after if after[name] != before[name]} == set(rung.fields)
    plain, highest = traits[0], traits[-2]
    switched = {name for rung in steps.rungs[1:] for name in rung.fields}
    assert {name for name in plain if plain[name] != highest[name]} == switched
    assert switched == set(steps.rungs[0].fields)
    shipped = traits[-1]
    left = {name for name in shipped if shipped[name] != highest[name]}
    assert left <= {*FIXED[steps.family], *steps.rungs[-2].fields}  # a row may do without the last rung


def result_of(*rates: float) -> dict[str, Any]:
    """A result with the rates of the sm90 ladder's lower rungs on one cell; the rung above them failed."""
    (steps,) = [item for item in LADDERS if item.family == "sm90"]
    titles = [rung.title for rung in steps.rungs]
    results: dict[str, Any] = {title: {"tflops": rate} for title, rate in zip(titles, rates, strict=False)}
    results[titles[len(rates)]] = {"problem": "RuntimeError: no"}
    return {
        "environment": {"gpu": "a GPU", "date": "2026-01-01", "versions": {"torch": "2"}},
        "matmul_tflops": 700.0,
        "rungs": {"sm90": [dataclasses.asdict(rung) for rung in steps.rungs]},
        "cells": [
            {"label": "D64 full 512", "family": "sm90", "peer": "fa4", "results": results | {"fa4": {"tflops": 650.0}}}
        ],
    }


def test_the_table_has_gains_failures_and_the_peer() -> None:
    text = ladder_report.markdown(result_of(400.0, 500.0))
    assert "| TMA | " in text and "| 400 |" in text
    assert "| 500 (+25%) |" in text
    assert "| failed |" in text
    assert "| *FA4* | the peer | 650 |" in text
    assert "700 TFLOP/s" in text


def test_a_result_is_rendered_without_a_gpu(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plot, page = tmp_path / "ladder.json", tmp_path / "ladder.png", tmp_path / "ladder.md"
    source.write_text(json.dumps(result_of(400.0, 500.0)))
    page.write_text("before\n<!-- ladder: begin -->\nold\n<!-- ladder: end -->\nafter\n")
    arguments = ["--render", str(source), "--plot", str(plot), "--into", str(page)]
    assert ladder.main(arguments) == 1  # a rung failed
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "500 (+25%)" in page.read_text() and "old" not in page.read_text()
    assert "500 (+25%)" in capsys.readouterr().out


def test_bad_cells_and_missing_markers_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ladder.parse(["--json", "x.json", "--cells", "64:512:diagonal"])
    assert "HEAD_DIM" in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="has no <!-- ladder: begin -->"):
        ladder_report.insert("text", page)
