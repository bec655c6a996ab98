"""The packed forms of the functions, and padded batches to packed sequences and back."""

from __future__ import annotations

import pytest
import torch

import cuteflash
from tests.test_packed import inputs, int32


@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True}])
def test_packed_forms_are_views(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 4, 16, generator=generator).unbind()
    expected = cuteflash.flash_attn_func(q, k, v, **options)
    seen = []
    original = cuteflash.packing.flash_attn_func
    monkeypatch.setattr(cuteflash.packing, "flash_attn_func", lambda *x, **more: seen.append(x) or original(*x, **more))
    qkv, kv = torch.stack([q, k, v], dim=2), torch.stack([k, v], dim=2)
    torch.testing.assert_close(cuteflash.flash_attn_qkvpacked_func(qkv, **options), expected, rtol=0, atol=0)
    torch.testing.assert_close(cuteflash.flash_attn_kvpacked_func(q, kv, **options), expected, rtol=0, atol=0)
    assert all(x._base is qkv for x in seen[0]) and all(x._base is kv for x in seen[1][1:])


@pytest.mark.parametrize("options", [{}, {"causal": True, "return_lse": True, "deterministic": True}])
def test_packed_forms_of_packed_sequences(options: dict[str, bool]) -> None:
    q, k, v, cu, _ = inputs(heads=2, kv_heads=2, d_v=16, lengths=((3, 0, 7), (3, 0, 7)))
    expected = cuteflash.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **options)
    qkv, kv = torch.stack([q, k, v], dim=1), torch.stack([k, v], dim=1)
    for result in (
        cuteflash.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, **options),
        cuteflash.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7, **options),
    ):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_packed_dimension_is_checked() -> None:
    with pytest.raises(
        ValueError, match=r"qkv.shape is \(2, 5, 2, 4, 16\); allowed: \(batch, seqlen, 3, heads, head_d"
    ):
        cuteflash.flash_attn_qkvpacked_func(torch.empty(2, 5, 2, 4, 16))
    with pytest.raises(ValueError, match=r"kv.shape is \(5, 3, 4, 16\); allowed: \(total, 2, kv_heads, head_dim\)"):
        cuteflash.flash_attn_varlen_kvpacked_func(torch.empty(5, 4, 16), torch.empty(5, 3, 4, 16), int32(0), int32(0))
    with pytest.raises(TypeError, match=r"qkv is a list; allowed: a torch\.Tensor"):
        cuteflash.flash_attn_varlen_qkvpacked_func([], int32(0))  # type: ignore[call-overload]


MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]])
UNUSED = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32], ids=str)
def test_unpadding_takes_the_tokens_that_count(dtype: torch.dtype) -> None:
    hidden = torch.arange(12.0).view(3, 4, 1).expand(3, 4, 2)
    tokens, indices, cu_seqlens, longest, used = cuteflash.unpad_input(hidden, MASK.to(dtype))
    assert tokens[:, 0].tolist() == indices.tolist() == [0, 1, 2, 9, 10]
    assert tokens.shape == (5, 2) and cu_seqlens.dtype == used.dtype == torch.int32
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 3, 5], 3, [3, 0, 2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_unused_tokens_keep_their_place(dtype: torch.dtype) -> None:
    hidden = torch.arange(12.0).view(3, 4)
    tokens, indices, cu_seqlens, longest, used = cuteflash.unpad_input(hidden, MASK.to(dtype), UNUSED.to(dtype))
    assert tokens.tolist() == indices.tolist() == [0, 1, 2, 3, 4, 9, 10, 11]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 5, 8], 4, [3, 0, 2])


def test_padding_is_the_inverse_and_both_have_gradients() -> None:
    hidden = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        tokens, indices, *_ = cuteflash.unpad_input(x, MASK)
        return cuteflash.pad_input(tokens * 3, indices, 3, 4)

    assert torch.equal(there_and_back(hidden), hidden * MASK[..., None] * 3)
    assert torch.autograd.gradcheck(there_and_back, hidden)


def test_an_empty_batch_has_no_tokens() -> None:
    tokens, indices, cu_seqlens, longest, used = cuteflash.unpad_input(torch.empty(0, 4, 2), torch.empty(0, 4))
    assert tokens.shape == (0, 2) and (cu_seqlens.tolist(), longest, used.tolist()) == ([0], 0, [])
    assert cuteflash.pad_input(tokens, indices, 0, 4).shape == (0, 4, 2)


def test_a_mask_of_another_shape_is_refused() -> None:
    for masks, name in (((MASK.T,), "attention_mask"), ((MASK, MASK[:, :3]), "unused_mask")):
        with pytest.raises(ValueError, match=rf"{name}.shape is .*; allowed: \(3, 4\), \(batch, seqlen\)"):
            cuteflash.unpad_input(torch.empty(3, 4, 2), *masks)
