"""What is planned and launched for a backward on a GPU: CPU tensors, and kernels that record their arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cuteflash import api, bwd_planning, flash_attn_func, ops, planning, strides
from cuteflash.arguments import BwdScalars, BwdTensors
from cuteflash.core.workspace import Workspace
from cuteflash.dispatch import Choice
from cuteflash.problem import UNBOUNDED, BwdProblem
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.row import Row
from tests.test_ops import BWD, FWD_LSE, NUM_SMS, Gpu, qkv

TILE_M, HEAD_DIM = 64, 32
COUNT = len(BwdTensors._fields)


def workspace(batch: int, heads: int, seqlen_q: int) -> Workspace:
    return Workspace.dense(batch, heads, seqlen_q, TILE_M, HEAD_DIM)


def choice_of(waves: float = 0, **fields: Any) -> Choice:
    """A row that asks for so many waves of blocks, with these fields of its traits."""
    traits = BwdTraitsSm90(TILE_M, 128, HEAD_DIM, HEAD_DIM, **fields)
    return Choice("sm90", traits, Row(traits, waves=waves), "a row of a test")


class BwdGpu(Gpu):
    """A `Gpu` whose tables have one row for every backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.chosen = [choice_of()]
        monkeypatch.setattr(bwd_planning, "choices", lambda *problem: tuple(self.chosen))
        self.bwd = ops.CudaBackward()

    def last(self) -> tuple[BwdProblem, BwdTensors, BwdScalars]:
        """The last launch."""
        problem, arguments = self.launches[-1]
        assert isinstance(problem, BwdProblem)
        return problem, BwdTensors(*arguments[:COUNT]), BwdScalars(*arguments[COUNT:])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> BwdGpu:
    return BwdGpu(monkeypatch)


def saved(**sizes: int) -> tuple[Tensor, ...]:
    """The tensors of a backward, up to LSE."""
    q, k, v = qkv(**sizes)
    out, lse = FWD_LSE(q, k, v)
    return torch.randn_like(out), q, k, v, out, lse


def test_a_launch_gets_tensors_scalars_and_the_number_of_sms(gpu: BwdGpu) -> None:
    dout, q, k, v, out, lse = saved()
    dlse = torch.randn_like(lse)
    gradients = gpu.bwd(dout, q, k, v, out, lse, dlse, 0.3, 5, -1, 2.0, None, True)
    problem, tensors, scalars = gpu.last()
    assert problem == BwdProblem.dense("bf16", 16, 24, "window", softcap=True, dlse=True, deterministic=True)
    expected = BwdTensors(q, k, v, out, lse, dout, dlse, *gradients, tensors.workspace)
    assert all(got is x for got, x in zip(tensors, expected, strict=True))
    assert scalars == BwdScalars(0.3, 2.0, 5, UNBOUNDED, 0, NUM_SMS)
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype and gradient.is_contiguous()
    assert tensors.workspace.dtype == torch.float32
    assert tensors.workspace.shape == (workspace(2, 4, 6).size,)


def test_without_a_gradient_of_lse_its_problem_has_none(gpu: BwdGpu) -> None:
    gpu.bwd(*saved(), None, None, -1, 0)
    problem, tensors, scalars = gpu.last()
    assert problem == BwdProblem.dense("bf16", 16, 24, "causal") and tensors.dlse is None
    assert scalars.softmax_scale == 0.25


def test_a_new_shape_of_a_known_kind_asks_nothing_again(gpu: BwdGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError("asked")

    gpu.bwd(*saved(s_q=40, s_k=50), None)
    for name in ("check_bwd", "current_target", "target_of", "choices", "compiled"):
        monkeypatch.setattr(bwd_planning, name, asked)
    for shape in ({"s_q": 41, "s_k": 53}, {"batch": 3}, {"heads": 8, "kv_heads": 4}, {"s_q": 60}):
        given = saved(**({"s_q": 40, "s_k": 50} | shape))
        gpu.bwd(*given, None)
        _, tensors, _ = gpu.last()
        assert tensors.q is given[1] and tensors.dk.shape == given[2].shape
        assert tensors.workspace.numel() == workspace(given[1].shape[0], given[1].shape[2], given[1].shape[1]).size
    with pytest.raises(AssertionError, match="asked"):
        gpu.bwd(*saved(s_q=40, s_k=50), torch.zeros(2, 4, 40))  # another problem
    with pytest.raises(AssertionError, match="asked"):
        gpu.bwd(*saved(s_q=41, s_k=2000), None)  # a class of lengths with rows of its own


def test_a_call_takes_the_first_row_for_which_it_has_enough_blocks(
    gpu: BwdGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[BwdTraitsSm90] = []
    monkeypatch.setattr(bwd_planning, "compiled", lambda cls, traits, *rest: lambda *arguments: launched.append(traits))
    held = choice_of(0.5, persistent=True, lone_tiles=True, held_dq=8)  # half a wave of heads
    gpu.chosen = [held, choice_of(2, in_turn=True), choice_of()]
    sizes = {(33, 50): 0, (32, 50): 2, (32, 700): 1, (22, 700): 1, (21, 700): 2, (100, 700): 0}  # 132 multiprocessors
    for (batch, s_k), expected in (*sizes.items(), *sizes.items()):  # of one kind of calls
        gpu.bwd(*saved(batch=batch, s_q=2, s_k=s_k), None)
        assert launched.pop() is gpu.chosen[expected].traits
    assert not launched


def test_an_equal_call_is_planned_once(gpu: BwdGpu) -> None:
    results = [gpu.bwd(*saved(), None) for _ in range(3)]
    assert gpu.planned == 1 and len(gpu.launches) == 3
    assert len({x.data_ptr() for gradients in results for x in gradients}) == 9


def test_what_inference_mode_planned_serves_training(gpu: BwdGpu) -> None:
    strides._element.cache_clear()
    with torch.inference_mode():
        given = saved()
        gpu.fwd_lse(*given[1:4])
        gpu.bwd(*given, None)
    given = saved()
    results = *gpu.fwd_lse(*given[1:4]), *gpu.bwd(*given, None), gpu.last()[1].workspace
    assert gpu.planned == 2 and not any(x.is_inference() for x in results)


@pytest.mark.parametrize("shape", [(2, 4, 6), (1, 1, 1), (3, 1, 5), (7,), (0,)], ids=str)
def test_what_is_made_from_a_template_is_as_from_its_shape(shape: tuple[int, ...]) -> None:
    template = strides.fp32_template(shape, torch.device("cpu"))
    assert template.untyped_storage().nbytes() == 4
    made, expected = torch.empty_like(template), torch.empty(shape)
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), torch.float32)
    assert made.untyped_storage().nbytes() >= 4 * made.numel()


def of_sum(x: Tensor) -> Tensor:
    return x.new_ones(()).expand(x.shape)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


COPIED = {
    "of a sum": of_sum,
    "heads last": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "odd rows": lambda x: torch.cat([x, x[..., :4]], -1)[..., :-4],
    "odd address": shifted,
}


@pytest.mark.parametrize("way", COPIED)
def test_an_upstream_gradient_that_a_kernel_cannot_address_is_copied(gpu: BwdGpu, way: str) -> None:
    dout, *rest = saved()
    for _ in range(2):
        odd = COPIED[way](dout)
        gpu.bwd(odd, *rest, None)
        got = gpu.last()[1].do
        assert got.is_contiguous() and got.data_ptr() % 16 == 0 and torch.equal(got, odd)


def test_an_upstream_gradient_that_a_kernel_can_address_is_not_copied(gpu: BwdGpu) -> None:
    dout, *rest = saved()
    for view in (dout, dout[:1].expand(2, -1, -1, -1), dout.transpose(1, 2).contiguous().transpose(1, 2)):
        gpu.bwd(view, *rest, None)
        assert gpu.last()[1].do is view


def test_statistics_reach_the_kernel_compact(gpu: BwdGpu) -> None:
    *given, lse = saved(batch=1)
    transposed = lse.mT.contiguous().mT
    odd = lse.as_strided(lse.shape, (5, *lse.stride()[1:]))
    for got_lse, dlse in [(transposed, of_sum(lse)), (odd, odd), (lse, transposed)]:
        gpu.bwd(*given, got_lse, dlse)
        _, tensors, _ = gpu.last()
        assert tensors.lse.stride() == tensors.dlse.stride() == (24, 6, 1)
        assert torch.equal(tensors.lse, got_lse) and torch.equal(tensors.dlse, dlse)


def test_strides_of_size_1_dimensions_are_made_usable(gpu: BwdGpu) -> None:
    dout, q, k, v, out, lse = saved(batch=1, s_k=1)
    q, out, dout = (x.as_strided(x.shape, (7, *x.stride()[1:])) for x in (q, out, dout))
    k = k.as_strided(k.shape, (3, 5, 16, 1))
    dq, dk, dv = gpu.bwd(dout, q, k, v, out, lse, None)
    _, tensors, _ = gpu.last()
    for got, x in zip((tensors.q, tensors.k, tensors.v, tensors.o, tensors.do), (q, k, v, out, dout), strict=True):
        assert all(stride % 8 == 0 for stride in got.stride()[:-1]) and torch.equal(got, x)
    assert dq.stride() == (6 * 4 * 16, 64, 16, 1) and dk.stride() == (32, 32, 16, 1) and dv.stride() == (48, 48, 24, 1)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"s_q": 0}, {"heads": 0}, {"s_k": 0}])
def test_nothing_is_launched_if_no_query_sees_a_key(gpu: BwdGpu, shape: dict[str, int]) -> None:
    given = saved(**shape)
    for _ in range(2):
        for gradient, x in zip(gpu.bwd(*given, None), given[1:4], strict=True):
            assert gradient.shape == x.shape and (gradient == 0).all()
    assert not gpu.launches


def test_alignment_is_checked_on_every_call(gpu: BwdGpu) -> None:
    dout, *rest = saved()
    gpu.bwd(dout, *rest, None)
    for position, name in enumerate(("q", "k", "v", "out")):
        changed = [shifted(x) if i == position else x for i, x in enumerate(rest)]
        with pytest.raises(ValueError, match=rf"^{name}\.data_ptr\(\)"):
            gpu.bwd(dout, *changed, None)
    assert len(gpu.launches) == 1


def bad_arguments() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    dout, q, k, _, out, lse = saved()
    return {
        "q rank": ({"q": q[0]}, ValueError, "q has 3 dimensions"),
        "kv heads": ({"k": k[:, :, :1]}, ValueError, r"v.shape\[2\] \(heads\) is 2; allowed: 1, that of k"),
        "dout dtype": ({"dout": dout.half()}, TypeError, "dout.dtype is torch.float16; allowed: torch.bfloat16"),
        "dout rank": ({"dout": dout[0]}, ValueError, "dout has 3 dimensions"),
        "dout shape": ({"dout": dout[:, 1:]}, ValueError, r"dout.shape is \(2, 5, 4, 24\); allowed: \(2, 6, 4, 24\)"),
        "dout nested": ({"dout": torch.nested.as_nested_tensor(dout)}, NotImplementedError, "dout is a nested tensor"),
        "out shape": ({"out": out[..., :16]}, ValueError, r"out.shape is \(2, 6, 4, 16\); allowed: \(2, 6, 4, 24\)"),
        "out strides": ({"out": COPIED["heads last"](out)}, ValueError, r"out.stride\(3\) is 4; allowed: 1"),
        "out device": ({"out": out.to("meta")}, ValueError, "out.device is meta; allowed: cpu, that of q"),
        "lse dtype": ({"lse": lse.double()}, TypeError, "lse.dtype is torch.float64; allowed: torch.float32, for a q"),
        "lse shape": ({"lse": lse.mT}, ValueError, r"lse.shape is \(2, 6, 4\); allowed: \(2, 4, 6\)"),
        "lse sparse": ({"lse": lse.to_sparse()}, NotImplementedError, "lse.layout is torch.sparse_coo"),
        "dlse shape": ({"dlse": lse[:1]}, ValueError, r"dlse.shape is \(1, 4, 6\); allowed: \(2, 4, 6\)"),
        "dlse dtype": ({"dlse": lse.half()}, TypeError, "dlse.dtype is torch.float16; allowed: torch.float32"),
        "dlse device": ({"dlse": lse.to("meta")}, ValueError, "dlse.device is meta; allowed: cpu, that of q"),
        "scale": ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan"),
        "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; allowed: 0"),
        "window": ({"window_left": -2}, ValueError, "window_left is -2; allowed: -1"),
        "family": ({"family": "sm70"}, ValueError, "family is 'sm70'; allowed: None, 'sm80', 'sm90'"),
    }


NAMES = ("dout", "q", "k", "v", "out", "lse", "dlse")


@pytest.mark.parametrize("case", bad_arguments())
def test_bad_input_is_refused_before_a_launch(gpu: BwdGpu, case: str) -> None:
    changed, error, message = bad_arguments()[case]
    good = dict(zip(NAMES, (*saved(), None), strict=True))
    gpu.bwd(*good.values())
    tensors = good | {name: value for name, value in changed.items() if name in NAMES}
    options = {name: value for name, value in changed.items() if name not in NAMES}
    flat = {"softmax_scale": None, "window_left": -1, "window_right": -1, "softcap": 0.0, "family": None} | options
    with pytest.raises(error, match=message):
        gpu.bwd(*tensors.values(), *flat.values())
    assert len(gpu.launches) == 1
    with pytest.raises(error, match=message):
        BWD(*tensors.values(), **options)
    if not options and case not in ("dout nested", "lse sparse") and "device" not in case:
        with pytest.raises(error, match=message.replace("cpu", "meta")):
            BWD(*(x if x is None else x.to("meta") for x in tensors.values()))


@pytest.mark.parametrize(("mode", "expected"), [(None, False), ("warn", False), ("error", True)])
def test_torchs_deterministic_mode_counts_when_the_backward_runs(gpu: BwdGpu, mode: str | None, expected: bool) -> None:
    given = saved()
    gpu.bwd(*given, None, 0.5)
    try:
        torch.use_deterministic_algorithms(mode is not None, warn_only=mode == "warn")
        gpu.bwd(*given, None, 0.5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert gpu.last()[0].is_deterministic == expected
    assert gpu.last()[2].softmax_scale == 0.5


@pytest.fixture
def plain(gpu: BwdGpu, monkeypatch: pytest.MonkeyPatch) -> BwdGpu:
    """`flash_attn_func` takes CPU tensors for plain CUDA ones, and the operators are not to be called."""

    def is_plain(*tensors: Tensor) -> bool:
        return forward_ad._current_level < 0 and torch._C._len_torch_dispatch_stack() == 0

    monkeypatch.setattr(api, "is_plain_cuda_call", is_plain)
    monkeypatch.setattr(ops, "fwd_lse_cuda", gpu.fwd_lse)
    monkeypatch.setattr(ops, "bwd_cuda", gpu.bwd)
    monkeypatch.setattr(ops, "plain_routes", (ops.Known(), ops.Known()))
    return gpu


@pytest.mark.parametrize("return_lse", [False, True])
def test_plain_cuda_tensors_go_past_the_dispatcher(plain: BwdGpu, return_lse: bool) -> None:
    tensors = tuple(x.requires_grad_() for x in qkv())
    result = flash_attn_func(*tensors, causal=True, deterministic=True, family="sm90", return_lse=return_lse)
    out, *lse = result if return_lse else (result,)
    torch.autograd.backward([out, *lse], [torch.ones_like(x) for x in (out, *lse)])
    (forward, _), (backward, arguments) = plain.launches
    assert forward.has_lse and forward.scores.mask == "causal"
    assert backward == BwdProblem.dense("bf16", 16, 24, "causal", dlse=return_lse, deterministic=True)
    kernels = BwdTensors(*arguments[:COUNT])
    assert kernels.q.data_ptr() == tensors[0].data_ptr() and kernels.o.data_ptr() == out.data_ptr()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in tensors)


def test_plain_calls_that_take_turns_get_the_launches_of_each(plain: BwdGpu) -> None:
    for _ in range(2):
        for s_q in (6, 7):
            for options in ({}, {"return_lse": True}, {"causal": True}):
                tensors = tuple(x.requires_grad_() for x in qkv(s_q=s_q))
                result = flash_attn_func(*tensors, **options)
                outs = result if isinstance(result, tuple) else (result,)
                assert len(outs) == 1 + ("return_lse" in options) and outs[0].shape[1] == s_q
                torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
                problem, kernels, _ = plain.last()
                assert problem.scores.mask == ("causal" if "causal" in options else "full")
                assert problem.has_dlse == ("return_lse" in options) and kernels.dq.shape == tensors[0].shape


def test_copies_that_saved_tensor_hooks_return_are_launched_as_they_lie(plain: BwdGpu) -> None:
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(batch=1, s_k=1)]
    odd = tensors[0].detach().as_strided(tensors[0].shape, (7, *tensors[0].stride()[1:])).requires_grad_()
    for q in (tensors[0], odd):
        for unpack in (lambda x: x, lambda x: x.contiguous().clone(), shifted_heads, lambda x: x):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
                flash_attn_func(q, *tensors[1:]).sum().backward()
            _, kernels, _ = plain.last()
            assert kernels.q.stride()[1:] == unpack(q).stride()[1:]
            assert all(stride % 8 == 0 for x in kernels[:4] for stride in x.stride()[:-1])


def shifted_heads(x: Tensor) -> Tensor:
    """Other strides for the same elements."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]] if x.dim() == 4 else x


def test_a_saved_tensor_that_comes_back_on_an_odd_address_is_refused(plain: BwdGpu) -> None:
    tensors = [x.requires_grad_() for x in qkv()]
    flash_attn_func(*tensors).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, shifted):
        out = flash_attn_func(*tensors)
    with pytest.raises(ValueError, match=r"^q\.data_ptr\(\)"):
        out.sum().backward()


def test_without_gradients_no_node_is_made(plain: BwdGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "fwd_cuda", plain.fwd)
    tensors = qkv()
    assert flash_attn_func(*tensors).grad_fn is None
    with torch.no_grad():
        assert flash_attn_func(*(x.requires_grad_() for x in tensors)).grad_fn is None


def seen(dispatched: list[str]) -> TorchDispatchMode:
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dispatched.append(func.name())
            return func(*args, **(kwargs or {}))

    return Record()


@pytest.mark.parametrize("way", ["mode", "create_graph"])
def test_a_backward_that_something_has_to_see_is_dispatched(plain: BwdGpu, way: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = flash_attn_func(q, k, v)
    dispatched: list[str] = []
    if way == "mode":
        with seen(dispatched):
            torch.autograd.grad(out, q, torch.ones_like(out))
        assert "cuteflash::bwd" in dispatched
    else:
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            dq.sum().backward()
    assert len(plain.launches) == 1  # the forward's


@pytest.mark.parametrize("transposed", [False, True])
def test_fake_gradients_have_the_shapes_and_strides_of_real_ones(transposed: bool) -> None:
    dout, *inputs, out, lse = saved()
    if transposed:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    given = of_sum(dout), *inputs, out, lse
    real = BWD(*given, None)
    with FakeTensorMode() as mode:
        fake = BWD(*(mode.from_tensor(x) for x in given), None)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def test_fake_cuda_gradients_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 6, 4, 16, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(2, 4, 6, device="cuda")
        dq, _, dv = BWD(q, q, q, q, q, lse, lse, deterministic=True)
        assert dq.device.type == dv.device.type == "cuda" and dq.shape == q.shape
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(planning, "current_target", lambda index: "sm_80")
        with pytest.raises(NotImplementedError, match="family is 'sm90', which sm_80 does not run"):
            BWD(q, q, q, q, q, lse, None, family="sm90")
