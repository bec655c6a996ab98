"""The flash implementation behind F.scaled_dot_product_attention, as far as a machine without a GPU can tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention

from cuteflash.integrations import sdpa

OPERATOR = "aten::_scaled_dot_product_flash_attention"


def inputs(s_q: int, s_k: int, heads: int = 4, kv_heads: int = 4, contiguous: bool = True):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, s_q, heads, 16), (2, s_k, kv_heads, 16), (2, s_k, kv_heads, 16)
    tensors = (torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes)
    return [x.contiguous() if contiguous else x for x in tensors]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("s_q", "s_k"), [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_same_result_as_torch(s_q, s_k, is_causal, contiguous):
    q, k, v = inputs(s_q, s_k, contiguous=contiguous)
    output, lse, *_ = sdpa.flash_attention(q, k, v, 0.0, is_causal, scale=0.3)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert output.stride() == torch.empty_like(q).stride()
    scores = (q @ k.mT) * 0.3
    if is_causal:
        scores = scores.masked_fill(~torch.ones(s_q, s_k).tril().bool(), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_grouped_heads():
    q, k, v = inputs(6, 6, heads=4, kv_heads=2)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(sdpa.flash_attention(q, k, v)[0], expected, atol=1e-5, rtol=1e-5)


def test_results_are_as_torch_declares_them():
    q, k, v = inputs(5, 9)
    ours = sdpa.flash_attention(q, k, v)
    declared = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)))
    assert len(ours) == len(declared)
    for mine, theirs in zip(ours, declared, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        else:
            assert mine == theirs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("s_q", "s_k"), [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_same_gradients_as_torch(s_q, s_k, is_causal, contiguous):
    tensors = inputs(s_q, s_k, kv_heads=2, contiguous=contiguous)
    output, lse, *rest = sdpa.flash_attention(*tensors, 0.0, is_causal, scale=0.3)
    grad_out = output.sin()
    # As torch's derivative calls it: cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, and what dropout has.
    arguments = (grad_out, *tensors, output, lse, *rest[:4], 0.0, is_causal, *rest[4:6])
    got = sdpa.flash_attention_backward(*arguments, scale=0.3)
    leaves = [x.detach().requires_grad_() for x in tensors]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=0.3, enable_gqa=True)
    for x, mine, wanted in zip(tensors, got, torch.autograd.grad(expected, leaves, grad_out), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
        assert mine.stride() == torch.empty_like(x).stride()


def test_the_backward_takes_what_torchs_schema_says():
    schema = torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert names[6:] == [*sdpa.REST, "scale"]


def test_refusals():
    q, k, v = inputs(4, 4)
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1"):
        sdpa.flash_attention(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        sdpa.flash_attention(q, k, v, 0.0, False, True)
    output, lse, *rest = sdpa.flash_attention(q, k, v)
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1"):
        sdpa.flash_attention_backward(output, q, k, v, output, lse, *rest[:4], 0.1, False, *rest[4:6])


def test_activation_overrides_the_operator_and_restoring_gives_it_back():
    def has_cuda_kernel() -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, "CUDA"))

    before = has_cuda_kernel()
    sdpa.register()
    assert "cuteflash" in torch_attention.list_flash_attention_impls()
    assert has_cuda_kernel() == before  # registering is not activating
    torch_attention.activate_flash_attention_impl("cuteflash")
    try:
        assert torch_attention.current_flash_attention_impl() == "cuteflash"
        assert has_cuda_kernel()
    finally:
        torch_attention.restore_flash_attention_impl()
    assert torch_attention.current_flash_attention_impl() is None
    assert has_cuda_kernel() == before


def test_a_torch_without_the_registry_is_named(monkeypatch):
    monkeypatch.delattr(torch_attention, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match=f"torch {torch.__version__.split('+')[0]}"):
        sdpa.register()
