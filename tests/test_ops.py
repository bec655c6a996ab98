"""The operators: torch's own checks, what is planned for a CUDA call, and that the fast paths change nothing.

A GPU's launches are driven here on CPU tensors, with kernels that record their arguments.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cuteflash import api, bwd_planning, calls, flash_attn_func, ops, planning
from cuteflash.arguments import mask_of_window
from cuteflash.dispatch import Choice
from cuteflash.problem import UNBOUNDED, FwdProblem
from cuteflash.traits.row import Row
from cuteflash.traits.sm90 import FwdTraitsSm90
from tests.user_tables import MEASURED, OwnTables

FWD, FWD_LSE = torch.ops.cuteflash.fwd.default, torch.ops.cuteflash.fwd_lse.default
BWD = torch.ops.cuteflash.bwd.default
NUM_SMS = 132


def qkv(s_q=6, s_k=9, heads=4, kv_heads=2, d=16, d_v=24, batch=2, dtype=torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, s_q, heads, d), (batch, s_k, kv_heads, d), (batch, s_k, kv_heads, d_v)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("op", [FWD, FWD_LSE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [(), (0.5, -1, 0), (None, 3, 2, 10.0, True, "sm80")], ids=str)
def test_opcheck(op, dtype: torch.dtype, options: tuple[Any, ...]) -> None:
    torch.library.opcheck(op, (*qkv(dtype=dtype), *options))


@pytest.mark.parametrize("op", [FWD, FWD_LSE], ids=str)
def test_opcheck_of_views(op) -> None:
    q, k, v = qkv(batch=1)
    torch.library.opcheck(op, (q.expand(3, -1, -1, -1), k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1).transpose(0, 0)))


@pytest.mark.parametrize("shape", [{}, {"batch": 0}, {"s_q": 0}, {"s_k": 0}, {"s_q": 1, "batch": 1}, {"d_v": 16}])
@pytest.mark.parametrize("transposed", [False, True])
def test_fake_results_have_the_shapes_and_strides_of_real_ones(shape: dict[str, int], transposed: bool) -> None:
    tensors = qkv(**shape)
    if transposed:
        tensors = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    real = FWD_LSE(*tensors)
    with FakeTensorMode() as mode:
        fake = FWD_LSE(*(mode.from_tensor(x) for x in tensors))
    for r, f in zip(real, fake):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_fake_cuda_results_need_no_gpu() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 6, 4, 16, device="cuda", dtype=torch.bfloat16)
        o, lse = FWD_LSE(q, q, q, softcap=3.0)
    assert o.device.type == lse.device.type == "cuda" and lse.shape == (2, 4, 6)


def test_options_go_by_name_or_by_position() -> None:
    q, k, v = qkv()
    by_name = FWD(q, k, v, softcap=4.0, window_right=0, softmax_scale=0.3)
    assert torch.equal(by_name, FWD(q, k, v, 0.3, -1, 0, 4.0))
    assert torch.equal(by_name, flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, softcap=4.0))


@pytest.mark.parametrize("window", [(-1, 2**63 - 1), (2**63 - 1, 2**63 - 1), (0, 2**63 - 1), (2**63 - 1, 0)], ids=str)
def test_windows_beyond_every_length_are_unbounded(window: tuple[int, int]) -> None:
    q, k, v = qkv()
    left, right = (-1 if side > UNBOUNDED else side for side in window)
    assert torch.equal(FWD(q, k, v, None, *window), FWD(q, k, v, None, left, right))


def test_the_schema_is_made_of_the_options() -> None:
    arguments = (
        "(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
        "float softcap=0., bool? pack_gqa=None, str? family=None, bool deterministic=False, str? lengths=None, "
        "int attention_chunk=0, int num_splits=1, Tensor? sinks=None)"
    )
    assert str(FWD._schema) == f"cuteflash::fwd{arguments} -> Tensor"
    assert str(FWD_LSE._schema) == f"cuteflash::fwd_lse{arguments} -> (Tensor, Tensor)"
    assert str(BWD._schema) == (
        "cuteflash::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, "
        "float? softmax_scale=None, int window_left=-1, int window_right=-1, float softcap=0., str? family=None, "
        "bool deterministic=False, str? lengths=None, int attention_chunk=0) -> (Tensor, Tensor, Tensor)"
    )


def test_a_field_of_the_options_is_an_argument_of_the_schema() -> None:
    class Longer(NamedTuple):
        softmax_scale: float | None = None
        dropout: float = 0.5
        sink: str | None = None

    schema = dataclasses.replace(ops.FWD, options=Longer, tensors=("q", "cu_q"), trailing=()).schema
    assert (
        schema == "fwd(Tensor q, Tensor cu_q, float? softmax_scale=None, float dropout=0.5, str? sink=None) -> Tensor"
    )


def test_lazily_negated_tensors_are_negated() -> None:
    q, k, v = qkv()
    assert torch.equal(FWD(torch._neg_view(q), k, v), FWD(-q, k, v))


def test_modes_see_the_operator() -> None:
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        FWD(*qkv())
    assert FWD in seen


class Gpu:
    """An sm_90a on which kernels only record: (problem, arguments) of every launch in `launches`.

    `planned` counts the kernels that were asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[FwdProblem, tuple[Any, ...]]] = []
        self.planned = 0
        for module in (planning, bwd_planning):
            monkeypatch.setattr(module, "current_target", lambda index: "sm_90a")
            monkeypatch.setattr(module, "compiled", self._compiled)
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        properties = types.SimpleNamespace(multi_processor_count=NUM_SMS)
        monkeypatch.setattr(planning.torch.cuda, "get_device_properties", lambda device: properties)
        self.fwd, self.fwd_lse = ops.CudaForward(has_lse=False), ops.CudaForward(has_lse=True)

    def _compiled(self, kernel_cls, traits, problem, target):
        self.planned += 1
        return lambda *arguments: self.launches.append((problem, arguments))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_launch_gets_tensors_scalars_and_the_number_of_sms(gpu: Gpu) -> None:
    q, k, v = qkv()
    o, lse = gpu.fwd_lse(q, k, v, 0.3, 5, -1, 2.0, False)
    problem, arguments = gpu.launches[0]
    assert problem == FwdProblem.dense("bf16", 16, 24, "window", softcap=True, lse=True)
    assert all(got is x for got, x in zip(arguments, (q, k, v, o, lse)))
    assert arguments[5:] == (0.3, 2.0, 5, UNBOUNDED, 0, NUM_SMS)
    assert o.shape == (2, 6, 4, 24) and o.dtype == q.dtype and o.is_contiguous()
    assert lse.shape == (2, 4, 6) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_a_launch_gets_plain_numbers_for_numpys(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_plain_cuda_call", lambda q, k, v: True)
    monkeypatch.setattr(api, "fwd_cuda", gpu.fwd)
    window = np.int64(3), np.int32(-1)
    flash_attn_func(*qkv(), softmax_scale=np.float64(0.5), softcap=np.float16(2), window_size=window)
    scalars = gpu.launches[0][1][5:]
    assert scalars == (0.5, 2.0, 3, UNBOUNDED, 0, NUM_SMS) and {type(x) for x in scalars} == {float, int}


def test_without_lse_none_is_allocated(gpu: Gpu) -> None:
    o = gpu.fwd(*qkv(dtype=torch.float16), None, -1, 0, 0.0, False)
    problem, arguments = gpu.launches[0]
    assert problem == FwdProblem.dense("fp16", 16, 24, "causal")
    assert arguments[3] is o and arguments[4] is None
    assert arguments[5] == 16**-0.5


def test_an_equal_call_is_planned_once(gpu: Gpu) -> None:
    results = [gpu.fwd(*qkv()) for _ in range(3)]
    assert gpu.planned == 1 and len(gpu.launches) == 3
    assert len({x.data_ptr() for x in results}) == 3


def test_calls_that_take_turns_get_the_launch_of_each(gpu: Gpu) -> None:
    for _ in range(3):
        for s_q in (6, 7):
            for tensors in (qkv(s_q=s_q), tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(s_q=s_q))):
                o, lse = gpu.fwd_lse(*tensors)
                assert o.shape[1] == lse.shape[2] == s_q and o.is_contiguous()
    assert gpu.planned == 1


VARIANTS = {
    "as it is": (lambda x: x, (), "bf16 full", (0.25, 0.0, UNBOUNDED, UNBOUNDED, 0)),
    "scale": (lambda x: x, (0.5,), "bf16 full", (0.5, 0.0, UNBOUNDED, UNBOUNDED, 0)),
    "left": (lambda x: x, (None, 3), "bf16 window", (0.25, 0.0, 3, UNBOUNDED, 0)),
    "another left": (lambda x: x, (None, 4), "bf16 window", (0.25, 0.0, 4, UNBOUNDED, 0)),
    "causal": (lambda x: x, (None, -1, 0), "bf16 causal", (0.25, 0.0, UNBOUNDED, 0, 0)),
    "chunk": (
        lambda x: x,
        (None, -1, 0, 0.0, None, None, False, None, 7),
        "bf16 window chunked",
        (0.25, 0.0, UNBOUNDED, 0, 7),
    ),
    "softcap": (lambda x: x, (None, -1, -1, 2.0), "bf16 full softcap", (0.25, 2.0, UNBOUNDED, UNBOUNDED, 0)),
    "fp16": (lambda x: x.half(), (), "fp16 full", (0.25, 0.0, UNBOUNDED, UNBOUNDED, 0)),
    "batch": (lambda x: x[:1], (), "bf16 full", (0.25, 0.0, UNBOUNDED, UNBOUNDED, 0)),
    "length": (lambda x: x[:, 1:], (), "bf16 full", (0.25, 0.0, UNBOUNDED, UNBOUNDED, 0)),
    "one query": (lambda x: x[:, :1], (None, -1, 0), "bf16 full", (0.25, 0.0, UNBOUNDED, 0, 0)),
    "strides": (lambda x: x.repeat(1, 2, 1, 1)[:, ::2], (), "bf16 full", (0.25, 0.0, UNBOUNDED, UNBOUNDED, 0)),
}


def test_what_differs_between_calls_never_leaks_from_one_into_another(gpu: Gpu) -> None:
    for change, options, title, scalars in [*VARIANTS.values(), *VARIANTS.values()]:
        q, k, v = (change(x) for x in qkv(d_v=16))
        o, lse = gpu.fwd_lse(q, k, v, *options)
        problem, arguments = gpu.launches[-1]
        extras = [name for name in ("softcap", "chunked") if getattr(problem.scores, name)]
        assert " ".join([problem.operands.qk_dtype, problem.scores.mask, *extras]) == title
        assert arguments[5:] == (*scalars, NUM_SMS)
        assert o.shape == q.shape and o.dtype == q.dtype and o.is_contiguous()
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert gpu.planned == len(VARIANTS) - len({"batch", "length", "strides"})  # which need no kernel of their own


def test_the_lengths_of_a_call_choose_among_a_problems_kernels(
    gpu: Gpu, own_tables: OwnTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = {"decode": 32, "tiny": 64, "brief": 96, "short": 48, "long": 80}
    rows = [Row(FwdTraitsSm90(128, tile_n, 32, 32), lengths=(shape,)) for shape, tile_n in tiles.items()]
    own_tables.write("sm_90a", "sm90", [MEASURED(row) for row in rows])
    launched = []
    monkeypatch.setattr(
        planning, "compiled", lambda cls, traits, *rest: lambda *arguments: launched.append(traits.tile_n)
    )
    sizes = (16, 9), (17, 9), (17, 90), (17, 900), (17, 1536), (16, 9)
    for (s_q, s_k), shape in zip(sizes, [*tiles, "decode"], strict=True):
        gpu.fwd(*qkv(s_q=s_q, s_k=s_k, d_v=16), None, -1, -1, 0.0, False)
        assert launched[-1] == tiles[shape]


def test_only_making_a_plan_asks_for_the_class_of_lengths(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: Any) -> None:
        raise AssertionError("asked")

    gpu.fwd(*qkv())
    for module in (calls, planning):
        monkeypatch.setattr(module, "length_class_of", asked)
    gpu.fwd(*qkv())
    traced = make_fx(FWD, tracing_mode="symbolic")(*qkv())
    assert isinstance(next(iter(traced.graph.nodes)).meta["val"].shape[1], torch.SymInt)
    with pytest.raises(AssertionError, match="asked"):
        gpu.fwd(*qkv(s_k=10))


def test_launches_are_bounded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = planning.Planner.launch
    monkeypatch.setattr(planning.Planner, "launch", lambda self, *call: planned.append(call) or plan(self, *call))
    monkeypatch.setattr(calls, "LAUNCHES_MAX", 3)
    for s_k in [1, 2, 3, 4, 4, 1]:
        gpu.fwd(*qkv(s_k=s_k))
    assert len(planned) == 5  # 1 2 3, then room is made for 4, and 1 is planned again


def test_alignment_is_checked_on_every_call(gpu: Gpu) -> None:
    q, k, v = qkv()
    gpu.fwd(q, k, v)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(ValueError, match=r"q\.data_ptr\(\)"):
        gpu.fwd(shifted, k, v)
    assert len(gpu.launches) == 1


def test_bad_input_raises_before_a_launch(gpu: Gpu) -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="softmax_scale is nan"):
        gpu.fwd(q, k, v, math.nan)
    assert gpu.planned == 0 and not gpu.launches


@pytest.mark.parametrize("shape", [{"batch": 0}, {"s_q": 0}, {"heads": 0}, {"s_k": 0}])
def test_nothing_is_launched_where_no_query_sees_a_key(gpu: Gpu, shape: dict[str, int]) -> None:
    q, k, v = qkv(**shape)
    for _ in range(2):
        o, lse = gpu.fwd_lse(q, k, v)
        assert o.shape == (*q.shape[:3], 24) and (o == 0).all()
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and (lse == -math.inf).all()
        assert torch.equal(gpu.fwd(q, k, v), o)
    assert not gpu.launches


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("d_v", [16, 24])
def test_the_output_is_contiguous_for_any_input(gpu: Gpu, transposed: bool, d_v: int) -> None:
    q, k, v = qkv(d_v=d_v)
    if transposed:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert gpu.fwd(q, k, v).stride() == (6 * 4 * d_v, 4 * d_v, d_v, 1)


def test_expanded_inputs_reach_the_kernel_unchanged(gpu: Gpu) -> None:
    q, k, v = qkv(batch=1)
    expanded = k.expand(2, -1, -1, -1)
    gpu.fwd(q.repeat(2, 1, 1, 1), expanded, v.expand(2, -1, -1, -1))
    assert gpu.launches[0][1][1] is expanded


def test_strides_of_size_1_dimensions_are_made_usable(gpu: Gpu) -> None:
    q, k, v = qkv(batch=1, s_k=1)
    odd = k.as_strided(k.shape, (3, 5, 16, 1))
    o = gpu.fwd(q.as_strided(q.shape, (7, *q.stride()[1:])), odd, v)
    got_q, got_k, got_v, got_o = gpu.launches[0][1][:4]
    for got in (got_q, got_k, got_v, got_o):
        assert all(stride % 8 == 0 for stride in got.stride()[:-1])
    assert torch.equal(got_q, q) and torch.equal(got_k, k) and got_k.data_ptr() == odd.data_ptr() and got_v is v
    assert o.stride() == (6 * 4 * 24, 4 * 24, 24, 1)


@pytest.mark.parametrize(("pack_gqa", "packed_heads"), [(True, 8), (False, 1), (None, 8)])
def test_short_queries_are_packed_unless_told_not_to(gpu: Gpu, pack_gqa: bool | None, packed_heads: int) -> None:
    gpu.fwd(*qkv(heads=16), None, -1, -1, 0.0, pack_gqa)
    assert gpu.launches[0][0].operands.packed_heads == packed_heads


@pytest.mark.parametrize(
    ("window", "seqlen_q", "expected"),
    [
        ((-1, -1), 5, ("full", UNBOUNDED, UNBOUNDED)),
        ((-1, 0), 5, ("causal", UNBOUNDED, 0)),
        ((-1, 0), 1, ("full", UNBOUNDED, 0)),  # the last row sees every key
        ((-1, 7), 1, ("full", UNBOUNDED, 7)),
        ((-1, 7), 5, ("window", UNBOUNDED, 7)),
        ((7, -1), 5, ("window", 7, UNBOUNDED)),
        ((7, 0), 1, ("window", 7, 0)),
        ((0, 0), 5, ("window", 0, 0)),
        ((1 << 40, 1 << 40), 5, ("window", UNBOUNDED, UNBOUNDED)),
    ],
)
def test_mask_kinds(window: tuple[int, int], seqlen_q: int, expected: tuple[str, int, int]) -> None:
    assert mask_of_window(*window, seqlen_q) == expected
