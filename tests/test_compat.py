"""The compatible functions: signatures as literal tables, results as the public functions', refusals by name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import flash_attn_func, flash_attn_with_kvcache
from cuteflash.compat import bert_padding, flash_attn, flash_attn_interface

REQUIRED = inspect.Parameter.empty
WINDOW = (-1, -1)

TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": WINDOW,
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
DESCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
FLASH_ATTENTION_2: dict[str, dict[str, Any]] = {
    "flash_attn_func": {**dict.fromkeys(("q", "k", "v"), REQUIRED), **TAIL},
    "flash_attn_kvpacked_func": {**dict.fromkeys(("q", "kv"), REQUIRED), **TAIL},
    "flash_attn_qkvpacked_func": {"qkv": REQUIRED, **TAIL},
    "flash_attn_varlen_func": {
        **dict.fromkeys(("q", "k", "v", *LENGTHS), REQUIRED),
        **TAIL,
        "block_table": None,
    },
    "flash_attn_varlen_kvpacked_func": {**dict.fromkeys(("q", "kv", *LENGTHS), REQUIRED), **TAIL},
    "flash_attn_varlen_qkvpacked_func": {**dict.fromkeys(("qkv", "cu_seqlens", "max_seqlen"), REQUIRED), **TAIL},
    "flash_attn_with_kvcache": {
        **dict.fromkeys(("q", "k_cache", "v_cache"), REQUIRED),
        **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"), None),
        **dict.fromkeys(("cache_leftpad", "block_table", "softmax_scale"), None),
        "causal": False,
        "window_size": WINDOW,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}
BERT_PADDING: dict[str, dict[str, Any]] = {
    "index_first_axis": {"input": REQUIRED, "indices": REQUIRED},
    "index_put_first_axis": {"values": REQUIRED, "indices": REQUIRED, "first_axis_dim": REQUIRED},
    "pad_input": dict.fromkeys(("hidden_states", "indices", "batch", "seqlen"), REQUIRED),
    "unpad_input": {"hidden_states": REQUIRED, "attention_mask": REQUIRED, "unused_mask": None},
    "unpad_input_for_concatenated_sequences": {"hidden_states": REQUIRED, "attention_mask_in_length": REQUIRED},
}
TAIL_3 = {
    "window_size": WINDOW,
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": False,
    "sm_margin": 0,
    "return_attn_probs": False,
}
FLASH_ATTENTION_3: dict[str, dict[str, Any]] = {
    "flash_attn_combine": {"out_partial": REQUIRED, "lse_partial": REQUIRED, "out": None, "out_dtype": None},
    "flash_attn_func": {
        **dict.fromkeys(("q", "k", "v"), REQUIRED),
        "softmax_scale": None,
        "causal": False,
        "qv": None,
        **DESCALES,
        **TAIL_3,
        "s_aux": None,
    },
    "flash_attn_qkvpacked_func": {
        "qkv": REQUIRED,
        "softmax_scale": None,
        "causal": False,
        **DESCALES,
        "window_size": WINDOW,
        "attention_chunk": 0,
        "softcap": 0.0,
        "deterministic": False,
        "num_heads_q": None,
        "sm_margin": 0,
        "return_attn_probs": False,
    },
    "flash_attn_varlen_func": {
        **dict.fromkeys(("q", "k", "v", *LENGTHS), REQUIRED),
        **dict.fromkeys(("seqused_q", "seqused_k", "softmax_scale"), None),
        "causal": False,
        "qv": None,
        **DESCALES,
        **TAIL_3,
        "page_table": None,
        "s_aux": None,
        "q_v": None,
    },
    "flash_attn_with_kvcache": {
        **dict.fromkeys(("q", "k_cache", "v_cache"), REQUIRED),
        **dict.fromkeys(("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"), None),
        **dict.fromkeys(("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q"), None),
        "rotary_seqlens": None,
        **DESCALES,
        "softmax_scale": None,
        "causal": False,
        "window_size": WINDOW,
        "attention_chunk": 0,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "scheduler_metadata": None,
        "num_splits": 0,
        "pack_gqa": None,
        "sm_margin": 0,
        "return_softmax_lse": False,
    },
    "get_scheduler_metadata": {
        **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv"), REQUIRED),
        **dict.fromkeys(("headdim", "cache_seqlens"), REQUIRED),
        "qkv_dtype": torch.bfloat16,
        **dict.fromkeys(("headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size"), None),
        "max_seqlen_k_new": 0,
        "causal": False,
        "window_size": WINDOW,
        "attention_chunk": 0,
        "has_softcap": False,
        "num_splits": 0,
        "pack_gqa": None,
        "sm_margin": 0,
        "total_q": None,
    },
}


def tensors(s_q: int = 5, s_k: int = 7, head_dim: int = 16, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, s_q, heads, head_dim), (2, s_k, kv_heads, head_dim), (2, s_k, kv_heads, head_dim)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize(
    ("module", "table"),
    [(flash_attn, FLASH_ATTENTION_2), (flash_attn_interface, FLASH_ATTENTION_3), (bert_padding, BERT_PADDING)],
    ids=["FlashAttention-2", "FlashAttention-3", "bert_padding"],
)
def test_signatures(module: Any, table: dict[str, dict[str, Any]]) -> None:
    assert sorted(module.__all__) == sorted(table)
    for name, arguments in table.items():
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        assert [(x.name, x.default) for x in parameters] == list(arguments.items()), name
        assert {x.kind for x in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, name


def test_flash_attention_2_in_its_order() -> None:
    q, k, v = tensors()
    ours = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0), softcap=8.0, return_lse=True)
    theirs = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, -1), 8.0, None, False, True)
    assert len(theirs) == 3 and theirs[2] is None
    assert torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (3, -1), 8.0), ours[0])


def test_flash_attention_3_in_its_order() -> None:
    q, k, v = tensors()
    ours = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0), softcap=8.0, return_lse=True)
    arguments = (0.3, True, None, None, None, None, (3, 0), 0, 8.0, 1, False, False, 0)
    theirs = flash_attn_interface.flash_attn_func(q, k, v, *arguments, True)
    assert len(theirs) == 2 and torch.equal(theirs[0], ours[0]) and torch.equal(theirs[1], ours[1])
    assert torch.equal(flash_attn_interface.flash_attn_func(q, k, v, *arguments), ours[0])


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_a_whole_cache(module: Any) -> None:
    q, k, v = tensors()
    ours = flash_attn_func(q, k, v, causal=True, return_lse=True)
    out, lse = module.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True)
    torch.testing.assert_close((out, lse), ours)
    torch.testing.assert_close(module.flash_attn_with_kvcache(q, k, v, causal=True), ours[0])


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_cache_that_grows_in_the_order_of_both(is_paged: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = tensors(3, 3, head_dim=16)
    caches = [torch.randn(2, 16, 2, 16, generator=generator) for _ in range(2)]
    lengths = torch.tensor([4, 13], dtype=torch.int32)
    cos, sin = (torch.randn(16, 8, generator=generator) for _ in range(2))
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4) if is_paged else None
    if is_paged:
        caches = [x.reshape(8, 4, 2, 16) for x in caches]
    mine, two, three = ([x.clone() for x in caches] for _ in range(3))
    ours = flash_attn_with_kvcache(
        q, *mine, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, page_table=table, softmax_scale=0.3,
        window_size=(5, 1), softcap=8.0, rotary_interleaved=False, return_lse=True,
    )  # fmt: skip
    tokens = (k, v, cos, sin, lengths, None, None, table)
    tail = (0.3, False, (5, 1), 8.0, False, None, 2, True)
    theirs = flash_attn.flash_attn_with_kvcache(q, *two, *tokens, *tail)
    assert all(torch.equal(a, b) for a, b in zip((*theirs, *two), (*ours, *mine), strict=True))
    tokens = (k, v, None, cos, sin, lengths, None, None, table, None, None, 3, None)
    tail = (None, None, None, 0.3, False, (5, 1), 0, 8.0, False, None, 2, None, 0, True)
    theirs = flash_attn_interface.flash_attn_with_kvcache(q, *three, *tokens, *tail)
    assert all(torch.equal(a, b) for a, b in zip((*theirs, *three), (*ours, *mine), strict=True))
    assert not torch.equal(mine[0], caches[0])


def test_chunks_of_flash_attention_3() -> None:
    q, k, v = tensors()
    ours = flash_attn_func(q, k, v, causal=True, attention_chunk=3)
    assert torch.equal(flash_attn_interface.flash_attn_func(q, k, v, causal=True, attention_chunk=3), ours)
    theirs = flash_attn_interface.flash_attn_with_kvcache(q, k, v, causal=True, attention_chunk=3)
    torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize("num_heads_q", [None, 4])
def test_flash_attention_3_takes_packed_heads(num_heads_q: int | None) -> None:
    q, k, v = tensors(7, 7, kv_heads=2 if num_heads_q else 4)
    packed = torch.cat((q, k, v), dim=2) if num_heads_q else torch.stack((q, k, v), dim=2)
    out = flash_attn_interface.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=num_heads_q)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize(("shape", "num_heads_q"), [((2, 7, 8, 16), None), ((2, 7, 8, 16), 3), ((2, 7, 3, 4, 16), 4)])
def test_packed_heads_of_another_shape(shape: tuple[int, ...], num_heads_q: int | None) -> None:
    with pytest.raises(ValueError, match=r"qkv\.shape is \(2, 7, .*num_heads_q.*allowed"):
        flash_attn_interface.flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=num_heads_q)


@pytest.mark.parametrize("window", [(-1, -1), (None, None), (-7, -2), [-1, None]], ids=str)
def test_windows_without_a_side(window: Any) -> None:
    q, k, v = tensors()
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v))


@pytest.mark.parametrize("return_attn_probs", [False, True])
def test_a_head_dim_between_multiples_of_8(return_attn_probs: bool) -> None:
    q, k, v = tensors(head_dim=13)
    wide = [torch.nn.functional.pad(x, (0, 3)) for x in (q, k, v)]
    expected, lse = flash_attn_func(*wide, softmax_scale=1 / math.sqrt(13), return_lse=True)
    result = flash_attn.flash_attn_func(q, k, v, return_attn_probs=return_attn_probs)
    out = result[0] if return_attn_probs else result
    assert out.shape == q.shape and torch.equal(out, expected[..., :13])
    assert not return_attn_probs or torch.equal(result[1], lse)


def test_head_dims_that_differ_are_not_made_equal() -> None:
    q, k, v = tensors(head_dim=16)
    with pytest.raises(ValueError, match=r"q\.shape\[3\] \(head_dim\) is 13"):
        flash_attn.flash_attn_func(q[..., :13], k, v)


def test_a_last_dimension_that_is_not_contiguous_is_copied() -> None:
    q, k, v = tensors()
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    assert torch.equal(flash_attn.flash_attn_func(*strided), flash_attn_func(q, k, v))


TENSOR = torch.zeros(2, 3)
REFUSED_2 = {"dropout_p": 0.1, "alibi_slopes": TENSOR}
REFUSED_3 = {"sm_margin": 4}
DESCALES_3 = dict.fromkeys(("q_descale", "k_descale", "v_descale"), TENSOR)
REFUSALS = [
    (flash_attn.flash_attn_func, REFUSED_2),
    (flash_attn.flash_attn_with_kvcache, {"alibi_slopes": TENSOR}),
    (flash_attn_interface.flash_attn_func, REFUSED_3),
    (
        flash_attn_interface.flash_attn_with_kvcache,
        {"sm_margin": 4} | DESCALES_3,
    ),
]


def check_refusals(function: Any, refused: dict[str, Any]) -> None:
    """Each argument is refused by its name, although every required one is None: nothing was looked at before."""
    required = [x for x in inspect.signature(function).parameters.values() if x.default is REQUIRED]
    for name, value in refused.items():
        shown = "a tensor of shape (2, 3)" if isinstance(value, Tensor) else str(value)
        with pytest.raises(NotImplementedError) as error:
            function(*(None for _ in required), **{name: value})
        assert str(error.value).startswith(f"{name} is {shown}; cuteflash supports "), name


@pytest.mark.parametrize(("function", "refused"), REFUSALS, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_not_there_yet_is_refused_by_name(function: Any, refused: dict[str, Any]) -> None:
    check_refusals(function, refused)


TABLE = torch.zeros(2, 3, dtype=torch.int64)
FP8 = {name: x.to(torch.float8_e4m3fn) for name, x in zip("qkv", tensors(head_dim=20), strict=True)}
MISNAMED: list[tuple[Any, dict[str, Any], str]] = [  # a call, and how its error begins
    (flash_attn.flash_attn_func, {"return_attn_probs": 2}, "return_attn_probs is 2; allowed"),
    (flash_attn.flash_attn_with_kvcache, {"return_softmax_lse": 2}, "return_softmax_lse is 2; allowed"),
    (flash_attn.flash_attn_with_kvcache, {"block_table": TABLE}, "block_table.dtype is torch.int64; allowed"),
    (flash_attn.flash_attn_with_kvcache, {"k": 0, "v": 0, "block_table": TABLE}, "k is a int; allowed"),
    (flash_attn_interface.flash_attn_func, {"return_attn_probs": 2}, "return_attn_probs is 2; allowed"),
    (flash_attn_interface.flash_attn_func, {"s_aux": torch.zeros(3)}, r"s_aux.shape is \(3,\); allowed"),
    (flash_attn_interface.flash_attn_func, {"num_splits": TABLE}, "num_splits is tensor"),
    (flash_attn_interface.flash_attn_func, {"attention_chunk": TABLE}, "attention_chunk is tensor"),
    (flash_attn_interface.flash_attn_with_kvcache, {"return_softmax_lse": 2}, "return_softmax_lse is 2; allowed"),
    (flash_attn_interface.flash_attn_with_kvcache, FP8 | {"k": tensors()[1]}, "k is a tensor"),
]


@pytest.mark.parametrize(("function", "change", "message"), MISNAMED, ids=lambda x: x if isinstance(x, str) else "")
def test_errors_have_the_names_of_the_module(function: Any, change: dict[str, Any], message: str) -> None:
    names = list(inspect.signature(function).parameters)[:3]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{message}"):
        function(**(dict(zip(names, tensors(), strict=True)) | change))


def test_errors_of_a_whole_cache_of_8_bits_name_it() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(head_dim=16))
    with pytest.raises(ValueError, match=r"^v_cache.shape\[1\] \(seqlen\) is 6; allowed: 7, that of k_cache "):
        flash_attn_interface.flash_attn_with_kvcache(q, k, v[:, 1:])


def quantised(*inputs: Tensor, batch: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """8-bit tensors, and descale factors by name."""
    generator = torch.Generator().manual_seed(1)
    scales = [torch.rand(batch, 2, generator=generator) + 0.5 for _ in inputs]
    return [x.to(torch.float8_e4m3fn) for x in inputs], dict(zip(DESCALES, scales, strict=True))


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_with_kvcache"])
def test_8_bits_of_flash_attention_3(name: str) -> None:
    operands, scales = quantised(*tensors(head_dim=32), batch=2)
    theirs = getattr(flash_attn_interface, name)
    ours = flash_attn_func(*operands, **scales, causal=True)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(theirs(*operands, causal=True, **scales), ours)
    scales["k_descale"] = torch.ones(2, 2)
    ours = flash_attn_func(*operands, **scales)
    del scales["k_descale"]
    assert torch.equal(theirs(*operands, **scales), ours)
    ones = dict.fromkeys(DESCALES, torch.ones(2, 2))
    assert torch.equal(theirs(*operands), flash_attn_func(*operands, **ones))


def test_8_bits_that_do_not_fit_are_named() -> None:
    inputs = tensors(head_dim=48)
    operands, scales = quantised(*inputs, batch=2)
    with pytest.raises(ValueError, match=r"q.shape\[3\] \(head_dim\) is 20; allowed: multiples of 16"):
        flash_attn_interface.flash_attn_func(*(x[..., :20] for x in operands), **scales)
    with pytest.raises(ValueError, match=r"v_descale.shape is \(1, 2\); allowed: \(2, 2\)"):
        flash_attn_interface.flash_attn_func(
            *(x[..., :16] for x in operands), **scales | {"v_descale": torch.ones(1, 2)}
        )
    with pytest.raises(TypeError, match=r"q.dtype is torch.float32; allowed on cpu: torch.float8_e4m3fn"):
        flash_attn_interface.flash_attn_func(*inputs, **scales)


@pytest.mark.parametrize("num_splits", [0, 2])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_with_kvcache"])
def test_splits(name: str, num_splits: int) -> None:
    q, k, v = tensors()
    expected = flash_attn_func(q, k, v)
    torch.testing.assert_close(getattr(flash_attn_interface, name)(q, k, v, num_splits=num_splits), expected)
    torch.testing.assert_close(flash_attn.flash_attn_with_kvcache(q, k, v, num_splits=num_splits), expected)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_compiled_as_one_graph(module: Any) -> None:
    q, k, v = tensors(head_dim=12)
    compiled = torch.compile(module.flash_attn_func, fullgraph=True, backend="eager")
    ours, theirs = (call(q, k, v, causal=True, return_attn_probs=True) for call in (module.flash_attn_func, compiled))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_what_is_not_a_tensor_is_named() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match="k is a list"):
        flash_attn.flash_attn_func(q, k.tolist(), v)
    with pytest.raises(TypeError, match="qkv is a NoneType"):
        flash_attn_interface.flash_attn_qkvpacked_func(None)
    with pytest.raises(TypeError, match=r"num_heads_q is 4.0; allowed: None, an int"):
        flash_attn_interface.flash_attn_qkvpacked_func(torch.zeros(2, 7, 8, 16), num_heads_q=4.0)
    with pytest.raises(NotImplementedError, match=r"^qkv"):
        flash_attn_interface.flash_attn_qkvpacked_func(torch.zeros(2, 7, 3, 4, 16).to_sparse())


def test_rows_by_index_and_back() -> None:
    rows = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 1, 3])
    picked = bert_padding.index_first_axis(rows, indices)
    assert torch.equal(picked, rows[indices])
    back = bert_padding.index_put_first_axis(picked, indices, 6)
    assert torch.equal(back[indices], picked) and not back[[0, 2, 5]].any()
    assert torch.equal(bert_padding.index_first_axis(rows, indices.int()), picked)
    assert torch.equal(bert_padding.index_put_first_axis(picked, indices.int(), 6), back)
    assert torch.autograd.gradcheck(
        lambda x: bert_padding.index_put_first_axis(bert_padding.index_first_axis(x, indices), indices, 6), rows
    )
