"""The benchmark's own honesty, on the CPU: operation counts, checks that catch wrong outputs, ratios, reports."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch

from benchmarks import contest, forward, implementations, report
from cuteflash.problem import MaskKind
from cuteflash.tune import accuracy
from cuteflash.tune.cells import Cell, Inputs, grid, make_inputs, parse_cell
from cuteflash.tune.machine import Matmul
from cuteflash.tune.timing import interleaved, median, spread

CPU = torch.device("cpu")
SMALL = Cell(32, "causal", 48, tokens=96, hidden=64)


def result_of(cells: list[dict[str, Any]]) -> dict[str, Any]:
    environment = {"gpu": "a GPU", "date": "2026-01-01", "versions": {"torch": "2"}}
    device = {"matmul_tflops": 700.0, "copy_gbps": 3000.0}
    return {"environment": environment, "dtype": "bf16", "device": device, "host_us": {"sm90": 9.0}, "cells": cells}


def cell_row(label: str = "D64 full 512", mask: str = "full", seqlen: int = 512, **tflops: float) -> dict[str, Any]:
    results = {name: {"tflops": value, "ms": 1.0, "spread": 0.0} for name, value in tflops.items()}
    return {"label": label, "head_dim": 64, "mask": mask, "seqlen": seqlen, "results": results}


def test_grid_is_the_published_one() -> None:
    cells = grid()
    assert len(cells) == len(set(cells)) == 36
    assert {(cell.tokens, cell.head_dim * cell.heads) for cell in cells} == {(16384, 2048)}
    assert {cell.batch * cell.seqlen for cell in cells} == {16384}


def test_flops_count_two_products_and_halve_for_causal() -> None:
    full, causal = Cell(64, "full", 1024), Cell(64, "causal", 1024)
    assert full.flops == 2 * (2 * full.batch * full.heads * 1024 * 1024 * 64)
    assert causal.flops * 2 == full.flops


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [((64, "full", 1000), "seqlen is 1000; it must divide"), ((2056, "full", 1024), "head_dim is 2056; allowed: 1 to")],
)
def test_a_cell_that_does_not_fit_is_refused(arguments: tuple[int, MaskKind, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Cell(*arguments)


def test_a_cell_has_as_many_heads_as_fit() -> None:
    assert Cell(64, "full", 1024).heads == 32
    assert Cell(96, "full", 1024).heads == 21


def test_cells_parse_from_text() -> None:
    assert parse_cell("128:512:causal") == Cell(128, "causal", 512)
    for text in ("128:512", "128:512:alibi", "x:512:full"):
        with pytest.raises(ValueError, match=r"HEAD_DIM\[xHEAD_DIM_V\]:"):
            parse_cell(text)


def sdpa(inputs: Inputs) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    causal = inputs.cell.mask == "causal"
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).contiguous()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_reference_agrees_with_torch_across_chunks(mask: MaskKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "CHUNK_ROWS", 20)
    inputs = make_inputs(Cell(32, mask, 48, tokens=96, hidden=64), CPU)
    inputs = Inputs(inputs.cell, inputs.q.float(), inputs.k.float(), inputs.v.float())
    assert accuracy.error(sdpa(inputs), accuracy.make_reference(inputs)) < 1e-5


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out[0, 3, 0].add_(0.2), "error"),
        (lambda out: out[0, 3, 1].fill_(float("nan")), "NaN"),
        (lambda out: out[1, 3, 0].add_(0.5), "another implementation"),
    ],
)
def test_a_wrong_output_is_caught_wherever_it_is(spoil: Any, words: str) -> None:
    inputs = make_inputs(SMALL, CPU)
    reference = accuracy.make_reference(inputs)
    right = sdpa(inputs)
    assert accuracy.complaint(right, reference, right) is None
    wrong = right.clone()
    spoil(wrong)
    assert words in str(accuracy.complaint(wrong, reference, right))


def test_nan_is_an_infinite_error() -> None:
    inputs = make_inputs(SMALL, CPU)
    assert accuracy.error(torch.full_like(inputs.q, math.nan), accuracy.make_reference(inputs)) == math.inf


def test_rounds_visit_every_runner() -> None:
    visits: list[str] = []

    def recorder(name: str) -> Any:
        def run(calls: int) -> torch.Tensor:
            visits.append(name)
            return torch.zeros(())

        return run

    samples = interleaved({name: recorder(name) for name in "abc"}, CPU, rounds=3)
    assert [len(samples[name]) for name in "abc"] == [3, 3, 3]
    assert {name: visits.count(name) for name in "abc"} == dict.fromkeys("abc", 3 + 1)  # an estimate sizes the batches


def test_median_and_spread() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([2.0, 2.0, 2.0]) == 0.0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


def test_measured_cell_has_error_beside_speed() -> None:
    makers = {name: implementations.maker(name, SMALL) for name in ("sm90", "fa2")}
    measured = contest.measure(SMALL, makers, CPU, rounds=1)
    assert list(measured["results"]) == ["sm90", "fa2"]
    for entry in measured["results"].values():
        assert "problem" not in entry
        assert entry["tflops"] > 0
        assert 0 < entry["error"] <= measured["tolerance"]


def test_what_slows_a_round_down_for_all_leaves_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [1.0, 1.5, 1.1, 1.4, 1.3]
    pace = {"sm90": 2.0, "fa2": 3.0, contest.MATMUL: 1.0}
    monkeypatch.setattr(
        contest, "interleaved", lambda runners, *_: {name: [pace[name] * x for x in rounds] for name in runners}
    )
    makers = {name: implementations.maker("fa2", SMALL) for name in ("sm90", "fa2")}
    matmul = Matmul(lambda calls: torch.zeros(()), flops=13 * 10**8)
    measured = contest.measure(SMALL, makers, CPU, rounds=5, matmul=matmul)
    assert {name: entry["ms"] for name, entry in measured["results"].items()} == pytest.approx(
        {"sm90": 2.0 * 1.3, "fa2": 3.0 * 1.3}
    )
    assert all(entry["spread"] == pytest.approx(0.0, abs=1e-9) for entry in measured["results"].values())
    assert measured["matmul_tflops"] == pytest.approx(1.0)


def test_a_failing_implementation_is_reported_and_left_out() -> None:
    def broken(inputs: Inputs) -> Any:
        raise RuntimeError("no such\nkernel")

    measured = contest.measure(SMALL, {"sm90": broken, "fa2": implementations.maker("fa2", SMALL)}, CPU, rounds=1)
    assert measured["results"]["sm90"] == {"problem": "RuntimeError: no such kernel"}
    assert measured["results"]["fa2"]["tflops"] > 0


def test_run_writes_json_plot_and_table(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forward, "grid", lambda *_: [SMALL])
    path, plot = tmp_path / "results" / "forward.json", tmp_path / "plots" / "forward.png"
    arguments = forward.parse(["--json", str(path), "--plot", str(plot), "--rounds", "1"])
    assert forward.run_grid(arguments, ["sm90", "fa2"], CPU) == 0
    stored = json.loads(path.read_text())
    assert stored["cells"][0]["label"] == "D32 causal 48"
    assert set(stored["host_us"]) == {"sm90", "fa2"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "D32 causal 48" in capsys.readouterr().out


def test_the_summary_names_the_share_of_the_matrix_product_at_the_longest_full_sequences() -> None:
    cells = [cell_row("D64 full 512", sm90=600.0), cell_row("D64 full 1024", seqlen=1024, sm90=350.0, sm80=300.0)]
    cells.append(cell_row("D64 causal 2048", mask="causal", seqlen=2048, sm90=700.0))
    for cell, rate in zip(cells, (600.0, 700.0, 800.0), strict=True):
        cell["matmul_tflops"] = rate
    (line,) = [line for line in report.summary_lines(result_of(cells)) if "of that matrix product" in line]
    assert line == "of that matrix product, timed beside them: D64 full 1024 0.500"


def test_ratios_take_the_faster_peer_and_only_right_results() -> None:
    cells = [cell_row("a", sm90=600.0, fa4=500.0, cudnn=400.0), cell_row("b", sm90=300.0, fa4=500.0, cudnn=600.0)]
    assert report.ratio(cells[0], "sm90/best") == 1.2
    assert report.ratio(cells[1], "sm90/best") == 0.5
    assert report.ratio(cells[0], "sm80/FA2") is None
    entry = report.summary(cells)["sm90/best"]
    assert entry["geomean"] == pytest.approx(math.sqrt(0.6))
    assert (entry["worst"], entry["worst_cell"], entry["cells"]) == (0.5, "b", 2)
    cells[0]["results"]["sm90"]["problem"] = "error 1 over 0.1"
    assert report.summary(cells)["sm90/best"]["cells"] == 1
    assert report.summary(cells)["sm90/FA4"]["worst"] == pytest.approx(0.6)


def test_markdown_shows_numbers_and_problems() -> None:
    cells = [cell_row(sm90=512.4, fa4=500.0), cell_row("D64 full 1024", seqlen=1024, sm90=1.0, fa4=2.0)]
    cells[1]["results"]["sm90"]["problem"] = "error 1 over 0.1"
    text = report.markdown(result_of(cells))
    assert "| D64 full 512 | 512 | 500 | 1.02 |" in text
    assert "| D64 full 1024 | wrong | 2 | - |" in text
    assert "ours sm90: error 1 over 0.1" in text
    assert "700 TFLOP/s" in text


def test_report_command_renders_and_draws(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "forward.json", tmp_path / "forward.png"
    cells = [cell_row(mask=mask, seqlen=n, sm90=n / 2.0, fa2=300.0) for mask in ("full", "causal") for n in (512, 1024)]
    path.write_text(json.dumps(result_of(cells)))
    assert report.main([str(path), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 1000
    assert "| cell | ours sm90 | FA2 |" in capsys.readouterr().out


def test_report_replaces_what_stands_between_the_markers(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "README.md"
    begin, end = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for text in ("| new |\n", "| newer |\n"):
        report.insert(text, path)
    assert path.read_text() == f"before\n{begin}\n| newer |\n{end}\nafter\n"
    path.write_text("no markers\n")
    with pytest.raises(ValueError, match="no <!-- benchmark"):
        report.insert("x", path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert forward.main(["--json", "unused.json"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--impls", "sm90,fa9"], ["--masks", "window"], ["--traits-override", '[{"tile_m": 64}]']]
)
def test_bad_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        forward.parse(["--json", "unused.json", *arguments])
