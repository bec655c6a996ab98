"""The modules on packed sequences and packed projections, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cuteflash import flash_attn_func
from cuteflash.nn import MHA, FlashCrossAttention, FlashSelfAttention
from tests.test_nn import DIM, HEADS, assert_close, random

LENGTHS, LENGTHS_K = (3, 0, 5), (4, 2, 6)


def cumulative(lengths: tuple[int, ...]) -> Tensor:
    return F.pad(torch.tensor(lengths), (1, 0)).cumsum(0).int()


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (2, 0), "softcap": 3.0}], ids=str)
def test_packed_projections(options: dict[str, Any]) -> None:
    qkv = random(2, 5, 3, 2, 16)
    q, k, v = qkv.unbind(2)
    expected = flash_attn_func(q, k, v, **options)
    assert torch.equal(FlashSelfAttention(**options)(qkv), expected)
    assert torch.equal(FlashCrossAttention(**options)(q, qkv[:, :, 1:]), expected)
    assert torch.equal(FlashSelfAttention()(qkv, causal=True), flash_attn_func(q, k, v, causal=True))


def test_packed_sequences_of_packed_projections() -> None:
    qkv, kv = random(8, 3, 2, 16), random(12, 2, 2, 16, seed=1)
    cu_q, cu_k = cumulative(LENGTHS), cumulative(LENGTHS_K)
    alone = [FlashSelfAttention(causal=True)(x[None])[0] for x in qkv.split(LENGTHS)]
    assert_close(FlashSelfAttention(causal=True)(qkv, cu_seqlens=cu_q, max_seqlen=5), torch.cat(alone))
    cross = FlashCrossAttention(causal=True)
    alone = [cross(q[None], x[None])[0] for q, x in zip(qkv[:, 0].split(LENGTHS), kv.split(LENGTHS_K))]
    assert_close(cross(qkv[:, 0], kv, None, cu_q, 5, cu_k, 6), torch.cat(alone))


@pytest.mark.parametrize("max_seqlen", [5, None])
@pytest.mark.parametrize("options", [{}, {"rotary_emb_dim": 8}, {"num_heads_kv": 1, "window_size": (2, 0)}], ids=str)
def test_each_packed_sequence_is_as_if_alone(options: dict[str, Any], max_seqlen: int | None) -> None:
    layer = MHA(DIM, HEADS, causal=True, dtype=torch.float64, **options)
    x = random(8, DIM)
    with torch.no_grad():
        alone = [layer(part[None])[0] for part in x.split(LENGTHS)]
        assert_close(layer(x, cu_seqlens=cumulative(LENGTHS), max_seqlen=max_seqlen), torch.cat(alone))


def test_packed_cross_attention() -> None:
    layer = MHA(DIM, HEADS, cross_attn=True, dtype=torch.float64)
    x, x_kv = random(8, DIM), random(12, DIM, seed=1)
    lengths = {"cu_seqlens": cumulative(LENGTHS), "max_seqlen": 5}
    lengths_k = {"cu_seqlens_k": cumulative(LENGTHS_K), "max_seqlen_k": 6}
    with torch.no_grad():
        alone = [layer(a[None], b[None])[0] for a, b in zip(x.split(LENGTHS), x_kv.split(LENGTHS_K))]
        assert_close(layer(x, x_kv, **lengths, **lengths_k), torch.cat(alone))


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_torchs_attention(packed: bool) -> None:
    class Torchs(MHA):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, *rest: Any) -> Tensor:
            parts = [x.split(LENGTHS) if packed else x for x in (q, k, v)]
            outs = [
                F.scaled_dot_product_attention(*(x.transpose(-3, -2) for x in part), is_causal=True, enable_gqa=True)
                for part in zip(*parts)
            ]
            return (torch.cat if packed else torch.stack)([out.transpose(-3, -2) for out in outs])

    options: dict[str, Any] = {"num_heads_kv": 1, "causal": True, "rotary_emb_dim": 16, "dtype": torch.float64}
    ours, theirs = MHA(DIM, HEADS, **options), Torchs(DIM, HEADS, **options)
    theirs.load_state_dict(ours.state_dict())
    lengths = {"cu_seqlens": cumulative(LENGTHS), "max_seqlen": 5} if packed else {}
    found = []
    for layer in (ours, theirs):
        x = (random(8, DIM) if packed else random(2, 8, DIM)).requires_grad_()
        layer(x, **lengths).square().sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("deterministic", [False, True])
def test_training_under_autocast(deterministic: bool) -> None:
    torch.manual_seed(0)
    layer = MHA(DIM, HEADS, causal=True, rotary_emb_dim=16, deterministic=deterministic)
    x = random(2, 8, DIM, dtype=torch.float32)
    gradients = []
    for enabled in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = layer(x).float().square().mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    assert gradients[1].dtype == torch.float32
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.03


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_as_one_graph(packed: bool) -> None:
    layer = MHA(DIM, HEADS, 1, causal=True, rotary_emb_dim=16)
    lengths = {"cu_seqlens": cumulative(LENGTHS), "max_seqlen": 5} if packed else {}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for call in (layer, compiled):
        layer.zero_grad()
        x = random(*((8,) if packed else (2, 8)), DIM, dtype=torch.float32).requires_grad_()
        out = call(x, **lengths)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_activation_checkpointing() -> None:
    layer = MHA(DIM, HEADS, causal=True, rotary_emb_dim=16, dtype=torch.float64)
    gradients = []
    for recomputed in (False, True):
        layer.zero_grad()
        x = random(2, 5, DIM).requires_grad_()
        out = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        out.square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    for one, other in zip(*gradients):
        assert torch.equal(one, other)
