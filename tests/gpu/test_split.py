"""Split keys: the same result however the keys of a tile are dealt to blocks."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.gpu.checks import Case, assert_right, poisoned
from tests.gpu.gradients import small
from tests.gpu.packed import DISTRIBUTIONS, Lengths, Packed
from tests.gpu.pairwise import every_pair

pytestmark = pytest.mark.gpu

MASKS = {
    "full": Case(lse=True),
    "causal": Case(lse=True, causal=True),
    "window": Case(lse=True, window=(300, 20)),
}
DECODE = Case(seqlen_q=1, seqlen_k=2000, heads=8, kv_heads=2, head_dim=128, lse=True)
NUMBERS = 0, 2, 3, 7, 1000


@pytest.fixture(params=NUMBERS)
def num_splits(request: pytest.FixtureRequest, device: torch.device) -> int:
    """How many parts keys are split into."""
    if device.type == "cpu" and request.param != NUMBERS[0]:
        pytest.skip("one number is enough on the CPU, which splits nothing: see tests/test_split.py")
    return int(request.param)


def call(inputs: tuple[Tensor, ...], case: Case, family: str, num_splits: int) -> tuple[Tensor, Tensor | None]:
    """O, and LSE if the case asks for it."""
    with poisoned(), torch.no_grad():
        result = cuteflash.flash_attn_func(*inputs, family=family, num_splits=num_splits, **case.options())
    return result if case.lse else (result, None)


def check(case: Case, family: str, device: torch.device, num_splits: int = 0) -> None:
    case = small(device, case)
    inputs = case.inputs(device)
    assert_right(inputs, case, *call(inputs, case, family, num_splits))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("seqlen_k", [129, 1000, 4096, 20_000])
def test_decoding(seqlen_k: int, num_splits: int, lse: bool, family: str, device: torch.device) -> None:
    check(dataclasses.replace(DECODE, seqlen_k=seqlen_k, lse=lse), family, device, num_splits)


@every_pair(heads=[(4, 4), (8, 1), (6, 2), (7, 1)], seqlen_q=[1, 4, 17, 100, 300], mask=tuple(MASKS))
def test_queries(heads: tuple[int, int], seqlen_q: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=seqlen_q, seqlen_k=3000, heads=heads[0], kv_heads=heads[1])
    check(case, family, device)
    check(dataclasses.replace(case, seqlen_k=700), family, device, 5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dims", [(24, 24), (64, 64), (96, 96), (160, 160), (192, 128), (256, 256)], ids=str)
def test_head_dims(head_dims: tuple[int, int], mask: str, family: str, device: torch.device) -> None:
    head_dim, head_dim_v = head_dims
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim, head_dim_v=head_dim_v, dtype="fp16")
    check(dataclasses.replace(case, seqlen_q=3, seqlen_k=1500, heads=4, kv_heads=1), family, device)


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_batches(batch: int, family: str, device: torch.device) -> None:
    check(dataclasses.replace(DECODE, batch=batch, softcap=20.0), family, device)


def test_queries_without_keys(family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS["causal"], seqlen_q=400, seqlen_k=200, heads=2, batch=1)
    check(case, family, device, 4)


def test_keys_of_huge_weight(family: str, device: torch.device) -> None:
    check(dataclasses.replace(DECODE, logits=30.0), family, device)


def test_what_is_not_a_number_stays(family: str, device: torch.device) -> None:
    inputs = DECODE.inputs(device)
    inputs[0][0, 0, 3] = float("nan")
    out, lse = call(inputs, DECODE, family, 0)
    assert lse is not None
    assert out[0, 0, 3].isnan().all()
    assert out.isnan().sum() == DECODE.head_dim
    assert lse.isnan().sum() == 1


def test_repeated_runs_are_bitwise_equal(family: str, cuda: torch.device) -> None:
    for case in (DECODE, dataclasses.replace(MASKS["causal"], seqlen_q=100, seqlen_k=5000)):
        inputs = case.inputs(cuda)
        first, first_lse = call(inputs, case, family, 0)
        assert_right(inputs, case, first, first_lse)
        for _ in range(50):
            out, lse = call(inputs, case, family, 0)
            assert torch.equal(out, first)
            assert torch.equal(lse, first_lse)


def test_launches_on_several_streams_do_not_disturb_each_other(family: str, cuda: torch.device) -> None:
    inputs = DECODE.inputs(cuda)
    expected, _ = call(inputs, DECODE, family, 0)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(call(inputs, DECODE, family, 0)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)


def test_a_graph_replays(family: str, cuda: torch.device) -> None:
    q, k, v = DECODE.inputs(cuda)
    cuteflash.flash_attn_func(q, k, v, family=family, num_splits=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [cuteflash.flash_attn_func(q, k, v, family=family, num_splits=0) for _ in range(3)]
    for seed in range(3):
        fresh = DECODE.inputs(cuda, seed)
        for tensor, new in zip((q, k, v), fresh, strict=True):
            tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert_right(fresh, DECODE, out)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_splits", [0, 3], indirect=True)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_packed_lengths(distribution: str, num_splits: int, mask: str, family: str, device: torch.device) -> None:
    choose = random.Random(distribution)
    case = dataclasses.replace(MASKS[mask], heads=4, kv_heads=2)
    lengths = DISTRIBUTIONS[distribution](choose)
    ones = tuple(min(n, 1) for n in lengths)
    longer = tuple(n * choose.randint(0, 9) for n in lengths)
    for queries in (ones, lengths):
        Packed(queries, longer, case, num_splits=num_splits).check(family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(5000,), (1,) * 70 + (9000,), (9000,) + (0,) * 100 + (200,)], ids=len)
def test_packed_decoding(lengths: Lengths, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], heads=8, kv_heads=1, head_dim=128)
    for queries in (1, 4):
        Packed((queries,) * len(lengths), lengths, case, num_splits=0).check(family, device)


def test_only_rows_in_use_count(family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS["causal"], heads=4, kv_heads=2)
    lengths, keys = (3, 200, 1, 0, 90), (3000, 500, 900, 300, 0)
    packed = Packed(lengths, keys, case, (2, 0, 1, 0, 90), (1700, 500, 0, 300, 0), rest_q=70, rest_k=9, num_splits=0)
    packed.check(family, device)


def test_a_graph_replays_with_growing_lengths(family: str, cuda: torch.device) -> None:
    case = dataclasses.replace(DECODE, batch=3, seqlen_k=6000)
    q, k, v = case.inputs(cuda)
    rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    vectors = Packed((1,) * 3, (6000,) * 3, case).vectors(cuda)
    used = torch.tensor((1, 2, 3), dtype=torch.int32, device=cuda)
    vectors["seqused_k"] = used
    options = {"num_splits": 0, "family": family, "return_lse": True, **vectors}
    with torch.no_grad():
        cuteflash.flash_attn_varlen_func(*rows, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = cuteflash.flash_attn_varlen_func(*rows, **options)
        for lengths in ((1, 2, 3), (0, 700, 6000), (6000, 6000, 6000), (5, 6000, 0)):
            used.copy_(torch.tensor(lengths))
            out.fill_(float("nan"))
            graph.replay()
            packed = Packed((1,) * 3, (6000,) * 3, case, used_k=lengths)
            packed.assert_right(rows, out, lse)
