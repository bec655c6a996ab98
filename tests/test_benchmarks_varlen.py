"""The benchmark of packed sequences, on the CPU: lengths, checks, counts, the report."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import contest, packed, report, running, varlen
from benchmarks.judges import GradientJudge, OutputJudge
from benchmarks.packed import DISTRIBUTIONS, PackedCell
from cuteflash.cli import bench
from cuteflash.problem import MaskKind

CPU = torch.device("cpu")
DETERMINISTIC: list[bool] = []  # what calls asked for


def small(distribution: str = "equal", mask: MaskKind = "causal") -> PackedCell:
    return PackedCell(distribution, 32, mask, tokens=96, hidden=64)


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions of 96 tokens, and an implementation that computes sequence by sequence."""
    few = {"equal": (32, 32, 32), "zipf": (20, 61, 15)}
    monkeypatch.setattr(packed, "_lengths", lambda name, tokens: few[name] if tokens == 96 else real(name, tokens))
    monkeypatch.setattr(varlen.cuteflash, "flash_attn_varlen_func", by_sequence, raising=False)


real = packed._lengths


def by_sequence(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, causal: bool, **options: Any) -> Tensor:
    assert torch.equal(options.pop("cu_seqlens_k"), cu_seqlens_q)
    ends = cu_seqlens_q.tolist()
    assert options.pop("max_seqlen_q") == options.pop("max_seqlen_k") == max(b - a for a, b in itertools.pairwise(ends))
    DETERMINISTIC.append(options.pop("deterministic", False))
    assert set(options) == {"family"}
    parts = [
        torch.nn.functional.scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=causal)
        for a, b in itertools.pairwise(ends)
    ]
    return torch.cat([part.transpose(0, 1) for part in parts])


def test_distributions_are_the_promised_ones() -> None:
    lengths = {name: PackedCell(name, 128, "full").lengths for name in DISTRIBUTIONS}
    assert {sum(own) for own in lengths.values()} == {65536}
    assert min(map(min, lengths.values())) >= 1
    assert set(lengths["equal"]) == {1024} and set(lengths["tiny"]) == {16} and len(lengths["tiny"]) == 4096
    assert sorted(lengths["one-long"])[-2:] == [64, 32768]
    first, second, third, *_ = sorted(lengths["zipf"], reverse=True)
    assert first / second == pytest.approx(2, rel=0.01) and first / third == pytest.approx(3, rel=0.01)
    assert len(lengths["uniform"]) == 64 and max(lengths["uniform"]) < 4 * 1024


def test_flops_are_the_sum_over_the_sequences() -> None:
    full, causal = small("zipf", "full"), small("zipf")
    assert full.flops == 2 * causal.flops == 4 * 2 * 32 * (20**2 + 61**2 + 15**2)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("backward", "products"), [(False, 2), (True, 5)])
def test_ours_packed_and_dense_are_checked_and_timed(mask: MaskKind, backward: bool, products: int) -> None:
    cell, plan = small("equal", mask), running.Plan([], varlen.NAMES[:3], rounds=1)
    cells = varlen.measure_cell(plan, cell, CPU, None, backward=backward)["cells"]
    assert list(cells["results"]) == ["default", "sm80", "default-dense"]
    for entry in cells["results"].values():
        assert "problem" not in entry
        assert entry["tflops"] * entry["ms"] * 1e9 == pytest.approx(products / 2 * cell.flops)


def test_only_equal_lengths_run_dense() -> None:
    plan = running.Plan([], ["sm90", "sm90-dense"], rounds=1)
    cells = varlen.measure_cell(plan, small("zipf"), CPU, None, backward=False)["cells"]
    assert list(cells["results"]) == ["sm90"] and "problem" not in cells["results"]["sm90"]


def test_a_deterministic_implementation_asks_for_it() -> None:
    DETERMINISTIC.clear()
    plan = running.Plan([], ["default-det"], rounds=1)
    cells = varlen.measure_cell(plan, small("zipf"), CPU, None, backward=True)["cells"]
    assert "problem" not in cells["results"]["default-det"] and DETERMINISTIC and all(DETERMINISTIC)


@pytest.mark.parametrize("row", [3, 40, 95])
def test_a_wrong_row_of_any_checked_sequence_is_caught(row: int) -> None:
    judge = OutputJudge.of_packed(small("zipf"), CPU)
    out = varlen.packed_runner("sm90", judge.inputs)(1)
    assert judge.complaint(out, out) is None
    wrong = out.clone()
    wrong[row, 0] += 0.2
    assert "error" in str(judge.complaint(wrong, out))


@pytest.mark.parametrize(("head", "words"), [(0, "error of dk"), (1, "dk differs from another implementation")])
def test_a_wrong_gradient_is_caught_in_heads_that_are_compared_with_fp32_and_in_others(head: int, words: str) -> None:
    judge = GradientJudge.of_packed(dataclasses.replace(small("zipf"), hidden=96), CPU)  # heads 0 and 2 of 3
    found = varlen.packed_backward_runner("sm90", judge.inputs)(1)
    assert judge.complaint(found, found) is judge.imprecision(found) is None
    wrong = found._replace(dk=found.dk.clone())
    wrong.dk[40, head] += 1.0
    assert words in str(judge.complaint(wrong, found))


def test_keys_of_a_neighbour_are_an_error() -> None:
    judge = OutputJudge.of_packed(small("zipf", "full"), CPU)
    whole = functools.partial(varlen.dense, batch=1, family="sm90", causal=False)
    makers = {"sm90": lambda inputs: lambda calls: whole(inputs.q, inputs.k, inputs.v)}
    assert "error" in contest.measure(judge, makers, CPU, rounds=1)["results"]["sm90"]["problem"]


def test_run_writes_json_and_report(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, readme = tmp_path / "varlen.json", tmp_path / "README.md"
    plan = running.Plan([small(), small("zipf")], ["default", "default-dense"], rounds=1)
    assert bench.measure(varlen.run_of(backward=False), plan, CPU, path) == 0
    assert "forward of packed sequences, TFLOP/s, bf16" in capsys.readouterr().out
    stored = json.loads(path.read_text())
    assert [cell["label"] for cell in stored["cells"]] == ["D32 causal equal", "D32 causal zipf"]
    assert stored["summary"]["ours/dense"]["cells"] == 1
    readme.write_text("<!-- varlen forward benchmark: begin -->\n<!-- varlen forward benchmark: end -->\n")
    assert report.main([str(path), "--into", str(readme)]) == 0
    text = readme.read_text()
    assert "forward of packed sequences; 64k tokens" in text
    assert "| cell | ours | ours dense | ours/dense |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert varlen.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_the_backwards_report_says_so() -> None:
    result = varlen.run_of(backward=True)(running.Plan([small()], ["sm90"], rounds=1), CPU)
    assert "backward of packed sequences; 64k tokens" in report.markdown(result)
    assert report.marker(result) == "varlen backward benchmark"


def test_the_command_measures_what_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(running, "unavailable", lambda name, where: None)
    monkeypatch.setattr(bench, "measure", lambda *arguments: given.append(arguments) or 0)
    monkeypatch.setattr(varlen, "run_of", lambda backward: f"run {backward}")
    assert (
        varlen.main(["--backward", "--lengths", "tiny", "--head-dim", "128", "--impls", "fa4", "sm90", "--quick"]) == 0
    )
    ((run, plan, where, path),) = given
    assert (run, where, path) == ("run True", torch.device("cuda", 0), None)
    assert plan.cells == [PackedCell("tiny", 128, "full"), PackedCell("tiny", 128, "causal")]
    assert (plan.names, plan.rounds) == (["sm90", "fa4"], varlen.QUICK_ROUNDS)
