"""The modules and the training example on a GPU."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash.nn import MHA

pytestmark = pytest.mark.gpu

DIM, HEADS, KV_HEADS = 256, 4, 2
LENGTHS = (100, 0, 37, 259)


class TorchMHA(MHA):
    """The same with torch's attention, one sequence after the other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *lengths: Any) -> Tensor:
        parts = zip(*(x.unbind() if cu_seqlens is None else x.split(LENGTHS) for x in (q, k, v)), strict=True)
        heads = ([x.transpose(0, 1)[None] for x in part] for part in parts)
        outs = [F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)[0].transpose(0, 1) for x in heads]
        return torch.stack(outs) if cu_seqlens is None else torch.cat(outs)


def step(layer: MHA, x: Tensor, given: Tensor, lengths: dict[str, Any]) -> list[Tensor]:
    """Output and all gradients, fp32."""
    x = x.to(layer.out_proj.weight.dtype).requires_grad_()
    out = layer(x, **lengths)
    gradients = torch.autograd.grad(out, (x, *layer.parameters()), given.to(out.dtype))
    return [tensor.detach().float() for tensor in (out, *gradients)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_and_its_gradients_are_as_exact_as_torchs(
    packed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"causal": True, "rotary_emb_dim": 32, "device": device}
    ours = MHA(DIM, HEADS, KV_HEADS, **options).to(dtype)
    theirs = TorchMHA(DIM, HEADS, KV_HEADS, **options).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    exact = copy.deepcopy(theirs).float()
    shape = (sum(LENGTHS),) if packed else (2, 200)
    x, given = torch.randn(2, *shape, DIM, device=device).to(dtype).float()
    cu_seqlens = F.pad(torch.tensor(LENGTHS), (1, 0)).cumsum(0).int().to(device)
    lengths: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max(LENGTHS)} if packed else {}
    results = [step(layer, x, given, lengths) for layer in (ours, theirs, exact)]
    for mine, torchs, right in zip(*results, strict=True):
        slack = 2 * float((right + 0.3 - 0.3 - right).abs().max())
        assert float((mine - right).abs().max()) <= 3 * float((torchs - right).abs().max()) + slack


@pytest.mark.parametrize("options", [[], ["--packed"], ["--dtype=fp16", "--kv-heads=2"]], ids=str)
def test_the_training_example(options: list[str], cuda: torch.device, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("rich")
    import train_gpt

    assert train_gpt.main(["--steps=40", "--device=cuda", *options, "--json", str(tmp_path / "run.json")]) == 0
