"""Attention of 16-bit tensors through FP8 in one call, on Hopper: as exact as FP8 is, eager, compiled and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash import Fp8, flash_attn_func
from tests.gpu.checks import SMALL_LLAMA, Case, poisoned, reference, rms

pytestmark = pytest.mark.gpu

ROUNDING = 0.08  # relative, of normal values: 0.026 each of V and P, 0.037 of scores near 1, together 0.052
CASES = {
    "full": Case(head_dim=128, seqlen_q=300, seqlen_k=520, heads=8, kv_heads=2),
    "causal": Case(head_dim=64, causal=True, seqlen_q=257, heads=4),
    "empty rows": Case(head_dim=64, causal=True, seqlen_q=300, seqlen_k=140, heads=4, kv_heads=1),
    "window": Case(head_dim=96, window=(70, 30), seqlen_q=200, dtype="fp16"),
    "wide": Case(head_dim=256, seqlen_q=130, seqlen_k=1100, heads=2),
    "latent": Case(head_dim=192, head_dim_v=128, causal=True, seqlen_q=260, heads=2),
    "one query": Case(head_dim=128, seqlen_q=1, seqlen_k=700, heads=8, kv_heads=2),
}


def in_two_calls(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    some = cuteflash.quantize_qkv(q, k, v, transpose_v=True, smooth_v=True)
    assert some.vt is not None
    scales = {"q_descale": some.q_descale, "k_descale": some.k_descale, "v_descale": some.v_descale}
    formats = {"transposed_v": True, "out_dtype": q.dtype, "v_mean": some.v_mean}
    return flash_attn_func(some.q, some.k, some.vt, **scales, **formats, **options)


@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_as_exact_as_8_bits_are(case: str, mean: float, hopper: torch.device) -> None:
    one = CASES[case]
    q, k, v = one.inputs(hopper)
    v = v + mean
    exact, exact_lse = reference(q, k, v, one, torch.float64)
    options = one.options() | {"return_lse": True}
    with poisoned():
        out, lse = flash_attn_func(q, k, v, fp8=True, **options)
    assert out.dtype == q.dtype
    seen = (exact_lse > float("-inf")).mT[..., None]
    assert rms(out.double() - exact) <= ROUNDING * rms((exact - mean) * seen) + 2**-8 * rms(exact)
    assert ((lse - exact_lse).nan_to_num(0.0).abs() <= 0.3).all()
    torch.testing.assert_close((out, lse), in_two_calls(q, k, v, **options))


def test_a_rotation_leaves_scores_as_they_are(hopper: torch.device) -> None:
    case = CASES["full"]
    q, k, v = case.inputs(hopper)
    exact, _ = reference(q, k, v, case, torch.float64)
    for hadamard in (32, 128):
        out = flash_attn_func(q, k, v, fp8=Fp8(hadamard), **case.options())
        assert rms(out.double() - exact) <= ROUNDING * rms(exact)


def test_slices_of_a_fused_projection(hopper: torch.device) -> None:
    qkv = torch.randn(2, 200, 3, 4, 64, device=hopper, dtype=torch.bfloat16)
    views = qkv.unbind(2)
    out = cuteflash.flash_attn_qkvpacked_func(qkv, causal=True, fp8=True)
    assert torch.equal(out, flash_attn_func(*(x.contiguous() for x in views), causal=True, fp8=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool, hopper: torch.device) -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v * 2, causal=True, fp8=Fp8(hadamard=64)) * 0.5

    backend = "inductor" if hopper.type == "cuda" else "aot_eager"
    compiled = torch.compile(scaled, fullgraph=True, dynamic=dynamic, backend=backend)
    for seqlen in (96, 160):
        tensors = Case(seqlen_q=seqlen, heads=4, kv_heads=2).inputs(hopper)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), scaled(*tensors))


def test_a_graph_replays_with_other_values(hopper_gpu: torch.device) -> None:
    q, k, v = Case(seqlen_q=256, heads=4, kv_heads=2).inputs(hopper_gpu)
    flash_attn_func(q, k, v, causal=True, fp8=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attn_func(q, k, v, causal=True, fp8=True)
    q.copy_(torch.randn_like(q) * 3)
    v.copy_(torch.randn_like(v) + 5)
    graph.replay()
    assert torch.equal(captured, flash_attn_func(q, k, v, causal=True, fp8=True))


def test_gradients_are_refused(hopper: torch.device) -> None:
    q, k, v = Case(seqlen_q=64).inputs(hopper)
    with pytest.raises(NotImplementedError, match=r"k.requires_grad is True"):
        flash_attn_func(q, k.requires_grad_(), v, fp8=True)


def test_a_language_model_is_close_to_eager(hopper: torch.device) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    from cuteflash.integrations import transformers as integration

    integration.register()
    config = transformers.LlamaConfig(**SMALL_LLAMA)
    tokens = torch.randint(0, 128, (2, 300), device=hopper)
    logits = {}
    for name in ("eager", integration.FP8_NAME):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=torch.bfloat16)
        with torch.no_grad():
            logits[name] = model.to(hopper).eval()(tokens).logits.float()
    error = logits[integration.FP8_NAME] - logits["eager"]
    assert rms(error) <= 0.1 * rms(logits["eager"])
