"""The backward benchmark's own honesty, on the CPU: checks that catch wrong gradients, counts, ratios, reports."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import types
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import ahead, backward, contest, implementations, memory, report, running
from benchmarks.judges import GradientJudge, TrainingJudge
from cuteflash.cli import bench
from cuteflash.cli.app import app
from cuteflash.problem import MASK_KINDS, BwdProblem, FwdProblem, MaskKind
from cuteflash.tune import accuracy, cells, gradients
from cuteflash.tune.cells import Cell, Inputs, grid
from cuteflash.tune.gradients import BwdInputs, Gradients, make_bwd_inputs
from tests.test_benchmarks import cell_row, result_of

CPU = torch.device("cpu")
SMALL = Cell(32, "causal", 48, tokens=96, hidden=64)
OF_FA2 = functools.partial(implementations.backward_runner, "fa2")


def by_definition(inputs: BwdInputs[Inputs]) -> Gradients:
    """Gradients of all heads, from the mask's definition, in the inputs' precision."""
    cell = inputs.forward.cell
    q, k, v = (x.detach().requires_grad_() for x in (inputs.forward.q, inputs.forward.k, inputs.forward.v))
    left, right = cell.window
    distance = torch.arange(cell.seqlen)[None] - torch.arange(cell.seqlen - cell.seqlen_q, cell.seqlen)[:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * cell.head_dim**-0.5
    scores = scores.masked_fill((distance > right) | (distance < -left), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, dim=-1), v)
    return Gradients(*torch.autograd.grad(out, (q, k, v), inputs.dout))


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_reference_is_the_gradient_over_the_visible_keys_across_chunks(
    mask: MaskKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "WINDOW", (9, 0))
    monkeypatch.setattr(accuracy, "CHUNK_ROWS", 7)
    made = make_bwd_inputs(Cell(32, mask, 24, head_dim_v=16, seqlen_q=20, tokens=48, hidden=64), CPU)
    exact = Inputs(made.forward.cell, *(x.float() for x in (made.forward.q, made.forward.k, made.forward.v)))
    inputs = BwdInputs(exact, made.dout.float())
    reference = gradients.make_reference(inputs, heads=4)
    assert len(reference.index) == 4
    assert all(errors.maximum < 1e-5 for errors in reference.errors(by_definition(inputs)).values())


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("dq", lambda x: x[0, 3, 0].add_(0.2), "error of dq"),
        ("dk", lambda x: x[0, 3, 1].fill_(float("nan")), "dk has NaN"),
        ("dv", lambda x: x[1, 3, 0].mul_(2.0), "dv differs from another implementation"),
    ],
)
def test_a_wrong_gradient_is_caught_wherever_it_is(name: str, spoil: Any, words: str) -> None:
    inputs = make_bwd_inputs(SMALL, CPU)
    reference, right = gradients.make_reference(inputs), OF_FA2(inputs)(1)
    assert gradients.complaint(right, reference, right) is gradients.imprecision(right, reference) is None
    wrong = Gradients(*(x.clone(memory_format=torch.contiguous_format) for x in right))
    spoil(getattr(wrong, name))
    assert words in str(gradients.complaint(wrong, reference, right))


def test_many_small_errors_are_imprecise_though_none_is_large() -> None:
    inputs = make_bwd_inputs(SMALL, CPU)
    reference, exact = gradients.make_reference(inputs), by_definition(inputs)
    signs = torch.randint(0, 2, exact.dk.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rough = exact._replace(dk=exact.dk + 2 * reference.low_precision["dk"].rms * signs)
    assert gradients.complaint(rough, reference, exact) is None
    assert "rms error of dk" in str(gradients.imprecision(rough, reference))


@pytest.mark.parametrize(("judge", "make"), [(GradientJudge, "backward_runner"), (TrainingJudge, "training_runner")])
def test_gradients_of_ours_and_of_a_peer_are_checked_and_timed(judge: Any, make: str) -> None:
    makers = {name: functools.partial(getattr(implementations, make), name) for name in ("sm90", "sm80-det", "fa2")}
    measured = contest.measure(judge.of(SMALL, CPU), makers, CPU, rounds=1)
    assert list(measured["results"]) == ["sm90", "sm80-det", "fa2"]
    for entry in measured["results"].values():
        assert "problem" not in entry
        assert entry["tflops"] * entry["ms"] * 1e9 == pytest.approx(judge.products * SMALL.flops)
        for name in Gradients._fields:
            assert 0 < entry["gradients"][name]["error"] <= measured["gradients"][name]["tolerance"]


def test_a_peer_without_a_deterministic_backward_is_left_out() -> None:
    with pytest.raises(NotImplementedError, match="no option for a deterministic backward"):
        implementations.attention("cudnn-det", SMALL)


def test_deterministic_names_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(implementations.cuteflash, "flash_attn_func", lambda q, k, v, **options: given.append(options))
    for name in ("sm90", "sm80-det"):
        implementations.attention(name, SMALL).call(*3 * [torch.empty(())])
    plain, deterministic = given
    assert plain == {"family": "sm90", "causal": True}
    assert deterministic == {"family": "sm80", "causal": True, "deterministic": True}


@pytest.mark.parametrize("causal", [False, True])
def test_materialised_attention_is_attention(causal: bool) -> None:
    cell = dataclasses.replace(SMALL, mask="causal" if causal else "full")
    inputs = make_bwd_inputs(cell, CPU)
    found = implementations.training_runner("materialised", inputs)(1)
    assert gradients.complaint(found, gradients.make_reference(inputs), by_definition(inputs)) is None


def test_grid_is_that_of_the_forward() -> None:
    assert backward.SETS["grid"].cells == grid()
    assert set(backward.NAMES) < set(backward.ALLOWED)
    assert {cell.head_dim for cell in backward.SETS["more"].cells} == {96, 192}
    few = [(cell.batch, cell.seqlen, cell.heads) for cell in backward.SETS["few"].cells if cell.mask == "causal"]
    assert few[:4] == [(8, 256, 32), (4, 512, 32), (2, 1024, 32), (1, 2048, 32)] and few[-1] == (1, 2048, 16)


def test_kernels_to_compile_ahead_are_those_of_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    def choices(problem: Any, *slot: str) -> list[Any]:
        """Of a backward a second row, for few blocks."""
        numbers = range(2 if problem.operation == "bwd" else 1)
        return [types.SimpleNamespace(traits=(*slot, number)) for number in numbers]

    monkeypatch.setattr(ahead, "choices", choices)
    cell, length = Cell(64, "full", 512, "fp16"), "short"
    found = list(ahead.kernels_with_gradients([cell], ["sm90", "sm80-det", "fa2"], "sm_90a"))
    forward = FwdProblem.dense("fp16", 64, 64, "full", lse=True)
    assert found == [
        (("sm_90a", "sm90", length, 0), forward),
        *((("sm_90a", "sm90", length, i), BwdProblem.dense("fp16", 64, 64, "full")) for i in range(2)),
        (("sm_90a", "sm80", length, 0), forward),
        *((("sm_90a", "sm80", length, i), BwdProblem.dense("fp16", 64, 64, deterministic=True)) for i in range(2)),
    ]


def test_each_kernel_is_compiled_once_by_processes_that_import_the_package_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[Any, ...]] = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, jobs: int, mp_context: Any) -> None:
            super().__init__(1)

        def submit(self, function: Any, *arguments: Any) -> Any:
            given.append((function.__module__, *arguments))
            return concurrent.futures.Future()

    monkeypatch.setattr(ahead.concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(concurrent.futures.Future, "exception", lambda future: None)
    monkeypatch.setattr(ahead, "kernel_class", lambda traits: f"kernel of {traits}")
    problem = FwdProblem.dense("bf16", 64, 64)
    ahead.compile_all([("a", problem), ("b", problem), ("a", problem)], "sm_90a", jobs=2)
    module = ahead.build.__module__
    assert module.startswith("cuteflash.")
    assert given == [(module, f"kernel of {name}", name, problem, "sm_90a") for name in ("a", "b")]


def test_a_problem_without_a_row_is_left_to_the_run() -> None:
    assert list(ahead.kernels_with_gradients([SMALL], ["sm90", "fa2"], "sm_80")) == []


def test_run_writes_json_plot_and_both_tables(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "backward.json", tmp_path / "backward.png"
    plan = running.Plan([SMALL], ["sm90", "sm90-det", "fa2"], rounds=2)
    assert bench.measure(backward.run, plan, CPU, path, plot) == 0
    stored = json.loads(path.read_text())
    assert list(stored["cells"][0]["results"]) == ["sm90", "sm90-det", "fa2"]
    assert list(stored["both"][0]["results"]) == list(stored["host_us"]) == ["sm90", "fa2"]
    assert {"sm90 det./sm90"} <= set(stored["summary"]) and "summary_both" in stored
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "backward, TFLOP/s, bf16" in shown and "forward + backward, TFLOP/s, bf16" in shown


def backward_result() -> dict[str, Any]:
    alone = [cell_row("D64 full 512", sm90=90.0, fa4=80.0, cudnn=60.0, **{"sm90-det": 81.0})]
    alone.append(cell_row("D64 causal 512", mask="causal", sm90=50.0, fa4=100.0, cudnn=40.0, **{"sm90-det": 30.0}))
    both = [cell_row("D64 full 512", sm90=200.0, fa4=100.0, cudnn=90.0)]
    used = {"label": "D128 causal 16384", "batch": 1, "heads": 16, "mib": {"sm90": 200.0, "materialised": 40000.0}}
    spent = used | {"mib": {"sm90": 400.0}, "problems": {"materialised": "OutOfMemoryError: no"}}
    return result_of(alone) | {"both": both, "memory": [used | {"problems": {}}, spent]}


def test_the_report_has_each_parts_means_the_price_of_determinism_by_mask_and_the_memory() -> None:
    text = report.markdown(backward_result())
    assert "TFLOP/s, bf16, backward; 16k tokens" in text
    for line in (
        "| D64 full 512 | 90 | 81 | 80 | 60 | 1.12 | 1.50 | 1.12 | 0.90 |",
        "- backward, sm90/best: geometric mean 0.750, worst 0.500 at D64 causal 512 (2 cells)",
        "- forward + backward, sm90/best: geometric mean 2.000, worst 2.000 at D64 full 512 (1 cells)",
        "- backward, full, sm90 det./sm90: geometric mean 0.900, worst 0.900 at D64 full 512 (1 cells)",
        "- backward, causal, sm90 det./sm90: geometric mean 0.600, worst 0.600 at D64 causal 512 (1 cells)",
        "- host time per forward + backward under autograd, µs, of a known shape: ours sm90 9.0",
        "16 heads: ours sm90 200, materialised 40,000\n",
        "16 heads: ours sm90 400; materialised failed: OutOfMemoryError: no\n",
    ):
        assert line in text


def test_a_problem_of_forward_and_backward_is_told() -> None:
    result = backward_result()
    result["both"][0]["results"]["sm90"]["problem"] = "error of dq"
    assert report.problem_lines(result) == ["D64 full 512, forward + backward, ours sm90: error of dq"]


def test_the_report_goes_between_the_backwards_markers(tmp_path: pathlib.Path) -> None:
    path, readme = tmp_path / "backward.json", tmp_path / "README.md"
    path.write_text(json.dumps(backward_result()))
    names = "benchmark", "backward benchmark"
    readme.write_text("".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in names))
    assert report.main([str(path), "--into", str(readme)]) == 0
    before, _, after = readme.read_text().partition("<!-- backward benchmark: begin -->")
    assert "D64" not in before and "D64 causal 512" in after


def test_peak_memory_is_told_by_length_and_one_that_fails_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, inputs: BwdInputs[Inputs]) -> Any:
        if name == "materialised":
            raise torch.OutOfMemoryError("no room")
        return lambda calls: None

    monkeypatch.setattr(memory, "SEQLENS", (16, 32))
    monkeypatch.setattr(memory, "training_runner", failing)
    monkeypatch.setattr(memory, "peak_bytes", lambda run, device: 3 << 20)
    first, second = memory.peaks(["sm90", "materialised"], CPU, "bf16")
    assert (first["label"], second["label"]) == ("D128 causal 16", "D128 causal 32")
    assert first["mib"] == {"sm90": 3.0}
    assert first["problems"] == {"materialised": "OutOfMemoryError: no room"}


def test_peak_memory_is_what_a_call_needed_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = {"bytes": 1000}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(bytes=100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["bytes"])
    assert memory.peak_bytes(lambda calls: peak.update(bytes=100 + 70 * calls), CPU) == 70


def test_the_command_measures_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(running, "unavailable", lambda name, where: None)
    monkeypatch.setattr(bench, "measure", lambda *arguments: given.append(arguments) or 0)
    assert CliRunner().invoke(app, ["bench", "--backward"]).exit_code == 0
    with pytest.raises(SystemExit):
        backward.main(["--impls", "fa2,sm90-det", "--head-dim", "64", "--quick"])
    (run, plan, *_), (_, quick, *_) = given
    assert run is backward.run
    assert (plan.cells, tuple(plan.names), plan.rounds) == (grid(), backward.NAMES, backward.FULL_ROUNDS)
    assert (quick.names, quick.rounds) == (["sm90-det", "fa2"], backward.QUICK_ROUNDS)
    assert {cell.seqlen for cell in quick.cells} == {1024, 8192}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--impls", "fa2-det"], "impls is 'fa2-det'; allowed: default, sm90, sm80, sm90-det, sm80-det, fa4, fa4-det"),
        (["--set", "real"], "set is 'real'; allowed: grid, more"),
        (["--traits", '[{"family": "sm80", "tile_m": 64, "tile_n": 64}]'], "traits is given with --backward"),
    ],
)
def test_bad_options_of_a_backward_are_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--backward", *arguments])
    assert result.exit_code == 2
    assert complaint in result.stderr
