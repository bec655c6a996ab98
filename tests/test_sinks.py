"""Attention sinks on a CPU: the definition, gradients, transforms, refusals, and what is launched."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from cutlass import cute
from torch import Tensor

from cuteflash import (
    bwd_planning,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    ops,
    packed_ops,
    packed_planning,
    planning,
    sink_ops,
)
from cuteflash.arguments import BwdArguments
from cuteflash.compat import flash_attn_interface
from cuteflash.core.bwd_signature import bwd_fake_args
from cuteflash.core.launch import batched
from cuteflash.dispatch import Choice, choose_shipped, kernel_class
from cuteflash.kernels.common.bwd_prepare import BwdPrepare
from cuteflash.kernels.common.workspace import workspace_of
from cuteflash.problem import BwdProblem, FwdProblem, Scores
from cuteflash.problem_names import extras_of
from tests.kernel_store import KernelStore
from tests.machine_code import functions

FWD, FWD_LSE = torch.ops.cuteflash.fwd.default, torch.ops.cuteflash.fwd_lse.default
VARLEN_LSE = torch.ops.cuteflash.varlen_fwd_lse.default
SINK_BWD, VARLEN_SINK_BWD = torch.ops.cuteflash.sink_bwd.default, torch.ops.cuteflash.varlen_sink_bwd.default
F64 = torch.float64
NONE = float("-inf")
CAUSAL = (None, -1, 0, 0.0, None, None, False, None, 0, 1)  # all options
LENGTHS = (3, 0, 4)


def given(s_q: int = 6, s_k: int = 9, dtype: torch.dtype = F64, grad: bool = True) -> list[Tensor]:
    """q, k, v and sinks of 4 heads that read 2."""
    generator = torch.Generator().manual_seed(s_q + 10 * s_k)
    shapes = (2, s_q, 4, 8), (2, s_k, 2, 8), (2, s_k, 2, 16), (4,)
    tensors = [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in tensors]


def packed(dtype: torch.dtype = F64, grad: bool = True) -> tuple[list[Tensor], Tensor]:
    """q, k, v and sinks of sequences of `LENGTHS`, with two rows after the last, and where they begin."""
    q, k, v, sinks = given(9, 9, dtype, grad=False)
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return [x.requires_grad_(grad) for x in (q[0], k[0], v[0], sinks)], ends


def naive(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, causal: bool = False, cap: float = 0.0) -> tuple[Tensor, ...]:
    """O and LSE by one more key, whose score is the sink and whose value is 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if causal:
        s_q, s_k = scores.shape[2:]
        scores = scores.masked_fill(torch.ones(s_q, s_k, dtype=bool).triu(s_k - s_q + 1), NONE)
    scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(dim=-1)[..., :-1] @ v).transpose(1, 2), scores.logsumexp(dim=-1)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 7), (300, 290), (4, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_results_and_gradients_are_those_of_the_definition(shape: tuple[int, int], causal: bool, cap: float) -> None:
    tensors = given(*shape)
    ours = flash_attn_func(*tensors[:3], sinks=tensors[3], causal=causal, softcap=cap, return_lse=True)
    theirs = naive(*tensors, causal, cap)
    torch.testing.assert_close(ours, theirs)
    flows = [torch.randn_like(x) for x in theirs]
    some = [x for x in tensors if x.numel()]
    torch.testing.assert_close(torch.autograd.grad(ours, some, flows), torch.autograd.grad(theirs, some, flows))


def test_gradients_by_finite_differences() -> None:
    tensors = given(3, 4)
    assert torch.autograd.gradcheck(lambda q, k, v, s: FWD_LSE(q, k, v, None, -1, 0, sinks=s), tensors)
    tensors, ends = packed()

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_varlen_func(q, k, v, ends, ends, sinks=sinks, return_lse=True)
        return out[: ends[-1]], lse[:, : ends[-1]]

    assert torch.autograd.gradcheck(attend, tensors)


@pytest.mark.parametrize("sink", [NONE, -400.0, 400.0])
def test_extreme_sinks(sink: float) -> None:
    q, k, v, sinks = given(9, 6)
    sinks = torch.full_like(sinks, sink).requires_grad_()
    out, lse = flash_attn_func(q, k, v, sinks=sinks, causal=True, return_lse=True)
    without, lse_without = flash_attn_func(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, torch.zeros_like(out) if sink > 0 else without)
    torch.testing.assert_close(lse, lse_without.clamp(min=sink))
    dsinks, dq = torch.autograd.grad(
        (out.sum(), lse.masked_fill(lse == NONE, 0.0).sum()), (sinks, q), (torch.ones(()).double(),) * 2
    )
    rows = {NONE: 0, -400.0: 2 * 3, 400.0: 2 * 9}[sink]  # those that give all weight to the sink
    torch.testing.assert_close(dsinks, torch.full_like(sinks, rows))
    assert torch.isfinite(dq).all()


def test_packed_sequences_are_those_by_themselves() -> None:
    (q, k, v, sinks), ends = packed()
    used = torch.tensor([2, 0, 4], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, v, ends, ends, seqused_q=used, causal=True, sinks=sinks, return_lse=True)
    counted = torch.zeros(9, dtype=torch.bool)
    for begin, end, n in ((0, 3, 2), (3, 7, 4)):
        part = flash_attn_func(
            *(x[None, begin : begin + n] for x in (q,)), *(x[None, begin:end] for x in (k, v)),
            causal=True, sinks=sinks, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close((out[begin : begin + n], lse[:, begin : begin + n]), (part[0][0], part[1][0]))
        counted[begin : begin + n] = True
    assert (out[~counted] == 0).all() and (lse[:, ~counted] == NONE).all()
    flow = torch.full_like(lse, float("nan")).masked_fill(counted, 1.0)
    (dsinks,) = torch.autograd.grad(lse, sinks, flow)
    expected = torch.exp(sinks[:, None] - lse)[:, counted].sum(dim=1)
    torch.testing.assert_close(dsinks, expected)
    rows = packed_planning.counted_rows(packed_planning.PackedInputs(q, k, v, ends, ends, used))
    assert torch.equal(rows, counted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(dtype: torch.dtype) -> None:
    q, k, v, sinks = given(dtype=dtype)
    checks: Any = torch.library.opcheck
    for op in (FWD, FWD_LSE):
        checks(op, (q, k, v, *CAUSAL, sinks))
        checks(op, (q, k, v), {"sinks": sinks.detach().float()})
    out, lse = (x.detach() for x in FWD_LSE(q, k, v, *CAUSAL, sinks))
    checks(SINK_BWD, (out, *(x.detach() for x in (q, k, v)), out, lse, sinks.detach(), lse, None, -1, 0))
    (q, k, v, sinks), ends = packed(dtype)
    checks(VARLEN_LSE, (q, k, v, ends, ends), {"sinks": sinks})
    out, lse = (x.detach() for x in VARLEN_LSE(q, k, v, ends, ends, sinks=sinks))
    checks(VARLEN_SINK_BWD, (out, *(x.detach() for x in (q, k, v)), out, lse, sinks.detach(), ends, ends))


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    tensors = given(dtype=torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return flash_attn_func(q * 2, k, v, causal=True, sinks=sinks * 2) + 1

    ours = torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors)
    theirs = attend(*tensors)
    torch.testing.assert_close(ours, theirs)
    both = (torch.autograd.grad(x.square().sum(), tensors) for x in (ours, theirs))
    torch.testing.assert_close(*both)


def test_vmap_and_func_transforms() -> None:
    q, k, v, sinks = given(grad=False)
    many, some = torch.stack([q, q + 1]), torch.stack([sinks, sinks - 1])

    def attend(q: Tensor, sinks: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, sinks=sinks)

    torch.testing.assert_close(
        torch.vmap(attend, in_dims=(0, None))(many, sinks), torch.stack([attend(x, sinks) for x in many])
    )
    torch.testing.assert_close(
        torch.vmap(attend)(many, some), torch.stack([attend(x, s) for x, s in zip(many, some, strict=True)])
    )

    def loss(sinks: Tensor, q: Tensor) -> Tensor:
        return attend(q, sinks).square().sum()

    grads = torch.vmap(torch.func.grad(loss))(some, many)
    for grad, x, s in zip(grads, many, some, strict=True):
        torch.testing.assert_close(grad, torch.func.grad(loss)(s, x))
    with pytest.raises(NotImplementedError, match=r"^sinks has a tangent"):
        torch.func.jvp(lambda x: loss(x, q), (sinks,), (sinks,))


def test_second_derivatives_are_refused() -> None:
    q, k, v, sinks = given()
    (grad,) = torch.autograd.grad(flash_attn_func(q, k, v, sinks=sinks).sum(), sinks, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        grad.sum().backward()


def test_autocast_takes_sinks_of_16_bits_along() -> None:
    q, k, v, sinks = given(dtype=torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        results = [flash_attn_func(q, k, v, sinks=s) for s in (sinks, sinks.half(), sinks.bfloat16())]
    assert {x.dtype for x in results} == {torch.bfloat16}
    torch.testing.assert_close(results[0], results[1], atol=1e-2, rtol=1e-2)


def test_other_forms_take_them() -> None:
    q, _, _, sinks = given(grad=False)
    wanted = flash_attn_func(q, q, q, sinks=sinks)
    three, two = torch.stack([q, q, q], dim=2), torch.stack([q, q], dim=2)
    assert torch.equal(flash_attn_qkvpacked_func(three, sinks=sinks), wanted)
    assert torch.equal(flash_attn_kvpacked_func(q, two, sinks=sinks), wanted)
    assert torch.equal(flash_attn_interface.flash_attn_func(q, q, q, s_aux=sinks), wanted)
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    flat = q.flatten(0, 1)
    mine = [
        flash_attn_varlen_qkvpacked_func(three.flatten(0, 1), ends, sinks=sinks),
        flash_attn_interface.flash_attn_varlen_func(flat, flat, flat, ends, ends, 6, 6, s_aux=sinks),
    ]
    for out in mine:
        torch.testing.assert_close(out.view_as(wanted), wanted)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"sinks": 1.0}, TypeError, "sinks is a float; allowed: None, a torch.Tensor"),
    "number of heads": ({"sinks": torch.zeros(2)}, ValueError, r"sinks.shape is \(2,\); allowed: \(4,\), one for each"),
    "dimensions": ({"sinks": torch.zeros(4, 1)}, ValueError, r"sinks.shape is \(4, 1\)"),
    "dtype": ({"sinks": torch.zeros(4).half()}, TypeError, "sinks.dtype is torch.float16; allowed: torch.float32 or"),
    "device": ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks.device is meta; allowed: cpu"),
    "sparse": ({"sinks": torch.zeros(4).to_sparse()}, NotImplementedError, "sinks.layout is torch.sparse_coo"),
    "scales": ({"q_descale": torch.ones(2, 2)}, NotImplementedError, "q_descale is given with sinks"),
    "out_dtype": ({"out_dtype": torch.float16}, NotImplementedError, "out_dtype is given with sinks"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case: str) -> None:
    arguments, error, message = BAD[case]
    q, k, v, _ = given(dtype=torch.bfloat16, grad=False)
    arguments = {"sinks": torch.zeros(4)} | arguments
    with pytest.raises(error, match=message):
        flash_attn_func(q, k, v, **arguments)
    ends = torch.tensor([0, 6], dtype=torch.int32)
    keys = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(q[0], k[0], v[0], ends, keys, **arguments)


def test_fp8_is_refused() -> None:
    q, k, v, sinks = given(dtype=torch.bfloat16, grad=False)
    with pytest.raises(NotImplementedError, match="fp8 is given with sinks; supported with sinks: q, k and v of 16"):
        flash_attn_func(q, k, v, sinks=sinks, fp8=True)


class Gpu:
    """An sm_90a on which kernels only record: (problem, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        properties = types.SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(planning.torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        for module in (planning, bwd_planning, packed_planning):
            monkeypatch.setattr(module, "current_target", lambda index: "sm_90a")
            monkeypatch.setattr(module, "compiled", self._compiled)
        counters = types.SimpleNamespace(of=lambda device: torch.zeros(1, dtype=torch.int32))
        monkeypatch.setattr(packed_planning, "counters", counters)

    def _compiled(self, kernel_cls: Any, traits: Any, problem: Any, target: str) -> Any:
        return lambda *arguments: self.launches.append((problem, arguments))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_kernels_get_sinks_after_the_scalars(gpu: Gpu) -> None:
    q, k, v, sinks = given(dtype=torch.bfloat16, grad=False)
    fwd, bwd = ops.CudaForward(has_lse=True), sink_ops.CudaSinkBackward()
    for logits in (sinks, sinks.float(), sinks):
        out, lse = fwd(q, k, v, *CAUSAL, logits)
        assert bwd(out, q, k, v, out, lse, logits, None, *CAUSAL[:4])[3].dtype == logits.dtype
    fwd(q, k, v, *CAUSAL, None)
    (problem, first), (gradient, second) = gpu.launches[:2]
    assert first[-1] is sinks and second[-2] is sinks and second[-1].shape[0] == 4
    assert [x.scores.sink for x, _ in gpu.launches] == ["bf16"] * 2 + ["fp32"] * 2 + ["bf16"] * 2 + [None]
    assert isinstance(gradient, BwdProblem) and "bf16 sink" in extras_of(problem)
    assert len(gpu.launches[-1][1]) == len(first) - 1


def test_kernels_of_packed_sequences_get_them_too(gpu: Gpu) -> None:
    (q, k, v, sinks), ends = packed(torch.bfloat16, grad=False)
    out, lse = packed_ops.CudaForward(has_lse=True)(q, k, v, ends, ends, None, None, *CAUSAL, sinks)
    *_, dsinks = sink_ops.varlen_cuda()(out, q, k, v, out, lse, sinks, ends, ends)
    (_, first), (_, second) = gpu.launches
    assert first[-1] is sinks and second[-2] is sinks and dsinks.shape == sinks.shape
    assert (second[-1] == 0).all()  # tiles that do not exist add nothing


def test_without_keys_nothing_is_launched(gpu: Gpu) -> None:
    q, k, v, sinks = given(3, 0, torch.bfloat16, grad=False)
    out, lse = ops.CudaForward(has_lse=True)(q, k, v, *CAUSAL, sinks)
    assert not out.any() and torch.equal(lse, sinks.float()[None, :, None].expand(2, 4, 3))
    flow = torch.ones_like(lse)
    bwd = sink_ops.CudaSinkBackward()
    assert torch.equal(bwd(out, q, k, v, out, lse, sinks, flow)[3], torch.full_like(sinks, 6))
    assert not bwd(out, q, k, v, out, lse, sinks)[3].any()
    ends, none = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    q, k, v = q[0], k[0], v[0]
    out, lse = packed_ops.CudaForward(has_lse=True)(q, k, v, ends, none, None, None, *CAUSAL, sinks)
    assert torch.equal(lse[:, :2], sinks.float()[:, None].expand(4, 2)) and (lse[:, 2] == NONE).all()
    backward = sink_ops.varlen_cuda()
    flow = torch.tensor([1.0, 1.0, float("nan")]).expand(4, 3)
    arguments = out, q, k, v, out, lse, sinks, ends, none, None, None
    assert torch.equal(backward(*arguments, flow)[3], torch.full_like(sinks, 2))
    assert not backward(*arguments)[3].any()
    assert not gpu.launches


def test_an_unknown_type_is_no_problem() -> None:
    with pytest.raises(ValueError, match="sink is 'e4m3'; allowed: fp32, fp16, bf16"):
        Scores(sink="e4m3")  # type: ignore[arg-type]


class Prepare:
    """Of a backward's kernels the one that takes the sinks."""

    def __init__(self, traits: Any, problem: BwdProblem) -> None:
        self.traits, self.problem, self.family = traits, problem, traits.family

    def fake_args(self) -> tuple[Any, ...]:
        return bwd_fake_args(self.problem)

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        tensors, packed, _, sinks, stream = BwdArguments.of(arguments, True)
        tensors = batched(tensors, self.problem.storage)
        workspace = workspace_of(self.traits, tensors, packed)
        BwdPrepare(self.traits, self.problem).launch(tensors, packed, sinks, workspace, stream)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "head_dim"), [("sm_90a", 64), ("sm_80", 128), ("sm_90a", 256), ("sm_80", 256)])
def test_rows_compile_without_a_spill(target: str, head_dim: int, kernels: KernelStore) -> None:
    forward = FwdProblem.dense(
        "bf16", head_dim, head_dim, "window", softcap=True, sink="bf16", lse=True, packed_heads=4
    )
    backward = BwdProblem.dense("bf16", head_dim, head_dim, "window", softcap=True, sink="bf16", deterministic=True)
    traits = choose_shipped(forward, target).traits
    kernels(kernel_class(traits), traits, forward, target).assert_no_complaint()
    kernels(Prepare, choose_shipped(backward, target).traits, backward, target).assert_no_complaint()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_sinks_change_one_kernel_of_a_backward(target: str, kernels: KernelStore) -> None:
    """The others are those of `tests/test_tables.py`, which has them compiled for every row."""
    with_sinks, without = (
        BwdProblem.dense("bf16", 64, 64, "window", softcap=True, sink=sink, deterministic=True)
        for sink in ("bf16", None)
    )
    traits = choose_shipped(with_sinks, target).traits
    whole, others = (kernels(kernel_class(traits), traits, problem, target) for problem in (with_sinks, without))
    whole.assert_no_complaint()
    (prepare,) = functions(kernels(Prepare, traits, with_sinks, target).cubin)
    code, same = functions(whole.cubin), functions(others.cubin)
    assert prepare not in same and len(code) == len(same) >= 3
    assert set(code) - set(same) == {prepare}
