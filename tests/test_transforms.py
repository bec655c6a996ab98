"""Torch's transforms and modes around the operators: right, or refused in words that name what is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from cuteflash import flash_attn_func, ops, torch_internals
from tests.test_ops import FWD, FWD_LSE, qkv

Function = Callable[..., Any]


def with_dual(function: Function, *primals: Tensor) -> Any:
    with forward_ad.dual_level():
        return function(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in primals))


def with_jvp(function: Function, *primals: Tensor) -> Any:
    return torch.func.jvp(function, primals, tuple(torch.ones_like(x) for x in primals))


FORWARD_MODE: dict[str, Function] = {
    "dual tensor": with_dual,
    "jvp": with_jvp,
    "jacfwd": lambda function, *primals: torch.func.jacfwd(function)(*primals),
    "linearize": lambda function, *primals: torch.func.linearize(function, *primals),
    "jvp of vmap": lambda function, x: with_jvp(torch.vmap(function), x[None]),
    "vmap of jvp": lambda function, x: torch.vmap(lambda x: with_jvp(function, x)[1])(x[None]),
    "jvp of jvp": lambda function, x: with_jvp(lambda y: with_jvp(lambda z: function(y) + z, x), x),
}


@pytest.mark.parametrize("op", [FWD, FWD_LSE, flash_attn_func], ids=["fwd", "fwd_lse", "flash_attn_func"])
@pytest.mark.parametrize("way", FORWARD_MODE)
def test_forward_mode_is_refused(way: str, op: Function) -> None:
    tensors = qkv(dtype=torch.float32)
    for position, name in enumerate("qkv"):

        def function(x: Tensor, position: int = position) -> Any:
            return op(*(x if index == position else other for index, other in enumerate(tensors)))

        with pytest.raises(NotImplementedError, match=f"^{name} has a tangent .*no forward-mode .*{name}.detach()"):
            FORWARD_MODE[way](function, tensors[position])


def test_forward_mode_is_refused_with_gradients_too() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="v has a tangent"):
        with_dual(lambda v: flash_attn_func(q.requires_grad_(), k, v), v)


def test_tensors_without_a_tangent_pass_through_forward_mode() -> None:
    q, k, v = qkv(dtype=torch.float32)
    expected = FWD(q, k, v)
    assert torch.equal(with_jvp(lambda x: x * FWD(q, k, v), torch.ones(2, 6, 4, 24))[1], expected)
    assert torch.equal(with_dual(lambda q: FWD(q.detach(), k, v), q), expected)
    with forward_ad._set_fwd_grad_enabled(False):
        assert torch.equal(with_dual(lambda q: FWD(q, k, v), q), expected)


def test_reverse_mode_passes_by_what_it_does_not_differentiate() -> None:
    q, k, v = qkv(dtype=torch.float32)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = FWD(q * x, k, v).sum()
        return x * weight

    assert torch.equal(torch.func.grad(function)(torch.ones(())), FWD(q, k, v).sum())


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of q in every call of the reference."""
    calls: list[tuple[int, ...]] = []
    reference = ops.flash_attention_2

    def counted(q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(tuple(q.shape))
        return reference(q, *rest, **options)

    monkeypatch.setattr(ops, "flash_attention_2", counted)
    return calls


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, 3), (-2, 1, None)], ids=str)
def test_vmap_is_one_call_of_a_larger_batch(in_dims: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    options = (0.3, 4, 2, 5.0)
    mapped = [torch.stack([(i + 1) * x for i in range(3)]) if dim is not None else x for x, dim in zip(qkv(), in_dims)]
    expected = [FWD_LSE(*(x if dim is None else x[i] for x, dim in zip(mapped, in_dims)), *options) for i in range(3)]
    calls.clear()
    moved = [x if dim is None else x.movedim(0, dim) for x, dim in zip(mapped, in_dims)]
    o, lse = torch.vmap(lambda *tensors: FWD_LSE(*tensors, *options), in_dims=in_dims)(*moved)
    assert calls == [(6, 6, 4, 16)]
    torch.testing.assert_close(o, torch.stack([x[0] for x in expected]))
    torch.testing.assert_close(lse, torch.stack([x[1] for x in expected]))


def test_vmap_of_vmap_and_of_nothing() -> None:
    q, k, v = (torch.stack([x, 2 * x])[None] for x in qkv())
    o = torch.vmap(torch.vmap(flash_attn_func))(q, k, v)
    torch.testing.assert_close(o[0, 1], FWD(q[0, 1], k[0, 1], v[0, 1]))
    assert torch.vmap(FWD)(q[0, :0], k[0, :0], v[0, :0]).shape == (0, *o.shape[2:])


def test_errors_inside_vmap_name_the_shapes_that_the_function_sees() -> None:
    q, k, v = (torch.stack([x, x]) for x in qkv())
    with pytest.raises(ValueError, match=r"v.shape\[0\] \(batch\) is 1; allowed: 2, that of k \(k.shape is \(2, 9,"):
        torch.vmap(FWD)(q, k, v[:, :1])
    with pytest.raises(ValueError, match=r"q has 3 dimensions, shape \(6, 4, 16\)"):
        torch.vmap(FWD)(q[:, 0], k, v)


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """What `torch.autocast("cuda", torch.float16)` sets, also without CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_takes_what_torchs_own_attention_takes(dtype: torch.dtype, to: torch.dtype) -> None:
    tensors = qkv(dtype=dtype)
    with torch.autocast("cpu", to):
        o, lse = flash_attn_func(*tensors, return_lse=True)
        torchs = scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), enable_gqa=True)
        with torch.autocast("cpu", enabled=False):
            assert FWD(*tensors).dtype == dtype
    expected = FWD_LSE(*(x.to(torchs.dtype) for x in tensors))
    assert o.dtype == torchs.dtype and torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_autocast_mends_mixed_dtypes() -> None:
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn_func(q.bfloat16(), k, v.half()).dtype == torch.bfloat16
        with torch.inference_mode():
            assert flash_attn_func(q, k, v).dtype == torch.bfloat16


def test_autocast_of_one_device_leaves_others(cuda_autocast: None) -> None:
    assert FWD(*qkv(dtype=torch.float32)).dtype == torch.float32
    with FakeTensorMode():
        q = torch.empty(2, 6, 4, 16, device="cuda")
        assert flash_attn_func(q, q.bfloat16(), q).dtype == torch.float16


@pytest.mark.slow
def test_autocast_is_compiled() -> None:
    torch._dynamo.reset()
    tensors = qkv(dtype=torch.float32)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), model(*tensors))


@pytest.mark.parametrize("causal", [False, True])
def test_flops_are_counted_as_torchs_own_attention(causal: bool) -> None:
    q, k, v = qkv(heads=2)
    with FlopCounterMode(display=False) as counter:
        flash_attn_func(q, k, v, causal=causal)
        flash_attn_func(q, k, v, causal=causal, return_lse=True)
    expected = sdpa_flop_count(*(x.transpose(1, 2).shape for x in (q, k, v)))
    assert counter.get_flop_counts()["Global"] == {
        torch.ops.cuteflash.fwd: expected,
        torch.ops.cuteflash.fwd_lse: expected,
    }


def test_flops_of_grouped_heads_are_those_of_all_query_heads() -> None:
    with FlopCounterMode(display=False) as counter:
        FWD(*qkv(heads=4, kv_heads=2))
    assert counter.get_total_flops() == 2 * (2 * 4 * 6 * 9) * (16 + 24)


class CudaTensor:
    """What the direct path to CUDA asks of a tensor."""

    is_cuda, requires_grad = True, False

    def __init__(self, dtype: torch.dtype = torch.bfloat16, negated: bool = False) -> None:
        self.dtype = dtype
        self.negated = negated

    def is_neg(self) -> bool:
        return self.negated


@contextlib.contextmanager
def functorch() -> Iterator[None]:
    level = torch._C._functorch._vmap_increment_nesting(1, "error")
    try:
        yield
    finally:
        assert torch._C._functorch._vmap_decrement_nesting() == level


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    torch._enable_functionalization(reapply_views=False)
    try:
        yield
    finally:
        torch._disable_functionalization()


PLAIN = {"nothing": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
NOT_PLAIN = {
    "dual level": forward_ad.dual_level,
    "dispatch mode": TorchDispatchMode,
    "function mode": BaseTorchFunctionMode,
    "functorch": functorch,
    "functionalization": functionalization,
}


@pytest.fixture
def tensor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch_internals, "Tensor", CudaTensor)
    return CudaTensor()


@pytest.mark.parametrize("mode", PLAIN | NOT_PLAIN)
def test_the_direct_path_to_cuda_is_for_plain_calls(mode: str, tensor: Any) -> None:
    with (PLAIN | NOT_PLAIN)[mode]():
        assert torch_internals.is_plain_cuda_call(tensor, tensor, tensor) == (mode in PLAIN)
        if mode != "function mode":  # which does not see what the engine calls
            with torch.no_grad():
                assert torch_internals.is_plain_backward(tensor) == (mode in PLAIN)


TRACERS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "jit": lambda f: torch.jit.trace(f, torch.ones(2), check_trace=False),
    "fx": lambda f: make_fx(f)(torch.ones(2)),
    "fx before autograd": lambda f: make_fx(f, pre_dispatch=True)(torch.ones(2)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(2)),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_sees_plain_calls(tracer: str, tensor: Any) -> None:
    found: list[bool] = []

    def traced(x: Tensor) -> Tensor:
        with torch.no_grad():
            found.append(torch_internals.is_plain_backward(tensor))
        found.append(torch_internals.is_plain_cuda_call(tensor, tensor, tensor))
        return x + 1

    TRACERS[tracer](traced)
    assert found and not any(found)


def test_a_backward_that_is_differentiated_is_dispatched(tensor: Any) -> None:
    assert not torch_internals.is_plain_backward(tensor)
    with torch.no_grad():
        assert not torch_internals.is_plain_backward(CudaTensor(negated=True))


def test_a_lazily_negated_tensor_leaves_the_direct_path(tensor: Any) -> None:
    negated = CudaTensor(negated=True)
    for tensors in [(negated, tensor, tensor), (tensor, negated, tensor), (tensor, tensor, negated)]:
        assert not torch_internals.is_plain_cuda_call(*tensors)


def test_autocast_leaves_the_direct_path_where_it_changes_a_dtype(cuda_autocast: None, tensor: Any) -> None:
    right = CudaTensor(torch.float16)
    assert torch_internals.is_plain_cuda_call(right, right, right)
    for tensors in [(tensor, right, right), (right, tensor, right), (right, right, tensor), (tensor, tensor, tensor)]:
        assert not torch_internals.is_plain_cuda_call(*tensors)
