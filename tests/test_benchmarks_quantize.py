"""The benchmark of quantising to FP8, on the CPU: bytes, checks, kernels known ahead, the report."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from benchmarks import quantize
from benchmarks.quantize import WAYS, Shape, Way
from cuteflash.quantize_problem import QuantizeOptions

CPU = torch.device("cpu")
SMALL = Shape(64, batch=1, seqlen=130, hidden=128)


@pytest.mark.parametrize(
    ("way", "bytes_of_qk", "bytes_of_v"),
    [
        (Way(QuantizeOptions(), given=True), 3, 3),
        (Way(QuantizeOptions(), given=True, rotary=True), 3, 3),
        (Way(QuantizeOptions(smooth_v=True), given=True), 3, 5),
        (Way(QuantizeOptions("block")), 3, 3),
        (Way(QuantizeOptions("block", smooth_v=True)), 3, 5),
        (Way(QuantizeOptions()), 5, 5),
        (Way(QuantizeOptions(smooth_v=True)), 5, 5),
    ],
)
def test_bytes_are_those_that_have_to_move(way: Way, bytes_of_qk: int, bytes_of_v: int) -> None:
    shape = Shape(64, batch=2, seqlen=130, group=2, hidden=256)
    tokens = 2 * 130 * 64
    inputs = quantize.make_inputs(shape, way, CPU)
    assert quantize.traffic(way, inputs) == tokens * ((4 + 2) * bytes_of_qk + 2 * bytes_of_v)


def test_all_ways_are_checked_timed_and_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, notes = tmp_path / "quantize.json", tmp_path / "notes.md"
    quantize.run([SMALL], CPU, path, rounds=1)
    (shape,) = json.loads(path.read_text())["shapes"]
    assert list(shape["results"]) == list(WAYS)
    assert all(
        entry["us"] > 0 and entry["of_copy"] > 0 and "problem" not in entry for entry in shape["results"].values()
    )
    notes.write_text("<!-- quantize benchmark: begin -->\n<!-- quantize benchmark: end -->\n")
    assert quantize.main(["--from", str(path), "--into", str(notes)]) == 0
    assert "| | D64, 1 × 130 |" in notes.read_text() and "| scales of heads, Vᵀ | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "spoil", "words"),
    [
        ("q", lambda x: (x.float() * 1.3).to(x.dtype), "q is off by more than a rounding"),
        ("vt", lambda x: x.roll(1, dims=-1), "v is off by more than a rounding"),
        ("k", lambda x: (x.view(torch.uint8) + 1).view(x.dtype), "k are rounded otherwise"),
        ("k_descale", lambda x: x * 1.001, "k_descale is wrong"),
        ("v_mean", lambda x: None, "v_mean is wrong"),
    ],
)
def test_a_wrong_result_is_caught(field: str, spoil: Any, words: str) -> None:
    way = Way(QuantizeOptions(transpose_v=True, smooth_v=True))
    inputs = quantize.make_inputs(SMALL, way, CPU)
    found = quantize.call_of(way, inputs)()
    assert quantize.complaint(way, inputs, found) is None
    wrong = found._replace(**{field: spoil(getattr(found, field))})
    assert words in str(quantize.complaint(way, inputs, wrong))


def test_kernels_are_known_ahead() -> None:
    kernels = quantize.kernels((Shape(64), Shape(64, 16, 1024)))
    assert len(kernels) == len(WAYS)  # length and batch change none
    assert {problem.head_dim for _, _, problem in kernels} == {64}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
