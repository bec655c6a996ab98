"""Packed sequences: what the functions compute on a CPU, what a launch gets, and which input is refused.

A GPU's launches are driven here on CPU tensors, with kernels that record their arguments.
"""

from __future__ import annotations

import contextlib
import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cuteflash import flash_attn_func, flash_attn_varlen_func, packed_ops, packed_planning
from cuteflash.arguments import FwdScalars, FwdTensors, PackedTensors
from cuteflash.dispatch import Choice
from cuteflash.problem import FwdProblem, Operands, Scores, Storage

VARLEN, VARLEN_LSE = torch.ops.cuteflash.varlen_fwd.default, torch.ops.cuteflash.varlen_fwd_lse.default
LENGTHS_Q, LENGTHS_K = (3, 0, 7, 1, 4), (5, 2, 0, 6, 4)
NUM_SMS = 132


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return int32(0, *(sum(lengths[: i + 1]) for i in range(len(lengths))))


def inputs(rest=0, heads=4, kv_heads=2, d=16, d_v=24, dtype=torch.float32, lengths=(LENGTHS_Q, LENGTHS_K)) -> Any:
    generator = torch.Generator().manual_seed(0)
    total_q, total_k = (sum(side) + rest for side in lengths)
    shapes = (total_q, heads, d), (total_k, kv_heads, d), (total_k, kv_heads, d_v)
    return *(torch.randn(shape, generator=generator).to(dtype) for shape in shapes), *map(ends, lengths)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1), "softmax_scale": 0.3},
    "softcap": {"softcap": 5.0, "pack_gqa": True, "family": "sm80", "deterministic": True},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_each_sequence_is_what_it_would_be_alone(case: str) -> None:
    q, k, v, cu_q, cu_k = inputs()
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, torch.tensor(6), return_lse=True, **OPTIONS[case])
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu_q, cu_k, **OPTIONS[case]))
    alone = {name: value for name, value in OPTIONS[case].items() if name != "deterministic"}
    for i in range(len(LENGTHS_Q)):
        of_q, of_k = (slice(cu[i].item(), cu[i + 1].item()) for cu in (cu_q, cu_k))
        o_i, lse_i = flash_attn_func(q[None, of_q], k[None, of_k], v[None, of_k], return_lse=True, **alone)
        assert torch.equal(out[of_q], o_i[0])
        assert torch.equal(lse[:, of_q], lse_i[0])


def test_rows_that_do_not_count_are_not_read_and_give_zero() -> None:
    q, k, v, cu_q, cu_k = inputs(rest=3)
    used_q, used_k = int32(2, 0, 7, 0, 4), int32(5, 1, 0, 3, 2)
    kept_q, kept_k = (
        torch.cat([torch.arange(b, b + n) for b, n in zip(cu.tolist(), used.tolist(), strict=False)])
        for cu, used in ((cu_q, used_q), (cu_k, used_k))
    )
    expected = flash_attn_varlen_func(
        q[kept_q], k[kept_k], v[kept_k], ends(tuple(used_q.tolist())), ends(tuple(used_k.tolist()))
    )
    for tensor, kept in ((q, kept_q), (k, kept_k), (v, kept_k)):
        tensor[[i for i in range(len(tensor)) if i not in kept]] = math.nan
    out, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, seqused_q=used_q, seqused_k=used_k, return_lse=True)
    assert torch.equal(out[kept_q], expected)
    rest = [i for i in range(len(q)) if i not in kept_q]
    assert (out[rest] == 0).all()
    assert (lse[:, rest] == -math.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize(("op", "used"), [(VARLEN, ()), (VARLEN_LSE, (int32(1, 0, 2, 1, 4), None))], ids=str)
def test_opcheck(op: Any, used: tuple[Any, ...]) -> None:
    torch.library.opcheck(op, (*inputs(), *used))


def test_the_schema() -> None:
    assert str(VARLEN._schema) == (
        "cuteflash::varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, float? softmax_scale=None, int window_left=-1, "
        "int window_right=-1, float softcap=0., bool? pack_gqa=None, str? family=None, bool deterministic=False, "
        "str? lengths=None, int attention_chunk=0, int num_splits=1, Tensor? sinks=None) -> Tensor"
    )


@pytest.mark.slow
def test_compiling_makes_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((LENGTHS_Q, LENGTHS_K), ((9, 2, 3), (3, 4, 5)), ((5, 5), (2, 8))):
            arguments = inputs(lengths=lengths)
            limits = max(lengths[0]), max(lengths[1])
            out = compiled(*arguments, *limits, causal=True, return_lse=True)
            expected = flash_attn_varlen_func(*arguments, *limits, causal=True, return_lse=True)
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_results_look_like_real_ones(device: str) -> None:
    real = VARLEN_LSE(*inputs(dtype=torch.bfloat16))
    with FakeTensorMode() if device != "meta" else contextlib.nullcontext():
        made = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in inputs(dtype=torch.bfloat16)]
        fake = VARLEN_LSE(*made)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert fake[0].device.type == device


def test_vmap_makes_one_call_after_the_other() -> None:
    q, k, v, cu_q, cu_k = inputs()
    shorter = ends((1, 2, 3, 4, 5))
    stacked = torch.stack([cu_q, shorter])
    out, lse = torch.vmap(VARLEN_LSE, in_dims=(None, 0, None, 0, None))(q, torch.stack([k, -k]), v, stacked, cu_k)
    for i, (keys, cu) in enumerate(((k, cu_q), (-k, shorter))):
        expected = VARLEN_LSE(q, keys, v, cu, cu_k)
        assert torch.equal(out[i], expected[0]) and torch.equal(lse[i], expected[1])
        found = torch.vmap(lambda cu: flash_attn_varlen_func(q, keys, v, cu, cu_k, 7, 6))(stacked)  # noqa: B023
        assert torch.equal(found[i], expected[0])
    with pytest.raises(ValueError, match="mapped dimension has size 0; allowed: 1 or more"):
        torch.vmap(VARLEN, in_dims=(0, *[None] * 4))(q.expand(0, *q.shape), k, v, cu_q, cu_k)


def test_autocast_takes_its_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn_varlen_func(*inputs()).dtype == torch.bfloat16


def test_flops_are_those_of_each_sequence() -> None:
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_func(*inputs())
    pairs = sum(a * b for a, b in zip(LENGTHS_Q, LENGTHS_K, strict=True))
    assert counter.get_total_flops() == 2 * 4 * pairs * (16 + 24)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:  # lengths that nobody knows: equal ones
        flash_attn_varlen_func(*(torch.empty(x.shape, dtype=x.dtype) for x in inputs()))
    assert counter.get_total_flops() == 2 * 4 * (15 * 17 // 5) * (16 + 24)


def test_tangents_are_refused() -> None:
    q, *rest = inputs()
    with pytest.raises(NotImplementedError, match="q has a tangent"):
        torch.func.jvp(lambda x: flash_attn_varlen_func(x, *rest), (q,), (q,))


class Gpu:
    """An sm_90a on which kernels only record: (problem, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[FwdProblem, tuple[Any, ...]]] = []
        self.planned: list[FwdProblem] = []
        properties = types.SimpleNamespace(multi_processor_count=NUM_SMS)
        stream = types.SimpleNamespace(device_index=0, cuda_stream=1)
        for module in ("planning", "packed_planning"):
            monkeypatch.setattr(f"cuteflash.{module}.current_target", lambda index: "sm_90a")
        monkeypatch.setattr(packed_planning, "compiled", self._compiled)
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        monkeypatch.setattr(packed_planning, "counters", packed_planning.TileCounters())
        self.captures = False
        self.stream = stream
        self.fwd, self.fwd_lse = packed_ops.CudaForward(has_lse=False), packed_ops.CudaForward(has_lse=True)

    def _compiled(self, kernel_cls: Any, traits: Any, problem: FwdProblem, target: str) -> Any:
        self.planned.append(problem)
        return lambda *arguments: self.launches.append((problem, arguments))

    def packed(self) -> PackedTensors:
        """The tensors of packed sequences of the latest launch."""
        start = len(FwdTensors._fields)
        return PackedTensors(*self.launches[-1][1][start : start + len(PackedTensors._fields)])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_launch_gets_tensors_vectors_a_counter_and_scalars(gpu: Gpu) -> None:
    q, k, v, cu_q, cu_k = inputs(dtype=torch.bfloat16)
    used = int32(1, 0, 1, 1, 1)
    o, lse = gpu.fwd_lse(q, k, v, cu_q, cu_k, None, used, 0.3, 5, -1, 2.0, False)
    problem, arguments = gpu.launches[0]
    assert problem == FwdProblem(
        Operands("bf16", "bf16", "bf16", 16, 24),
        Scores("window", softcap=True),
        Storage("varlen", "varlen", used_k=True),
        has_lse=True,
    )
    assert all(got is x for got, x in zip(arguments, (q, k, v, o, lse), strict=False))
    *vectors, counter, _, _, _ = gpu.packed()
    assert all(got is x for got, x in zip(vectors, (cu_q, cu_k, None, used), strict=True))
    assert counter.tolist() == [0] and counter.dtype == torch.int32
    assert FwdScalars(*arguments[13:]) == FwdScalars(0.3, 2.0, 5, 1 << 30, 0, NUM_SMS)
    assert o.shape == (15, 4, 24) and o.is_contiguous()
    assert lse.shape == (4, 15) and lse.dtype == torch.float32


def test_an_equal_call_is_planned_once_whatever_its_vectors_say(gpu: Gpu) -> None:
    q, k, v, cu_q, cu_k = inputs(dtype=torch.bfloat16)
    for cu in (cu_q, ends((0, 0, 15, 0, 0)), ends((3, 3, 3, 3, 3))):
        gpu.fwd(q, k, v, cu, cu_k)
    assert len(gpu.planned) == 1 and len(gpu.launches) == 3


def test_a_single_query_may_be_masked_like_others(gpu: Gpu) -> None:
    q, k, v, _, cu_k = inputs(dtype=torch.bfloat16)
    gpu.fwd(q[:5], k, v, ends((1,) * 5), cu_k, None, None, None, -1, 0)
    assert gpu.planned[0].scores.mask == "causal"  # sequences may differ in length


def test_results_are_filled_beforehand_if_some_queries_do_not_count(gpu: Gpu) -> None:
    arguments = inputs(dtype=torch.bfloat16)
    o, lse = gpu.fwd_lse(*arguments, int32(1, 0, 1, 1, 1), None)
    assert gpu.planned[0].storage == Storage("varlen", "varlen", used_q=True)
    assert (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("lengths", [((), ()), ((0,), (3,)), ((3,), (0,))], ids=str)
def test_nothing_is_launched_if_there_is_nothing_to_see(gpu: Gpu, lengths: Any) -> None:
    q, *rest = inputs(dtype=torch.bfloat16, lengths=lengths)
    o, lse = gpu.fwd_lse(q, *rest)
    assert not gpu.launches and not gpu.planned
    assert o.shape == (len(q), 4, 24) and (o == 0).all() and (lse == -math.inf).all()


def test_each_stream_has_a_counter_and_so_has_each_captured_launch(gpu: Gpu) -> None:
    def counter() -> Tensor:
        gpu.fwd(*inputs(dtype=torch.bfloat16))
        return gpu.packed().tile_counter

    first = counter()
    assert counter() is first
    gpu.stream.cuda_stream = 2
    second = counter()
    assert second is not first
    gpu.captures = True
    assert len({id(x) for x in (first, second, counter(), counter())}) >= 3
    gpu.captures = False
    assert counter() is second


def test_strides_of_size_1_dimensions_are_made_usable(gpu: Gpu) -> None:
    q, k, v, *vectors = inputs(dtype=torch.bfloat16, kv_heads=1)
    odd = k.as_strided(k.shape, (16, 3, 1))
    gpu.fwd(q, odd, v, *vectors)
    assert gpu.launches[0][1][1].stride() == (16, 8, 1)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q rank": ({"q": torch.empty(1, 15, 4, 16)}, ValueError, r"q has 4 dimensions.*allowed: 3, .total, heads, head_d"),
    "k head_dim": ({"k": torch.empty(17, 2, 8)}, ValueError, r"k.shape\[2\] \(head_dim\) is 8; allowed: 16"),
    "v total": ({"v": torch.empty(16, 2, 24)}, ValueError, r"v.shape\[0\] \(total\) is 16; allowed: 17, that of k"),
    "heads": ({"q": torch.empty(15, 3, 16)}, ValueError, r"q.shape\[1\] \(heads\) is 3; .* k.shape\[1\], which is 2"),
    "row stride": (
        {"q": torch.empty(15, 4, 17)[..., :16]},
        ValueError,
        r"q.stride\(1\) is 17; allowed: multiples of 4",
    ),
    "dtype": (
        {"cu_seqlens_q": ends(LENGTHS_Q).long()},
        TypeError,
        "cu_seqlens_q.dtype is torch.int64; allowed: torch.i",
    ),
    "used dtype": ({"seqused_k": torch.ones(5)}, TypeError, "seqused_k.dtype is torch.float32; allowed: torch.int32"),
    "rank": (
        {"cu_seqlens_k": ends(LENGTHS_K)[None]},
        ValueError,
        r"cu_seqlens_k has 2 dimensions, shape \(1, 6\); all",
    ),
    "batch": (
        {"cu_seqlens_k": int32(0, 17)},
        ValueError,
        r"cu_seqlens_k.shape is \(2,\); allowed: \(6,\), that of cu_s",
    ),
    "used batch": ({"seqused_q": int32(1)}, ValueError, r"seqused_q.shape is \(1,\); allowed: \(5,\), one less than"),
    "no end": ({"cu_seqlens_q": int32(), "cu_seqlens_k": int32()}, ValueError, r"cu_seqlens_q.shape is \(0,\)"),
    "device": (
        {"cu_seqlens_q": ends(LENGTHS_Q).to("meta")},
        ValueError,
        "cu_seqlens_q.device is meta; allowed: cpu, t",
    ),
    "contiguity": ({"seqused_q": int32(*[1] * 10)[::2]}, ValueError, r"seqused_q.stride\(0\) is 2; allowed: 1"),
    "sparse": ({"cu_seqlens_q": ends(LENGTHS_Q).to_sparse()}, NotImplementedError, "cu_seqlens_q.layout is torch.spar"),
    "scale": ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0; allowed: None or a positive"),
}
BAD_TO_THE_FUNCTION: dict[str, tuple[dict[str, Any], type[Exception], str]] = BAD | {
    "no tensor": ({"cu_seqlens_k": [0, 17]}, TypeError, "cu_seqlens_k is a list; allowed: a torch.Tensor"),
    "used list": ({"seqused_q": [1]}, TypeError, "seqused_q is a list; allowed: None, a torch.Tensor"),
    "negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; allowed: None, an int of 0 or more"),
    "float": ({"max_seqlen_k": 7.0}, TypeError, "max_seqlen_k is 7.0; allowed: None, an int of 0 or more, an integer"),
    "float tensor": ({"max_seqlen_k": torch.ones(())}, TypeError, r"max_seqlen_k is a tensor, torch.float32 of"),
    "two": ({"max_seqlen_q": int32(1, 2)}, TypeError, r"max_seqlen_q is a tensor, torch.int32 of shape \(2,\)"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic is 1; allowed: True, False"),
    "causal": ({"causal": 1}, TypeError, "causal is 1; allowed: True, False"),
    "family": ({"family": 90}, TypeError, "family is 90; allowed: None, 'sm80', 'sm90'"),
}  # fmt: skip
NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")


@pytest.mark.parametrize("case", BAD_TO_THE_FUNCTION)
def test_bad_input(case: str) -> None:
    change, error, message = BAD_TO_THE_FUNCTION[case]
    arguments = dict(zip(NAMES, inputs(), strict=True)) | change
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**arguments)
    if case in BAD:
        with pytest.raises(error, match=message):
            VARLEN(**arguments)


@pytest.mark.parametrize("case", [name for name in BAD if name not in ("row stride", "device", "k head_dim", "q rank")])
def test_bad_input_launches_nothing(gpu: Gpu, case: str) -> None:
    change, error, message = BAD[case]
    good = dict(zip(NAMES, inputs(dtype=torch.bfloat16), strict=True))
    gpu.fwd(*good.values())
    change = {name: x.bfloat16() if name in "qkv" else x for name, x in change.items()}
    arguments = good | {"seqused_q": None, "seqused_k": None, "softmax_scale": None} | change
    with pytest.raises(error, match=message):
        gpu.fwd(*arguments.values())
    assert len(gpu.launches) == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "start": ({"cu_seqlens_q": int32(1, 3, 3, 10, 11, 15)}, r"cu_seqlens_q\[0\] is 1, where sequence 0 begins"),
    "decreasing": (
        {"cu_seqlens_k": int32(0, 5, 4, 7, 13, 17)},
        r"cu_seqlens_k\[2\] is 4, the end of sequence 1, which begins at 5; allowed: 5 or more",
    ),
    "too long": ({"cu_seqlens_k": int32(0, 5, 7, 7, 13, 18)}, r"cu_seqlens_k\[-1\] is 18, the end of sequence 4"),
    "used": ({"seqused_k": int32(5, 3, 0, 6, 4)}, r"seqused_k\[1\] is 3; allowed: 0 to 2, the length of sequence 1"),
    "negative": ({"seqused_q": int32(-1, 0, 7, 1, 4)}, r"seqused_q\[0\] is -1; allowed: 0 to 3"),
    "longest": ({"max_seqlen_q": 6}, "max_seqlen_q is 6; allowed: 7 or more, the length of sequence 2"),
    "longest, used": ({"max_seqlen_k": int32(1), "seqused_k": int32(0, 0, 0, 2, 0)}, "max_seqlen_k is 1; .*sequence 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_found_on_a_cpu(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**dict(zip(NAMES, inputs(), strict=True)) | change)


@pytest.mark.parametrize("case", [name for name in WRONG if "longest" not in name])
def test_wrong_values_are_found_on_a_gpu_on_request(gpu: Gpu, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = WRONG[case]
    arguments = dict(zip(NAMES, inputs(dtype=torch.bfloat16), strict=True)) | {"seqused_q": None} | change
    gpu.fwd(*arguments.values())
    for value in ("0", "1"):
        monkeypatch.setenv("CUTEFLASH_CHECK", value)
        with pytest.raises(ValueError, match=message) if value == "1" else contextlib.nullcontext():
            gpu.fwd(*arguments.values())
    assert len(gpu.launches) == 2


def test_rows_after_the_last_sequence_are_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(rest=1)
    assert flash_attn_varlen_func(*arguments).shape == (16, 4, 24)
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[-1\] is 15, the end of sequence 4; allowed: 16, that is q.sh"):
        flash_attn_varlen_func(*arguments)
