"""The benchmark of latent attention's prompts, on the CPU: inputs, checks, what is timed, the table."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from benchmarks import mla_prefill
from benchmarks.decode_inputs import complaint
from benchmarks.mla_prefill import MADE, OURS, WHOLE, Prompts, Shape, attention_in_fp32, make_prompts

CPU = torch.device("cpu")
CAUSAL = Shape(2, 48, 3)
FULL = CAUSAL._replace(causal=False)


@pytest.mark.parametrize("shape", [CAUSAL, FULL])
@pytest.mark.parametrize("call", [mla_prefill.in_parts, mla_prefill.in_one, mla_prefill.made_here])
def test_our_ways_are_attention(shape: Shape, call: object) -> None:
    prompts = make_prompts(shape, CPU)
    assert callable(call)
    assert complaint(call(prompts)[-1][:, [0, 2]], attention_in_fp32(prompts, [0, 2])) is None


def test_a_mask_leaves_half_of_the_scores() -> None:
    assert FULL.flops == 2 * 320 * 2 * 3 * 48**2 and CAUSAL.flops == 2 * 320 * 2 * 3 * 48 * 49 / 2


def test_everything_is_checked_timed_and_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(prompts: Prompts) -> torch.Tensor:
        return mla_prefill.in_one(prompts) + 1

    monkeypatch.setattr(mla_prefill, "missing_peer", lambda name: "not installed")
    path, notes = tmp_path / "prefill.json", tmp_path / "notes.md"
    mla_prefill.run([CAUSAL, FULL], CPU, path, 1)
    cells = json.loads(path.read_text())["shapes"]
    for cell in cells:
        assert all(cell["results"][name]["tflops"] > 0 for name in (OURS, WHOLE, MADE))
        assert cell["results"]["fa4"] == cell["results"]["cudnn"] == {"left out": "NotImplementedError: not installed"}
    notes.write_text("<!-- mla prefill benchmark: begin -->\n<!-- mla prefill benchmark: end -->\n")
    assert mla_prefill.main(["--from", str(path), "--into", str(notes)]) == 0
    assert "| 2 × 0k, 3 heads, causal | 0 | 0 | 0 | – | – |" in notes.read_text()
    ratio = min(cell["results"][OURS]["tflops"] / cell["results"][WHOLE]["tflops"] for cell in cells)
    assert f"worst {ratio:.3f} at" in notes.read_text()
    monkeypatch.setattr(mla_prefill, "in_parts", wrong)
    mla_prefill.run([CAUSAL], CPU, path, 1)
    assert mla_prefill.main(["--from", str(path)]) == 1
    assert "problem: " in capsys.readouterr().out
