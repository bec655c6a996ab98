"""Quantising packed sequences to FP8: each is what it is alone, whatever lies beside it and however it is cut."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash import quantize_qkv
from cuteflash.traits.arch import arch_of_capability
from cuteflash.traits.quantize import TARGET
from tests.gpu.packed import around_tiles, one_long, tiny, zipf
from tests.quantized import check_packed, data, tables

pytestmark = pytest.mark.gpu

LENGTHS = (130, 0, 1, 128, 40, 700, 3), (5, 129, 0, 256, 60, 1100, 0)
USED = (100, 0, 1, 0, 39, 513, 3), (0, 128, 0, 250, 60, 1024, 0)


@pytest.fixture(autouse=True)
def supported(device: torch.device) -> None:
    if device.type == "cuda":
        arch = arch_of_capability(*torch.cuda.get_device_capability(device))
        if arch.name != TARGET:
            pytest.skip(f"{arch.name} has no kernel that quantises")
        torch.full((1 << 28,), 0x7F, dtype=torch.uint8, device=device)  # NaN where results will be allocated


def packed(lengths: Any, device: torch.device, rest: int = 11, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of sequences with these lengths; NaN after the last one."""
    rows_q, rows_k = (sum(some) for some in lengths)
    tensors = data(rows_q + rest, rows_k + rest, batch=1, device=device, **sizes)
    for x, rows in zip(tensors, (rows_q, rows_k, rows_k), strict=True):
        x[:, rows:] = float("nan")
    q, k, v = (x[0] for x in tensors)
    return q, k, v


ALL: dict[str, Any] = {"smooth_v": True, "transpose_v": True}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], bool]] = {  # head dims, options, whether some rows do not count
    "narrow": ((16, 48), {}, True),
    "head": ((128, 128), ALL, False),
    "block": ((128, 128), {"granularity": "block"} | ALL, True),
    "latent": ((192, 128), ALL, True),
    "wide": ((256, 256), ALL, False),
    "wide block": ((256, 256), {"granularity": "block"}, False),
    "rotary": ((64, 64), {"rotary_interleaved": True, "hadamard": 64} | tables(1200, 48), False),
    "rotary block": ((128, 128), {"granularity": "block", "hadamard": 64} | ALL | tables(1200, 128), False),
    "wide rotary": ((256, 256), ALL | tables(1200, 256), False),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, device: torch.device) -> None:
    (head_dim, head_dim_v), options, is_used = CASES[case]
    tensors = packed(LENGTHS, device, head_dim=head_dim, head_dim_v=head_dim_v, heads=6, kv_heads=3)
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    check_packed(tensors, LENGTHS, USED if is_used else (None, None), **given)


@pytest.mark.parametrize("lengths", [zipf, one_long, tiny, around_tiles])
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_lengths(lengths: Any, granularity: str, device: torch.device) -> None:
    of_q = lengths(random.Random(5))
    of_k = random.Random(1).sample(of_q, len(of_q))
    for rest in (0, 300):
        tensors = packed((of_q, of_k), device, rest, head_dim=64)
        check_packed(tensors, (of_q, of_k), granularity=granularity, transpose_v=True, smooth_v=True)


@pytest.mark.parametrize("lengths", [((0, 0), (3, 0)), ((3, 0), (0, 0)), ((0,), (0,)), ((), ())], ids=str)
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_lengths_of_zero(lengths: Any, granularity: str, device: torch.device) -> None:
    for rest in (0, 3):
        check_packed(packed(lengths, device, rest), lengths, granularity=granularity, transpose_v=True, smooth_v=True)


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_given_scales(granularity: str, device: torch.device) -> None:
    q, k, v = packed(LENGTHS, device)
    batch = len(LENGTHS[0])
    blocks = [len(x) // 128 + batch for x in (q, k, k)]
    shapes = [(batch, 2)] * 3 if granularity == "head" else [(1, 2, count) for count in blocks]
    named = zip("qkv", shapes, strict=True)
    scales = {f"{name}_descale": torch.rand(shape, device=device) * 0.01 + 1e-3 for name, shape in named}
    check_packed((q, k, v), LENGTHS, granularity=granularity, transpose_v=True, **scales)


@pytest.mark.parametrize(
    ("dtype", "granularity"), [(torch.float8_e4m3fn, "head"), (torch.float8_e5m2, "block")], ids=str
)
def test_what_is_not_a_number_stays_in_its_rows(dtype: torch.dtype, granularity: str, device: torch.device) -> None:
    q, k, v = packed(LENGTHS, device)
    q[3, 1, 7] = k[134, 0, 3] = v[140, 1, 60] = float("nan")
    q[129, 0, 0], v[4, 0, 1] = float("inf"), -float("inf")
    check_packed((q, k, v), LENGTHS, granularity=granularity, smooth_v=True, dtype=dtype)


def test_a_graph_replays_with_other_lengths(cuda: torch.device) -> None:
    total, batch, choose = 2000, 9, random.Random(3)
    tensors = packed(((total,), (total,)), cuda, 0)
    cu = torch.empty(batch + 1, dtype=torch.int32, device=cuda)

    def change() -> list[int]:
        ends = [0, *sorted(choose.randint(0, total) for _ in range(batch))]
        cu.copy_(torch.tensor(ends))
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def call() -> Any:
        return quantize_qkv(*tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, smooth_v=True, transpose_v=True)

    change()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        lengths = change()
        for x in captured[:4]:
            if x is not None:
                x.view(torch.uint8).fill_(0x7F)
        graph.replay()
        alone = check_packed(tensors, (lengths, lengths), smooth_v=True, transpose_v=True)
        for a, b in zip(captured, alone, strict=True):
            assert a is b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
