"""The dense operators, `torch.ops.cuteflash.fwd`, `fwd_lse` and `bwd`, and what runs behind them on each device.

    CUDA      a launch, looked up by everything that it depends on, or planned (`cuteflash.planning`), which checks the
              arguments and may compile; then the results are allocated and the kernel launched. No host read, no
              synchronisation.
    CPU       the same checks, then the reference (FlashAttention-2 in torch).
    fake      the same checks on possibly symbolic sizes, and empty results with the strides of the real ones.
    autograd  a node (`cuteflash.autograd`) if a gradient is needed: of a forward one that keeps LSE and calls `bwd`, of
              `bwd` one that refuses second derivatives.

What vmap, autocast and other transforms and modes of torch do with them is in `cuteflash.transforms`.
Two forward operators, so that a call without LSE never allocates one; with gradients `fwd` is `fwd_lse`, by this name
also for selective checkpointing and other modes. A CUDA graph can capture a call once an earlier one with the same
problem and length class (`cuteflash.traits.length_class`) has compiled its kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from cuteflash.arguments import BwdOptions, FwdOptions, bwd_options, without_sinks
from cuteflash.autograd import Dispatched, DispatchedSinks, attend, attend_sinks
from cuteflash.bwd_planning import BwdPlanner
from cuteflash.calls import Call, Known, bwd_call_of, call_of, call_with_sinks
from cuteflash.operators import Operator, define
from cuteflash.planning import (
    FwdPlanner,
    Launch,
    Result,
    target_of,
)
from cuteflash.reference import flash_attention_2, flash_attention_2_backward
from cuteflash.strides import compacted
from cuteflash.torch_internals import is_plain_backward
from cuteflash.transforms import register_backward_transforms, register_transforms
from cuteflash.validate import ALIGNMENT, check_alignment, check_bwd, check_fwd, lse_dtype

ALIGNMENT_MASK = ALIGNMENT - 1
ALL_OPTIONS = len(FwdOptions._fields)


class CudaForward:
    """The CUDA implementation of a forward operator: look the launch of an equal call up, or plan one.

    Args:
        has_lse: whether it returns the log-sum-exp, too.
    """

    def __init__(self, has_lse: bool) -> None:
        self.planner = FwdPlanner(has_lse)
        self.known: Known[Launch] = Known()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        """The results, as the operator returns them."""
        if len(options) > ALL_OPTIONS:
            return self.with_sinks(q, k, v, options)
        call = checked_call(q, k, v, options)
        last, launch = self.known.last
        if call != last:
            launch = self.known.find(call, self.planner.launch, call, q, k, v)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        return launch(q, k, v)

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor, arguments: tuple[Any, ...]) -> Result:
        """The results of a call with all options and, unless None, sinks."""
        options, sinks = without_sinks(arguments)
        if sinks is None:
            return self(q, k, v, *options)
        call = call_with_sinks(checked_call(q, k, v, options), sinks)
        launch = self.known.find(call, self.planner.launch, call, q, k, v, sinks)
        check_alignment(q, k, v)
        return launch(q, k, v, sinks)


class CudaBackward:
    """The CUDA implementation of the backward operator, likewise."""

    def __init__(self) -> None:
        self.planner = BwdPlanner()
        self.known: Known[Launch] = Known()

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None = None,
        *options: Any,
    ) -> Result:
        """The gradients, as the operator returns them."""
        if is_determinism_enforced():
            options = tuple(BwdOptions(*options)._replace(deterministic=True))
        launch = self.launch_of(dout, q, k, v, out, lse, dlse, options)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v, out=out)
        if dout.data_ptr() & ALIGNMENT_MASK:
            dout = compacted(dout)
        return launch(dout, q, k, v, out, lse, dlse)

    def launch_of(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        options: tuple[Any, ...],
    ) -> Launch:
        """The launch of a call, which is checked for all but the addresses of its tensors."""
        try:
            call = bwd_call_of(dout, q, k, v, out, lse, dlse, options)
        except RuntimeError:
            check_bwd(dout, q, k, v, out, lse, dlse, BwdOptions(*options))
            raise
        return self.known.find(call, self.planner.launch, call, dout, q, k, v, out, lse, dlse)


def checked_call(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Call:
    """See `call_of`; errors of tensors that have no shape or strides are in our words."""
    try:
        return call_of(q, k, v, options)
    except RuntimeError:
        check_fwd(q, k, v, FwdOptions(*options))
        raise


def is_determinism_enforced() -> bool:
    """Whether torch's deterministic mode is on and not only warns, which is what torch's own flash attention obeys.

    The mode counts when a backward runs.
    """
    return are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: FwdOptions, *, has_lse: bool) -> Result:
    _check_fwd(q, k, v, sinks, options)
    check_target(q, options.family)
    b, s_q, h, _ = q.shape
    o = q.new_empty((b, s_q, h, v.shape[3]))
    return (o, q.new_empty((b, h, s_q), dtype=lse_dtype(q))) if has_lse else o


def check_target(q: Tensor, family: str | None) -> None:
    """Raise NotImplementedError if there is no kernel for the GPU of a fake call's tensors."""
    if q.device.type == "cuda" and torch.cuda.is_available():  # else traced for another machine's GPU
        target_of(q.device, family)


def _check_fwd(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: FwdOptions) -> None:
    check_fwd(q, k, v, options, sinks)


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: FwdOptions, *, has_lse: bool) -> Result:
    check_fwd(q, k, v, options, sinks)
    check_alignment(q, k, v)
    result = flash_attention_2(q, k, v, **options.definition(q.shape[3]), sinks=sinks)
    return result if has_lse else result[0]


def _bwd_fake(*arguments: Any) -> Result:
    check_bwd(*arguments)
    _, q, k, v, *_, options = arguments
    check_target(q, options.family)
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _bwd_cpu(*arguments: Any) -> Result:
    check_bwd(*arguments)
    *tensors, options = arguments
    _, q, k, v, out, *_ = tensors
    check_alignment(q, k, v, out=out)
    return flash_attention_2_backward(*tensors, **options.definition(q.shape[3]))


def _differentiable_forward(
    implementation: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *options: Any, has_lse: bool
) -> Result:
    options, sinks = without_sinks(options)
    if sinks is not None:
        return attend_sinks(q, k, v, DispatchedSinks(implementation, "sink_bwd", options, has_lse), sinks)
    return attend(q, k, v, Dispatched(implementation, bwd, options, has_lse))


def _forward(
    name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool, with_gradients: Operator | None = None
) -> Operator:
    return Operator(
        name=name,
        tensors=("q", "k", "v"),
        options=FwdOptions,
        trailing=("sinks",),
        returns=returns,
        check=_check_fwd,
        cuda=cuda,
        cpu=functools.partial(_fwd_cpu, has_lse=has_lse),
        fake=functools.partial(_fwd_fake, has_lse=has_lse),
        differentiable=functools.partial(_differentiable_forward, has_lse=has_lse),
        transforms=register_transforms,
        with_gradients=with_gradients,
    )


fwd_cuda, fwd_lse_cuda, bwd_cuda = CudaForward(has_lse=False), CudaForward(has_lse=True), CudaBackward()
BWD = Operator(
    name="bwd",
    tensors=("dout", "q", "k", "v", "out", "lse"),
    optional=("dlse",),
    options=BwdOptions,
    returns=tuple[Tensor, Tensor, Tensor],
    check=check_bwd,
    cuda=bwd_cuda,
    cpu=_bwd_cpu,
    fake=_bwd_fake,
    transforms=register_backward_transforms,
)
FWD_LSE = _forward("fwd_lse", tuple[Tensor, Tensor], fwd_lse_cuda, has_lse=True)
FWD = _forward("fwd", Tensor, fwd_cuda, has_lse=False, with_gradients=FWD_LSE)
bwd, fwd_lse, fwd = define(BWD), define(FWD_LSE), define(FWD)


class PlainRoute:
    """The route past the dispatcher, of all calls with plain CUDA tensors that are equal.

    A backward's sizes, dtypes and devices are those of its forward. Its launch is looked up by the rest: the strides of
    its gradients, and those of what was saved, of which a saved-tensor hook (offloading, say) may return a copy.
    """

    __slots__ = ("forward", "known", "options", "returns_lse")

    def __init__(self, launch: Launch, options: tuple[Any, ...], returns_lse: bool) -> None:
        self.forward = launch
        self.options = bwd_options(options)
        self.returns_lse = returns_lse
        self.known: Known[Launch] = Known()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> Result:
        """See `cuteflash.autograd.Route`. Through the dispatcher if something there has to see it."""
        if not is_plain_backward(dout):
            return bwd(dout, q, k, v, out, lse, dlse, *self.options)
        addresses = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if addresses & ALIGNMENT_MASK or are_deterministic_algorithms_enabled():
            return bwd_cuda(dout, q, k, v, out, lse, dlse, *self.options)
        strides = (
            dout.stride(), q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(),
            dlse if dlse is None else dlse.stride(),
        )  # fmt: skip
        last, launch = self.known.last
        if strides != last:
            launch = self.known.find(strides, bwd_cuda.launch_of, dout, q, k, v, out, lse, dlse, self.options)
        return launch(dout, q, k, v, out, lse, dlse)


plain_routes: tuple[Known[PlainRoute], Known[PlainRoute]] = Known(), Known()  # without and with LSE


def attend_plain(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], has_lse: bool) -> Result:
    """A forward with gradients past the dispatcher, for plain CUDA tensors."""
    call, routes = checked_call(q, k, v, options), plain_routes[has_lse]
    last, route = routes.last
    if call != last:
        route = routes.find(call, _plain_route, call, q, k, v, options, has_lse)
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
        check_alignment(q, k, v)
    return attend(q, k, v, route)


def _plain_route(call: Call, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], has_lse: bool) -> PlainRoute:
    return PlainRoute(fwd_lse_cuda.planner.launch(call, q, k, v), options, has_lse)
