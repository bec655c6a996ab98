"""The benchmark of appending to a KV cache, on the CPU: bytes, checks, kernels known ahead, the report."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from benchmarks import append
from benchmarks.append import WAYS, Shape

CPU = torch.device("cpu")
SMALL = Shape(2, 6, head_dim=32, heads=4, kv_heads=2)


def test_all_ways_are_checked_timed_and_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, notes = tmp_path / "append.json", tmp_path / "notes.md"
    append.run([SMALL, SMALL._replace(page_size=4), SMALL._replace(tokens=1)], CPU, path, rounds=1)
    shapes = json.loads(path.read_text())["shapes"]
    for shape in shapes:
        assert list(shape["results"]) == list(WAYS)
        for entry in shape["results"].values():
            assert "problem" not in entry and entry["us"] > 0 and entry["of_copy"] > 0 and entry["host_us"] > 0
    notes.write_text("<!-- append benchmark: begin -->\n<!-- append benchmark: end -->\n")
    assert append.main(["--from", str(path), "--into", str(notes)]) == 0
    assert "D32, 2 × 6, 4/2 heads, pages of 4" in notes.read_text() and "(host " in capsys.readouterr().out


def test_bytes_are_those_that_have_to_move() -> None:
    step = append.make_step(SMALL, CPU)
    tokens = 2 * 6 * 32
    assert append.traffic("append", step) == tokens * 2 * 2 * (2 + 2)
    assert append.traffic("rotary and append, torch", step) == tokens * 2 * 2 * (4 + 2 + 2)


@pytest.mark.parametrize("page_size", [0, 4])
def test_a_wrong_result_is_caught(page_size: int) -> None:
    way = "rotary and append, one launch"
    step = append.make_step(SMALL._replace(page_size=page_size), CPU)
    q = append.fused(step)
    assert append.complaint(way, step, q) is None
    assert append.complaint(way, step, q * 1.1) == "q is off by more than a rounding"
    for name in ("k", "v"):
        cache = getattr(step, f"{name}_cache")
        wrong = step._replace(**{f"{name}_cache": torch.where(cache.isnan(), cache, cache + 1)})
        assert append.complaint(way, wrong, q) == f"{name} is off by more than a rounding"
    filled = step._replace(v_cache=step.v_cache.nan_to_num())
    assert append.complaint(way, filled, q) == "a row that is nobody's was written to"


def test_kernels_are_known_ahead() -> None:
    assert len(append.kernels((SMALL, SMALL._replace(batch=4, tokens=90)))) == 3
    assert len(append.kernels((SMALL, SMALL._replace(page_size=4)))) == 5  # the rotation knows nothing of pages


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for machines without a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert append.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
