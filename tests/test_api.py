"""What `flash_attn_func` computes, on CPU tensors, judged by a naive fp64 attention written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cuteflash import flash_attn_func


def naive(q: Tensor, k: Tensor, v: Tensor, *, scale=None, left=-1, right=-1, softcap=0.0) -> tuple[Tensor, Tensor]:
    """(O, LSE) in the dtype of the inputs, one query head after the other, every query's visible keys listed."""
    b, s_q, h, d = q.shape
    s_k, h_k = k.shape[1:3]
    o, lse = q.new_zeros(b, s_q, h, v.shape[3]), q.new_full((b, h, s_q), -math.inf)
    for head in range(h):
        kv = head // (h // h_k)
        s = q[:, :, head] @ k[:, :, kv].transpose(1, 2) * (d**-0.5 if scale is None else scale)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        for i in range(s_q):
            at = i + s_k - s_q
            keys = [j for j in range(s_k) if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)]
            if keys:
                row = s[:, i, keys]
                lse[:, head, i] = torch.logsumexp(row, -1)
                o[:, i, head] = (torch.softmax(row, -1)[:, None] @ v[:, keys, kv])[:, 0]
    return o, lse


def assert_close(got: Tensor, q: Tensor, k: Tensor, v: Tensor, **mask) -> None:
    """The design's rule: twice the error of the same computation in the input's precision, plus twice a rounding."""
    ref = naive(q.double(), k.double(), v.double(), **mask)[0]
    low = naive(q, k, v, **mask)[0]
    ref_low = ref.to(q.dtype)
    rounding = 2 * ((ref_low + 0.3 - 0.3) - ref_low).abs().max().item()
    assert (got.double() - ref).abs().max() <= 2 * (low.double() - ref).abs().max() + rounding


def qkv(s_q=37, s_k=61, heads=4, kv_heads=2, d=16, d_v=None, batch=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    return make(batch, s_q, heads, d), make(batch, s_k, kv_heads, d), make(batch, s_k, kv_heads, d_v or d)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_is_as_accurate_as_torch_in_the_same_dtype(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = qkv(dtype=dtype)
    o = flash_attn_func(q, k, v, causal=causal)
    assert o.dtype == dtype
    assert_close(o, q, k, v, right=0 if causal else -1)


def test_fp64_is_computed_in_fp64() -> None:
    q, k, v = qkv(dtype=torch.float64)
    o = flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(o, naive(q, k, v, right=0)[0], atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_query_heads_share_kv_heads_in_groups(heads: int, kv_heads: int) -> None:
    q, k, v = qkv(heads=heads, kv_heads=kv_heads)
    assert_close(flash_attn_func(q, k, v), q, k, v)


@pytest.mark.parametrize(("d", "d_v"), [(8, 8), (24, 40), (64, 32), (32, 256), (256, 8)])
def test_head_dims_are_multiples_of_eight_and_may_differ(d: int, d_v: int) -> None:
    q, k, v = qkv(d=d, d_v=d_v)
    o = flash_attn_func(q, k, v)
    assert o.shape == (*q.shape[:3], d_v)
    assert_close(o, q, k, v)


@pytest.mark.parametrize(("s_q", "s_k"), [(1, 1), (1, 130), (5, 3), (61, 37), (129, 128), (40, 300)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (0, 0), (5, 3), (-1, 4), (9, -1), (1000, 1000)])
def test_windows_are_aligned_bottom_right(s_q: int, s_k: int, window: tuple[int, int]) -> None:
    q, k, v = qkv(s_q=s_q, s_k=s_k, heads=2, kv_heads=1, batch=1)
    left, right = window
    o, lse = flash_attn_func(q, k, v, window_size=window, return_lse=True)
    assert_close(o, q, k, v, left=left, right=right)
    expected = naive(q.double(), k.double(), v.double(), left=left, right=right)[1]
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [(3, 5), [3, 5], (3, -1)])
def test_causal_takes_the_right_side_of_a_window(window) -> None:
    q, k, v = qkv()
    assert torch.equal(
        flash_attn_func(q, k, v, causal=True, window_size=window), flash_attn_func(q, k, v, window_size=(3, 0))
    )


def test_no_window_is_none() -> None:
    q, k, v = qkv()
    assert torch.equal(flash_attn_func(q, k, v, window_size=None), flash_attn_func(q, k, v))


@pytest.mark.parametrize("scale", [None, 1, 0.3, 40.0, 2e-38])
def test_softmax_scale_is_any_positive_number(scale: float | None) -> None:
    q, k, v = qkv()
    assert_close(flash_attn_func(q, k, v, softmax_scale=scale), q, k, v, scale=scale)


@pytest.mark.parametrize("softcap", [2, 30.0])
def test_softcap_bounds_the_scores(softcap: float) -> None:
    q, k, v = qkv()
    q = q * 10
    assert_close(flash_attn_func(q, k, v, softcap=softcap, causal=True), q, k, v, softcap=softcap, right=0)


def test_large_logits() -> None:
    q, k, v = qkv()
    q = q * 30
    assert_close(flash_attn_func(q, k, v, causal=True), q, k, v, right=0)


def test_rows_without_a_visible_key_are_zero() -> None:
    q, k, v = qkv(s_q=9, s_k=4)
    o, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (o[:, :5] == 0).all() and (lse[:, :, :5] == -math.inf).all()
    assert lse[:, :, 5:].isfinite().all()


def test_zero_keys_give_zero_and_minus_infinity() -> None:
    q, k, v = qkv(s_k=0)
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    assert o.shape == q.shape and (o == 0).all()
    assert lse.shape == (2, 4, 37) and (lse == -math.inf).all()


@pytest.mark.parametrize("empty", [{"batch": 0}, {"s_q": 0}, {"heads": 0, "kv_heads": 0}, {"heads": 0}])
def test_an_empty_dimension_gives_an_empty_result(empty: dict[str, int]) -> None:
    q, k, v = qkv(**empty)
    o, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert o.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])


def test_lse_is_fp32_batch_heads_seqlen() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    assert torch.equal(o, flash_attn_func(q, k, v))
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 37) and lse.is_contiguous()
    expected = naive(q.double(), k.double(), v.double())[1]
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)


VIEWS = {
    "heads before seqlen": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a wider head dim": lambda x: torch.cat([x, x.new_full((*x.shape[:3], 24), math.nan)], -1)[..., :-24],
    "storage offset": lambda x: torch.cat([x.new_full((1, *x.shape[1:]), math.nan), x])[1:],
    "every other token": lambda x: torch.stack([x, torch.full_like(x, math.nan)], 2).flatten(1, 2)[:, ::2],
    "odd stride of a size-1 dimension": lambda x: x[:1].as_strided(x[:1].shape, (3, *x.stride()[1:])),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides_with_a_contiguous_last_dimension(view) -> None:
    tensors = [view(x) for x in qkv()]
    o = flash_attn_func(*tensors, causal=True)
    assert torch.equal(o, flash_attn_func(*(x.contiguous() for x in tensors), causal=True))
    assert o.is_contiguous()


def test_expanded_inputs() -> None:
    q, k, v = qkv(batch=1, kv_heads=1)
    q, k, v = q.expand(3, -1, -1, -1), k.expand(3, -1, 4, -1), v.expand(3, -1, 4, -1)
    assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("option", [{"pack_gqa": True}, {"pack_gqa": False}, {"family": "sm80"}, {"family": "sm90"}])
def test_how_it_runs_does_not_change_what_is_computed(option) -> None:
    q, k, v = qkv()
    assert torch.equal(flash_attn_func(q, k, v, **option), flash_attn_func(q, k, v))


def test_repeated_calls_are_bitwise_equal() -> None:
    q, k, v = qkv(dtype=torch.float16)
    first = flash_attn_func(q, k, v, causal=True)
    assert all(torch.equal(first, flash_attn_func(q, k, v, causal=True)) for _ in range(5))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_autograd_node(mode) -> None:
    q, k, v = qkv()
    expected = flash_attn_func(q, k, v)
    with mode():
        o = flash_attn_func(q.requires_grad_(), k, v)
    assert o.grad_fn is None and not o.requires_grad
    assert torch.equal(o, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "return_lse"), [("inductor", False), ("aot_eager", True)])  # inductor is slow
def test_compiles_without_a_graph_break(backend: str, return_lse: bool) -> None:
    torch._dynamo.reset()
    options = {"causal": True, "window_size": (9, 2), "softcap": 20.0, "return_lse": return_lse, "pack_gqa": True}

    def model(q: Tensor, k: Tensor, v: Tensor):
        return flash_attn_func(q * 2, k, v.contiguous(), **options)

    q, k, v = qkv()
    expected, got = model(q, k, v), torch.compile(model, backend=backend, fullgraph=True)(q, k, v)
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_one_graph_serves_all_lengths() -> None:
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    compiled(*qkv(s_q=37, s_k=61, batch=3))
    with torch.compiler.set_stance("fail_on_recompile"):
        for s_q, s_k, batch in [(5, 9, 5), (64, 130, 7)]:
            q, k, v = qkv(s_q=s_q, s_k=s_k, batch=batch)
            torch.testing.assert_close(compiled(q, k, v), model(q, k, v))


def test_exports_with_unbounded_dynamic_lengths() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, causal=True)

    s_q, s_k = torch.export.Dim("s_q"), torch.export.Dim("s_k")
    shapes = {"q": {1: s_q}, "k": {1: s_k}, "v": {1: s_k}}
    program = torch.export.export(Attention(), qkv(), dynamic_shapes=shapes).module()
    q, k, v = qkv(s_q=11, s_k=200)
    assert torch.equal(program(q, k, v), flash_attn_func(q, k, v, causal=True))
