"""`flash_attn_with_kvcache`: random calls by definition, many steps as one prefill, and a CUDA graph of a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.appended import tables
from tests.gpu.checks import assert_close_to, assert_lse_close_to, poisoned
from tests.kvcached import by_hand, random_call

pytestmark = pytest.mark.gpu

CALLS, STEPS = 8, 1000  # a call is a kernel of its own in each family
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("seed", range(CALLS))
def test_a_call_is_append_rotary_and_attention(seed: int, family: str, device: torch.device) -> None:
    call = random_call(1000 + seed, DTYPES)
    expected, found = by_hand(call, torch.float32), call.on(device).copy()
    with poisoned():
        o, lse = found.run(family=family)
    caches = found.tensors["k_cache"].cpu(), found.tensors["v_cache"].cpu()
    tolerance = {"atol": 1e-2, "rtol": 1e-2, "equal_nan": True}  # a rotated row may be rounded the other way
    torch.testing.assert_close(caches[0], expected["k_cache"], **tolerance)
    assert torch.equal(caches[1].nan_to_num(7.0), expected["v_cache"].nan_to_num(7.0))
    exact, low = by_hand(call, torch.float32, caches), by_hand(call, o.dtype, caches)
    if "rotary_cos" in call.tensors:  # and so may a query
        torch.testing.assert_close(o.cpu().float(), exact["o"], atol=3e-2, rtol=3e-2)
    elif o.numel():
        assert_close_to(o.cpu(), exact["o"], low["o"])
        assert_lse_close_to(lse.cpu(), exact["lse"], call.case)


@pytest.mark.parametrize("page_size", [0, 16])
def test_steps_are_one_prefill(page_size: int, family: str, device: torch.device) -> None:
    """Tokens that are appended one by one give what all of them give at once, up to the order of sums."""
    steps, batch, heads, kv_heads, head_dim = 40, 3, 8, 2, 64
    generator = torch.Generator(device).manual_seed(page_size)

    def normal(count: int) -> Tensor:
        return torch.randn(batch, steps, count, head_dim, generator=generator, device=device).bfloat16()

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    given = {name: x.to(device) for name, x in tables(steps, 32).items()} | {"causal": True, "family": family}
    shape = (batch, steps, kv_heads, head_dim)
    if page_size:
        pages = -(-steps // page_size)
        table = torch.randperm(batch * pages, generator=generator, device=device).reshape(batch, pages)
        given["page_table"] = table.to(torch.int32)
        shape = (batch * pages, page_size, kv_heads, head_dim)
    whole, caches = ([torch.full(shape, torch.nan, device=device).bfloat16() for _ in range(2)] for _ in range(2))
    expected = cuteflash.flash_attn_with_kvcache(q, *whole, k, v, cache_seqlens=0, **given)
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    for i in range(steps):
        one = slice(i, i + 1)
        o = cuteflash.flash_attn_with_kvcache(q[:, one], *caches, k[:, one], v[:, one], cache_seqlens=lengths, **given)
        torch.testing.assert_close(o, expected[:, one], atol=2e-2, rtol=2e-2)
        lengths += 1
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(whole, caches, strict=True))


@dataclasses.dataclass
class Decoder:
    """A decode step with caches of its own, whose lengths grow on the device."""

    caches: tuple[Tensor, Tensor]
    lengths: Tensor
    given: dict[str, object]

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = cuteflash.flash_attn_with_kvcache(
            q,
            *self.caches,
            k,
            v,
            cache_seqlens=self.lengths,
            **self.given,  # type: ignore[arg-type]
        )
        self.lengths.add_(1)
        return o


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_graph_replays_every_step(page_size: int, family: str, cuda: torch.device) -> None:
    batch, heads, kv_heads, head_dim, capacity = 4, 8, 2, 64, STEPS + 64
    generator = torch.Generator(cuda).manual_seed(page_size)
    given: dict[str, object] = {name: x.to(cuda) for name, x in tables(capacity, 32).items()}
    given |= {"causal": True, "family": family}
    shape = (batch, capacity, kv_heads, head_dim)
    if page_size:
        pages = -(-capacity // page_size)
        table = torch.randperm(batch * pages, generator=generator, device=cuda).reshape(batch, pages)
        given["page_table"] = table.to(torch.int32)
        shape = (batch * pages, page_size, kv_heads, head_dim)

    def decoder() -> Decoder:
        lengths = torch.tensor([0, 3, 17, 20], dtype=torch.int32, device=cuda)
        caches = torch.full(shape, 0.5, device=cuda).bfloat16(), torch.full(shape, 0.5, device=cuda).bfloat16()
        return Decoder(caches, lengths, given)

    def normal(count: int) -> Tensor:
        return torch.randn(STEPS, batch, 1, count, head_dim, generator=generator, device=cuda).bfloat16()

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    eager, replayed = decoder(), decoder()
    decoder().step(q[0], k[0], v[0])  # compiles
    inputs = q[0].clone(), k[0].clone(), v[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = replayed.step(*inputs)
    differ = torch.zeros((), dtype=torch.bool, device=cuda)
    for i in range(STEPS):
        for mine, new in zip(inputs, (q[i], k[i], v[i]), strict=True):
            mine.copy_(new)
        graph.replay()
        differ |= (o != eager.step(q[i], k[i], v[i])).any()  # not looked at before the end
    assert not differ
    assert all(torch.equal(a, b) for a, b in zip(eager.caches, replayed.caches, strict=True))
