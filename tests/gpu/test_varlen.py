"""Packed sequences: each is what it would be alone, whatever lies beside it, however long the others are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

import cuteflash
from cuteflash.arguments import mask_of_window
from cuteflash.compile import compiler
from cuteflash.dispatch import choose_shipped
from cuteflash.problem import FwdProblem, Storage
from cuteflash.traits.arch import arch_of_capability
from cuteflash.traits.length_class import length_class_of
from tests.gpu.checks import Case, poisoned
from tests.gpu.gradients import small
from tests.gpu.packed import DISTRIBUTIONS, Packed, around_tiles, uniform
from tests.gpu.pairwise import every_pair

pytestmark = pytest.mark.gpu

MASKS = {
    "full": Case(lse=True),
    "causal": Case(lse=True, causal=True),
    "window": Case(lse=True, window=(70, 30)),
}
BEYOND = 2**31  # elements: what a 32-bit offset cannot hold


@every_pair(distribution=tuple(DISTRIBUTIONS), head_dim=[64, 128], mask=tuple(MASKS))
def test_lengths(distribution: str, head_dim: int, mask: str, family: str, device: torch.device) -> None:
    choose = random.Random(distribution)
    case = small(device, dataclasses.replace(MASKS[mask], head_dim=head_dim))
    lengths = DISTRIBUTIONS[distribution](choose)
    others = list(lengths)
    choose.shuffle(others)
    Packed(lengths, case=case).check(family, device)
    Packed(lengths, tuple(others), case).check(family, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dims", [(24, 24), (96, 96), (192, 128), (256, 256), (40, 72)], ids=str)
def test_head_dims(head_dims: tuple[int, int], dtype: str, family: str, device: torch.device) -> None:
    head_dim, head_dim_v = head_dims
    case = Case(lse=True, causal=True, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    Packed(uniform(random.Random(1)), case=case).check(family, device)


@every_pair(heads=[(8, 2), (6, 1), (7, 1)], pack_gqa=[True, False], mask=tuple(MASKS))
def test_grouped_heads(heads: tuple[int, int], pack_gqa: bool, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], heads=heads[0], kv_heads=heads[1], pack_gqa=pack_gqa)
    choose = random.Random(2)
    Packed(around_tiles(choose), around_tiles(choose), case).check(family, device)


@pytest.mark.parametrize("mask", MASKS)
def test_softcap(mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], softcap=15.0, logits=4.0)
    Packed(uniform(random.Random(3)), case=case).check(family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pack_gqa", [True, False])
def test_only_rows_in_use_count(pack_gqa: bool, mask: str, family: str, device: torch.device) -> None:
    choose = random.Random(4)
    lengths = [around_tiles(choose) for _ in range(2)]
    used = [tuple(choose.randint(0, n) for n in side) for side in lengths]
    case = dataclasses.replace(MASKS[mask], heads=4, kv_heads=2, pack_gqa=pack_gqa)
    for used_q, used_k in itertools.product((None, used[0]), (None, used[1])):
        Packed(*lengths, case, used_q, used_k, rest_q=70, rest_k=9).check(family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rest", [1, 64, 300])
def test_rows_after_the_last_sequence_are_defined(rest: int, mask: str, family: str, device: torch.device) -> None:
    packed = Packed((50, 0, 200), (90, 30, 100), MASKS[mask], rest_q=rest, rest_k=rest)
    inputs = packed.inputs(device)
    out, lse = packed.call(inputs, family)
    packed.assert_right(inputs, out, lse)
    assert (out[250:] == 0).all()
    assert (lse[:, 250:] == float("-inf")).all()


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((0, 0), (3, 5)), ((3, 5), (0, 0)), ((), ())], ids=str)
def test_nothing_to_see(lengths: tuple[tuple[int, ...], tuple[int, ...]], family: str, device: torch.device) -> None:
    for rest in (0, 4):
        packed = Packed(*lengths, rest_q=rest, rest_k=rest)
        out, lse = packed.call(packed.inputs(device), family)
        assert out.shape == (sum(lengths[0]) + rest, 3, 64)
        assert (out == 0).all()
        assert (lse == float("-inf")).all()


@every_pair(pack_gqa=[False, True], mask=tuple(MASKS), head_dim=[64, 128, 256], value=[float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_sequence(
    pack_gqa: bool, mask: str, head_dim: int, value: float, family: str, device: torch.device
) -> None:
    lengths = (5, 130, 1, 64, 200, 17, 128, 90, 33)
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim, heads=4, kv_heads=2, pack_gqa=pack_gqa)
    packed = Packed(lengths, tuple(reversed(lengths)), case, rest_q=40, rest_k=40)
    q, k, v = packed.inputs(device)
    clean, clean_lse = packed.call((q, k, v), family)
    packed.assert_right((q, k, v), clean, clean_lse)
    for of_q, of_k in list(zip(packed.spans("q"), packed.spans("k"), strict=True))[1::2]:
        q[of_q], k[of_k], v[of_k] = value, value, value
    out, lse = packed.call((q, k, v), family)
    for span in packed.spans("q")[::2]:
        assert torch.equal(out[span], clean[span])
        assert torch.equal(lse[:, span], clean_lse[:, span])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [77, 512])
def test_equal_lengths_give_what_a_dense_batch_gives(length: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=length, batch=5, head_dim=128, pack_gqa=False)
    dense = case.inputs(device)
    with torch.no_grad():
        expected, expected_lse = cuteflash.flash_attn_func(*dense, family=family, **case.options())
    out, lse = Packed((length,) * 5, case=case).call(tuple(x.flatten(0, 1) for x in dense), family)
    expected, expected_lse = expected.flatten(0, 1), expected_lse.transpose(0, 1).flatten(1)
    if share_a_row(case, family, device):
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    else:  # sums in another order
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


def share_a_row(case: Case, family: str, device: torch.device) -> bool:
    """Whether a dense batch and packed sequences run with the same traits, but for the resident blocks."""
    if device.type == "cpu":
        return True
    target = arch_of_capability(*torch.cuda.get_device_capability(device)).name
    left, right = case.window
    mask, _, _ = mask_of_window(left, 0 if case.causal else right, case.seqlen_q)
    dense = FwdProblem.dense("bf16", case.head_dim, case.head_dim, mask, lse=True)
    packed = dataclasses.replace(dense, storage=Storage("varlen", "varlen"))
    lengths = length_class_of(case.seqlen_q, case.seqlen_q)
    rows: list[Any] = [choose_shipped(problem, target, family, lengths).traits for problem in (dense, packed)]
    alone = [dataclasses.replace(traits, blocks_per_sm=1) for traits in rows]
    return bool(alone[0] == alone[1])


def test_many_tiny_sequences(family: str, device: torch.device) -> None:
    batch, length = 4096 if device.type == "cuda" else 64, 16
    case = Case(seqlen_q=length, batch=batch, heads=2, head_dim=64, causal=True, lse=True, pack_gqa=False)
    dense = case.inputs(device)
    with torch.no_grad():
        expected, _ = cuteflash.flash_attn_func(*dense, family=family, **case.options())
    out, _ = Packed((length,) * batch, case=case).call(tuple(x.flatten(0, 1) for x in dense), family)
    torch.testing.assert_close(out, expected.flatten(0, 1), atol=2e-2, rtol=2e-2)


def test_views_of_one_tensor(family: str, device: torch.device) -> None:
    packed = Packed(uniform(random.Random(5)), case=Case(lse=True, causal=True, heads=4))
    inputs = packed.inputs(device)
    qkv = torch.stack(inputs, dim=1)
    cu = packed.vectors(device)["cu_seqlens_q"]
    with poisoned(), torch.no_grad():
        out, lse = cuteflash.flash_attn_varlen_qkvpacked_func(qkv, cu, family=family, causal=True, return_lse=True)
    packed.assert_right(inputs, out, lse)


def test_row_strides_beyond_32_bits(family: str, cuda: torch.device) -> None:
    packed = Packed((130, 0, 170), (90, 60, 200), Case(lse=True, causal=True, heads=2))
    stride = BEYOND // 290 // 8 * 8  # there are 300 queries and 350 keys
    room = torch.empty(350 * stride, dtype=torch.bfloat16, device=cuda)
    views = []
    for index, x in enumerate(packed.inputs(cuda)):
        view = room.as_strided(x.shape, (stride, 64, 1), index * 1_000_000)
        views.append(view.copy_(x))
    packed.assert_right(tuple(views), *packed.call(tuple(views), family))


@pytest.mark.parametrize("causal", [False, True])
def test_repeated_runs_are_bitwise_equal(causal: bool, family: str, cuda: torch.device) -> None:
    case = Case(lse=True, causal=causal, heads=16, head_dim=128)
    packed = Packed(tuple(random.Random(6).randint(0, 700) for _ in range(30)), case=case)
    inputs, vectors = packed.inputs(cuda), packed.vectors(cuda)
    first, first_lse = packed.call(inputs, family, vectors)
    packed.assert_right(inputs, first, first_lse)
    for _ in range(30):
        out, lse = packed.call(inputs, family, vectors)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


def test_launches_on_several_streams_do_not_disturb_each_other(family: str, cuda: torch.device) -> None:
    packed = Packed(uniform(random.Random(7)), case=Case(lse=True, causal=True, heads=8))
    inputs, vectors = packed.inputs(cuda), packed.vectors(cuda)
    expected, _ = packed.call(inputs, family, vectors)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(packed.call(inputs, family, vectors)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)


def test_a_graph_replays_with_other_lengths(family: str, cuda: torch.device) -> None:
    case = Case(lse=True, causal=True)
    choose = random.Random(8)
    total, batch = 900, 10

    def some() -> Packed:
        inner = sorted(choose.randint(0, total) for _ in range(batch - 1))
        cuts = [0, *inner, choose.randint(inner[-1], total)]
        lengths = tuple(end - begin for begin, end in itertools.pairwise(cuts))
        return Packed(lengths, case=case, rest_q=total - cuts[-1], rest_k=total - cuts[-1])

    packed = some()
    static, vectors = packed.inputs(cuda), packed.vectors(cuda)
    packed.call(static, family, vectors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out, lse = cuteflash.flash_attn_varlen_func(*static, **vectors, family=family, **case.options())
    for seed in range(1, 6):
        packed = some()
        fresh = packed.inputs(cuda, seed)
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        for name, source in packed.vectors(cuda).items():
            if source is not None:
                vectors[name].copy_(source)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        packed.assert_right(fresh, out, lse)


def test_other_lengths_compile_nothing(family: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(causal=True, lse=True)
    Packed((40, 50, 60), case=case).check(family, cuda)

    def compiles(*arguments: object, **named: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "_obtain_and_load", compiles)
    for lengths in ((60, 50, 41), (33, 70), (100, 0, 0, 100, 20)):
        Packed(lengths, case=case).check(family, cuda)


def test_no_call_waits_for_the_gpu(family: str, cuda: torch.device) -> None:
    packed = Packed((40, 50, 60), case=Case(causal=True, lse=True), rest_q=5, rest_k=5)
    inputs, vectors = packed.inputs(cuda), packed.vectors(cuda)
    packed.call(inputs, family, vectors)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows in (155, 153):
            parts = tuple(x[:rows] for x in inputs)
            cuteflash.flash_attn_varlen_func(*parts, **vectors, max_seqlen_q=60, max_seqlen_k=60, family=family)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_wrong_values_are_found_on_request(family: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed((40, 50, 60))
    inputs, vectors = packed.inputs(cuda), packed.vectors(cuda)
    vectors["cu_seqlens_k"][2] = 30
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] is 30, the end of sequence 1, which begins at 40"):
        packed.call(inputs, family, vectors)
