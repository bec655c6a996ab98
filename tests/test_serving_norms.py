"""Norms are replaced by torch's if they give the same, and by nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from serving.norms import use_fused_norms
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

WIDTH = 48


class HalvingRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> Tensor:
        halved: Tensor = super().forward(hidden_states) / 2
        return halved


class Nested(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList([norm])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_norm_is_replaced_and_gives_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(WIDTH, eps=1e-3).to(dtype)
    norm.weight.data.normal_()
    before = copy.deepcopy(norm)
    model = Nested(norm)
    use_fused_norms(model)
    fused = model.inner[0]
    assert type(fused) is torch.nn.RMSNorm and fused.weight is norm.weight and torch.equal(norm.weight, before.weight)
    x = 0.03 * torch.randn(5, 7, WIDTH, dtype=dtype)  # so small that eps matters
    torch.testing.assert_close(fused(x), before(x))


@pytest.mark.parametrize("kind", [GemmaRMSNorm, HalvingRMSNorm])
def test_other_norms_are_left_alone(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model = Nested(kind(WIDTH))
    use_fused_norms(model)
    assert type(model.inner[0]) is kind
