"""Quantising packed sequences on a CPU: each is what it is alone, whatever lies beside it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteflash import quantize_ops, quantize_planning, quantize_qkv
from cuteflash.quantize_problem import QuantizeTensors
from tests.quantized import FP8, check_packed, data, tables

OP = torch.ops.cuteflash.quantize_qkv_varlen.default
LENGTHS = (130, 0, 1, 128, 40), (5, 129, 0, 256, 60)
USED = (100, 0, 1, 0, 39), (0, 128, 0, 250, 60)
REST = 11  # rows after the last sequence


def packed(rest: int = REST, lengths: Any = LENGTHS, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of sequences with these lengths; NaN after the last one."""
    rows_q, rows_k = (sum(some) for some in lengths)
    tensors = data(rows_q + rest, rows_k + rest, batch=1, **sizes)
    for x, rows in zip(tensors, (rows_q, rows_k, rows_k), strict=True):
        x[:, rows:] = float("nan")
    q, k, v = (x[0] for x in tensors)
    return q, k, v


def vectors(lengths: Any = LENGTHS) -> list[Tensor]:
    return [torch.tensor((0, *some)).cumsum(0).int() for some in lengths]


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transpose_v": True, "smooth_v": True},
        {"hadamard": 32, "transpose_v": True, "dtype": torch.float8_e5m2},
        {"hadamard": 64} | tables(300, 48),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("used", [(None, None), USED, (None, USED[1]), (USED[0], None)], ids=["all", "used", "k", "q"])
def test_each_sequence_is_what_it_is_alone(used: Any, granularity: str, options: dict[str, Any]) -> None:
    check_packed(packed(head_dim_v=48), LENGTHS, used, granularity=granularity, **options)


@pytest.mark.parametrize("lengths", [((0, 0), (3, 0)), ((3, 0), (0, 0)), ((0,), (0,)), ((), ())], ids=str)
@pytest.mark.parametrize("granularity", ["head", "block"])
def test_lengths_of_zero(lengths: Any, granularity: str) -> None:
    for rest in (0, 3):
        tensors = packed(rest, lengths, head_dim=16)
        check_packed(tensors, lengths, granularity=granularity, transpose_v=True, smooth_v=True)


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_given_scales_are_used_and_returned(granularity: str) -> None:
    q, k, v = packed()
    blocks = [len(x) // 128 + len(LENGTHS[0]) for x in (q, k, k)]
    shapes = [(5, 2)] * 3 if granularity == "head" else [(1, 2, count) for count in blocks]
    scales = {f"{name}_descale": torch.rand(shape) * 0.01 + 1e-3 for name, shape in zip("qkv", shapes, strict=True)}
    found = check_packed((q, k, v), LENGTHS, granularity=granularity, **scales)
    assert found.q_descale is scales["q_descale"]


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_what_is_not_a_number_stays_in_its_rows(granularity: str) -> None:
    q, k, v = packed()
    q[3, 1, 7] = k[134, 0, 3] = v[140, 1, 60] = float("nan")
    q[129, 0, 0], v[4, 0, 1] = float("inf"), -float("inf")
    check_packed((q, k, v), LENGTHS, granularity=granularity, smooth_v=True)


@pytest.mark.parametrize("options", [(), ("block", 32, False, True, True, "e5m2")], ids=["plain", "block"])
def test_opcheck(options: tuple[Any, ...]) -> None:
    lengths = (20, 0, 3), (9, 1, 0)
    used = [torch.tensor(some, dtype=torch.int32) for some in ((10, 0, 3), (9, 0, 0))]
    tensors = (*packed(0, lengths, head_dim=32), *vectors(lengths), *used)
    torch.library.opcheck(OP, (*tensors, *(None,) * 5, *options))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_saturation_is_counted_if_asked(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.ones(8, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    k[3, 1, :5], k[4, 0, 0] = -1e5, float("nan")
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    scales = {f"{name}_descale": torch.ones(2, 2) for name in "qkv"}
    call = functools.partial(quantize_qkv, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(**scales)
        monkeypatch.setenv("CUTEFLASH_CHECK", "1")
        call()
    with pytest.warns(UserWarning, match=r"5 of 256 elements of k are as large as .*, .* times k_descale") as found:
        call(**scales)
    assert len(found) == 1


def test_fake_results_have_the_shapes_and_strides_of_real_ones() -> None:
    tensors = (*packed(), *vectors())
    for options in ((), ("block", 0, False, True, True)):
        arguments = (*tensors, *(None,) * 7, *options)
        real = OP(*arguments)
        with FakeTensorMode() as mode:
            fake = OP(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_bad_input_is_named() -> None:
    q, k, v = packed(0)
    cu_q, cu_k = vectors()
    both = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"cu_seqlens_q": cu_q}, ValueError, "cu_seqlens_k is None; allowed with cu_seqlens_q: a tensor"),
        ({"seqused_k": cu_k}, ValueError, "cu_seqlens_q is None; allowed with seqused_k: a tensor"),
        (both | {"cu_seqlens_k": cu_k[:-1]}, ValueError, r"cu_seqlens_k.shape is \(5,\); allowed: \(6,\)"),
        (both | {"cu_seqlens_q": cu_q.long()}, TypeError, "cu_seqlens_q.dtype is torch.int64; allowed: torch.int32"),
        (both | {"cu_seqlens_q": [0, 1]}, TypeError, "cu_seqlens_q is a list; allowed: a torch.Tensor"),
        (both | {"cu_seqlens_q": cu_q + 1}, ValueError, r"cu_seqlens_q\[0\] is 1"),
        (both | tables(100, 16), ValueError, "rotary_cos.shape.0. is 100; allowed: 130 or more, the longest .* of q"),
        (both | {"seqused_q": cu_q[1:]}, ValueError, r"seqused_q\[1\] is 130; allowed: 0 to 0"),
        (both | {"dtype": torch.float16}, TypeError, "dtype is torch.float16; allowed: torch.float8_e4m3fn, torch.flo"),
        (
            both | {f"{x}_descale": torch.ones(1, 2, 3) for x in "qkv"} | {"granularity": "block"},
            ValueError,
            r"q_descale.shape is \(1, 2, 3\); allowed with granularity 'block': \(1, 2, 7\), \(1, kv_heads, blocks",
        ),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            quantize_qkv(q, k, v, **arguments)
            pytest.fail(message)


class Gpu:
    """The CUDA implementation on CPU tensors, with a kernel that records its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: list[Any] = []
        self.launches: list[QuantizeTensors] = []
        monkeypatch.setattr(quantize_ops, "known", type(quantize_ops.known)())
        monkeypatch.setattr(quantize_planning, "current_target", lambda index: "sm_90a")
        monkeypatch.setattr(quantize_planning, "kernel_of", self.kernel_of)

    def kernel_of(self, problem: Any) -> Callable[..., None]:
        self.problems.append(problem)
        return lambda *tensors: self.launches.append(QuantizeTensors(*tensors))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_launch_gets_what_its_kernel_takes(gpu: Gpu) -> None:
    q, k, v = packed()
    cu_q, cu_k = vectors()
    used_k = torch.tensor(USED[1], dtype=torch.int32)
    arguments = (q, k, v, cu_q, cu_k, None, used_k, *(None,) * 5, "head", 0, False, True, True)
    result = quantize_ops.quantize_varlen_cuda(*arguments)
    (problem,), (tensors,) = gpu.problems, gpu.launches
    assert problem.is_packed and problem.has_used and problem.transposes_v
    assert tensors[:3] == (q, k, v) and tensors[3:10] == result
    assert tensors.cu_q is cu_q and tensors.cu_k is cu_k and tensors.used_k is used_k
    assert tensors.used_q.tolist() == list(LENGTHS[0]) and tensors.used_q.dtype == torch.int32
    # 310 and 461 rows of 5 sequences are at most 6 parts of 512 tokens: 4 heads of Q, 2 of K, 2 x 3 x 64 sums of V
    assert tensors.workspace.shape == (6 * 4 + 6 * 2 + 6 * 2 * 3 * 64,)


def test_a_kernel_never_gets_a_tensor_without_rows(gpu: Gpu) -> None:
    lengths = (3, 0), (0, 0)
    q, k, v = packed(0, lengths)
    result = quantize_ops.quantize_varlen_cuda(q, k, v, *vectors(lengths))
    (tensors,) = gpu.launches
    assert result[1].shape[0] == 0
    assert [x.shape[0] for x in tensors[:6]] == [3, 1, 1, 3, 1, 1]


def test_nothing_is_launched_without_sequences(gpu: Gpu) -> None:
    result = quantize_ops.quantize_varlen_cuda(*packed(9, ((), ())), *vectors(((), ())))
    assert not gpu.launches and result[0].dtype == FP8
    assert not any(x.view(torch.uint8).any() for x in result[:3])
