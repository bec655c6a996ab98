"""The compatible functions for packed tensors and sequences: results as the public functions', refusals by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.compat import bert_padding, flash_attn, flash_attn_interface
from tests.test_compat import REFUSED_2, REFUSED_3, check_refusals, quantised, tensors

CU_SEQLENS_Q, CU_SEQLENS_K = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 4, 6, 14]).int()


def packed(heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of three sequences, of 3, 0 and 7 queries and of 4, 2 and 8 keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = (10, heads, head_dim), (14, kv_heads, head_dim), (14, kv_heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def assert_same(theirs: Any, ours: tuple[Tensor, Tensor], *rest: None) -> None:
    assert len(theirs) == 2 + len(rest) and tuple(theirs[2:]) == rest
    assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])


OPTIONS = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "softcap": 8.0}
IN_ORDER_2 = (0.0, 0.3, True, (3, 0), 8.0, None, False)
LENGTHS = (CU_SEQLENS_Q, CU_SEQLENS_K, 7, 8)


def test_varlen_of_flash_attention_2() -> None:
    q, k, v = packed()
    ours = cuteflash.flash_attn_varlen_func(q, k, v, *LENGTHS, **OPTIONS, return_lse=True)
    assert_same(flash_attn.flash_attn_varlen_func(q, k, v, *LENGTHS, *IN_ORDER_2, True), ours, None)
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, *LENGTHS, *IN_ORDER_2), ours[0])


def test_varlen_of_flash_attention_3() -> None:
    q, k, v = packed()
    ours = cuteflash.flash_attn_varlen_func(q, k, v, *LENGTHS, **OPTIONS, return_lse=True)
    arguments = (None, None, 0.3, True, None, None, None, None, (3, 0), 0, 8.0)
    theirs = flash_attn_interface.flash_attn_varlen_func(q, k, v, *LENGTHS, *arguments, return_attn_probs=True)
    assert_same(theirs, ours)


def test_8_bits_of_flash_attention_3() -> None:
    operands, scales = quantised(*packed(), batch=3)
    ours = cuteflash.flash_attn_varlen_func(*operands, *LENGTHS, **scales, causal=True, return_lse=True)
    theirs = functools.partial(flash_attn_interface.flash_attn_varlen_func, *operands, *LENGTHS, causal=True)
    assert ours[0].dtype == torch.bfloat16
    assert_same(theirs(**scales, return_attn_probs=True), ours)
    ones = dict.fromkeys(scales, torch.ones(3, 2))
    assert torch.equal(theirs(), cuteflash.flash_attn_varlen_func(*operands, *LENGTHS, **ones, causal=True))


def test_used_lengths_of_flash_attention_3() -> None:
    q, k, v = packed()
    used = torch.tensor([2, 0, 5], dtype=torch.int32)
    ours = cuteflash.flash_attn_varlen_func(q, k, v, *LENGTHS, seqused_q=used, seqused_k=used, causal=True)
    theirs = flash_attn_interface.flash_attn_varlen_func(q, k, v, *LENGTHS, used, used, causal=True)
    assert torch.equal(theirs, ours)


def test_pages() -> None:
    q, k, v = packed()
    ours = cuteflash.flash_attn_varlen_func(q, k, v, *LENGTHS, **OPTIONS, return_lse=True)
    table = torch.tensor([[5, 2], [0, -1], [3, 6]], dtype=torch.int32)
    pages = [x.new_full((7, 4, *x.shape[1:]), float("nan")) for x in (k, v)]
    for cache, x in zip(pages, (k, v), strict=True):
        cache[5], cache[0, :2], cache[3], cache[6] = x[:4], x[4:6], x[6:10], x[10:]
    theirs = flash_attn.flash_attn_varlen_func(q, *pages, *LENGTHS, *IN_ORDER_2, True, table)
    assert_same(theirs, ours, None)
    used = torch.tensor([4, 2, 8], dtype=torch.int32)
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "softcap": 8.0, "page_table": table}
    theirs = flash_attn_interface.flash_attn_varlen_func(
        q, *pages, CU_SEQLENS_Q, None, 7, 8, seqused_k=used, **options, return_attn_probs=True
    )
    assert_same(theirs, ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(3, 2)}, "block_table.dtype is torch.float32"),
        ({"return_attn_probs": 2}, "return_attn_probs is 2"),
        ({"v": torch.zeros(7, 4, 2, 8)[1:]}, r"v.shape\[0\] \(num_pages\) is 6; allowed: 7, that of k$"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k is a NoneType; allowed: a torch.Tensor"),
        ({"cu_seqlens_k": CU_SEQLENS_Q[:3]}, r"cu_seqlens_k.diff\(\).shape is \(2,\); allowed: \(3,\), the batch"),
        ({"cu_seqlens_k": CU_SEQLENS_Q.flip(0)}, r"cu_seqlens_k.diff\(\)\[0\] is -"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_of_pages_have_the_names_of_the_call(change: dict[str, Any], message: str) -> None:
    q, pages, table = torch.zeros(13, 4, 8), torch.zeros(7, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int32)
    arguments = {"q": q, "k": pages, "v": pages, "block_table": table}
    arguments |= dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), LENGTHS, strict=True))
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        flash_attn.flash_attn_varlen_func(**(arguments | change))


@pytest.mark.parametrize("module", [cuteflash, flash_attn_interface])
def test_lengths_of_pages_are_given_once(module: Any) -> None:
    """FlashAttention-3 refuses `cu_seqlens_k` with pages, too: of two lengths one would be ignored."""
    q, pages, table = torch.zeros(13, 4, 8), torch.zeros(7, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int32)
    used = torch.ones(3, dtype=torch.int32)
    with pytest.raises(TypeError, match="cu_seqlens_k and seqused_k are both given; allowed with page_table: one of"):
        module.flash_attn_varlen_func(q, pages, pages, *LENGTHS, seqused_k=used, page_table=table)
    with pytest.raises(ValueError, match=r"^seqused_k\[0\] is 9; allowed: 0 to 8"):
        module.flash_attn_varlen_func(
            q, pages, pages, LENGTHS[0], None, *LENGTHS[2:], seqused_k=used * 9, page_table=table
        )


@pytest.mark.parametrize("module", [cuteflash, flash_attn])
def test_errors_of_packed_qkv_name_its_one_vector(module: Any) -> None:
    qkv = torch.zeros(14, 3, 2, 8)
    with pytest.raises(TypeError, match=r"^cu_seqlens is a list"):
        module.flash_attn_varlen_qkvpacked_func(qkv, [0, 14], 14)
    with pytest.raises(ValueError, match=r"^max_seqlen is 3; allowed: 8 or more, the length of sequence 2"):
        module.flash_attn_varlen_qkvpacked_func(qkv, CU_SEQLENS_K, 3)


def test_packed_tensors() -> None:
    q, k, v = tensors(7, 7, kv_heads=4)
    ours = cuteflash.flash_attn_func(q, k, v, **OPTIONS, return_lse=True)
    kv, qkv = torch.stack((k, v), dim=2), torch.stack((q, k, v), dim=2)
    assert_same(flash_attn.flash_attn_kvpacked_func(q, kv, *IN_ORDER_2, True), ours, None)
    assert_same(flash_attn.flash_attn_qkvpacked_func(qkv, *IN_ORDER_2, True), ours, None)


def test_packed_tensors_of_packed_sequences() -> None:
    q, k, v = packed()
    ours = cuteflash.flash_attn_varlen_func(q, k, v, *LENGTHS, **OPTIONS, return_lse=True)
    kv = torch.stack((k, v), dim=1)
    assert_same(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *LENGTHS, *IN_ORDER_2, True), ours, None)
    lengths = CU_SEQLENS_K, CU_SEQLENS_K, 8, 8
    ours = cuteflash.flash_attn_varlen_func(k, k, v, *lengths, **OPTIONS, return_lse=True)
    qkv = torch.stack((k, k, v), dim=1)
    theirs = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, CU_SEQLENS_K, 8, *IN_ORDER_2, True)
    assert_same(theirs, ours, None)


def test_a_head_dim_between_multiples_of_8() -> None:
    q, k, v = packed(head_dim=13)
    wide = [torch.nn.functional.pad(x, (0, 3)) for x in (q, k, v)]
    expected = cuteflash.flash_attn_varlen_func(*wide, *LENGTHS, softmax_scale=13**-0.5)
    kv = torch.stack((k, v), dim=1)
    for theirs in (
        flash_attn.flash_attn_varlen_func(q, k, v, *LENGTHS),
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *LENGTHS),
    ):
        assert torch.equal(theirs, expected[..., :13])


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (flash_attn.flash_attn_kvpacked_func, REFUSED_2),
        (flash_attn.flash_attn_qkvpacked_func, REFUSED_2),
        (flash_attn.flash_attn_varlen_func, REFUSED_2),
        (flash_attn.flash_attn_varlen_kvpacked_func, REFUSED_2),
        (flash_attn.flash_attn_varlen_qkvpacked_func, REFUSED_2),
        (flash_attn_interface.flash_attn_varlen_func, REFUSED_3),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_not_there_yet_is_refused_by_name(function: Any, refused: dict[str, Any]) -> None:
    check_refusals(function, refused)


def test_padding_there_and_back() -> None:
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask)
    assert torch.equal(rows, hidden[mask.bool()]) and indices.tolist() == [0, 1, 5, 6, 7]
    assert cu_seqlens.tolist() == [0, 2, 5] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and used.tolist() == [2, 3]
    assert torch.equal(bert_padding.pad_input(rows, indices, 2, 4), hidden * mask[..., None])


def test_rows_of_several_sequences_are_unpadded() -> None:
    hidden = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    assert torch.equal(rows, torch.cat((hidden[0, :5], hidden[2]))) and indices.tolist() == [*range(5), *range(12, 18)]
    assert cu_seqlens.tolist() == [0, 2, 5, 11] and cu_seqlens.dtype == torch.int32 and longest == 6


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_gradients(module: Any) -> None:
    """Those of the public functions, also through a padded head dim."""
    inputs = [x.double().requires_grad_() for x in tensors(3, 4, head_dim=8, heads=2, kv_heads=1)]
    assert torch.autograd.gradcheck(lambda *x: module.flash_attn_func(*x, causal=True, deterministic=True), inputs)
    inputs = [x.double().requires_grad_() for x in tensors(3, 4, head_dim=5, heads=2, kv_heads=1)]
    assert torch.autograd.gradcheck(lambda *x: module.flash_attn_func(*x, causal=True), inputs)
