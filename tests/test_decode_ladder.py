"""The ladders of decoding without a GPU: their rungs lead to the shipped rows, and their report is in bytes."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch

from benchmarks import decode_ladder, ladder, ladder_report
from benchmarks.backward_ladder import SHIPPED
from benchmarks.decode_ladder import CELLS, LADDERS, WHOLE, DecodeLadder, decode_cell, latent_runner
from cuteflash.dispatch import choose_mla, choose_shipped
from cuteflash.mla_problem import MlaProblem
from cuteflash.traits.arch import get_arch
from cuteflash.tune.cells import Cell

TARGET, CPU = "sm_90a", torch.device("cpu")
SERVED = [(steps, cell) for steps in LADDERS for cell in CELLS if steps.serves(cell, TARGET)]
each = pytest.mark.parametrize(("steps", "cell"), SERVED, ids=[f"{steps.name}-{cell.label}" for steps, cell in SERVED])


def test_each_cell_has_the_ladder_of_the_kernel_that_runs_it() -> None:
    of_cells = {cell: [steps.name for steps, own in SERVED if own == cell] for cell in CELLS}
    for cell, names in of_cells.items():
        if cell.spec.latent_dims:
            assert names == [f"{'sm80' if cell.heads == 16 else 'sm90'} latents"]
        else:
            assert names == ["sm80 decoding", "sm90 decoding"]
    assert not any(steps.serves(Cell(128, "full", 4096), TARGET) for steps in LADDERS)


@each
def test_a_rung_gives_its_traits_the_shipped_values_and_no_others(steps: DecodeLadder, cell: Cell) -> None:
    variants = steps.variants(cell, TARGET)
    assert [told["title"] for told in steps.told()] == [WHOLE.title, *variants] == list(steps.makers(cell, TARGET))
    assert all(traits.check(get_arch(TARGET)) is None for traits in variants.values())
    fields = {title: dataclasses.asdict(traits) for title, traits in variants.items()}
    below = fields[steps.rungs[0].title]
    assert steps.plain.items() <= below.items()
    for rung in steps.rungs[1:-1]:
        changed = {name for name, value in fields[rung.title].items() if value != below[name]}
        assert changed == set(rung.traits)
        below = fields[rung.title]
    assert below == fields[SHIPPED.title]
    assert {name for rung in steps.rungs for name in rung.traits} == set(steps.plain)


@each
def test_the_last_rung_is_what_dispatch_takes(steps: DecodeLadder, cell: Cell) -> None:
    shipped = steps.variants(cell, TARGET)[SHIPPED.title]
    if cell.spec.latent_dims:
        assert shipped == choose_mla(MlaProblem("bf16"), cell.heads, TARGET)
    else:
        assert shipped == choose_shipped(cell.problem, TARGET, steps.family, "decode", 4).traits
    assert {problem.is_split for _, problem in steps.kernels(cell, TARGET)} == {True}


def test_the_command_line_chooses_the_ladders() -> None:
    arguments = ladder.parse(["--json", "x", "--decode"])
    assert (arguments.ladders, arguments.cells) == (list(LADDERS), list(CELLS))
    only = ladder.parse(["--json", "x", "--decode", "--family", "sm80"])
    assert [steps.name for steps in only.ladders] == ["sm80 decoding", "sm80 latents"]
    for more in (["--cells", "128:1x4096:full"], ["--fp8"]):
        with pytest.raises(SystemExit):
            ladder.parse(["--json", "x", "--decode", *more])


@pytest.mark.parametrize("num_splits", [0, 1])
def test_latents_are_planned_with_the_rungs_traits(monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    cell = decode_ladder.latent_cell(2, 100, 16)
    steps = next(steps for steps in LADDERS if steps.serves(cell, TARGET))
    judge = steps.judge(cell, CPU)
    asked: list[Any] = []

    def plan_of(q: Any, pages: Any, table: Any, options: Any, traits: Any) -> Any:
        asked.append((tuple(pages.shape), tuple(table.shape), options, traits))
        return lambda q, pages, table, lengths, descale, out: out.fill_(float(lengths[1]))

    monkeypatch.setattr(decode_ladder, "plan_of", plan_of)
    for traits in steps.variants(cell, TARGET).values():
        assert bool((latent_runner(traits, num_splits, judge.inputs)(1) == 100).all())
        assert asked[-1] == ((4, 64, 1, 576), (2, 2), (576**-0.5, False, num_splits, "sm80"), traits)


def test_speeds_are_bytes_read_and_written_once(tmp_path: pathlib.Path) -> None:
    cell, steps = decode_cell(2, 1024), LADDERS[1]
    nbytes = 2 * 2 * (8 * 2 * 1024 * 128 + 2 * 32 * 128)  # K and V of 8 heads, Q and O of 32
    assert steps.judge(cell, CPU).facts["nbytes"] == nbytes
    results = {told["title"]: {"ms": 1 / (at + 1), "tflops": 1.0} for at, told in enumerate(steps.told())}
    measured = {"label": cell.label, "family": steps.name, "peer": None, "dtype": "bf16", "nbytes": nbytes}
    result = {
        "environment": {"gpu": "a GPU", "date": "2026-01-01", "versions": {"torch": "2"}},
        "matmul_tflops": 700.0,
        "copy_gbps": 4000.0,
        "rungs": {steps.name: steps.told()},
        "cells": [measured | {"results": results}],
    }
    text = ladder_report.markdown(result)
    assert "GB/s, bf16; in brackets" in text and "copy 4000 GB/s." in text and "TFLOP/s, bf16" not in text
    gbps = nbytes / 1e6
    assert f"| {gbps:.0f} |" in text and f"| {2 * gbps:.0f} (+100%) |" in text
    ladder_report.plot(result, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
