"""Bad input that no other file is about: errors that name the caller's argument, whatever it was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.compat import bert_padding, flash_attn, flash_attn_interface

HUGE = 10**400  # more than an operator's int, or a float, holds
E4M3 = torch.float8_e4m3fn


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attend(**changed: Any) -> Any:
    return cuteflash.flash_attn_func(*[half(1, 2, 1, 32)] * 3, **changed)


def decode_latents(cache: Tensor, **changed: Any) -> Any:
    return cuteflash.flash_mla_decode(half(2, 1, 4, 576), cache, ints(1, 2), **changed)


def append_latents(**changed: Any) -> Any:
    given: dict[str, Any] = {"kv_cache": half(2, 64, 1, 576), "rows": half(2, 1, 576), "cache_seqlens": ints(1, 2)}
    return cuteflash.append_latents(**given | changed)


def quantize(**changed: Any) -> Any:
    return cuteflash.quantize_qkv(*[half(1, 2, 1, 32)] * 3, **changed)


def schedule(**changed: Any) -> Any:
    sizes = {"batch_size": 1, "max_seqlen_q": 1, "max_seqlen_k": 9, "num_heads_q": 1, "num_heads_kv": 1, "headdim": 32}
    return cuteflash.get_scheduler_metadata(**{**sizes, "cache_seqlens": ints(3)} | changed)


def combine(**changed: Any) -> Any:
    given = {"out_partial": torch.zeros(2, 3, 1, 8), "lse_partial": torch.zeros(2, 3, 1)}
    return cuteflash.flash_attn_combine(**given | changed)


def pad(**changed: Any) -> Any:
    return cuteflash.pad_input(
        **{"hidden_states": torch.ones(2, 4), "indices": torch.tensor([0, 5]), "batch": 2, "seqlen": 3} | changed
    )


def unpad(**changed: Any) -> Any:
    return cuteflash.unpad_input(**{"hidden_states": torch.ones(2, 3, 4), "attention_mask": torch.ones(2, 3)} | changed)


def pick(**changed: Any) -> Any:
    return bert_padding.index_first_axis(**{"input": torch.ones(3, 4), "indices": torch.tensor([0, 2])} | changed)


def put(**changed: Any) -> Any:
    given = {"values": torch.ones(2, 4), "indices": torch.tensor([0, 2]), "first_axis_dim": 3}
    return bert_padding.index_put_first_axis(**given | changed)


def unpad_concatenated(**changed: Any) -> Any:
    given = {"hidden_states": torch.ones(2, 3, 4), "attention_mask_in_length": torch.tensor([[1, 2, 0], [3, 0, 0]])}
    return bert_padding.unpad_input_for_concatenated_sequences(**given | changed)


def rotate(**changed: Any) -> Any:
    return cuteflash.apply_rotary(torch.zeros(1, 2, 1, 32), torch.ones(9, 8), torch.ones(9, 8), **changed)


def packed(**changed: Any) -> Any:
    ends = {"cu_seqlens_q": ints(0, 2, 4), "cu_seqlens_k": ints(0, 2, 4)}
    return cuteflash.flash_attn_varlen_func(*[half(4, 1, 32)] * 3, **ends | changed)


def with_qv(**changed: Any) -> Any:
    cache = half(2, 8, 1, 576)
    given = {"q": half(2, 1, 4, 64), "k_cache": cache[..., 512:], "v_cache": cache[..., :512], "qv": half(2, 1, 4, 512)}
    return flash_attn_interface.flash_attn_with_kvcache(**given | changed)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "out_dtype of no type that hashes": (lambda: attend(fp8=True, out_dtype=[]), TypeError, "out_dtype is []"),
    "dtype of no type that hashes": (lambda: quantize(dtype=[]), TypeError, "dtype is []"),
    "huge block": (lambda: quantize(hadamard=HUGE), ValueError, "hadamard is "),
    "huge width": (lambda: decode_latents(half(2, 64, 1, 576), head_dim_v=HUGE), ValueError, "head_dim_v is "),
    "huge position": (lambda: rotate(seqlen_offsets=HUGE), ValueError, "seqlen_offsets is "),
    "huge capacity": (lambda: schedule(max_seqlen_k=HUGE), ValueError, "max_seqlen_k is "),
    "too many heads": (lambda: schedule(num_heads_q=2**40), ValueError, "num_heads_q is 1099511627776"),
    "scale with a gradient": (
        lambda: cuteflash.flash_attn_func(
            *[half(1, 2, 1, 32).to(E4M3)] * 3,
            q_descale=torch.ones(1, 1),
            k_descale=torch.ones(1, 1, requires_grad=True),
            v_descale=torch.ones(1, 1),
        ),
        NotImplementedError,
        "k_descale.requires_grad is True",
    ),
    "latents' scale of 0": (
        lambda: decode_latents(half(2, 64, 1, 576).to(E4M3), descale=torch.zeros(())),
        ValueError,
        "descale is 0.0; allowed: positive",
    ),
    "latents' scale of NaN": (
        lambda: decode_latents(half(2, 64, 1, 576).to(E4M3), descale=torch.tensor([1.0, torch.nan])),
        ValueError,
        "descale[1] is nan; allowed: positive",
    ),
    "scale of appended latents": (
        lambda: append_latents(kv_cache=half(2, 64, 1, 576).to(E4M3), descale=torch.tensor([1.0, -1.0])),
        ValueError,
        "descale[1] is -1.0",
    ),
    "strides of latents": (
        lambda: append_latents(kv_cache=half(2, 64, 1, 2 * 576)[..., ::2]),
        ValueError,
        "kv_cache.stride(3) is 2",
    ),
    "strides of rows": (lambda: append_latents(rows=half(2, 1, 577)[..., 1:]), ValueError, "rows.stride(0) is 577"),
    "integer rows": (
        lambda: append_latents(
            kv_cache=half(2, 64, 1, 576).to(E4M3), rows=half(2, 1, 576).int(), descale=torch.ones(())
        ),
        TypeError,
        "rows.dtype is torch.int32",
    ),
    "rows elsewhere": (lambda: append_latents(rows=half(2, 1, 576).to("meta")), ValueError, "rows.device is meta"),
    "sparse latents": (
        lambda: append_latents(kv_cache=half(2, 64, 1, 576).to_sparse()),
        NotImplementedError,
        "kv_cache.layout is torch.sparse_coo",
    ),
    "pages of no row": (
        lambda: append_latents(kv_cache=half(2, 0, 1, 576), page_table=torch.zeros(2, 1, dtype=torch.int32)),
        ValueError,
        "kv_cache.shape[1] (page_size) is 0",
    ),
    "sparse parts": (
        lambda: combine(out_partial=torch.zeros(2, 3, 1, 8).to_sparse()),
        NotImplementedError,
        "out_partial.layout",
    ),
    "result with a gradient": (
        lambda: combine(out=torch.zeros(3, 1, 8, requires_grad=True)),
        ValueError,
        "out requires grad",
    ),
    "padding of no tensor": (lambda: pad(hidden_states=None), TypeError, "hidden_states is a NoneType"),
    "padding to too small a batch": (lambda: pad(batch=1), ValueError, "indices go from 0 to 5; allowed: 0 to 2"),
    "padding to a negative batch": (lambda: pad(batch=-1), ValueError, "batch is -1"),
    "padding to a length of no int": (lambda: pad(seqlen=1.5), TypeError, "seqlen is 1.5"),
    "places of another number": (lambda: pad(indices=torch.tensor([0])), ValueError, "indices.shape is (1,)"),
    "places of floats": (lambda: pad(indices=torch.zeros(2)), TypeError, "indices.dtype is torch.float32"),
    "unpadding of no tensor": (lambda: unpad(hidden_states=[]), TypeError, "hidden_states is a list"),
    "unpadding of a vector": (lambda: unpad(hidden_states=torch.ones(2)), ValueError, "hidden_states.shape is (2,)"),
    "mask of no tensor": (lambda: unpad(attention_mask=None), TypeError, "attention_mask is a NoneType"),
    "mask elsewhere": (
        lambda: unpad(attention_mask=torch.ones(2, 3, device="meta")),
        ValueError,
        "attention_mask.device is meta",
    ),
    "rows of no tensor": (lambda: pick(input=None), TypeError, "input is a NoneType"),
    "sparse rows": (lambda: pick(input=torch.ones(3, 4).to_sparse()), NotImplementedError, "input.layout is torch.s"),
    "rows of a number": (lambda: pick(input=torch.ones(())), ValueError, "input.shape is (); allowed: (rows, ...)"),
    "rows by a list": (lambda: pick(indices=[0, 2]), TypeError, "indices is a list"),
    "rows by a mask": (lambda: pick(indices=torch.ones(3).bool()), TypeError, "indices.dtype is torch.bool; allowed:"),
    "rows by a table": (
        lambda: pick(indices=torch.ones(2, 1).int()),
        ValueError,
        "indices.shape is (2, 1); allowed: o",
    ),
    "rows by indices elsewhere": (
        lambda: pick(indices=torch.tensor([0]).to("meta")),
        ValueError,
        "indices.device is m",
    ),
    "rows that there are not": (
        lambda: pick(indices=torch.tensor([1, 3])),
        ValueError,
        "indices go from 1 to 3; allowed: 0 to 2, input.shape[0] - 1",
    ),
    "values of no tensor": (lambda: put(values=[1]), TypeError, "values is a list"),
    "values of another number": (
        lambda: put(indices=torch.tensor([0])),
        ValueError,
        "indices.shape is (1,); allowed: (2,), one for each row of values",
    ),
    "values at places of floats": (lambda: put(indices=torch.ones(2)), TypeError, "indices.dtype is torch.float32"),
    "values at places elsewhere": (lambda: put(values=torch.ones(2, 4).to("meta")), ValueError, "that of values"),
    "values into too few rows": (
        lambda: put(first_axis_dim=2),
        ValueError,
        "indices go from 0 to 2; allowed: 0 to 1, first_axis_dim - 1",
    ),
    "values into no int of rows": (
        lambda: put(first_axis_dim=3.0),
        TypeError,
        "first_axis_dim is 3.0; allowed: an int",
    ),
    "values into fewer rows than none": (lambda: put(first_axis_dim=-1), ValueError, "first_axis_dim is -1; allowed"),
    "lengths of no tensor": (
        lambda: unpad_concatenated(attention_mask_in_length=[[1]]),
        TypeError,
        "attention_mask_in_length is a list",
    ),
    "lengths of other rows": (
        lambda: unpad_concatenated(attention_mask_in_length=torch.ones(2, 2).int()),
        ValueError,
        "attention_mask_in_length.shape is (2, 2); allowed: (2, 3)",
    ),
    "lengths elsewhere": (
        lambda: unpad_concatenated(hidden_states=torch.ones(2, 3, 4).to("meta")),
        ValueError,
        "attention_mask_in_length.device is cpu; allowed: meta",
    ),
    "lengths of more than a row": (
        lambda: unpad_concatenated(attention_mask_in_length=torch.tensor([[1, 2, 0], [3, 1, 0]])),
        ValueError,
        "attention_mask_in_length[1] has 4 tokens; allowed: up to 3",
    ),
    "a negative length": (
        lambda: unpad_concatenated(attention_mask_in_length=torch.tensor([[1, 2, 0], [3, -1, 0]])),
        ValueError,
        "attention_mask_in_length has a length of -1",
    ),
    "a sequence beyond its tensor, with limits": (
        lambda: packed(cu_seqlens_q=ints(0, 2, 9), max_seqlen_q=2, max_seqlen_k=2),
        ValueError,
        "cu_seqlens_q[-1] is 9",
    ),
    "more rows used than there are, with limits": (
        lambda: packed(seqused_k=ints(1, 7), max_seqlen_k=2),
        ValueError,
        "seqused_k[1] is 7",
    ),
    "a sparse tensor where another library's function copies": (
        lambda: flash_attn.flash_attn_func(half(1, 2, 1, 32).to_sparse(), *[half(1, 2, 1, 32)] * 2),
        NotImplementedError,
        "q.layout is torch.sparse_coo",
    ),
    "rows of qv that are not q's": (lambda: with_qv(qv=half(2, 1, 3, 512)), ValueError, "qv.shape is (2, 1, 3, 512)"),
    "dtype of qv": (lambda: with_qv(qv=half(2, 1, 4, 512).half()), TypeError, "qv.dtype is torch.float16"),
    "qv elsewhere": (lambda: with_qv(qv=half(2, 1, 4, 512).to("meta")), ValueError, "qv.device is meta"),
    "a head dim beyond the largest": (
        lambda: flash_attn.flash_attn_func(*[half(1, 2, 1, 260)] * 3),
        ValueError,
        "q.shape[3] (head_dim) is 260",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("splits", [2**40, HUGE])
def test_a_limit_of_splits_may_be_any_int(splits: int) -> None:
    assert attend(num_splits=splits).shape == attend().shape
    assert packed(num_splits=splits).shape == packed().shape


def test_a_mask_counts_tokens_whatever_its_numbers() -> None:
    tokens, indices, ends, longest, used = unpad(
        attention_mask=torch.tensor([[1, 2, 0], [0, 0, 0]]), unused_mask=torch.tensor([[0, 1, 1], [1, 0, 0]])
    )
    assert indices.tolist() == [0, 1, 2, 3] and tokens.shape == (4, 4)
    assert (ends.tolist(), longest, used.tolist()) == ([0, 3, 4], 3, [2, 0])


def test_places_of_32_bits() -> None:
    torch.testing.assert_close(pad(indices=ints(0, 5)), pad())
