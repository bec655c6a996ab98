"""Attention of 16-bit queries to an e4m3 cache, of which the kernel makes fp16: every element by definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash import flash_attn_with_kvcache
from cuteflash.compile import compiler
from cuteflash.traits.cache_sm80 import CONVERTING_CAPABILITY
from tests.gpu.checks import Case, poisoned
from tests.gpu.paged import E4M3, Paged

pytestmark = pytest.mark.gpu

KEYS = (0, 1, 5, 16, 63, 64, 65, 129, 300, 511)
LONG_KEYS = (1000, 2047, 3, 4096)
QUERIES = (0, 1, 3, 64, 65, 0, 130, 1, 40, 200)
MASKS = {
    "full": Case(lse=True, head_dim=128, heads=8, kv_heads=2),
    "causal": Case(lse=True, head_dim=128, heads=8, kv_heads=2, causal=True),
    "window": Case(lse=True, head_dim=128, heads=8, kv_heads=2, window=(200, 30)),
}
DECODE = Case(seqlen_q=1, heads=8, kv_heads=2, causal=True, lse=True, head_dim=128)


@pytest.fixture
def converting(device: torch.device) -> torch.device:
    """The device, if its instructions convert e4m3 or it is a CPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CONVERTING_CAPABILITY:
        pytest.skip("e4m3 caches need sm_89 or later")
    return device


@pytest.fixture
def converting_gpu(cuda: torch.device, converting: torch.device) -> torch.device:
    """The device, for what only CUDA has, if its instructions convert e4m3."""
    return converting


def check(
    family: str, keys: tuple[int, ...], page_size: int | None, case: Case, device: torch.device, **more: Any
) -> None:
    Paged(keys, page_size, case, e4m3=True, **more).check(family, device)


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(None, "bf16"), (1, "fp16"), (16, "bf16"), (16, "fp16"), (64, "fp16"), (100, "bf16"), (256, "fp16")],
)
def test_decode(page_size: int | None, dtype: str, converting: torch.device, family: str) -> None:
    case = dataclasses.replace(DECODE, dtype=dtype)
    check(family, KEYS, page_size, case, converting)
    check(family, LONG_KEYS, page_size, case, converting, num_splits=1000)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [None, 5, 16])
def test_queries(page_size: int | None, mask: str, converting: torch.device, family: str) -> None:
    check(family, KEYS, page_size, MASKS[mask], converting, queries=QUERIES)
    check(family, KEYS, page_size, dataclasses.replace(MASKS[mask], seqlen_q=70), converting)
    check(
        family, (1000, 0, 2047, 3, 4096), page_size, MASKS[mask], converting, queries=(3, 1, 0, 1, 40), num_splits=1000
    )


@pytest.mark.parametrize(
    ("head_dims", "page_size", "dtype"),
    [
        ((16, 16), 1, "fp16"),
        ((64, 64), 16, "bf16"),
        ((64, 64), None, "fp16"),
        ((96, 96), None, "bf16"),
        ((160, 160), 1, "fp16"),
        ((192, 128), 16, "bf16"),
        ((224, 224), None, "bf16"),
        ((256, 256), 1, "bf16"),
        ((256, 256), 16, "fp16"),
        ((256, 64), 16, "bf16"),
    ],
    ids=str,
)
def test_head_dims(
    head_dims: tuple[int, int], page_size: int | None, dtype: str, converting: torch.device, family: str
) -> None:
    case = Case(lse=True, causal=True, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype, kv_heads=1)
    check(family, KEYS, page_size, case, converting, queries=QUERIES)
    check(family, LONG_KEYS, page_size, dataclasses.replace(case, seqlen_q=3), converting, num_splits=7)


FEW_ROWS: dict[tuple[int, int], tuple[int | None, ...]] = {
    (128, 128): (1, 16, None),
    (64, 64): (16,),
    (80, 80): (1,),
    (32, 32): (None,),
    (192, 128): (None,),
    (256, 256): (16,),
    (128, 64): (1,),
}


@pytest.mark.parametrize(
    ("head_dims", "page_size"), [(dims, page) for dims, pages in FEW_ROWS.items() for page in pages]
)
def test_few_rows(head_dims: tuple[int, int], page_size: int | None, converting: torch.device, family: str) -> None:
    """Tiles of 8, 16 or 32 rows, some of which may be empty; sequences that blocks share, and others."""
    case = dataclasses.replace(DECODE, head_dim=head_dims[0], head_dim_v=head_dims[1])
    for queries, heads in ((1, (2, 2)), (2, (8, 2)), (3, (8, 2)), (4, (4, 1)), (3, (7, 1)), (4, (8, 1))):
        one = dataclasses.replace(case, seqlen_q=queries, heads=heads[0], kv_heads=heads[1])
        check(family, LONG_KEYS, page_size, one, converting, num_splits=1000)
    check(family, KEYS, page_size, case, converting, queries=(1, 0, 1, 2, 1, 1, 1, 1, 0, 2), num_splits=3)


@pytest.mark.parametrize(("mask", "dtype"), [("full", "fp16"), ("causal", "bf16"), ("window", "fp16")])
def test_masks_of_few_rows(mask: str, dtype: str, converting: torch.device, family: str) -> None:
    for queries, head_dim in ((2, 128), (4, 128), (8, 64)):
        case = dataclasses.replace(MASKS[mask], seqlen_q=queries, head_dim=head_dim, dtype=dtype, softcap=15.0)
        check(family, (*LONG_KEYS, 0, 2, 130), 16, case, converting, num_splits=40)
        check(family, (*LONG_KEYS, 0, 2, 130), None, dataclasses.replace(case, softcap=0.0), converting, num_splits=40)


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("num_splits", [1, 50])
def test_softcap_and_large_scores(num_splits: int, softcap: float, converting: torch.device, family: str) -> None:
    case = dataclasses.replace(MASKS["window"], softcap=softcap, logits=10.0, seqlen_q=4)
    check(family, LONG_KEYS, 16, case, converting, num_splits=num_splits)


@pytest.mark.parametrize("page_size", [None, 1, 16, 64], ids=str)
def test_split_keys_of_whole_caches(page_size: int | None, converting: torch.device, family: str) -> None:
    """Lengths that the host knows, by kernels of few rows and of many."""
    for queries, indexed in ((1, False), (1, True), (3, True), (20, True)):
        case = dataclasses.replace(DECODE, seqlen_q=queries)
        check(family, (1024,) * 5, page_size, case, converting, indexed=indexed, all_used=True, num_splits=1000)


@pytest.mark.parametrize("page_size", [1, 16, None], ids=str)
def test_padding_and_indices(page_size: int | None, converting: torch.device, family: str) -> None:
    leftpad = (0, 1, 5, 0, 16, 3, 17, 128, 64, 200)
    case = dataclasses.replace(MASKS["causal"], seqlen_q=30)
    check(family, KEYS, page_size, case, converting, indexed=True)
    check(family, (8, 9, 5, 16, 63, 64, 65, 129, 300, 511), page_size, case, converting, leftpad=leftpad, indexed=True)


@pytest.mark.parametrize("heads", [(8, 8), (7, 1), (6, 2), (32, 1)], ids=str)
@pytest.mark.parametrize("pack_gqa", [True, False])
def test_grouped_heads(pack_gqa: bool, heads: tuple[int, int], converting: torch.device, family: str) -> None:
    case = dataclasses.replace(DECODE, seqlen_q=3, heads=heads[0], kv_heads=heads[1], pack_gqa=pack_gqa)
    check(family, KEYS, 16, case, converting, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks(num_splits: int, converting: torch.device, family: str) -> None:
    paged = Paged(LONG_KEYS, 16, dataclasses.replace(DECODE, seqlen_q=2), num_splits=num_splits, e4m3=True)
    tensors, _ = paged.build(converting)
    out, lse = paged.call(tensors, family)
    sinks = torch.tensor([-2.0, 0.0, 3.0, 7.5] * 2, device=converting)
    found, found_lse = paged.call(tensors | {"sinks": sinks}, family)
    whole = torch.logaddexp(lse, sinks[None, :, None])
    torch.testing.assert_close(found_lse, whole, atol=1e-3, rtol=1e-4)
    expected = out.float() * torch.exp(lse - whole).transpose(1, 2)[..., None]
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def all_codes(device: torch.device) -> Tensor:
    """Every number and NaN of e4m3, (256,)."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(E4M3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_v_is_converted(dtype: torch.dtype, converting: torch.device, family: str) -> None:
    """One key has all the weight, so that O is V: exactly, as either 16-bit type holds all numbers of e4m3."""
    v = all_codes(converting).view(1, 1, 1, 256)
    q = torch.ones(1, 1, 1, 256, dtype=dtype, device=converting)
    ones = torch.ones(1, device=converting)
    found = flash_attn_with_kvcache(q, torch.zeros_like(v), v, k_descale=ones, v_descale=2 * ones, family=family)
    assert torch.equal(found.nan_to_num(0.5), (2 * v.float()).to(dtype).nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_k_is_converted(dtype: torch.dtype, converting: torch.device, family: str) -> None:
    """The score of a unit vector is an element of K, and the log-sum-exp of one score the score itself."""
    codes = all_codes(converting)
    k = torch.where(codes.float().isnan(), 0, codes.view(torch.uint8)).view(E4M3).view(1, 1, 1, 256)
    q = torch.eye(256, dtype=dtype, device=converting)[None, :, None]
    descale = torch.full((1,), 0.25, device=converting)
    _, lse = flash_attn_with_kvcache(
        q, k, k, k_descale=descale, v_descale=descale, softmax_scale=0.5, return_lse=True, family=family
    )
    torch.testing.assert_close(lse[0, 0], k.float().flatten() * 0.125, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_is_converted_for_few_rows(dtype: torch.dtype, converting: torch.device, family: str) -> None:
    """As above, of caches that are long enough for their keys to be split."""
    codes, ones = all_codes(converting), torch.ones(1, device=converting)
    k, v = torch.zeros(2, 1, 300, 1, 256, device=converting).to(E4M3)
    k.view(torch.uint8)[0, 137] = torch.ones((), device=converting).to(E4M3).view(torch.uint8)
    v.view(torch.uint8)[0, 137] = codes.view(torch.uint8)
    q = torch.ones(1, 1, 1, 256, dtype=dtype, device=converting)
    found = flash_attn_with_kvcache(q, k, v, k_descale=ones, v_descale=2 * ones, softmax_scale=1.0, family=family)
    expected = (2 * codes.float()).to(dtype)
    assert torch.equal(found.flatten().nan_to_num(0.5), expected.nan_to_num(0.5))
    numbers = torch.where(codes.float().isnan(), 0, codes.view(torch.uint8))
    k = torch.zeros(256, 300, 1, 256, dtype=torch.uint8, device=converting)
    k[:, 0, 0] = numbers
    q, lengths = (
        torch.eye(256, dtype=dtype, device=converting)[:, None, None],
        torch.ones(256, dtype=torch.int32, device=converting),
    )
    descales = {"k_descale": 0.25 * ones, "v_descale": ones}
    _, lse = flash_attn_with_kvcache(
        q,
        k.view(E4M3),
        k.view(E4M3),
        cache_seqlens=lengths,
        softmax_scale=0.5,
        return_lse=True,
        **descales,
        family=family,
    )
    torch.testing.assert_close(lse.flatten(), numbers.view(E4M3).float() * 0.125, atol=1e-6, rtol=1e-6)


def cached(device: torch.device, keys: int = 300) -> dict[str, Tensor]:
    """Two query heads of each of two KV heads, and caches with scales of 1."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    given = {"q": normal(2, 3, 4, 128).bfloat16()}
    given |= {name: normal(2, keys, 2, 128).to(E4M3) for name in ("k_cache", "v_cache")}
    return given | {name: torch.ones(2, device=device) for name in ("k_descale", "v_descale")}


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_queries_beyond_the_range_of_fp16(
    softcap: float, num_splits: int, converting: torch.device, family: str
) -> None:
    """bf16 reaches from 1e-38 to 3e38. Heads of a tile that differ by any factor do not disturb each other."""
    given = cached(converting)
    factors = torch.tensor([1e30, 1.0, 1e-20, 6e4], device=converting)
    mild = given | {"q": given["q"] * 2.0 ** torch.tensor([0, 1, 0, -1], device=converting).bfloat16()[:, None]}
    options: dict[str, Any] = {"num_splits": num_splits, "softcap": softcap, "pack_gqa": True}
    for factor in factors.tolist():
        power = 2.0 ** round(torch.tensor(factor).log2().item())
        wild = mild | {"q": (mild["q"].float() * power).bfloat16(), "k_descale": given["k_descale"] / power}
        torch.testing.assert_close(
            flash_attn_with_kvcache(**wild, **options, family=family),
            flash_attn_with_kvcache(**mild, **options, family=family),
            atol=2e-2,
            rtol=2e-2,
        )
    expected = flash_attn_with_kvcache(**given, **options, family=family)
    kept = [0, 2, 3]
    for power in (18, 90):
        one = given["q"].clone()
        one[:, :, 1] *= 2.0**power  # beside it heads of ordinary size
        found = flash_attn_with_kvcache(**given | {"q": one}, **options, family=family)
        assert torch.equal(found[:, :, kept], expected[:, :, kept])
        # Scores of 2^90 leave fp32 no difference that an exponential could have: their own row is not judged.
        assert power > 18 or found.isfinite().all()


def test_what_is_not_a_number_stays_in_its_rows(converting: torch.device, family: str) -> None:
    given = cached(converting)
    clean = flash_attn_with_kvcache(**given, family=family)
    for name in ("k_cache", "v_cache"):
        cache = given[name].clone()
        cache.view(torch.uint8)[1, 77, 0, 5] = 0x7F
        found = flash_attn_with_kvcache(**given | {name: cache}, family=family)
        hit = found[1, :, :2] if name == "k_cache" else found[1, :, :2, 5]
        assert hit.isnan().all()
        assert torch.equal(found[0], clean[0])
        assert torch.equal(found[1, :, 2:], clean[1, :, 2:])


def test_what_is_appended_is_attended_to(converting: torch.device, family: str) -> None:
    given = cached(converting)
    lengths = torch.tensor([100, 297], dtype=torch.int32, device=converting)
    new = {"k": given["q"][:, :, :2].clone(), "v": given["q"][:, :, 2:].clone()}
    descales = {
        "k_descale": torch.tensor([0.02, 0.03], device=converting),
        "v_descale": torch.rand(2, 2, device=converting) + 0.1,
    }
    found = flash_attn_with_kvcache(**given | new | descales, cache_seqlens=lengths, causal=True, family=family)
    again = flash_attn_with_kvcache(**given | descales, cache_seqlens=lengths + 3, causal=True, family=family)
    assert torch.equal(found, again)
    stored = given["k_cache"][0, 100:103].float() * descales["k_descale"][:, None]
    torch.testing.assert_close(stored, new["k"][0].float(), atol=1e-2, rtol=0.07)


def test_a_query_of_a_page_table_call(converting: torch.device, family: str) -> None:
    paged = Paged(KEYS, 16, MASKS["causal"], QUERIES, e4m3=True)
    tensors, alone = paged.build(converting)
    named = {name: tensors[name] for name in ("cu_seqlens_q", "seqused_k", "page_table", "k_descale", "v_descale")}
    caches = tensors["q"], tensors["k_cache"], tensors["v_cache"]
    with poisoned(), torch.no_grad():
        result = cuteflash.flash_attn_varlen_func(*caches, **named, causal=True, return_lse=True, family=family)
    paged.assert_right(alone, *result)


def test_other_lengths_and_scales_compile_nothing(
    converting_gpu: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(family, (40, 50, 60), 16, DECODE, converting_gpu)

    def compiles(*arguments: object, **named: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "_obtain_and_load", compiles)
    for keys in ((60, 50, 41), (33, 70), (100, 0, 0, 100, 20)):
        check(family, keys, 16, DECODE, converting_gpu)


def test_repeated_runs_are_bitwise_equal(converting_gpu: torch.device, family: str) -> None:
    for page_size, num_splits in ((1, 1), (16, 1), (None, 1000), (16, 1000)):
        case = dataclasses.replace(DECODE, heads=32, kv_heads=8)
        paged = Paged(LONG_KEYS, page_size, case, num_splits=num_splits, e4m3=True)
        tensors, alone = paged.build(converting_gpu)
        first, first_lse = paged.call(tensors, family)
        paged.assert_right(alone, first, first_lse)
        for _ in range(50):
            out, lse = paged.call(tensors, family)
            assert torch.equal(out, first)
            assert torch.equal(lse, first_lse)


def test_a_graph_replays_with_other_lengths(converting_gpu: torch.device, family: str) -> None:
    paged = Paged((511, 400, 300), 16, DECODE, num_splits=4, e4m3=True)
    tensors, alone = paged.build(converting_gpu)
    paged.assert_right(alone, *paged.call(tensors, family))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out, lse = torch.ops.cuteflash.kvcache_fwd_lse(*tensors.values(), *paged.options(family))
    tensors["seqused_k"].copy_(torch.tensor([17, 400, 0]))
    expected, expected_lse = paged.call(tensors, family)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
