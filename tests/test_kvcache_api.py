"""`flash_attn_with_kvcache` on a CPU: by definition, under torch.compile, and its errors, which leave caches alone."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.appended import tables
from tests.kvcached import Call, by_hand, random_call

CALLS = 150


@pytest.mark.parametrize("seed", range(CALLS))
def test_a_call_is_append_rotary_and_attention(seed: int) -> None:
    call = random_call(seed, (torch.float32,))
    expected = by_hand(call, torch.float64)
    found = call.copy()
    o, lse = found.run()
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(found.tensors[name], expected[name], atol=1e-6, rtol=1e-6, equal_nan=True)
    torch.testing.assert_close(o, expected["o"], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected["lse"], atol=2e-5, rtol=2e-5)
    without = call.copy()
    without.tensors["max_seqlen_q"] = None
    assert torch.equal(cuteflash.flash_attn_with_kvcache(**without.tensors, **call.options, **plain(call)), o)


def plain(call: Call) -> dict[str, Any]:
    """The mask of a call, without LSE."""
    return call.case.options() | {"return_lse": False}


def decode(**changed: Any) -> dict[str, Any]:
    """A decode step with a rotary embedding."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 1, 4), "k_cache": (2, 20, 2), "v_cache": (2, 20, 2), "k": (2, 1, 2), "v": (2, 1, 2)}
    tensors = {name: torch.randn(*shape, 16, generator=generator) for name, shape in shapes.items()}
    lengths = {"cache_seqlens": torch.tensor([5, 19], dtype=torch.int32)}
    return tensors | lengths | tables(32, 16) | {"causal": True} | changed


def paged(**changed: Any) -> dict[str, Any]:
    """The same with pages of 4 rows."""
    given = decode()
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].reshape(10, 4, 2, 16)
    return given | {"page_table": torch.arange(10, dtype=torch.int32).reshape(2, 5)} | changed


def test_one_length_for_all_is_an_int() -> None:
    lengths = torch.full((2,), 7, dtype=torch.int32)
    one, vector = decode(cache_seqlens=7), decode(cache_seqlens=lengths)
    assert torch.equal(cuteflash.flash_attn_with_kvcache(**one), cuteflash.flash_attn_with_kvcache(**vector))
    assert torch.equal(one["k_cache"], vector["k_cache"])


def test_without_lengths_the_whole_cache_counts() -> None:
    given = decode()
    q, k, v = (given[name] for name in ("q", "k_cache", "v_cache"))
    found = cuteflash.flash_attn_with_kvcache(q, k, v, causal=True, return_lse=True)
    expected = cuteflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [decode, paged])
def test_compiled_whole(make: Any) -> None:
    def step(**given: Any) -> Tensor:
        result: Tensor = cuteflash.flash_attn_with_kvcache(**given)
        return result * 2

    eager, compiled = make(), make()
    expected = step(**eager)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(**compiled), expected)
    assert torch.equal(compiled["k_cache"], eager["k_cache"]) and torch.equal(compiled["v_cache"], eager["v_cache"])


def test_many_steps_are_one_prefill() -> None:
    """Tokens that are appended one by one give what all of them give at once."""
    generator, steps = torch.Generator().manual_seed(1), 30
    q = torch.randn(2, steps, 4, 16, generator=generator)
    k, v = (torch.randn(2, steps, 2, 16, generator=generator) for _ in range(2))
    rotary, caches = tables(steps, 16), [torch.full((2, steps, 2, 16), torch.nan) for _ in range(2)]
    lengths = torch.zeros(2, dtype=torch.int32)
    outs = []
    for i in range(steps):
        new = k[:, i : i + 1], v[:, i : i + 1]
        outs.append(
            cuteflash.flash_attn_with_kvcache(
                q[:, i : i + 1], *caches, *new, cache_seqlens=lengths, causal=True, **rotary
            )
        )
        lengths += 1
    whole = [torch.full((2, steps, 2, 16), torch.nan) for _ in range(2)]
    expected = cuteflash.flash_attn_with_kvcache(q, *whole, k, v, cache_seqlens=0, causal=True, **rotary)
    torch.testing.assert_close(torch.cat(outs, dim=1), expected)
    torch.testing.assert_close(caches, whole)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "table of int64": (paged(page_table=torch.zeros(2, 5, dtype=torch.int64)), TypeError, "page_table.dtype"),
    "table of one dimension": (paged(page_table=torch.zeros(2, dtype=torch.int32)), ValueError, "page_table"),
    "table of another batch": (paged(page_table=torch.zeros(3, 5, dtype=torch.int32)), ValueError, "page_table.shape"),
    "table elsewhere": (
        paged(page_table=torch.zeros(2, 5, dtype=torch.int32, device="meta")),
        ValueError,
        "page_table",
    ),
    "no such page": (paged(page_table=torch.full((2, 5), 10, dtype=torch.int32)), ValueError, r"page_table\[0, "),
    "page size 0": (
        paged(k_cache=torch.zeros(10, 0, 2, 16), v_cache=torch.zeros(10, 0, 2, 16)),
        ValueError,
        "page_size. is 0",
    ),
    "entry beyond the cache": (
        decode(cache_batch_idx=torch.tensor([0, 2], dtype=torch.int32)),
        ValueError,
        r"cache_batch_idx\[1\] is 2",
    ),
    "cache too short": (
        decode(cache_seqlens=torch.tensor([5, 20], dtype=torch.int32)),
        ValueError,
        r"cache_seqlens\[1\] is 20",
    ),
    "length below 0": (
        decode(cache_seqlens=torch.tensor([-1, 0], dtype=torch.int32)),
        ValueError,
        r"cache_seqlens\[0\]",
    ),
    "int beyond the cache": (decode(cache_seqlens=21), ValueError, "cache_seqlens is 21"),
    "lengths of int64": (decode(cache_seqlens=torch.tensor([5, 19])), TypeError, "cache_seqlens.dtype"),
    "lengths of another batch": (decode(cache_seqlens=torch.zeros(3, dtype=torch.int32)), ValueError, "cache_seqlens"),
    "lengths of floats": (decode(cache_seqlens=1.5), TypeError, "cache_seqlens is 1.5"),
    "no lengths": (decode(cache_seqlens=None), ValueError, "cache_seqlens is None"),
    "padding beyond the keys": (
        decode(cache_leftpad=torch.tensor([7, 0], dtype=torch.int32)),
        ValueError,
        r"cache_leftpad\[0\] is 7",
    ),
    "rotary table too short": (decode() | tables(12, 16), ValueError, "rotary table 12 positions"),
    "one rotary table": (decode(rotary_sin=None), ValueError, "rotary_sin is None"),
    "k without v": (decode(v=None), ValueError, "v is None"),
    "v without k": (decode(k=None), ValueError, "v is given without k"),
    "rotary without k": (decode(k=None, v=None), ValueError, "rotary_cos is given without k"),
    "other dtype of q": (decode(q=torch.randn(2, 1, 4, 16).double()), TypeError, "dtype"),
    "other dtype of k": (decode(k=torch.randn(2, 1, 2, 16).double()), TypeError, "k.dtype"),
    "other dtype of a cache": (decode(v_cache=torch.zeros(2, 20, 2, 16).half()), TypeError, "v_cache.dtype"),
    "heads": (decode(q=torch.randn(2, 1, 3, 16)), ValueError, "heads"),
    "head dim": (decode(q=torch.randn(2, 1, 4, 24)), ValueError, "k_cache.shape"),
    "cache with grad": (decode(k_cache=torch.zeros(2, 20, 2, 16, requires_grad=True)), ValueError, "k_cache requires"),
    "q with grad": (decode(q=torch.zeros(2, 1, 4, 16, requires_grad=True)), ValueError, "q requires"),
    "no tensor": (decode(k_cache=3), TypeError, "k_cache is a int"),
    "chunk": (decode(attention_chunk=-1), ValueError, "attention_chunk is -1"),
    "splits": (decode(num_splits=-1), ValueError, "num_splits is -1"),
    "splits of floats": (decode(num_splits=1.5), TypeError, "num_splits is 1.5"),
    "limit": (decode(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1"),
    "scale": (decode(softmax_scale=-1.0), ValueError, "softmax_scale"),
    "flag": (decode(rotary_interleaved=1), TypeError, "rotary_interleaved"),
    "q between two boundaries": (
        decode(q=torch.randn(1 + 2 * 1 * 4 * 16)[1:].view(2, 1, 4, 16), rotary_cos=None, rotary_sin=None),
        ValueError,
        r"q.data_ptr\(\)",
    ),
    "packed q of no dimension": (
        paged(q=torch.zeros(()), cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32), max_seqlen_q=1),
        ValueError,
        "q has 0 dimensions",
    ),
    "q of no dimension": (decode(q=torch.zeros(())), ValueError, "q has 0 dimensions"),
    "ends of no dimension": (
        paged(q=torch.zeros(2, 4, 16), cu_seqlens_q=torch.tensor(0, dtype=torch.int32)),
        ValueError,
        "cu_seqlens_q has 0",
    ),
    "ends of two dimensions": (
        paged(q=torch.zeros(2, 4, 16), cu_seqlens_q=torch.zeros(1, 3, dtype=torch.int32)),
        ValueError,
        "cu_seqlens_q has 2",
    ),
    "no ends": (
        paged(q=torch.zeros(2, 4, 16), cu_seqlens_q=torch.zeros(0, dtype=torch.int32)),
        ValueError,
        r"cu_seqlens_q.shape is \(0,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_leaves_the_caches_alone(name: str) -> None:
    given, kind, message = BAD[name]
    caches = [given["k_cache"], given["v_cache"]]
    before = [x.detach().clone() if isinstance(x, Tensor) else x for x in caches]
    with pytest.raises(kind, match=message):
        cuteflash.flash_attn_with_kvcache(**given)
    for cache, saved in zip(caches, before, strict=True):
        assert not isinstance(cache, Tensor) or torch.equal(cache, saved)


@pytest.mark.parametrize("length", [-1, 21])
def test_a_length_is_named_as_the_argument_that_it_came_with(length: int) -> None:
    lengths = torch.tensor([5, length], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^cache_seqlens\[1\] is {length}; allowed: 0 to 20"):
        cuteflash.flash_attn_with_kvcache(
            torch.randn(2, 1, 4, 16), *torch.zeros(2, 2, 20, 2, 16), cache_seqlens=lengths
        )


def test_a_cache_that_requires_grad_is_refused_in_one_way() -> None:
    q, (k_cache, v_cache) = torch.randn(2, 1, 4, 16), torch.zeros(2, 2, 20, 2, 16)
    with pytest.raises(ValueError, match="k_cache requires grad"):
        cuteflash.flash_attn_with_kvcache(q, k_cache.requires_grad_(), v_cache)


def test_a_limit_of_splits_may_be_any_int() -> None:
    given = decode(num_splits=10**30)
    expected = cuteflash.flash_attn_with_kvcache(**decode())
    torch.testing.assert_close(cuteflash.flash_attn_with_kvcache(**given), expected, rtol=0, atol=0)


def test_tensors_that_require_grad_are_taken_without_gradients() -> None:
    given = decode(q=torch.zeros(2, 1, 4, 16, requires_grad=True))
    with torch.no_grad():
        assert not cuteflash.flash_attn_with_kvcache(**given).requires_grad


def test_the_snippets_of_the_page_run() -> None:
    text = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "serving.md").read_text()
    names: dict[str, Any] = {}
    shapes = []
    for snippet in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "serving.md", "exec"), names)
        shapes.append(tuple(names["out"].shape))
    assert shapes == [(2, 1, 8, 64), (8, 8, 64), (2, 1, 8, 64), (2, 4, 8, 64), (2, 1, 8, 64), (4, 1, 8, 64)]
