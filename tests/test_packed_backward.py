"""Gradients of packed sequences: on a CPU by every way torch has to ask for them, and what a launch gets."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from cuteflash import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    limits,
    packed_api,
    packed_ops,
    packed_planning,
)
from cuteflash.arguments import BwdScalars, BwdTensors, PackedTensors
from cuteflash.problem import UNBOUNDED, BwdProblem, Operands, Scores, Storage
from tests.test_packed import LENGTHS_K, LENGTHS_Q, NUM_SMS, VARLEN, VARLEN_LSE, Gpu, ends, inputs, int32

VARLEN_BWD = torch.ops.cuteflash.varlen_bwd.default
NAMES = ("dout", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "deterministic": True},
    "window": {"window_size": (2, 1), "softcap": 2.0, "softmax_scale": 0.5, "family": "sm80"},
}


def leaves(dtype: torch.dtype = torch.float64, **sizes: Any) -> tuple[Tensor, ...]:
    """Q, K and V that need gradients, and the vectors."""
    q, k, v, *vectors = inputs(dtype=dtype, **sizes)
    return *(x.requires_grad_() for x in (q, k, v)), *vectors


def saved(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> tuple[Tensor, ...]:
    """The tensors of a backward that have to be there."""
    q, k, v, *vectors = inputs(dtype=dtype, **sizes)
    out, lse = VARLEN_LSE(q, k, v, *vectors)
    return out.cos(), q, k, v, out, lse, *vectors


def loss(out: Tensor, lse: Tensor) -> Tensor:
    """Depends on both results; queries that see no key have no finite LSE."""
    return out.sin().sum() + lse[lse.isfinite()].cos().sum()


def gradients(function: Callable[..., Any], tensors: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*function(*tensors, return_lse=True, **options)), tensors[:3])


def assert_equal(got: Any, expected: Any) -> None:
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", OPTIONS)
def test_gradients_are_those_of_each_sequence_alone(case: str) -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor, *vectors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        parts = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), strict=True)
        outs, sums = zip(*(flash_attn_func(*(x[None] for x in part), **options) for part in parts), strict=True)
        return torch.cat(outs, dim=1)[0], torch.cat(sums, dim=2)[0]

    tensors = leaves()
    assert_equal(
        gradients(flash_attn_varlen_func, tensors, **OPTIONS[case]), gradients(alone, tensors, **OPTIONS[case])
    )


def test_gradcheck() -> None:
    q, k, v, *vectors = leaves(lengths=((2, 0, 3), (3, 2, 4)), d=8, d_v=8)
    used = int32(1, 0, 3), int32(3, 1, 2)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = VARLEN_LSE(q, k, v, *vectors, *used, None, 3, 1, 5.0)
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("use", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_rows_that_do_not_count_neither_get_nor_give_a_gradient(use: tuple[bool, bool]) -> None:
    q, k, v, cu_q, cu_k = inputs(rest=3, dtype=torch.float64)
    used = [
        x if is_used else None for x, is_used in zip((int32(2, 0, 7, 0, 4), int32(5, 1, 0, 3, 2)), use, strict=True)
    ]
    kept, vectors = [], []
    for cu, lengths in zip((cu_q, cu_k), used, strict=True):
        counts = (cu.diff() if lengths is None else lengths).tolist()
        kept.append(torch.cat([torch.arange(b, b + n) for b, n in zip(cu.tolist(), counts, strict=False)]))
        vectors.append(ends(tuple(counts)))
    of_q, of_k = kept
    parts = tuple(x.requires_grad_() for x in (q[of_q], k[of_k], v[of_k]))
    result = flash_attn_varlen_func(*parts, *vectors, return_lse=True)
    dout, dlse = (torch.randn_like(x) for x in result)
    expected = torch.autograd.grad(result, parts, (dout, dlse))

    padded = [torch.full_like(x, math.nan) for x in (q, k, v)]
    for x, part, rows in zip(padded, parts, (of_q, of_k, of_k), strict=True):
        x[rows] = part.detach()
    tensors = [x.requires_grad_() for x in padded]
    result = flash_attn_varlen_func(*tensors, cu_q, cu_k, seqused_q=used[0], seqused_k=used[1], return_lse=True)
    upstream = [torch.full_like(x, math.nan) for x in result]
    upstream[0][of_q], upstream[1][:, of_q] = dout, dlse
    got = torch.autograd.grad(result, tensors, upstream)
    for gradient, wanted, rows in zip(got, expected, (of_q, of_k, of_k), strict=True):
        assert torch.equal(gradient[rows], wanted)
        gradient[rows] = 0
        assert (gradient == 0).all()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_needs_a_gradient_gets_one(needed: tuple[int, ...]) -> None:
    expected = gradients(flash_attn_varlen_func, leaves())
    q, k, v, *vectors = inputs(dtype=torch.float64)
    tensors = [x.requires_grad_(i in needed) for i, x in enumerate((q, k, v))]
    loss(*flash_attn_varlen_func(*tensors, *vectors, return_lse=True)).backward()
    for i, (x, wanted) in enumerate(zip(tensors, expected, strict=True)):
        assert (x.grad is None) == (i not in needed)
        assert x.grad is None or torch.equal(x.grad, wanted)


@pytest.mark.parametrize("way", ["qkv", "kv"])
def test_packed_forms_pass_gradients_on(way: str) -> None:
    lengths = (LENGTHS_Q, LENGTHS_Q)
    q, k, v, cu, _ = leaves(lengths=lengths, kv_heads=4, d_v=16)
    packed = torch.stack([q, k, v][way == "kv" :], dim=1)
    options = {"causal": True, "deterministic": True, "return_lse": True}
    if way == "qkv":
        result = flash_attn_varlen_qkvpacked_func(packed, cu, 7, **options)
    else:
        result = flash_attn_varlen_kvpacked_func(q, packed, cu, cu, 7, 7, **options)
    got = torch.autograd.grad(loss(*result), (q, k, v))
    assert_equal(got, gradients(flash_attn_varlen_func, (q, k, v, cu, cu), causal=True))


def test_the_schema() -> None:
    assert str(VARLEN_BWD._schema) == (
        "cuteflash::varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q=None, Tensor? seqused_k=None, "
        "Tensor? dlse=None, float? softmax_scale=None, int window_left=-1, int window_right=-1, float softcap=0., "
        "str? family=None, bool deterministic=False, str? lengths=None, int attention_chunk=0) "
        "-> (Tensor, Tensor, Tensor)"
    )


@pytest.mark.slow
def test_opcheck() -> None:
    *tensors, lse, cu_q, cu_k = saved(torch.float32)
    torch.library.opcheck(VARLEN_BWD, (*tensors, lse, cu_q, cu_k, int32(1, 0, 2, 1, 4), None, lse.nan_to_num(0, 0, 0)))
    torch.library.opcheck(VARLEN, leaves(torch.float32))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_gradients_look_like_real_ones(device: str) -> None:
    arguments = saved()
    transposed = arguments[1].transpose(0, 1).contiguous().transpose(0, 1)
    with FakeTensorMode():
        q, *made = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in (transposed, *arguments)
        )
        fake = VARLEN_BWD(made[0], q, *made[2:])
    real = VARLEN_BWD(arguments[0], transposed, *arguments[2:])
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert all(x.device.type == device for x in fake)


@pytest.mark.slow
def test_a_compiled_step_is_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()

    def step(*tensors: Tensor) -> Tensor:
        out, lse = flash_attn_varlen_func(*tensors, causal=True, deterministic=True, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (((3, 2, 4),) * 2, ((9, 2, 3), (9, 4, 5)), ((5, 5), (7, 8))):
        tensors = leaves(torch.float32, lengths=lengths)
        got, expected = (torch.autograd.grad(call(*tensors), tensors[:3]) for call in (compiled, step))
        torch.testing.assert_close(got, expected)


def recorded(function: Callable[[], Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operators of this package that a mode sees, with their arguments."""
    seen: list[tuple[Any, tuple[Any, ...]]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "cuteflash":
                seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        function()
    return seen


def test_modes_see_one_forward_and_one_backward_with_its_options() -> None:
    tensors = leaves()
    options = {"window_size": (2, 1), "softcap": 2.0, "softmax_scale": 0.5, "pack_gqa": True, "deterministic": True}
    (forward, _), (backward, arguments) = recorded(
        lambda: flash_attn_varlen_func(*tensors, **options, family="sm80").sum().backward()
    )
    assert (forward, backward) == (VARLEN_LSE, VARLEN_BWD)
    assert arguments[8:11] == (None, None, None)
    assert arguments[11:] == (0.5, 2, 1, 2.0, "sm80", True)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_keeps_or_repeats_the_forward(kept: bool) -> None:
    policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is VARLEN_LSE else CheckpointPolicy.PREFER_RECOMPUTE

    def attend(*tensors: Tensor) -> Tensor:
        return flash_attn_varlen_func(*tensors).sin()

    tensors = leaves()
    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    results: list[tuple[Tensor, ...]] = []

    def step() -> None:
        out = checkpoint(attend, *tensors, use_reentrant=False, context_fn=contexts)
        results.append(torch.autograd.grad(out.sum(), tensors[:3]))

    forwards = [VARLEN_LSE] * (1 if kept else 2)
    assert [op for op, _ in recorded(step)] == [*forwards, VARLEN_BWD]
    assert_equal(results[0], torch.autograd.grad(attend(*tensors).sum(), tensors[:3]))


def test_autocast_gives_gradients_in_the_dtype_of_the_inputs() -> None:
    tensors = leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_varlen_func(*tensors)
        got = torch.autograd.grad(out.float().sin().sum(), tensors[:3])
    assert out.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in got)
    expected = torch.autograd.grad(flash_attn_varlen_func(*tensors).sin().sum(), tensors[:3])
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)


def test_second_derivatives_and_tangents_are_refused() -> None:
    q, *rest = leaves()
    (dq,) = torch.autograd.grad(flash_attn_varlen_func(q, *rest).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^cuteflash has no second derivatives: .*without create_graph"):
        dq.sum().backward()
    dout, *others = saved()
    with pytest.raises(NotImplementedError, match="dout has a tangent"):
        torch.func.jvp(lambda dout: VARLEN_BWD(dout, *others)[0], (dout,), (dout,))


def test_functional_gradients() -> None:
    q, *rest = inputs(dtype=torch.float64)

    def loss(q: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, *rest).sin().sum()

    expected = [torch.autograd.grad(loss(x), x)[0] for x in (y.requires_grad_() for y in (q.clone(), 2 * q))]
    assert torch.equal(torch.func.grad(loss)(q), expected[0])
    assert_equal(torch.vmap(torch.func.grad(loss))(torch.stack([q, 2 * q])), expected)


def test_flops_are_those_of_each_sequence() -> None:
    tensors = leaves()
    out = flash_attn_varlen_func(*tensors)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    pairs = sum(a * b for a, b in zip(LENGTHS_Q, LENGTHS_K, strict=True))
    assert counter.get_total_flops() == 2 * 4 * pairs * (3 * 16 + 2 * 24)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dout shape": (
        {"dout": torch.empty(14, 4, 24)},
        ValueError,
        r"dout.shape is \(14, 4, 24\); allowed: \(15, 4, 24\)",
    ),
    "dout rank": ({"dout": torch.empty(1, 15, 4, 24)}, ValueError, "dout has 4 dimensions"),
    "out": ({"out": torch.empty(15, 4, 16)}, ValueError, r"out.shape is \(15, 4, 16\); allowed: \(15, 4, 24\)"),
    "out strides": ({"out": torch.empty(15, 4, 25)[..., :24]}, ValueError, r"out.stride\(1\) is 25"),
    "lse": ({"lse": torch.empty(15, 4)}, ValueError, r"lse.shape is \(15, 4\); allowed: \(4, 15\)"),
    "dlse": ({"dlse": torch.empty(1, 4, 15)}, ValueError, r"dlse.shape is \(1, 4, 15\); allowed: \(4, 15\)"),
    "lse dtype": ({"lse": torch.empty(4, 15).half()}, TypeError, "lse.dtype is torch.float16; allowed: torch.float32"),
    "vector": ({"cu_seqlens_k": ends(LENGTHS_K).long()}, TypeError, "cu_seqlens_k.dtype is torch.int64"),
    "used": ({"seqused_q": int32(1)}, ValueError, r"seqused_q.shape is \(1,\); allowed: \(5,\)"),
    "sparse": ({"dout": torch.zeros(15, 4, 24).to_sparse()}, NotImplementedError, "dout.layout is torch.sparse"),
    "family": ({"family": "sm70"}, ValueError, "family is 'sm70'; allowed: None, 'sm80', 'sm90'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        VARLEN_BWD(**dict(zip(NAMES, saved(torch.float32), strict=True)) | change)


class BwdGpu(Gpu):
    """A `Gpu` whose tables have one row for every backward of packed sequences."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        choose = packed_planning.choose
        self.lengths: list[str] = []
        traits = types.SimpleNamespace(
            workspace_packed=lambda batch, heads, rows: types.SimpleNamespace(size=100 * batch + 10 * heads + rows)
        )

        def choose_row(problem: Any, target: str, family: str, lengths: str) -> Any:
            self.lengths.append(lengths)
            row = types.SimpleNamespace(traits=traits, kernel_cls=None)
            return row if problem.operation == "bwd" else choose(problem, target, family, lengths)

        monkeypatch.setattr(packed_planning, "choose", choose_row)
        self.bwd = packed_ops.CudaBackward()

    def last(self) -> tuple[Any, BwdTensors, PackedTensors, BwdScalars]:
        """The latest launch."""
        problem, arguments = self.launches[-1]
        end, scalars = len(BwdTensors._fields), len(arguments) - len(BwdScalars._fields)
        return (
            problem,
            BwdTensors(*arguments[:end]),
            PackedTensors(*arguments[end:scalars]),
            BwdScalars(*arguments[scalars:]),
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> BwdGpu:
    return BwdGpu(monkeypatch)


def test_a_launch_gets_tensors_vectors_a_counter_and_scalars(gpu: BwdGpu) -> None:
    dout, q, k, v, out, lse, cu_q, cu_k = saved()
    used, dlse = int32(1, 0, 1, 1, 1), torch.randn_like(lse)
    gradients = gpu.bwd(dout, q, k, v, out, lse, cu_q, cu_k, None, used, dlse, 0.3, 5, -1, 2.0, None, True)
    problem, tensors, vectors, scalars = gpu.last()
    assert problem == BwdProblem(
        Operands("bf16", "bf16", "bf16", 16, 24),
        Scores("window", softcap=True),
        Storage("varlen", "varlen", used_k=True),
        has_dlse=True,
        is_deterministic=True,
    )
    expected = BwdTensors(q, k, v, out, lse, dout, dlse, *gradients, tensors.workspace)
    assert all(got is x for got, x in zip(tensors, expected, strict=True))
    *lengths, counter, _, _, _ = vectors
    assert all(got is x for got, x in zip(lengths, (cu_q, cu_k, None, used), strict=True))
    assert counter.tolist() == [0] and counter.dtype == torch.int32
    assert scalars == BwdScalars(0.3, 2.0, 5, UNBOUNDED, 0, NUM_SMS)
    assert tensors.workspace.dtype == torch.float32 and tensors.workspace.shape == (5 * 100 + 4 * 10 + 15,)
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype and gradient.is_contiguous()
    assert all((gradient == 0).all() for gradient in gradients[1:])  # no kernel writes the rows that are not in use


def test_an_equal_call_is_planned_once_whatever_its_vectors_say(gpu: BwdGpu) -> None:
    *given, _, cu_k = saved()
    for cu in (ends(LENGTHS_Q), ends((0, 0, 15, 0, 0)), ends((3, 3, 3, 3, 3))):
        gpu.bwd(*given, cu, cu_k)
    assert len(gpu.planned) == 1 and len(gpu.launches) == 3 and gpu.lengths == ["brief"]
    assert gpu.last()[0].storage == Storage("varlen", "varlen") and gpu.last()[1].dlse is None


def odd_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :4]], dim=-1)[..., : x.shape[-1]]


def odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("layout", [odd_rows, odd_address, transposed, lambda x: x.new_ones(()).expand(x.shape)])
def test_gradients_that_a_kernel_cannot_address_are_copied(gpu: BwdGpu, layout: Callable[[Tensor], Tensor]) -> None:
    dout, q, k, v, out, lse, cu_q, cu_k = saved()
    dout, dlse = layout(dout), lse.T.contiguous().T
    gpu.bwd(dout, q, k, v, out, dlse, cu_q, cu_k, None, None, dlse)
    _, tensors, *_ = gpu.last()
    assert tensors.do.is_contiguous() and tensors.do.data_ptr() % 16 == 0 and torch.equal(tensors.do, dout)
    assert tensors.lse.is_contiguous() and tensors.dlse.is_contiguous()
    assert torch.equal(tensors.lse, lse) and torch.equal(tensors.dlse, dlse)


def test_inputs_on_an_odd_address_are_refused(gpu: BwdGpu) -> None:
    dout, q, k, v, out, *rest = saved()
    with pytest.raises(ValueError, match=r"^out\.data_ptr\(\)"):
        gpu.bwd(dout, q, k, v, odd_address(out), *rest)
    assert not gpu.launches


def test_strides_of_size_1_dimensions_are_made_usable(gpu: BwdGpu) -> None:
    dout, q, k, *rest = saved(kv_heads=1)
    gpu.bwd(dout, q, k.as_strided(k.shape, (16, 3, 1)), *rest)
    assert gpu.last()[1].k.stride() == (16, 8, 1)


@pytest.mark.parametrize("lengths", [((), ()), ((0,), (3,)), ((3,), (0,))], ids=str)
def test_nothing_is_launched_if_there_is_nothing_to_see(gpu: BwdGpu, lengths: Any) -> None:
    arguments = saved(lengths=lengths)
    got = gpu.bwd(*arguments)
    assert not gpu.launches and not gpu.planned
    assert [x.shape for x in got] == [x.shape for x in arguments[1:4]] and all((x == 0).all() for x in got)


@pytest.mark.parametrize("case", [name for name in BAD if name not in ("family", "out strides")])
def test_bad_input_launches_nothing(gpu: BwdGpu, case: str) -> None:
    change, error, message = BAD[case]
    good = dict(zip(NAMES, saved(), strict=True)) | {"seqused_q": None, "seqused_k": None, "dlse": None}
    gpu.bwd(*good.values())
    change = {name: x.bfloat16() if name in ("dout", "out") else x for name, x in change.items()}
    with pytest.raises(error, match=message):
        gpu.bwd(*(good | change).values())
    assert len(gpu.launches) == 1


def test_torchs_deterministic_mode_is_ours(gpu: BwdGpu) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        gpu.bwd(*saved())
    finally:
        torch.use_deterministic_algorithms(False)
    assert gpu.last()[0].is_deterministic


def test_wrong_values_are_found_on_request(gpu: BwdGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    *given, _, cu_k = saved()
    arguments = *given, int32(0, 3, 2, 10, 11, 15), cu_k
    gpu.bwd(*arguments)
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] is 2, the end of sequence 1, which begins at 3"):
        gpu.bwd(*arguments)
    assert len(gpu.launches) == 1


@pytest.fixture
def plain(gpu: BwdGpu, monkeypatch: pytest.MonkeyPatch) -> BwdGpu:
    """`flash_attn_varlen_func` takes CPU tensors for plain CUDA ones, and the operators are not to be called."""
    monkeypatch.setattr(
        packed_api,
        "is_plain_cuda_call",
        lambda *tensors: forward_ad._current_level < 0 and torch._C._len_torch_dispatch_stack() == 0,
    )
    monkeypatch.setattr(packed_ops, "varlen_fwd_lse_cuda", gpu.fwd_lse)
    monkeypatch.setattr(packed_ops, "varlen_bwd_cuda", gpu.bwd)
    return gpu


@pytest.mark.parametrize("return_lse", [False, True])
def test_plain_cuda_tensors_go_past_the_dispatcher(plain: BwdGpu, return_lse: bool) -> None:
    tensors = leaves(torch.bfloat16)
    used = int32(1, 0, 2, 1, 4)
    result = flash_attn_varlen_func(*tensors, seqused_k=used, causal=True, deterministic=True, return_lse=return_lse)
    out, *lse = result if return_lse else (result,)
    torch.autograd.backward([out, *lse], [torch.ones_like(x) for x in (out, *lse)])
    forward, problem = (launched for launched, _ in plain.launches)
    assert forward.has_lse and forward.storage == problem.storage == Storage("varlen", "varlen", used_k=True)
    assert problem.has_dlse == return_lse and problem.is_deterministic and problem.scores.mask == "causal"
    _, kernels, vectors, _ = plain.last()
    assert kernels.q.data_ptr() == tensors[0].data_ptr() and kernels.o.data_ptr() == out.data_ptr()
    assert vectors.seqused_k.data_ptr() == used.data_ptr()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in tensors[:3])


def test_plain_calls_that_take_turns_get_the_launches_of_each(plain: BwdGpu) -> None:
    variants: tuple[dict[str, Any], ...] = ({}, {"return_lse": True}, {"causal": True}, {"softcap": 2.0})
    for _ in range(3):
        for options in variants:
            given = leaves(torch.bfloat16)
            result = flash_attn_varlen_func(*given, **options)
            outs = result if isinstance(result, tuple) else (result,)
            torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
            problem, kernels, _, scalars = plain.last()
            assert len(outs) == 1 + ("return_lse" in options) and problem.has_dlse == ("return_lse" in options)
            assert problem.scores.mask == ("causal" if "causal" in options else "full")
            assert scalars.softcap == options.get("softcap", 0.0)
            assert kernels.q.data_ptr() == given[0].data_ptr() and kernels.dq.shape == given[0].shape
    assert len(plain.lengths) == 2 * len(variants)  # a forward and a backward of each are planned, once


def test_copies_that_saved_tensor_hooks_return_are_launched_as_they_lie(plain: BwdGpu) -> None:
    def shifted_heads(x: Tensor) -> Tensor:
        """Other strides for the same elements, but for vectors."""
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]] if x.dim() == 3 else x

    given = leaves(torch.bfloat16)
    for unpack in (lambda x: x, shifted_heads, lambda x: x.clone(), shifted_heads, lambda x: x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            flash_attn_varlen_func(*given).sum().backward()
        _, kernels, _, _ = plain.last()
        for x, mine in zip((kernels.q, kernels.k, kernels.v), given, strict=False):
            assert x.stride() == unpack(mine).stride()
        assert kernels.dq.is_contiguous() and kernels.do.is_contiguous()


def test_a_saved_tensor_that_comes_back_on_an_odd_address_is_refused(plain: BwdGpu) -> None:
    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.dim() == 3 else x

    given = leaves(torch.bfloat16)
    flash_attn_varlen_func(*given).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, shifted):
        out = flash_attn_varlen_func(*given)
    with pytest.raises(ValueError, match=r"^q\.data_ptr\(\)"):
        out.sum().backward()


LONGEST: dict[str, tuple[Any, str]] = {
    "unknown": ((None, None), "brief"),
    "half known": ((7, None), "brief"),
    "tensors": ((int32(7), int32(7)), "brief"),
    "tiny": ((7, np.int64(32)), "tiny"),
    "small": ((40, 7), "small"),
    "brief": ((65, 7), "brief"),
    "medium": ((1 << 20, 7), "medium"),
    "long": ((1 << 22, 7), "long"),  # most work is in the long ones
}


@pytest.mark.parametrize("case", LONGEST)
def test_the_longest_sequence_helps_to_choose_rows(plain: BwdGpu, case: str) -> None:
    longest, expected = LONGEST[case]
    for _ in range(2):
        flash_attn_varlen_func(*leaves(torch.bfloat16), *longest).float().sum().backward()
    assert plain.lengths == [expected] * 2  # of a forward and of its backward, each planned once


def test_other_longest_sequences_of_a_class_plan_nothing_again(plain: BwdGpu) -> None:
    for longest in (7, 20, 32):
        flash_attn_varlen_func(*leaves(torch.bfloat16), longest, longest).float().sum().backward()
    assert len(plain.planned) == 2 and len(plain.launches) == 6


@pytest.mark.slow
def test_a_compiled_graph_does_not_look_at_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(limits, "length_class_of_packed", asked)
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)
    arguments = leaves(torch.float32)
    compiled(*arguments, 7, 7)
    with pytest.raises(AssertionError, match="asked"):
        flash_attn_varlen_func(*arguments, 7, 7)


def test_a_plain_backward_that_is_differentiated_is_refused(plain: BwdGpu) -> None:
    q, *rest = leaves(torch.bfloat16)
    out = flash_attn_varlen_func(q, *rest)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        dq.sum().backward()
