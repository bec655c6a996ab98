"""Appending to a KV cache and rotating: every element of the caches and of Q against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import append_kv, apply_rotary
from tests.appended import FP8, Call, append_by_hand, begins_of, random_call, tables, turn

pytestmark = pytest.mark.gpu
STEP = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, FP8: 2.0**-3}  # of a rounding, relative


def assert_near(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for the last place: sums in fp32 may round otherwise. NaN is where it is expected."""
    a, b = found.cpu().float(), expected.cpu().float()
    assert bool((a.isnan() == b.isnan()).all()), f"{what}: NaN"
    a, b = a.nan_to_num(), b.nan_to_num()
    limit = STEP[found.dtype] * b.abs().clamp_min(2.0**-6) * 1.01 + 1e-6
    assert bool(((a - b).abs() <= limit).all()), f"{what} is off by {float((a - b).abs().max())}"


def check(call: Call, device: torch.device) -> None:
    """Compare a call on the device with the definition on the CPU; what is not written is unchanged, bit for bit."""
    if call.tensors["k_cache"].dtype == FP8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit elements need compute capability 8.9")
    k_cache, v_cache, q = append_by_hand(call)
    arguments = call.on(device).arguments
    found = append_kv(**arguments)
    for name, right in (("k_cache", k_cache), ("v_cache", v_cache)):
        now, before = arguments[name].cpu(), call.tensors[name]
        bits = torch.uint8 if right.dtype == FP8 else torch.int16
        kept = (right.view(bits) == before.view(bits)).all(-1)
        assert bool((now.view(bits)[kept] == before.view(bits)[kept]).all()), f"{name}: a row that is nobody's"
        assert_near(now, right, name)
    if q is None:
        assert found is None
    else:
        assert found is not None
        assert_near(found, q, "q")


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int, device: torch.device) -> None:
    check(random_call(seed), device)


@pytest.mark.parametrize("seed", range(100, 104))
def test_new_values_at_the_same_shapes(seed: int, device: torch.device) -> None:
    call = random_call(seed)
    check(call, device)
    call.tensors["cache_seqlens"] = (call.tensors["cache_seqlens"] - 1).clamp_min(0)
    check(call, device)


def test_caches_of_any_strides_and_slices_of_a_fused_projection(device: torch.device) -> None:
    both = torch.randn(3, 2, 2, 32, 128).bfloat16()  # (batch, K or V, kv_heads, seqlen, head_dim)
    k_cache, v_cache = (x.transpose(1, 2) for x in both.unbind(1))
    q, k, v = torch.randn(3, 5, 8, 128).bfloat16().split((4, 2, 2), dim=2)
    seqlens = torch.tensor([0, 27, 13], dtype=torch.int32)
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "q": q, "cache_seqlens": seqlens}
    check(Call(tensors | tables(40, 128), {}), device)


def test_tables_that_are_slices(device: torch.device) -> None:
    call = random_call(0)
    wide = tables(64, 32)
    for name, table in wide.items():
        padded = torch.full((64, 19), torch.nan)
        padded[:, 1:17] = table
        call.tensors[name] = padded[:, 1:17]
    call.tensors.pop("rotary_seqlens", None)
    check(Call({name: x for name, x in call.tensors.items() if "_q" not in name and name != "q"}, {}), device)


def test_nan_and_large_values_stay_in_their_rows(device: torch.device) -> None:
    k = torch.randn(1, 4, 2, 64).bfloat16()
    k[0, 1, 0, 3], k[0, 2, 1, 5], k[0, 3, 0, 60] = torch.nan, torch.inf, -1e30
    cache = torch.randn(1, 16, 2, 64).to(FP8)
    descale = torch.full((1, 2), 0.01)
    tensors: dict[str, Any] = {"k_cache": cache, "v_cache": cache.clone(), "k": k, "v": k.clone()}
    tensors |= {"cache_seqlens": torch.tensor([5], dtype=torch.int32), "k_descale": descale, "v_descale": descale}
    check(Call(tensors, {}), device)


def test_places_outside_of_the_cache_are_not_written(cuda: torch.device) -> None:
    """On a GPU the host does not read positions: nothing outside may change, whatever they are."""
    for paged in (False, True):
        arena = torch.zeros(12, 8, 2, 64, device=cuda, dtype=torch.bfloat16)
        k_cache, v_cache = arena[4:8], torch.zeros(4, 8, 2, 64, device=cuda, dtype=torch.bfloat16)
        k = torch.ones(4, 3, 2, 64, device=cuda, dtype=torch.bfloat16)
        places = [[0, 1], [99, -1], [2, -5], [3, 2**30]]
        table = torch.tensor(places, dtype=torch.int32, device=cuda) if paged else None
        idx = None if paged else torch.tensor([0, 1, 4, -1], dtype=torch.int32, device=cuda)
        seqlens = torch.tensor([-1, 6, 7, 14], dtype=torch.int32, device=cuda)
        append_kv(k_cache, v_cache, k, k, seqlens, page_table=table, cache_batch_idx=idx)
        expected = torch.zeros(4, 8)
        for entry, slot in [(0, 0), (0, 1), (2, 7)] if paged else [(0, 0), (0, 1), (1, 6), (1, 7)]:
            expected[entry, slot] = 1
        for cache in (k_cache, v_cache):
            assert torch.equal(cache[:, :, 0, 0].float().cpu(), expected)
        assert not arena[:4].any() and not arena[8:].any()


def test_cuda_graph_with_new_lengths(cuda: torch.device) -> None:
    call = random_call(1).on(cuda)
    call.tensors |= {name: x.to(cuda) for name, x in tables(64, 16, torch.float32).items()}
    arguments = call.arguments
    append_kv(**arguments)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(**arguments)
    for shift in (1, 2):
        arguments["cache_seqlens"].copy_((call.tensors["cache_seqlens"] - shift).clamp_min(0))
        for name in ("k_cache", "v_cache"):
            arguments[name].copy_(call.tensors[name])
        graph.replay()
        moved = {**call.tensors, "cache_seqlens": arguments["cache_seqlens"]}
        right = append_by_hand(Call(moved, call.options).on(torch.device("cpu")))
        for name, expected in zip(("k_cache", "v_cache"), right, strict=False):
            assert_near(arguments[name], expected, name)


def test_calls_wait_for_the_stream_that_they_are_made_on(cuda: torch.device) -> None:
    k = torch.zeros(64, 1, 8, 128, device=cuda, dtype=torch.bfloat16)
    k_cache, v_cache = (torch.zeros(64, 16, 8, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    seqlens = torch.zeros(64, device=cuda, dtype=torch.int32)
    append_kv(k_cache, v_cache, k, k, seqlens)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        k.fill_(1)
        append_kv(k_cache, v_cache, k, k, seqlens)
    stream.synchronize()
    assert bool((k_cache[:, 0] == 1).all()) and not k_cache[:, 1:].any()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 32), (72, 16), (256, 192)])
def test_apply_rotary(head_dim: int, rotary_dim: int, interleaved: bool, fixed: bool, device: torch.device) -> None:
    cos, sin = tables(40, rotary_dim).values()
    for packed in (False, True):
        for offsets in (5, torch.tensor([3, 0, 17], dtype=torch.int32)):
            x = torch.randn(*((11,) if packed else (3, 5)), 6, head_dim).half()
            ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32) if packed else None
            begins = [offsets] * 3 if isinstance(offsets, int) else offsets.tolist()
            right = x.clone()
            for b, i, at in begins_of(x, ends):
                position = begins[b] + (0 if fixed else i)
                right[at] = turn(x[at], cos[position], sin[position], interleaved).half()
            found = apply_rotary(
                x.to(device),
                cos.to(device),
                sin.to(device),
                interleaved=interleaved,
                seqlen_offsets=offsets if isinstance(offsets, int) else offsets.to(device),
                cu_seqlens=None if ends is None else ends.to(device),
                fixed=fixed,
            )
            assert_near(found, right, "x")


def test_many_packed_sequences(device: torch.device) -> None:
    """More than one step of the search for a token's sequence, among them many without a token."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (3000,), generator=generator)
    counts[100:900] = 0
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
    offsets = torch.randint(0, 30, (3000,), generator=generator).to(torch.int32)
    cos, sin = tables(40, 16).values()
    x = torch.randn(int(ends[-1]) + 2, 1, 16, generator=generator).bfloat16()
    sequence = torch.arange(3000).repeat_interleave(counts)
    positions = offsets[sequence] + torch.arange(int(ends[-1])) - ends[sequence]
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b = x[:-2].float().chunk(2, -1)
    right = torch.cat((torch.cat((a * c - b * s, a * s + b * c), -1).bfloat16(), x[-2:]))
    tensors = (x, cos, sin)
    found = apply_rotary(
        *(t.to(device) for t in tensors), seqlen_offsets=offsets.to(device), cu_seqlens=ends.to(device)
    )
    assert_near(found, right, "x")


def test_gradient_is_the_rotation_back(device: torch.device) -> None:
    x = torch.randn(2, 7, 3, 64, device=device).half().requires_grad_()
    cos, sin = (table.to(device) for table in tables(16, 32).values())
    apply_rotary(x, cos, sin, seqlen_offsets=4).backward(weight := torch.randn_like(x))
    assert x.grad is not None
    assert_near(x.grad, apply_rotary(weight, cos, -sin, seqlen_offsets=4), "gradient")
