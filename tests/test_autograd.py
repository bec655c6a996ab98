"""Gradients of the operators and of `flash_attn_func`, by every way torch has to ask for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cuteflash import flash_attn_func, operators, ops
from tests.test_ops import BWD, FWD, FWD_LSE, qkv
from tests.test_reference_bwd import materialised

OPTIONS: dict[str, Any] = {"window_size": (4, 2), "softcap": 2.0, "softmax_scale": 0.5}
DEFINITION = (0.5, 4, 2, 2.0)  # the same, as the references take it


def leaves(dtype: torch.dtype = torch.float64, **sizes: int) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in qkv(dtype=dtype, **sizes))


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O with torch's own gradients."""
    return materialised(q, k, v, *DEFINITION)[0]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, **OPTIONS)


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loss that depends on O and LSE."""
    o, lse = flash_attn_func(q, k, v, **OPTIONS, return_lse=True)
    return o.square().sum() + lse.sin().sum()


def gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*tensors), tensors)


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (1, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, OPTIONS], ids=str)
def test_gradcheck(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    if lengths[0] > lengths[1] and options:
        lengths = lengths[1], lengths[1]  # LSE of a row without a key is not finite
    tensors = leaves(s_q=lengths[0], s_k=lengths[1], batch=1, d=8, d_v=16)
    assert torch.autograd.gradcheck(lambda *x: flash_attn_func(*x, **options, return_lse=True), tensors, fast_mode=True)


def test_every_element_of_the_gradients() -> None:
    tensors = leaves(s_q=2, s_k=3, batch=1, d=8, d_v=8)
    assert torch.autograd.gradcheck(functools.partial(flash_attn_func, return_lse=True), tensors)


@pytest.mark.parametrize("of", ["out", "lse", "out of both", "both"])
def test_what_flows_into_either_result(of: str) -> None:
    tensors = leaves()

    def loss(function: Callable[..., Any]) -> Tensor:
        o, lse = function(*tensors)
        return sum(x.sin().sum() for x in ((o,) if "out" in of else (lse,) if of == "lse" else (o, lse)))

    expected = torch.autograd.grad(loss(lambda *x: materialised(*x, *DEFINITION)), tensors, materialize_grads=True)
    if of == "out":
        assert_close(torch.autograd.grad(ours(*tensors).sin().sum(), tensors), expected)
    else:
        assert_close(
            torch.autograd.grad(loss(functools.partial(flash_attn_func, **OPTIONS, return_lse=True)), tensors), expected
        )


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_needs_a_gradient_gets_one(needed: tuple[int, ...]) -> None:
    expected = gradients(both, leaves())
    tensors = [x.requires_grad_(i in needed) for i, x in enumerate(qkv(dtype=torch.float64))]
    both(*tensors).backward()
    for i, (x, wanted) in enumerate(zip(tensors, expected, strict=True)):
        assert (x.grad is None) == (i not in needed)
        if x.grad is not None:
            assert_close(x.grad, wanted)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"s_q": 0}, {"s_k": 0}, {"heads": 0}], ids=str)
def test_empty_dimensions_give_zero_or_empty_gradients(shape: dict[str, int]) -> None:
    for x, gradient in zip(tensors := leaves(**shape), gradients(both, tensors), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize("return_lse", [False, True])
def test_nothing_is_saved_twice(return_lse: bool) -> None:
    saved: list[Tensor] = []
    tensors = leaves(torch.bfloat16)
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash_attn_func(*tensors, return_lse=return_lse)
    shapes = [tuple(x.shape) for x in saved]
    assert shapes == [*(tuple(x.shape) for x in tensors), (2, 6, 4, 24), (2, 4, 6)]
    assert all(mine.data_ptr() == x.data_ptr() for mine, x in zip(saved, tensors))


@pytest.mark.parametrize("changed", range(4))
def test_a_change_in_place_is_noticed(changed: int) -> None:
    tensors = [2 * x for x in leaves()]
    out = ours(*tensors)
    loss = (2 * out).sum()
    with torch.no_grad():
        [*tensors, out][changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_expanded_gradients() -> None:
    tensors = leaves()
    assert_close(
        gradients(lambda *x: ours(*x).sum(), tensors),
        gradients(lambda *x: exact(*x).sum(), tensors),
    )


def test_a_second_backward_needs_a_retained_graph_as_usual() -> None:
    tensors = leaves()
    loss = both(*tensors)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(first, torch.autograd.grad(loss, tensors), strict=True))


SECOND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "create_graph": lambda f, q: torch.autograd.grad(f(q), q, create_graph=True)[0].sum().backward(),
    "grad of grad": lambda f, q: torch.func.grad(lambda q: torch.func.grad(f)(q).sum())(q),
    "jacrev of jacrev": lambda f, q: torch.func.jacrev(torch.func.jacrev(f))(q),
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.parametrize("op", [flash_attn_func, FWD, lambda *x: FWD_LSE(*x)[0]], ids=["function", "fwd", "fwd_lse"])
def test_second_derivatives_are_refused(way: str, op: Callable[..., Tensor]) -> None:
    q, k, v = qkv(dtype=torch.float64, batch=1)
    with pytest.raises(NotImplementedError, match=r"^cuteflash has no second derivatives: .*without create_graph"):
        SECOND[way](lambda q: op(q, k, v).square().sum(), q.requires_grad_())


@pytest.mark.parametrize("way", ["hessian", "jvp of grad"])
def test_forward_mode_over_a_backward_is_refused(way: str) -> None:
    q, k, v = qkv(dtype=torch.float64, batch=1)

    def loss(q: Tensor) -> Tensor:
        return flash_attn_func(q, k, v).square().sum()

    with pytest.raises(NotImplementedError, match="q has a tangent"):
        if way == "hessian":
            torch.func.hessian(loss)(q)
        else:
            torch.func.jvp(torch.func.grad(loss), (q,), (q,))


def test_a_tangent_of_the_backwards_own_input_is_refused() -> None:
    q, k, v = qkv(dtype=torch.float64)
    out, lse = FWD_LSE(q, k, v)
    with pytest.raises(NotImplementedError, match="dout has a tangent"):
        torch.func.jvp(lambda dout: BWD(dout, q, k, v, out, lse, None)[0], (out,), (out,))


def stacked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *x: torch.stack([function(*(i * y for y in x)) for i in (1, 2)])


FUNCTIONAL: dict[str, Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda *x: f(*x).sin().sum(), argnums=(0, 1, 2))(*x),
    "vjp": lambda f, x: torch.func.vjp(f, *x)[1](torch.ones_like(f(*x))),
    "jacrev": lambda f, x: torch.func.jacrev(lambda *x: f(*x).sum((0, 1, 3)), argnums=(0, 1, 2))(*x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda *x: f(*x).sin().sum(), (0, 1, 2)), (0, None, 0))(
        torch.stack([x[0], 2 * x[0]]), x[1], torch.stack([x[2], 3 * x[2]])
    ),
    "grad of vmap": lambda f, x: torch.func.grad(
        lambda *x: (
            torch.vmap(f, (0, None, 0))(torch.stack([x[0], 2 * x[0]]), x[1], torch.stack([x[2], x[2]])).sin().sum()
        ),
        (0, 1, 2),
    )(*x),
    "grad through vjp": lambda f, x: torch.func.grad(lambda *x: torch.func.vjp(f, *x)[0].sin().sum(), (0, 1, 2))(*x),
}


@pytest.mark.parametrize("op", [flash_attn_func, FWD], ids=["function", "operator"])
@pytest.mark.parametrize("way", FUNCTIONAL)
def test_functional_gradients(way: str, op: Callable[..., Tensor]) -> None:
    tensors = qkv(dtype=torch.float64, s_q=4, s_k=5)
    expected = FUNCTIONAL[way](lambda *x: materialised(*x, 0.25)[0], tensors)
    assert_close(FUNCTIONAL[way](op, tensors), expected)


@pytest.mark.parametrize("op", [FWD, FWD_LSE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_opcheck_of_forwards_with_gradients(op: Any, dtype: torch.dtype) -> None:
    torch.library.opcheck(op, (*leaves(dtype), 0.5, -1, 0))


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("options", [(), (None, 3, 2, 10.0, "sm80", True)], ids=str)
def test_opcheck_of_the_backward(with_dlse: bool, options: tuple[Any, ...]) -> None:
    q, k, v = qkv(dtype=torch.float32)
    out, lse = FWD_LSE(q, k, v, *options[:4])
    torch.library.opcheck(BWD, (out, q, k, v, out, lse, lse if with_dlse else None, *options))


def test_vmap_of_the_backward_is_one_call_of_a_larger_batch() -> None:
    q, k, v = qkv(dtype=torch.float64)
    out, lse = FWD_LSE(q, k, v)
    douts = torch.stack([out, 2 * out, out.sin()])
    got = torch.vmap(lambda dout, lse: BWD(dout, q, k, v, out, lse, lse), (0, 1))(
        douts, torch.stack([lse, lse, lse], 1)
    )
    expected = [BWD(dout, q, k, v, out, lse, lse) for dout in douts]
    for mine, wanted in zip(got, zip(*expected), strict=True):
        assert_close(mine, torch.stack(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_gives_gradients_in_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    tensors = leaves(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(*tensors, causal=True)
        got = torch.autograd.grad(out.sin().sum(), tensors)
    assert all(x.dtype == dtype for x in got)
    cast = tuple(x.detach().bfloat16().requires_grad_() for x in tensors)
    expected = torch.autograd.grad(flash_attn_func(*cast, causal=True).sin().sum(), cast)
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.float(), wanted.float(), atol=1e-2, rtol=1e-2)


def seen_by_a_mode(function: Callable[[], Any]) -> list[Any]:
    seen: list[Any] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        function()
    return [op for op in seen if op.namespace == "cuteflash"]


def test_modes_see_one_forward_and_one_backward() -> None:
    tensors = leaves()
    assert seen_by_a_mode(lambda: flash_attn_func(*tensors).sum().backward()) == [FWD_LSE, BWD]
    assert seen_by_a_mode(lambda: both(*tensors).backward()) == [FWD_LSE, BWD]


def test_the_options_of_the_forward_reach_the_backward() -> None:
    given: list[tuple[Any, ...]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is BWD:
                given.append(args[7:])
            return func(*args, **(kwargs or {}))

    tensors = leaves()
    options = {"softmax_scale": 0.3, "window_size": (3, 1), "softcap": 4.0}
    for more in ({}, {"pack_gqa": True, "family": "sm80", "deterministic": True}):
        with Record():
            flash_attn_func(*tensors, **options, **more).sum().backward()
    assert given == [(0.3, 3, 1, 4.0), (0.3, 3, 1, 4.0, "sm80", True)]


def test_flops_of_the_backward_are_counted_as_torchs_own() -> None:
    tensors = leaves(heads=2)
    with FlopCounterMode(display=False) as counter:
        flash_attn_func(*tensors, causal=True).sum().backward()
    q, k, v = (x.transpose(1, 2).shape for x in tensors)
    assert counter.get_flop_counts()["Global"] == {
        torch.ops.cuteflash.fwd_lse: sdpa_flop_count(q, k, v),
        torch.ops.cuteflash.bwd: sdpa_backward_flop_count((*q[:3], v[3]), q, k, v),
    }


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    tensors = leaves()
    got = gradients(lambda *x: checkpoint(lambda *y: ours(*y).sin(), *x, use_reentrant=False).sum(), tensors)
    if use_reentrant:  # which torch.autograd.grad cannot have
        checkpoint(lambda *y: ours(*y).sin(), *tensors, use_reentrant=True).sum().backward()
        got = tuple(x.grad for x in tensors)
    assert_close(got, gradients(lambda *x: exact(*x).sin().sum(), tensors))


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_keeps_or_repeats_the_forward(kept: bool) -> None:
    policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is FWD_LSE else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = leaves()
    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    results: list[tuple[Tensor, ...]] = []

    def step() -> None:
        out = checkpoint(lambda *x: ours(*x).sin() * 2, *tensors, use_reentrant=False, context_fn=contexts)
        results.append(torch.autograd.grad(out.sum(), tensors))

    assert seen_by_a_mode(step) == ([FWD_LSE, BWD] if kept else [FWD_LSE, FWD_LSE, BWD])
    assert_close(results[0], gradients(lambda *x: 2 * exact(*x).sin().sum(), tensors))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
def test_forward_and_backward_compile_without_a_graph_break(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = flash_attn_func(2 * q, k, v.contiguous(), **OPTIONS, return_lse=True)
        return o.sin().sum() + lse.sum() + flash_attn_func(q, k, v, causal=True, deterministic=True).sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for s_q, s_k in [(6, 9), (7, 11)][: 1 + dynamic]:
        tensors = leaves(torch.float32, s_q=s_q, s_k=s_k)
        got, expected = gradients(compiled, tensors), gradients(step, tensors)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_compiled_checkpoints_keep_what_the_policy_says() -> None:
    torch._dynamo.reset()
    backwards: list[Any] = []

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is FWD_LSE else CheckpointPolicy.PREFER_RECOMPUTE

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(lambda *x: ours(*x).sin(), q, k, v, use_reentrant=False, context_fn=contexts).sum()

    def keep(graph: Any, inputs: Any) -> Any:
        backwards.append([node.target for node in graph.graph.nodes if "cuteflash" in str(node.target)])
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    tensors = leaves(torch.float32)
    got = gradients(torch.compile(step, backend=backend, fullgraph=True), tensors)
    torch.testing.assert_close(got, gradients(step, tensors), atol=1e-5, rtol=1e-5)
    assert backwards == [[BWD]]


def test_as_torchs_own_attention_in_low_precision() -> None:
    tensors = leaves(torch.bfloat16, s_q=33, s_k=33)
    wanted = gradients(lambda *x: materialised(*x, 0.25, -1, 0)[0].sin().sum(), tuple(x.double() for x in tensors))

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).sin().sum()

    mine = gradients(lambda *x: flash_attn_func(*x, causal=True).sin().sum(), tensors)
    for x, y, z in zip(mine, gradients(torchs, tensors), wanted, strict=True):
        assert (x.double() - z).abs().max() <= 2 * (y.double() - z).abs().max() + 1e-2


def test_an_operator_without_a_gradient_says_so() -> None:
    op = operators.define(dataclasses.replace(ops.FWD_LSE, name="fwd_lse_without_gradient", differentiable=None))
    q, k, v = leaves()
    out, _ = op(q, k, v)
    with pytest.raises(NotImplementedError, match=r"no gradient of torch\.ops\.cuteflash\.fwd_lse_without_gradient"):
        out.sum().backward()


@pytest.mark.parametrize("left_out", [0, 1])
def test_the_backward_may_be_called_without_a_gradient_of_lse(left_out: int) -> None:
    q, k, v = qkv(dtype=torch.float64)
    out, lse = FWD_LSE(q, k, v)
    expected = BWD(out, q, k, v, out, lse, torch.zeros_like(lse))
    arguments = (out, q, k, v, out, lse, None)[: 7 - left_out]
    assert all(torch.equal(x, y) for x, y in zip(BWD(*arguments), expected, strict=True))
    mapped = torch.vmap(lambda dout: BWD(dout, *arguments[1:]))(out[None])
    assert all(torch.equal(x[0], y) for x, y in zip(mapped, expected, strict=True))
