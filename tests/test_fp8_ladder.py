"""The ladder of 8-bit operands without a GPU: its rungs lead from 16 bits to the shipped rows, and its report."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch

from benchmarks import fp8_ladder, ladder, ladder_report
from benchmarks.backward_ladder import SHIPPED
from benchmarks.fp8_ladder import HALF, PLAIN, RUNGS, STORED, Fp8Ladder, rung_runner
from cuteflash.dispatch import choose_shipped
from cuteflash.reference.fp8 import fp8_attention
from cuteflash.traits.arch import get_arch
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.tune.cells import Cell
from cuteflash.tune.operations import task_of_traits

STEPS, TARGET, CPU = Fp8Ladder(), "sm_90a", torch.device("cpu")
CELLS: list[Cell] = ladder.parse(["--json", "x", "--fp8"]).cells


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_every_rung_can_run_and_reads_the_form_of_its_cell(cell: Cell) -> None:
    assert STEPS.serves(cell, TARGET)
    variants = STEPS.variants(cell, TARGET)
    assert [told["title"] for told in STEPS.told()] == list(variants)
    for own, traits in variants.values():
        assert traits.check(get_arch(TARGET)) is None
        assert task_of_traits(traits) == own.task
    ends = {title: variants[title] for title in (HALF.title, SHIPPED.title, STORED.title)}
    assert [own.label.removeprefix(cell.label.removesuffix(" e4m3 vt")) for own, _ in ends.values()] == [
        "",
        " e4m3 vt",
        " e4m3",
    ]
    for own, traits in ends.values():
        assert traits == choose_shipped(own.problem, TARGET, "sm90", own.lengths).traits


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_a_rung_gives_its_traits_the_shipped_values_and_no_others(cell: Cell) -> None:
    variants = {title: dataclasses.asdict(traits) for title, (_, traits) in STEPS.variants(cell, TARGET).items()}
    shipped, below = variants[SHIPPED.title], variants[RUNGS[0].title]
    assert PLAIN.items() <= below.items()
    for rung in RUNGS[1:-1]:
        changed = {name for name, value in variants[rung.title].items() if value != below[name]}
        assert changed <= set(rung.traits)
        below = variants[rung.title]
    assert below == shipped
    assert {name for rung in RUNGS for name in rung.traits} == set(PLAIN)


def test_the_command_line_chooses_the_ladder() -> None:
    arguments = ladder.parse(["--json", "x", "--fp8", "--cells", "64:512:full"])
    assert arguments.ladders == list(fp8_ladder.LADDERS)
    assert [cell.label for cell in arguments.cells] == ["D64 full 512 e4m3 vt"]
    with pytest.raises(SystemExit):
        ladder.parse(["--json", "x", "--fp8", "--backward"])


def test_all_rungs_read_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(32, "causal", 64, "e4m3", tokens=64, hidden=32, transposed_v=True)
    given: list[Any] = []
    monkeypatch.setattr(fp8_ladder, "fwd_runner", lambda traits, target, inputs: given.append((traits, inputs)))
    judge = STEPS.judge(cell, CPU)
    for own, traits in STEPS.variants(cell, TARGET).values():
        rung_runner(traits, TARGET, own, judge.inputs)
        assert given[-1][1].cell == own
    for traits, inputs in given:
        assert isinstance(traits, FwdTraitsFp8Sm90) == (inputs.q.dtype == torch.float8_e4m3fn)
        for value, exact in zip(inputs.values(), judge.inputs.values(), strict=True):
            torch.testing.assert_close(value, exact, rtol=2**-8, atol=0)


def test_outputs_are_judged_and_their_error_is_told() -> None:
    cell = Cell(32, "full", 64, "e4m3", tokens=64, hidden=32, transposed_v=True)
    judge = STEPS.judge(cell, CPU)
    inputs = judge.inputs
    assert inputs.scales is not None
    out, _ = fp8_attention(inputs.q, inputs.k, inputs.rows_of_v(), inputs.scales[:3], 32**-0.5)
    assert judge.complaint(out, None) is judge.imprecision(out) is None
    assert 0 < judge.measured(out)["relative"] < 2**-8
    assert judge.imprecision(out * 1.1) is not None
    assert judge.facts["dtype"] == "e4m3"


def test_the_report_has_each_rungs_error(tmp_path: pathlib.Path) -> None:
    results = {
        told["title"]: {"tflops": 400.0 + 50 * at, "relative": 0.02 + at / 1000} for at, told in enumerate(STEPS.told())
    }
    cell = {"label": "D128 full 4096", "family": STEPS.name, "peer": None, "dtype": "e4m3", "results": results}
    result = {
        "environment": {"gpu": "a GPU", "date": "2026-01-01", "versions": {"torch": "2"}},
        "matmul_tflops": 700.0,
        "rungs": {STEPS.name: STEPS.told()},
        "cells": [cell],
    }
    text = ladder_report.markdown(result)
    assert "TFLOP/s, e4m3, 16k tokens" in text and "then the rms error in O's rms" in text
    assert "| 400, 2.00% |" in text and "| 450 (+12%), 2.10% |" in text and "the peer" not in text
    ladder_report.plot(result, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
