"""Attention to keys in two parts on a GPU: as exact as whole keys, dense and packed, and its gradients."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import flash_mla_prefill
from tests.gpu.checks import Case, assert_right, poisoned
from tests.gpu.packed import Packed

pytestmark = pytest.mark.gpu

CASES = {
    "causal": Case(300, head_dim=192, head_dim_v=128, causal=True, lse=True),
    "full": Case(129, 517, head_dim=192, head_dim_v=128, lse=True),
    "fp16": Case(65, 64, head_dim=192, head_dim_v=128, causal=True, dtype="fp16", lse=True, heads=5),
    "fewer keys": Case(200, 70, head_dim=192, head_dim_v=128, causal=True, lse=True),
    "one query": Case(1, 300, head_dim=192, head_dim_v=128, causal=True, lse=True),
    "head dim 128": Case(300, head_dim=128, head_dim_v=128, causal=True, lse=True),
    "head dim 256": Case(130, head_dim=256, head_dim_v=192, lse=True),
    "not whole slabs": Case(130, head_dim=160, head_dim_v=96, causal=True, lse=True),
}


def shared(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two parts of keys whose last columns are those of the first head, and the whole keys."""
    k_rope = k[..., :1, -64:].clone()
    own = k[..., :-64]
    return own, k_rope, torch.cat((own, k_rope.expand(*own.shape[:-1], 64)), dim=-1)


@pytest.mark.parametrize("name", CASES)
def test_dense_batches(name: str, device: torch.device) -> None:
    case = CASES[name]
    q, k, v = case.inputs(device)
    own, k_rope, whole = shared(k)
    with poisoned():
        out, lse = flash_mla_prefill(q, own, k_rope, v, causal=case.causal, return_lse=True)
    assert_right((q, whole, v), case, out, lse)


def test_parts_of_a_projection(device: torch.device) -> None:
    """Keys and values as a layer makes them: columns of one tensor each, and the shared part of another."""
    case = CASES["causal"]
    q = case.inputs(device)[0]
    projected = torch.randn(2, 300, 3, 256, device=device).to(q.dtype)
    rows = torch.randn(2, 300, 1, 576, device=device).to(q.dtype)
    k, v = projected.split(128, dim=-1)
    out, lse = flash_mla_prefill(q, k, rows[..., 512:], v, causal=True, return_lse=True)
    whole = torch.cat((k, rows[..., 512:].expand(-1, -1, 3, -1)), dim=-1)
    assert_right((q, whole, v), case, out, lse)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("rest", [0, 70])
def test_packed_sequences(mask: str, rest: int, device: torch.device) -> None:
    """Each as it would be alone; what follows the last sequence is NaN, and gets 0 and -inf."""
    choose = random.Random(3)
    lengths = tuple(choose.choice((0, 1, 63, 95, 96, 97, 200, 300)) for _ in range(9))
    case = dataclasses.replace(CASES["causal"], causal=mask == "causal")
    packed = Packed(lengths, case=case, rest_q=rest, rest_k=rest)
    q, k, v = packed.inputs(device)
    own, k_rope, whole = shared(k)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    named: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 300, "max_seqlen_k": 300}
    with poisoned():
        out, lse = flash_mla_prefill(q, own, k_rope, v, **named, causal=case.causal, return_lse=True)
    total = sum(lengths)
    for begin, length in zip(ends.tolist(), lengths, strict=False):
        some = slice(begin, begin + length)
        if length:
            alone = dataclasses.replace(case, batch=1, seqlen_q=length)
            assert_right((q[None, some], whole[None, some], v[None, some]), alone, out[None, some], lse[None, :, some])
    assert (out[total:] == 0).all() and (lse[:, total:] == -float("inf")).all()


def test_runs_are_bitwise_equal(device: torch.device) -> None:
    q, k, v = CASES["causal"].inputs(device)
    own, k_rope, _ = shared(k)
    first = flash_mla_prefill(q, own, k_rope, v, causal=True)
    for _ in range(50 if device.type == "cuda" else 2):
        assert torch.equal(flash_mla_prefill(q, own, k_rope, v, causal=True), first)


@pytest.mark.parametrize("name", ["causal", "fp16"])
def test_gradients(name: str, device: torch.device) -> None:
    case = CASES[name]
    q, k, v = case.inputs(device)
    own, k_rope, _ = shared(k)
    given = torch.randn(*q.shape[:3], v.shape[3], device=device)
    found = []
    for dtype in (q.dtype, torch.float32):
        leaves = [x.detach().to(dtype).cpu() if dtype == torch.float32 else x for x in (q, own, k_rope, v)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = flash_mla_prefill(*leaves, causal=True)
        found.append(torch.autograd.grad(out, leaves, given.to(out)))
    for ours, right in zip(*found, strict=True):
        error = (ours.float().cpu() - right).square().mean().sqrt() / right.square().mean().sqrt()
        assert float(error) < (0.02 if q.dtype == torch.bfloat16 else 0.004)
