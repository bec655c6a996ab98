"""Where tensors lie and when kernels run: strides, offsets, reuse, streams, graphs, determinism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.gpu.checks import Case, assert_right, call, poisoned

pytestmark = pytest.mark.gpu

CAUSAL = Case(150, 210, heads=4, kv_heads=4, causal=True)
BEYOND = 2**31  # elements: what a 32-bit offset cannot hold


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def padded_rows(x: Tensor) -> Tensor:
    room = x.new_full((*x.shape[:3], x.shape[3] + 24), float("nan"))
    room[..., 8 : 8 + x.shape[3]] = x
    return room[..., 8 : 8 + x.shape[3]]


def inside_a_cache(x: Tensor) -> Tensor:
    room = x.new_full((x.shape[0] + 1, x.shape[1] + 100, *x.shape[2:]), float("nan"))
    room[1:, 37 : 37 + x.shape[1]] = x
    return room[1:, 37 : 37 + x.shape[1]]


def interleaved(x: Tensor) -> Tensor:
    room = x.new_full((*x.shape[:2], 3, *x.shape[2:]), float("nan"))
    room[:, :, 1] = x
    return room[:, :, 1]


def expanded_heads(x: Tensor) -> Tensor:
    return x[:, :, :1].expand(x.shape)


def expanded_batch(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


LAYOUTS = (heads_first, padded_rows, inside_a_cache, interleaved, expanded_heads, expanded_batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_any_strides(layout, which: str, family: str, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    q, k, v = (layout(x) if name in which else x for name, x in zip("qkv", CAUSAL.inputs(device), strict=True))
    out, _ = call(q, k, v, CAUSAL, family)
    assert_right((q, k, v), CAUSAL, out)


def test_poison_reaches_what_is_allocated(device: torch.device) -> None:
    like = torch.zeros(64, 8, dtype=torch.bfloat16, device=device)
    with poisoned():
        made = (torch.empty_like(like), like.new_empty(3, 5), torch.empty(7, device=device))
    assert all(torch.isnan(x).all() for x in made)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_repeated_runs_are_bitwise_equal(head_dim: int, causal: bool, family: str, cuda: torch.device) -> None:
    case = Case(777, head_dim=head_dim, batch=4, heads=16, causal=causal, lse=True)
    inputs = case.inputs(cuda)
    first, first_lse = call(*inputs, case, family)
    assert_right(inputs, case, first, first_lse)
    assert first_lse is not None
    for _ in range(49):
        out, lse = call(*inputs, case, family)
        assert torch.equal(out, first)
        assert lse is not None
        assert torch.equal(lse, first_lse)


def test_batch_strides_beyond_32_bits(family: str, cuda: torch.device) -> None:
    dense = Case(130, 170, heads=2, causal=True).inputs(cuda)
    room = torch.empty(BEYOND + 3_000_000, dtype=torch.bfloat16, device=cuda)
    views = []
    for index, x in enumerate(dense):
        strides = (BEYOND + 64, x.shape[2] * x.shape[3], x.shape[3], 1)
        view = room.as_strided(x.shape, strides, index * 1_000_000)
        view.copy_(x)
        views.append(view)
    q, k, v = views
    case = Case(130, 170, heads=2, causal=True)
    out, _ = call(q, k, v, case, family)
    assert_right((q, k, v), case, out)


def test_output_beyond_32_bits(family: str, cuda: torch.device) -> None:
    heads, head_dim = 64, 256
    case = Case(BEYOND // (heads * head_dim) + 100, 64, head_dim=head_dim, batch=1, heads=heads, kv_heads=1)
    k, v = (torch.randn(1, 64, 1, head_dim, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    q = torch.randn(1, case.seqlen_q, heads, head_dim, dtype=torch.bfloat16, device=cuda)
    out, _ = call(q, k, v, case, family)
    assert out.numel() > BEYOND
    for rows in (slice(0, 50), slice(-50, None)):
        assert_right((q[:, rows], k, v), case, out[:, rows])
    assert all(torch.isfinite(part).all() for part in out.split(4096, dim=1))


def test_lengths_strides_and_batches_change_between_calls(family: str, device: torch.device) -> None:
    for seed, (batch, s_q, s_k, heads) in enumerate(
        [(2, 100, 150, 4), (1, 150, 100, 2), (3, 64, 64, 6), (2, 100, 150, 4)]
    ):
        case = Case(s_q, s_k, batch=batch, heads=heads, causal=True)
        q, k, v = case.inputs(device, seed)
        q = heads_first(q) if seed % 2 else q
        out, _ = call(q, k, v, case, family)
        assert_right((q, k, v), case, out)


def test_runs_on_the_current_stream(family: str, cuda: torch.device) -> None:
    q, k, v = CAUSAL.inputs(cuda)
    call(q, k, v, CAUSAL, family)  # compiled before anything overlaps
    late = CAUSAL.inputs(cuda, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for target, source in zip((q, k, v), late, strict=True):
            target.copy_(source)
        out, _ = call(q, k, v, CAUSAL, family)
    torch.cuda.current_stream().wait_stream(stream)
    assert_right(late, CAUSAL, out)


@pytest.mark.parametrize("lse", [False, True])
def test_a_graph_replays_with_new_inputs(lse: bool, family: str, cuda: torch.device) -> None:
    case = Case(150, 210, causal=True, lse=lse)
    static = case.inputs(cuda)
    call(*static, case, family)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = cuteflash.flash_attn_func(*static, family=family, **case.options())
    for seed in (1, 2):
        fresh = case.inputs(cuda, seed)
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        out, *rest = result if lse else (result,)
        out.fill_(float("nan"))
        graph.replay()
        assert_right(fresh, case, out, *rest)
