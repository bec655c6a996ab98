"""The benchmark's own honesty, on the CPU: operation counts, checks that catch wrong outputs, ratios, reports."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import contest, device, forward, implementations, report, running
from benchmarks.judges import OutputJudge
from cuteflash.cli import bench
from cuteflash.cli.app import app
from cuteflash.problem import MaskKind
from cuteflash.tune import accuracy
from cuteflash.tune.cells import Cell, Inputs, grid, make_inputs, parse_cell
from cuteflash.tune.machine import Matmul
from cuteflash.tune.timing import interleaved, median, spread

CPU = torch.device("cpu")
SMALL = Cell(32, "causal", 48, tokens=96, hidden=64)


def result_of(cells: list[dict[str, Any]]) -> dict[str, Any]:
    environment = {"gpu": "a GPU", "date": "2026-01-01", "versions": {"torch": "2"}}
    ceilings = {"matmul_tflops": 700.0, "copy_gbps": 3000.0}
    host = {"host_us": {"sm90": 9.0}, "host_new_us": {"sm90": 19.0}}
    return {"environment": environment, "dtype": "bf16", "device": ceilings, "cells": cells} | host


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
    assert accuracy.errors(sdpa(inputs), accuracy.make_reference(inputs)).maximum < 1e-5


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
    errors = accuracy.errors(torch.full_like(inputs.q, math.nan), accuracy.make_reference(inputs))
    assert errors.maximum == errors.rms == math.inf


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
    measured = contest.measure(OutputJudge.of(SMALL, CPU), makers, CPU, rounds=1)
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
    measured = contest.measure(OutputJudge.of(SMALL, CPU), makers, CPU, rounds=5, matmul=matmul)
    assert {name: entry["ms"] for name, entry in measured["results"].items()} == pytest.approx(
        {"sm90": 2.0 * 1.3, "fa2": 3.0 * 1.3}
    )
    assert all(entry["spread"] == pytest.approx(0.0, abs=1e-9) for entry in measured["results"].values())
    assert measured["matmul_tflops"] == pytest.approx(1.0)


def test_a_failing_implementation_is_reported_and_left_out() -> None:
    def broken(inputs: Inputs) -> Any:
        raise RuntimeError("no such\nkernel")

    measured = contest.measure(
        OutputJudge.of(SMALL, CPU), {"sm90": broken, "fa2": implementations.maker("fa2", SMALL)}, CPU, rounds=1
    )
    assert measured["results"]["sm90"] == {"problem": "RuntimeError: no such kernel"}
    assert measured["results"]["fa2"]["tflops"] > 0


def plan_of(*cells: Cell) -> running.Plan:
    return running.Plan(cells, ["sm90", "fa2"], rounds=1)


def test_run_writes_json_plot_and_table(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "results" / "forward.json", tmp_path / "plots" / "forward.png"
    assert bench.measure(forward.run, plan_of(SMALL), CPU, path, plot) == 0
    stored = json.loads(path.read_text())
    assert stored["cells"][0]["label"] == "D32 causal 48"
    assert set(stored["host_us"]) == set(stored["host_new_us"]) == {"sm90", "fa2"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "D32 causal 48" in capsys.readouterr().out


def test_host_times_are_told_and_an_older_result_without_those_of_new_shapes_is_read() -> None:
    result = result_of([cell_row(sm90=500.0)])
    known, new = "host time per call, µs, of a known shape: ours sm90 9.0", "of a shape not seen before: ours sm90 19.0"
    text = report.markdown(result)
    assert known in text and new in text
    del result["host_new_us"]
    assert known in report.markdown(result) and "not seen" not in report.markdown(result)


def test_host_time_of_new_shapes_is_that_of_shapes_never_called_before(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, list[tuple[torch.Size, int]]] = {"sm90": [], "fa2": []}
    clock = itertools.count()

    def runner(name: str, inputs: Inputs) -> Any:
        def run(calls: int) -> torch.Tensor:
            called[name].append((inputs.q.shape, calls))
            return inputs.q

        return run

    monkeypatch.setattr(device, "runner", runner)
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(clock))
    times = device.host_microseconds(["sm90", "fa2"], CPU, "bf16", calls=3, rounds=2)
    assert set(times.known) == set(times.new) == {"sm90", "fa2"}
    for calls in called.values():
        first, *rest = calls
        assert first[1] == 1
        assert [shape for shape, count in rest if count == 3] == [first[0]] * 4  # timed, then to warm up
        single = [shape[1] for shape, count in rest if count == 1]
        odd, even = [*range(127, device.LEAST_LENGTH, -2)], [*range(126, device.LEAST_LENGTH, -2)]
        assert single == odd + odd + even + even  # new ones, then the same


def test_an_interrupted_run_shows_and_keeps_what_it_has(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forward.json"
    measure = contest.measure

    def stopped(judge: OutputJudge, *rest: Any) -> dict[str, Any]:
        if judge.facts["dtype"] == "fp16":
            raise KeyboardInterrupt
        return measure(judge, *rest)

    monkeypatch.setattr(contest, "measure", stopped)
    plan = plan_of(SMALL, dataclasses.replace(SMALL, dtype="fp16"))
    assert bench.measure(forward.run, plan, CPU, path) == bench.INTERRUPTED
    assert [cell["dtype"] for cell in json.loads(path.read_text())["cells"]] == ["bf16"]
    shown = capsys.readouterr()
    assert "D32 causal 48" in shown.out and str(path) in shown.err


def test_real_inputs_are_the_promised_cells() -> None:
    cells = forward.SETS["real"].cells
    assert len(cells) == 2 * 2 * 6
    assert {(cell.mask, cell.seqlen) for cell in cells} == {("causal", 8192)}
    assert {cell.inputs for cell in cells} == {"plain", "sink:8", "sink:12", "sink:30", "peaked", "outliers"}
    assert forward.SETS["grid"].cells == grid()


def test_real_inputs_are_checked_timed_and_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [dataclasses.replace(SMALL, inputs=kind) for kind in forward.REAL_INPUTS]
    path = tmp_path / "real.json"
    assert bench.measure(forward.run, plan_of(*cells), CPU, path) == 0
    result = json.loads(path.read_text())
    assert [cell["inputs"] for cell in result["cells"]] == list(forward.REAL_INPUTS)
    assert all(entry["rms_ratio"] <= 1.5 for cell in result["cells"] for entry in cell["results"].values())
    header, *rows = report.rows_by_inputs(result["cells"])
    assert header == ["cell", "inputs", "ours sm90", "FA2", "sm90/plain", "rms sm90", "rms FA2"]
    assert [row[:2] for row in rows] == [["D32 causal 48", kind] for kind in forward.REAL_INPUTS]
    assert rows[0][4] == "1.00"
    assert "rms error at most" in capsys.readouterr().out
    markdown = tmp_path / "notes.md"
    both = "".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in ("benchmark", "real inputs"))
    markdown.write_text(both)
    assert report.main([str(path), "--into", str(markdown)]) == 0
    grid_part, real_part = markdown.read_text().split("<!-- real inputs: begin -->")
    assert "sink:30" in real_part and "sink:30" not in grid_part


def test_speed_on_other_inputs_is_compared_with_the_same_cells_plain_inputs() -> None:
    def cell(inputs: str, dtype: str, tflops: float) -> dict[str, Any]:
        return cell_row(sm90=tflops, fa4=100.0) | {"inputs": inputs, "dtype": dtype}

    cells = [cell("plain", "bf16", 100.0), cell("plain", "fp16", 200.0), cell("sink:8", "fp16", 150.0)]
    assert report.of_plain(cells[2], cells, "sm90") == 0.75
    assert report.of_plain(cells[0], cells, "sm90") == 1.0
    assert report.of_plain(cells[2], cells, "sm80") is None


def test_a_result_without_kinds_of_inputs_is_one_of_plain_ones() -> None:
    result = result_of([cell_row(sm90=512.4, fa4=500.0)])
    assert not report.has_other_inputs(result)
    assert report.marker(result) == "benchmark"


def rough(times: float) -> Any:
    """SDPA with errors of about so many times what torch's own computation makes."""

    def make(inputs: Inputs) -> Any:
        error = times * accuracy.make_reference(inputs).low_precision.rms
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, inputs.q.shape, generator=generator) * 2 - 1
        exact = sdpa(Inputs(inputs.cell, inputs.q.float(), inputs.k.float(), inputs.v.float()))
        return lambda calls: (exact + error * signs).to(inputs.q.dtype)

    return make


def test_many_small_errors_are_a_problem_of_ours_and_told_of_a_peer() -> None:
    measured = contest.measure(
        OutputJudge.of(SMALL, CPU), {"sm90": rough(2.0), "fa4": rough(2.0), "fa2": rough(0.5)}, CPU, rounds=1
    )
    ours, peer, other = (measured["results"][name] for name in ("sm90", "fa4", "fa2"))
    assert "times torch's own" in ours["problem"]
    assert "problem" not in peer and "problem" not in other
    assert ours["error"] <= measured["tolerance"]  # the maximum alone sees nothing
    assert ours["rms_ratio"] == peer["rms_ratio"] > 1.5 > other["rms_ratio"]


def test_a_peer_without_such_a_mask_is_left_out_and_no_problem() -> None:
    cell = dataclasses.replace(SMALL, mask="window")
    measured = contest.measure(
        OutputJudge.of(cell, CPU), {name: implementations.maker(name, cell) for name in ("sm90", "fa2")}, CPU, 1
    )
    assert "no windows" in measured["results"]["fa2"]["left out"]
    assert measured["results"]["sm90"]["tflops"] > 0
    assert report.problem_lines(result_of([measured])) == []
    assert "| D32 window 48 | 0 | - |" in report.markdown(result_of([measured]))


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


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    result = call()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "cuteflash: torch finds no GPU to measure on; the benchmark needs one\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--impls", "sm90,fa9"], "impls is 'fa9'; allowed: sm90, sm80, fa4, cudnn, fa2"),
        (["--mask", "alibi"], "mask is 'alibi'; allowed: full, causal, window"),
        (["--traits", '[{"tile_m": 64}]'], "family is None"),
        (["--inputs", "sink"], "inputs is 'sink'; allowed: plain, sink:NATS"),
        (["--head-dim", "wide"], "head_dim is 'wide'; allowed: comma-separated integers"),
        (["--head-dim", "12"], "head_dim is 12"),
        (["--seqlen", "1000"], "seqlen is 1000; it must divide the 16384 tokens"),
        (["--set", "all"], "set is 'all'; allowed: grid, real"),
        (["--inputs", "sink:8", "--plot", "x.png"], "plot is given, but shows only plain inputs; inputs is sink:8"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], complaint: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_the_command_measures_what_its_options_say(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(running, "unavailable", lambda name, where: "not here" if name == "fa4" else None)
    monkeypatch.setattr(bench, "measure", lambda *arguments: given.append(arguments) or 1)
    options = ["--head-dim", "64", "--mask", "window", "--inputs", "plain,sink:12.0", "--dtype", "fp16", "--quick"]
    assert call(*options, "--json", str(tmp_path / "x.json")).exit_code == 1
    assert call("--set", "real", "--impls", "fa2,sm90").exit_code == 1
    (_, first, where, path, _), (_, second, *_) = given
    lengths = itertools.product((1024, 8192), ("plain", "sink:12"))
    assert first.cells == [Cell(64, "window", n, "fp16", inputs=kind) for n, kind in lengths]
    assert (first.rounds, where, path) == (3, torch.device("cuda", 0), tmp_path / "x.json")
    assert first.names == ["sm90", "sm80", "cudnn", "fa2"]
    assert second.cells == forward.SETS["real"].cells
    assert (second.rounds, second.names) == (forward.FULL_ROUNDS, ["sm90", "fa2"])


def test_the_commands_help_has_its_own_name() -> None:
    assert "Usage: cuteflash bench" in CliRunner().invoke(app, ["bench", "--help"], prog_name="cuteflash").stdout
    with pytest.raises(SystemExit) as ended:
        forward.main(["--set", "no such"])
    assert ended.value.code == 2
