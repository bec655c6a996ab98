"""Latent attention around its decoding kernel: appending, both forms of the module, prompts in chunks, gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import append_latents, flash_attn_func, flash_mla_decode, merge_attn_states, mla_ops, mla_planning
from cuteflash.compat import flash_attn_interface, flash_mla
from cuteflash.nn import MultiHeadLatentAttention
from cuteflash.traits.arch import Family
from tests.gpu.checks import Case, assert_lse_close_to, reference

pytestmark = pytest.mark.gpu

HIDDEN, HEADS, PAGE, SLOTS = 128, 4, 64, 4
LENGTHS = (0, 63, 64, 130)
DTYPES = [torch.bfloat16, torch.float16]


def int32(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def cache_of(is_paged: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """NaN for four sequences of up to 256 rows, and the pages of each."""
    if not is_paged:
        return torch.full((len(LENGTHS), SLOTS * PAGE, 1, 576), math.nan, dtype=dtype, device=device), None
    count = len(LENGTHS) * SLOTS
    pages = torch.randperm(count + 2, generator=torch.Generator().manual_seed(0))[:count].view(-1, SLOTS)
    cache = torch.full((count + 2, PAGE, 1, 576), math.nan, dtype=dtype, device=device)
    return cache, pages.int().to(device)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_appended_bit_for_bit(is_paged: bool, dtype: torch.dtype, device: torch.device) -> None:
    cache, table = cache_of(is_paged, dtype, device)
    rows = torch.randn(len(LENGTHS), 70, 576, device=device).to(dtype)
    append_latents(cache, rows, int32(LENGTHS, device), page_table=table)
    flat = cache if table is None else cache[table.long()].flatten(1, 2)
    for i, length in enumerate(LENGTHS):
        assert torch.equal(flat[i, length : length + 70, 0], rows[i])
        assert flat[i, :length].isnan().all() and flat[i, length + 70 :].isnan().all()
    assert int(cache.isnan().sum()) == cache.numel() - rows.numel()


def module(dtype: torch.dtype, device: torch.device, **options: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    built = MultiHeadLatentAttention(HIDDEN, HEADS, q_lora_rank=64, **options)
    with torch.no_grad():
        for weight in built.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    return built.to(device=device, dtype=dtype)


def assert_as_exact(out: Tensor, low: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Errors against `exact` are at most `factor` times those of `low`, as root mean squares."""
    ours, theirs = ((x.double() - exact.double()).square().mean().sqrt() for x in (out, low))
    assert float(ours) <= factor * float(theirs)


@pytest.fixture
def decoded_by(family: Family, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family that decodes in calls that name none."""
    decode = mla_planning.CudaMlaDecode()

    def chosen(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return decode(*tensors, **options | {"family": family})

    monkeypatch.setattr(mla_ops.mla_decode_cuda, "decode", chosen)
    return family


@pytest.mark.usefixtures("decoded_by")
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_decoding_is_as_exact_as_the_plain_form(is_paged: bool, dtype: torch.dtype, device: torch.device) -> None:
    attention = module(dtype, device)
    exact_module = copy.deepcopy(attention).float().cpu()
    x = torch.randn(len(LENGTHS), 72, HIDDEN, device=device).to(dtype)
    exact, low = exact_module(x.float().cpu()).to(device), attention(x)
    cache, table = cache_of(is_paged, dtype, device)
    parts, done = [attention(x[:, :66], kv_cache=cache, page_table=table)], 66
    for count in (1, 3, 2):
        lengths = int32([done] * len(x), device)
        some = {"kv_cache": cache, "cache_seqlens": lengths, "page_table": table}
        parts.append(attention(x[:, done : done + count], **some))
        done += count
    assert_as_exact(torch.cat(parts, dim=1), low, exact)
    assert_as_exact(attention(x, absorbed=True), low, exact)


def test_gradients_of_the_plain_form(device: torch.device) -> None:
    attention = module(torch.bfloat16, device)
    exact_module = copy.deepcopy(attention).float().cpu()
    ends = int32([0, 5, 5, 100], device)
    x = torch.randn(100, HIDDEN, device=device).bfloat16()
    ours = attention(x, cu_seqlens=ends, max_seqlen=95)
    exact = exact_module(x.float().cpu(), cu_seqlens=ends.cpu(), max_seqlen=95)
    given = torch.randn_like(exact)
    found = torch.autograd.grad(ours, list(attention.parameters()), given.to(ours))
    expected = torch.autograd.grad(exact, list(exact_module.parameters()), given)
    for mine, right in zip(found, expected, strict=True):
        error = (mine.float().cpu() - right).square().mean().sqrt() / right.square().mean().sqrt()
        assert float(error) < 0.03


@pytest.mark.parametrize("cut", [1, 64, 200])
def test_prompts_in_chunks(cut: int, family: str, device: torch.device) -> None:
    case = Case(100, 300, head_dim=192, head_dim_v=128, causal=True, lse=True)
    q, k, v = case.inputs(device)
    options: dict[str, Any] = {"family": family, "return_lse": True}
    past = flash_attn_func(q, k[:, :cut], v[:, :cut], **options)
    out, lse = merge_attn_states(*past, *flash_attn_func(q, k[:, cut:], v[:, cut:], causal=True, **options))
    (exact, exact_lse), (low, _) = (reference(q, k, v, case, kind) for kind in (torch.float32, q.dtype))
    assert_as_exact(out, low, exact)
    assert_lse_close_to(lse, exact_lse, case)


@pytest.mark.usefixtures("decoded_by")
def test_other_libraries_calls(device: torch.device) -> None:
    cache, table = cache_of(True, torch.bfloat16, device)
    append_latents(cache, torch.randn(4, 140, 576, device=device).bfloat16(), 0, page_table=table)
    q = torch.randn(4, 2, 16, 576, device=device).bfloat16()
    lengths = int32(LENGTHS, device)
    out, lse = flash_mla_decode(q, cache, lengths, page_table=table, causal=True, return_lse=True)
    for given in ((), (lengths, 32, 1)):
        metadata = flash_mla.get_mla_metadata(*given)
        theirs = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *metadata, causal=True)
        assert torch.equal(theirs[0], out) and torch.equal(theirs[1], lse.masked_fill(lse == -math.inf, math.inf))
    k, v = cache[..., 512:], cache[..., :512]
    named = {"qv": q[..., :512], "page_table": table, "causal": True}
    cached = flash_attn_interface.flash_attn_with_kvcache(q[..., 512:], k, v, cache_seqlens=lengths, **named)
    assert torch.equal(cached, out)
    packed = flash_attn_interface.flash_attn_varlen_func(
        q[..., 512:].flatten(0, 1), k, v, int32([0, 2, 4, 6, 8], device), None, 2, 256, seqused_k=lengths,
        **named | {"qv": q[..., :512].flatten(0, 1)},
    )  # fmt: skip
    assert torch.equal(packed, out.flatten(0, 1))


def test_a_graph_of_a_step_replays_with_other_lengths_and_pages(cuda: torch.device) -> None:
    cache, table = cache_of(True, torch.bfloat16, cuda)
    assert table is not None
    append_latents(cache, torch.randn(4, 140, 576, device=cuda).bfloat16(), 0, page_table=table)
    lengths = int32(LENGTHS, cuda)
    q, rows = torch.randn(4, 1, 16, 576, device=cuda).bfloat16(), torch.randn(4, 1, 576, device=cuda).bfloat16()

    def step() -> Tensor:
        append_latents(cache, rows, lengths, page_table=table)
        lengths.add_(1)
        return flash_mla_decode(q, cache, lengths, page_table=table, causal=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        rows.normal_()
        table.copy_(table.flip(0))
        cache.normal_()
        before = lengths.clone()
        graph.replay()
        expected = flash_mla_decode(q, cache, before + 1, page_table=table, causal=True)
        assert torch.equal(out, expected) and torch.equal(lengths, before + 1)
