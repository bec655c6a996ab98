"""`examples/train_gpt.py` with our attention beside torch's."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import torch.nn.functional as F
import train_gpt
from gpt import corpus as corpora
from gpt.corpus import Batches
from gpt.model import GPT, TorchMHA
from torch import Tensor

from cuteflash.nn import MHA
from tests.gpt_runs import SETTINGS, SMALL, small_library


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> corpora.Corpus:
    return corpora.read(small_library(tmp_path_factory.mktemp("library")))


@pytest.mark.parametrize("packed", [False, True])
def test_both_attentions_have_the_same_gradients(corpus: corpora.Corpus, packed: bool) -> None:
    batch = Batches(corpus.training, 16, 4, 0, packed).at(0)
    gradients: list[list[Tensor]] = []
    for attention in (MHA, TorchMHA):
        model = GPT(SETTINGS, attention)
        F.cross_entropy(model(batch.inputs, batch.cu_seqlens).flatten(0, -2), batch.targets.flatten()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [[], ["--packed"], ["--dtype=bf16", "--kv-heads=1"]], ids=str)
def test_the_curves_agree(
    corpus: corpora.Corpus, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(corpora, "read", lambda: corpus)
    monkeypatch.setattr(train_gpt, "SAMPLED", 4)
    file = tmp_path / "run.json"
    assert train_gpt.main([*SMALL, *options, "--steps=20", "--nudged=2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result["runs"]) == ["sdpa", "sdpa nudged 1", "sdpa nudged 2", "cuteflash"]
    judgement = result["judgement"]
    assert judgement["agree"] and judgement["gap"] <= judgement["allowed"]
    first = [run["losses"][0] for run in result["runs"].values()]
    assert max(first) - min(first) < (1e-2 if "--dtype=bf16" in options else 1e-5)
