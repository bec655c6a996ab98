"""The backward inside torch on a GPU: compiled, captured, checkpointed, under autocast, in functional transforms."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import cuteflash
from tests.gpu.checks import Case
from tests.gpu.gradients import Upstream, assert_right, gradients, upstream

pytestmark = pytest.mark.gpu

CASE = Case(96, 160, heads=4, kv_heads=2, causal=True)
BOTH = dataclasses.replace(CASE, lse=True)


def attention(case: Case, family: str, deterministic: bool = False) -> Any:
    return functools.partial(cuteflash.flash_attn_func, **case.options(), family=family, deterministic=deterministic)


def leaves_of(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in inputs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_compile_without_graph_breaks(dynamic: bool, family: str, device: torch.device) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, given: Tensor, given_lse: Tensor) -> Tensor:
        out, lse = cuteflash.flash_attn_func(q, k, v, **BOTH.options(), family=family)
        return (out * given).sum() + (lse * given_lse).sum()

    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for seed, case in enumerate((BOTH, dataclasses.replace(BOTH, seqlen_q=80, seqlen_k=144))):
        leaves = leaves_of(case.inputs(device, seed))
        given = upstream(leaves, case, seed)
        assert_right(leaves, given, case, torch.autograd.grad(compiled(*leaves, *given), leaves))


@pytest.mark.parametrize("options", [(), (0.2, 20, 0), (None, -1, -1, 15.0)], ids=str)
def test_operators_pass_opcheck(options: tuple[Any, ...], family: str, device: torch.device) -> None:
    inputs = CASE.inputs(device)
    options = (*options, *(None, -1, -1, 0.0)[len(options) :])
    forward, backward = torch.ops.cuteflash.fwd_lse.default, torch.ops.cuteflash.bwd.default
    out, lse = forward(*inputs, *options, None, family)
    torch.library.opcheck(backward, (out, *inputs, out, lse, lse, *options, family, True))
    torch.library.opcheck(
        torch.ops.cuteflash.fwd.default, (*leaves_of(inputs), *options, None, family, True), atol=1e-2, rtol=1e-2
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_whole_step_is_captured_and_replays_with_new_inputs(
    deterministic: bool, family: str, cuda: torch.device
) -> None:
    attend = attention(BOTH, family, deterministic)
    static = leaves_of(BOTH.inputs(cuda))
    given = upstream(static, BOTH)
    torch.autograd.grad(attend(*static), static, given)  # compiled
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(attend(*static), static, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(attend(*static), static, given)
    for seed in (1, 2):
        fresh = BOTH.inputs(cuda, seed)
        fresh_given = upstream(fresh, BOTH, seed)
        with torch.no_grad():
            for target, source in zip((*static, *given), (*fresh, *fresh_given), strict=True):
                target.copy_(source)
            for gradient in got:
                gradient.fill_(float("nan"))
        graph.replay()
        assert_right(fresh, fresh_given, BOTH, got)


def test_a_step_never_waits_for_the_gpu(family: str, cuda: torch.device) -> None:
    attend, leaves = attention(BOTH, family), leaves_of(BOTH.inputs(cuda))
    given = upstream(leaves, BOTH)
    torch.autograd.grad(attend(*leaves), leaves, given)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(attend(*leaves), leaves, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_stream_is_the_backwards_own(family: str, cuda: torch.device) -> None:
    attend, leaves = attention(CASE, family), leaves_of(CASE.inputs(cuda))
    given = upstream(leaves, CASE)
    torch.autograd.grad(attend(*leaves), leaves, given.out)  # compiled before anything overlaps
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    late = torch.empty_like(given.out)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(given.out)
        got = torch.autograd.grad(attend(*leaves), leaves, late)
    torch.cuda.current_stream().wait_stream(stream)
    assert_right(leaves, given, CASE, got)


@pytest.mark.parametrize("policy", [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE], ids=str)
def test_activation_checkpointing(policy: CheckpointPolicy | None, family: str, device: torch.device) -> None:
    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return policy if op is torch.ops.cuteflash.fwd_lse.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {} if policy is None else {"context_fn": functools.partial(create_selective_checkpoint_contexts, choose)}
    leaves = leaves_of(CASE.inputs(device))
    given = upstream(leaves, CASE)
    out = checkpoint(attention(CASE, family), *leaves, use_reentrant=False, **contexts)
    assert_right(leaves, given, CASE, torch.autograd.grad(out, leaves, given.out))


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_gives_gradients_in_the_dtype_of_the_inputs(
    to: torch.dtype, family: str, device: torch.device
) -> None:
    leaves = leaves_of(tuple(x.to(to).float() for x in CASE.inputs(device)))
    cast = tuple(x.detach().to(to) for x in leaves)
    given = upstream(cast, CASE)
    with torch.autocast(device.type, to):
        out = attention(CASE, family)(*leaves)
    got = torch.autograd.grad(out, leaves, given.out)
    assert all(x.dtype == torch.float32 for x in got)
    assert_right(cast, given, CASE, tuple(x.to(to) for x in got))


@pytest.mark.parametrize("way", ["grad", "vjp", "vmap of vjp"])
def test_functional_gradients(way: str, family: str, device: torch.device) -> None:
    attend, inputs = attention(CASE, family), CASE.inputs(device)
    given = upstream(inputs, CASE)

    def vjp(*tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(attend, *tensors)[1](given.out)

    if way == "grad":
        got = torch.func.grad(lambda *x: (attend(*x) * given.out).sum(), argnums=(0, 1, 2))(*inputs)
    elif way == "vjp":
        got = vjp(*inputs)
    else:
        q, k, v = inputs
        got = tuple(x[1] for x in torch.vmap(vjp, (0, None, 0))(torch.stack([2 * q, q]), k, torch.stack([v, v])))
    assert_right(inputs, given, CASE, got)


def test_second_derivatives_are_refused(family: str, device: torch.device) -> None:
    q, k, v = leaves_of(CASE.inputs(device))
    (dq,) = torch.autograd.grad(attention(CASE, family)(q, k, v).float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cuteflash has no second derivatives"):
        dq.sum().backward()


def test_modes_see_the_backward(family: str, device: torch.device) -> None:
    leaves = leaves_of(CASE.inputs(device))
    out = attention(CASE, family)(*leaves)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    scores = CASE.batch * CASE.heads * CASE.seqlen_q * 160
    assert counter.get_total_flops() == 2 * scores * 5 * CASE.head_dim


@pytest.mark.parametrize("changed", range(3))
def test_a_change_in_place_is_noticed(changed: int, family: str, device: torch.device) -> None:
    tensors = [2 * x for x in leaves_of(CASE.inputs(device))]
    out = attention(CASE, family)(*tensors)
    with torch.no_grad():
        tensors[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bad_gradients_are_refused_before_any_launch(family: str, device: torch.device) -> None:
    inputs = CASE.inputs(device)
    out, lse = torch.ops.cuteflash.fwd_lse(*inputs, None, -1, 0)
    for dout, error, words in [
        (out[:, 1:], ValueError, r"dout\.shape is \(2, 95, 4, 64\)"),
        (out.half(), TypeError, r"dout\.dtype is torch\.float16"),
    ]:
        with pytest.raises(error, match=words):
            torch.ops.cuteflash.bwd(dout, *inputs, out, lse, None, None, -1, 0, 0.0, family)


def test_scaled_dot_product_attention_has_our_gradients(cuda: torch.device) -> None:
    from cuteflash.integrations import sdpa

    case = Case(130, heads=4, causal=True)
    leaves = leaves_of(case.inputs(cuda))
    given = upstream(leaves, case)
    sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("cuteflash")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in leaves)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            got = torch.autograd.grad(out, leaves, given.out)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert_right(leaves, given, case, got)


@pytest.mark.parametrize("lse", [False, True])
def test_nothing_but_inputs_and_results_is_kept(lse: bool, family: str, cuda: torch.device) -> None:
    case = Case(1024, batch=4, heads=8, lse=lse)
    leaves = leaves_of(case.inputs(cuda))
    given = upstream(leaves, case)
    attend = attention(case, family)
    gradients(leaves, given, case, family)  # compiled
    before = torch.cuda.memory_allocated()
    result = attend(*leaves)
    out = result[0] if lse else result
    rows = case.batch * case.heads * case.seqlen_q
    kept = torch.cuda.memory_allocated() - before
    assert kept <= out.numel() * out.element_size() + 4 * rows + 1024
    assert_right(leaves, given, case, torch.autograd.grad(result if lse else out, leaves, given if lse else given.out))


def test_out_alone_may_have_a_gradient_although_lse_was_returned(device: torch.device) -> None:
    inputs = BOTH.inputs(device)
    leaves = leaves_of(inputs)
    given = upstream(inputs, BOTH)
    out, _ = cuteflash.flash_attn_func(*leaves, **BOTH.options())
    got = torch.autograd.grad(out, leaves, given.out)
    assert_right(inputs, Upstream(given.out, None), CASE, got)
