"""Latent attention under the names of FlashMLA and of FlashAttention-3: arguments, results, refusals by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import flash_mla_decode
from cuteflash.compat import flash_attn_interface, flash_mla

LENGTHS = (65, 0, 3, 128)
BATCH, HEADS, PAGES = len(LENGTHS), 3, 9


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(seqlen_q: int = 2) -> dict[str, Tensor]:
    """q, cache, lengths and table, as `flash_mla_decode` takes them."""
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(BATCH, seqlen_q, HEADS, 576, generator=generator),
        "kv_cache": torch.randn(PAGES, 64, 1, 576, generator=generator),
        "cache_seqlens": int32(*LENGTHS),
        "page_table": torch.randperm(PAGES - 1, generator=generator).view(BATCH, 2).int(),
    }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of different shapes add in the same order; several threads would share them out by shape."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# FlashMLA


def test_the_signature_of_flash_mla() -> None:
    required = inspect.Parameter.empty
    tail = ("extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    expected = {
        **dict.fromkeys(("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"), required),
        "tile_scheduler_metadata": required,
        **dict.fromkeys(("num_splits", "softmax_scale"), None),
        **dict.fromkeys(("causal", "is_fp8_kvcache"), False),
        **dict.fromkeys(("indices", "attn_sink", *tail), None),
        "descale_k": None,  # ours
    }
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters.values()
    assert [(x.name, x.default) for x in parameters] == list(expected.items())
    assert {x.kind for x in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_mla_with_either_metadata(is_older: bool, causal: bool) -> None:
    q, cache, lengths, table = inputs().values()
    metadata = flash_mla.get_mla_metadata(*((lengths, 2 * HEADS, 1) if is_older else ()))
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *metadata, 0.3, causal)
    named = {"page_table": table, "softmax_scale": 0.3, "causal": causal}
    expected = flash_mla_decode(q, cache, lengths, **named, return_lse=True)
    assert torch.equal(out, expected[0])
    assert (lse[1] == math.inf).all() and (expected[1][1] == -math.inf).all()
    assert torch.equal(lse[expected[1] > -math.inf], expected[1][expected[1] > -math.inf])


def test_older_metadata_has_the_shapes_of_flash_mla() -> None:
    for given in ((int32(*LENGTHS), 128, 1), (int32(*LENGTHS), 128, 1, 64, False, None)):
        parts, splits = flash_mla.get_mla_metadata(*given)
        assert parts.shape == (1, 8) and parts.dtype == torch.int32
        assert splits.tolist() == [0, 1, 2, 3, 4] and splits.dtype == torch.int32
    named = {"cache_seqlens": int32(3), "num_q_tokens_per_head_k": 16, "num_heads_k": 1}
    assert [x.shape for x in flash_mla.get_mla_metadata(**named)] == [(1, 8), (2,)]
    newer, none = flash_mla.get_mla_metadata()
    assert isinstance(newer, flash_mla.FlashMLASchedMeta) and none is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([3], 16, 1), TypeError, "cache_seqlens is a list; allowed: a torch.Tensor"),
        ((torch.tensor([3]), 16, 1), TypeError, "cache_seqlens.dtype is torch.int64; allowed: torch.int32"),
        ((int32(3), 16.0, 1), TypeError, "num_q_tokens_per_head_k is 16.0; allowed: an int"),
        ((int32(3), 16, 0), ValueError, "num_heads_k is 0; allowed: 1 or more"),
        ((int32(3), 16, 1, 16, True, 2048), NotImplementedError, "topk is 2048; cuteflash supports None"),
    ],
    ids=str,
)
def test_metadata_that_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_mla.get_mla_metadata(*arguments)


SPARSE = ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")


@pytest.mark.parametrize("name", SPARSE)
def test_what_flash_mla_does_not_have_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError) as error:
        flash_mla.flash_mla_with_kvcache(None, None, None, None, None, None, **{name: torch.zeros(2, 3)})
    assert str(error.value).startswith(f"{name} is a tensor of shape (2, 3); cuteflash supports ")


def test_flash_mla_with_a_cache_of_e4m3() -> None:
    q, cache, lengths, table = inputs().values()
    cache = cache.to(torch.float8_e4m3fn)
    metadata = flash_mla.get_mla_metadata()
    for descale in (None, torch.rand(BATCH) + 0.5):
        out, _ = flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, 512, *metadata, is_fp8_kvcache=True, descale_k=descale
        )
        scale = torch.ones(1) if descale is None else descale
        assert torch.equal(out, flash_mla_decode(q, cache, lengths, page_table=table, descale=scale))


@pytest.mark.parametrize(
    ("cache", "is_fp8", "error", "message"),
    [
        (
            torch.zeros(2, 64, 1, 576),
            True,
            TypeError,
            "is_fp8_kvcache is True with a k_cache of torch.float32; allowed",
        ),
        (
            torch.zeros(2, 64, 1, 576, dtype=torch.float8_e4m3fn),
            False,
            TypeError,
            "is_fp8_kvcache is False with a k_ca",
        ),
        (
            torch.zeros(2, 64, 1, 656, dtype=torch.uint8),
            True,
            NotImplementedError,
            r"k_cache.shape\[3\] is 656, FlashM",
        ),
    ],
    ids=["16 bits", "e4m3", "656 bytes"],
)
def test_other_caches_of_flash_mla_are_refused(
    cache: torch.Tensor, is_fp8: bool, error: type[Exception], message: str
) -> None:
    q, _, lengths, table = inputs().values()
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, 512, *flash_mla.get_mla_metadata(), is_fp8_kvcache=is_fp8
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_table": None}, TypeError, "block_table is a NoneType; allowed: a torch.Tensor"),
        ({"cache_seqlens": None}, TypeError, "cache_seqlens is a NoneType; allowed: a torch.Tensor"),
        ({"head_dim_v": 256}, ValueError, "head_dim_v is 256; allowed: 512"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "^block_table.dtype is torch.float32"),
        ({"k_cache": torch.zeros(2, 64, 1, 512)}, ValueError, "^k_cache.shape"),
        ({"descale_k": torch.ones(1)}, ValueError, "^descale_k"),
        ({"tile_scheduler_metadata": None}, TypeError, "tile_scheduler_metadata is a NoneType; allowed: what get_mla"),
        ({"tile_scheduler_metadata": torch.zeros(1, 8)}, TypeError, "num_splits is a NoneType; allowed: what get_mla"),
        ({"num_splits": int32(0, 1)}, TypeError, "num_splits is a Tensor; allowed with a FlashMLASchedMeta: None"),
        ({"is_fp8_kvcache": torch.ones(2)}, TypeError, "is_fp8_kvcache is .*; allowed: True, False"),
    ],
    ids=str,
)
def test_calls_of_flash_mla_that_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = inputs()
    given = {
        "q": given["q"],
        "k_cache": given["kv_cache"],
        "block_table": given["page_table"],
        "cache_seqlens": given["cache_seqlens"],
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta(),
    }
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**(given | change))


# FlashAttention-3 with qv


def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the 64 rotated columns and of the 512 others."""
    return x[..., 512:], x[..., :512]


@pytest.mark.parametrize("copies_q", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (None, None)])
def test_a_cache_with_qv(copies_q: bool, window: Any) -> None:
    q, cache, lengths, table = inputs().values()
    q_rope, q_nope = (x.clone() if copies_q else x for x in apart(q))
    k, v = apart(cache)
    causal = window == (-1, 0)
    expected = flash_mla_decode(q, cache, lengths, page_table=table, causal=causal, return_lse=True)
    named = {"qv": q_nope, "cache_seqlens": lengths, "page_table": table, "window_size": window}
    out, lse = flash_attn_interface.flash_attn_with_kvcache(q_rope, k, v, **named, return_softmax_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(flash_attn_interface.flash_attn_with_kvcache(q_rope, k, v, **named), out)


def test_qv_is_what_its_definition_says() -> None:
    generator = torch.Generator().manual_seed(2)
    q, rows = torch.randn(2, 5, HEADS, 576, generator=generator), torch.randn(2, 7, 1, 576, generator=generator)
    (q_rope, q_nope), (k, v) = apart(q), apart(rows)
    out, lse = flash_attn_interface.flash_attn_func(q_rope, k, v, qv=q_nope, causal=True, return_attn_probs=True)
    scores = torch.einsum("bshd,btd->bhst", q_rope, k[:, :, 0]) + torch.einsum("bshd,btd->bhst", q_nope, v[:, :, 0])
    hidden = torch.ones(5, 7).triu(3).bool()
    scores = (scores * 576**-0.5).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        out, torch.einsum("bhst,btd->bshd", scores.softmax(-1), v[:, :, 0]), atol=1e-5, rtol=1e-5
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("counts", [(2, 1, 0, 3), (1, 1, 1, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("keyword", ["qv", "q_v"])
def test_packed_queries_with_pages(counts: tuple[int, ...], spare: int, keyword: str) -> None:
    q, cache, lengths, table = inputs(seqlen_q=3).values()
    packed = torch.cat(
        [x[:count] for x, count in zip(q, counts, strict=True)] + [torch.full_like(q[0, :spare], math.nan)]
    )
    ends = int32(0, *torch.tensor(counts).cumsum(0).tolist())
    q_rope, q_nope = apart(packed)
    named = {
        keyword: q_nope, "q": q_rope, "k": cache[..., 512:], "v": cache[..., :512], "cu_seqlens_q": ends,
        "cu_seqlens_k": None, "max_seqlen_q": max(counts), "max_seqlen_k": 128, "seqused_k": lengths,
        "page_table": table, "causal": True,
    }  # fmt: skip
    out, lse = flash_attn_interface.flash_attn_varlen_func(**named, return_attn_probs=True)
    assert out.shape == (len(packed), HEADS, 512) and lse.shape == (HEADS, len(packed))
    for i, count in enumerate(counts):
        mine = slice(int(ends[i]), int(ends[i + 1]))
        some = {"page_table": table[i : i + 1], "causal": True, "return_lse": True}
        expected = flash_mla_decode(q[i : i + 1, :count], cache, lengths[i : i + 1], **some)
        assert torch.equal(out[mine], expected[0][0]) and torch.equal(lse[:, mine], expected[1][0])
    assert (out[int(ends[-1]) :] == 0).all() and (lse[:, int(ends[-1]) :] == -math.inf).all()
    by_ends = named | {"seqused_k": None, "cu_seqlens_k": int32(0, *lengths.cumsum(0).tolist())}
    assert torch.equal(flash_attn_interface.flash_attn_varlen_func(**by_ends), out)
    cached = {"cache_seqlens": lengths, "page_table": table, "cu_seqlens_q": ends, "max_seqlen_q": max(counts)}
    again = flash_attn_interface.flash_attn_with_kvcache(q_rope, *apart(cache), qv=q_nope, causal=True, **cached)
    assert torch.equal(again, out)


def with_qv(**change: Any) -> dict[str, Any]:
    """Arguments of `flash_attn_with_kvcache`."""
    q, cache, lengths, table = inputs().values()
    (q_rope, q_nope), (k, v) = apart(q), apart(cache)
    given = {"q": q_rope, "k_cache": k, "v_cache": v, "qv": q_nope, "cache_seqlens": lengths, "page_table": table}
    return given | {name: make(given[name]) if callable(make) else make for name, make in change.items()}


UNSUPPORTED = ("k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "cu_seqlens_k_new")


@pytest.mark.parametrize("name", [*UNSUPPORTED, "rotary_seqlens", "q_descale", "k_descale", "v_descale"])
def test_what_a_call_with_qv_refuses_by_name(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=rf"{name} is a tensor of shape \(1,\) with qv; cuteflash supports None"
    ):
        flash_attn_interface.flash_attn_with_kvcache(**with_qv(**{name: torch.zeros(1)}))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"qv": lambda x: x[..., :256]},
            NotImplementedError,
            "qv is a tensor of 256 columns with q, k_cache and v_cache of 64, 64",
        ),
        (
            {"q": lambda x: x[..., :32]},
            NotImplementedError,
            "qv is a tensor of 512 columns with q, k_cache and v_cache of 32, 64",
        ),
        ({"v_cache": lambda x: x.clone()}, ValueError, "are not columns of one tensor; allowed with qv: v_cache = "),
        ({"k_cache": lambda x: x.roll(1, 1)}, ValueError, "are not columns of one tensor; allowed with qv: v_cache = "),
        ({"qv": [1]}, TypeError, "qv is a list; allowed: a torch.Tensor"),
        ({"window_size": (3, 0)}, NotImplementedError, r"window_size is \(3, 0\); cuteflash supports \(-1, -1\) or"),
        ({"softcap": 3.0}, NotImplementedError, "softcap is 3.0; cuteflash supports 0"),
        ({"attention_chunk": 3}, NotImplementedError, "attention_chunk is 3; cuteflash supports 0"),
        ({"scheduler_metadata": torch.zeros(1)}, NotImplementedError, "scheduler_metadata is a tensor of shape"),
        ({"page_table": lambda x: x[:2]}, ValueError, r"page_table.shape\[0\] is 2; allowed: 4, the batch"),
        ({"causal": torch.tensor(True)}, TypeError, r"^causal is .*tensor\(True\).*; allowed: True, False"),
        ({"return_softmax_lse": torch.ones(2)}, TypeError, "^return_softmax_lse is .*; allowed: True, False"),
    ],
)
def test_calls_with_qv_that_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_interface.flash_attn_with_kvcache(**with_qv(**change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_table": None}, ValueError, "page_table is None; allowed with qv: a tensor, k and v being the pages"),
        ({"seqused_k": None}, ValueError, "seqused_k is None; allowed with page_table: the lengths"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q is None; allowed with qv: an int of 0 or more"),
        ({"max_seqlen_q": 1}, ValueError, "max_seqlen_q is 1; allowed: 2 or more, the length of sequence 0"),
        ({"cu_seqlens_q": int32(0, 2, 1, 1, 1)}, ValueError, r"cu_seqlens_q\[2\] is 1, the end of sequence 1"),
        ({"seqused_q": int32(1)}, NotImplementedError, r"seqused_q is a tensor of shape \(1,\) with qv"),
        ({"s_aux": torch.zeros(3)}, NotImplementedError, r"s_aux is a tensor of shape \(3,\) with qv"),
        ({"q_v": torch.zeros(3)}, TypeError, "q_v and qv are both given; allowed: one of them"),
        ({"sm_margin": 3}, NotImplementedError, "sm_margin is 3; cuteflash supports 0"),
        ({"return_attn_probs": torch.ones(2)}, TypeError, "^return_attn_probs is .*; allowed: True, False"),
        ({"cu_seqlens_k": int32(0, 1, 2, 3, 4)}, TypeError, "cu_seqlens_k and seqused_k are both given; allowed with"),
        ({"seqused_k": None, "cu_seqlens_k": [0, 1]}, TypeError, "cu_seqlens_k is a list; allowed: a torch.Tensor"),
        ({"seqused_k": [1]}, TypeError, "seqused_k is a list; allowed: a torch.Tensor"),
        ({"seqused_k": None, "cu_seqlens_k": int32(0, 1, 0, 1, 2)}, ValueError, r"^cu_seqlens_k.diff\(\)\[1\] is -1"),
        ({"q": [1]}, TypeError, "q is a list; allowed: a torch.Tensor"),
    ],
    ids=str,
)
def test_packed_calls_with_qv_that_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q, cache, lengths, table = inputs().values()
    (q_rope, q_nope), (k, v) = apart(q[:, 0]), apart(cache)
    given: dict[str, Any] = {
        "q": q_rope, "k": k, "v": v, "cu_seqlens_q": int32(0, 2, 3, 3, 4), "cu_seqlens_k": None, "max_seqlen_q": 2,
        "max_seqlen_k": 128, "seqused_k": lengths, "qv": q_nope, "page_table": table,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        flash_attn_interface.flash_attn_varlen_func(**(given | change))
