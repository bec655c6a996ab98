"""The operators of packed sequences, `torch.ops.cuteflash.varlen_fwd`, `varlen_fwd_lse` and `varlen_bwd`.

They differ from `cuteflash.ops` in what they are given: sequences lie one after the other in q, k and v, without a
batch dimension, and int32 vectors on the same device say where each begins. The host never reads these vectors.

Rows after the last sequence's end, and those that `seqused_q` leaves out, get O = 0 and LSE = -inf. The kernels write
the former themselves. The latter lie between rows that a kernel writes, so the results are then filled beforehand.
Neither they nor the keys that do not count get or give a gradient: theirs are 0, whatever flows into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import BwdOptions, FwdOptions, bwd_options, without_sinks
from cuteflash.autograd import Dispatched, DispatchedSinks, attend_packed, attend_sinks
from cuteflash.calls import Known, looks_of
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK, check_target, is_determinism_enforced
from cuteflash.packed_planning import Planner, bwd_launch
from cuteflash.planning import Result
from cuteflash.reference import flash_attention_2, flash_attention_2_backward
from cuteflash.strides import compacted
from cuteflash.torch_internals import OpOverload, is_plain_backward
from cuteflash.transforms import register_autocast, register_one_by_one
from cuteflash.validate import check_alignment, check_sinks, lse_dtype, reads_values
from cuteflash.validate_packed import (
    PackedBwdInputs,
    PackedInputs,
    check_packed,
    check_packed_bwd,
    check_values,
    differences,
)


class PlainPackedRoute:
    """The route past the dispatcher, of all calls with plain CUDA tensors that are equal, as `ops.PlainRoute`.

    Args:
        launch: of the forward.
        options: of the forward, flat.
        returns_lse: see `cuteflash.autograd.Route`.
    """

    __slots__ = ("known", "launch", "options", "returns_lse")

    def __init__(self, launch: Callable[..., Result], options: tuple[Any, ...], returns_lse: bool) -> None:
        self.launch = launch
        self.options = bwd_options(options)
        self.returns_lse = returns_lse
        self.known: Known[Any] = Known()

    def forward(self, *tensors: Any) -> Result:
        """See `cuteflash.autograd.Route`."""
        return self.launch(PackedInputs(*tensors))

    def backward(self, dout: Tensor, *saved: Any) -> Result:
        """See `cuteflash.autograd.Route`. Through the dispatcher if something there has to see it."""
        if not is_plain_backward(dout):
            return varlen_bwd(dout, *saved, *self.options)
        q, k, v, out = saved[:4]
        addresses = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if addresses & ALIGNMENT_MASK or are_deterministic_algorithms_enabled() or reads_values():
            return varlen_bwd_cuda(dout, *saved, *self.options)
        strides = dout.stride(), *[x if x is None else x.stride() for x in saved]
        inputs = PackedBwdInputs(dout, *saved)
        last, launch = self.known.last
        if strides != last:
            launch = self.known.find(strides, varlen_bwd_cuda.launch_of, inputs, self.options)
        return launch(inputs)


class CudaForward:
    """The CUDA implementation of a forward: look the launch of an equal call up, or plan one.

    Args:
        has_lse: whether it returns the log-sum-exp, too.

    Attributes:
        routes: of its calls with gradients past the dispatcher, without and with LSE as a result.
    """

    def __init__(self, has_lse: bool) -> None:
        self.planner = Planner(has_lse)
        self.known: Known[Any] = Known()
        self.routes: tuple[Known[PlainPackedRoute], Known[PlainPackedRoute]] = Known(), Known()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_q: Tensor | None = None,
        used_k: Tensor | None = None,
        *options: Any,
    ) -> Result:
        """The results, as the operator returns them."""
        inputs = PackedInputs(q, k, v, cu_q, cu_k, used_q, used_k)
        options, logits = without_sinks(options)
        sinks = () if logits is None else (logits,)
        call = call_of((*inputs, *sinks), options, _check_flat, FwdOptions)
        last, launch = self.known.last
        if call != last:
            launch = self.known.find(call, self.plan, inputs, options, *sinks)
        check_now(inputs)
        return launch(inputs, *sinks)

    def plan(self, inputs: PackedInputs, options: tuple[Any, ...], *sinks: Tensor) -> Any:
        """The launch of a call, which is checked for all but the addresses of its tensors and what they say."""
        return self.planner.launch(inputs, FwdOptions(*options), *sinks)

    def with_gradients(self, inputs: PackedInputs, options: tuple[Any, ...], has_lse: bool) -> Result:
        """A call with gradients past the dispatcher, for plain CUDA tensors."""
        call, routes = call_of(inputs, options, _check_flat, FwdOptions), self.routes[has_lse]
        last, route = routes.last
        if call != last:
            route = routes.find(call, self.route, inputs, options, has_lse)
        check_now(inputs)
        q, k, v, *others = inputs
        return attend_packed(q, k, v, route, *others)

    def route(self, inputs: PackedInputs, options: tuple[Any, ...], has_lse: bool) -> PlainPackedRoute:
        """The route of a call and all that are equal to it."""
        return PlainPackedRoute(self.plan(inputs, options), options, has_lse)


def check_now(inputs: PackedInputs) -> None:
    """Raise ValueError for what may differ between equal calls: addresses and, on request, values."""
    if (inputs[0].data_ptr() | inputs[1].data_ptr() | inputs[2].data_ptr()) & ALIGNMENT_MASK:
        check_alignment(*inputs[:3])
    if reads_values():
        check_values(inputs, complete=True)


def call_of(
    inputs: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    check: Callable[..., None],
    options_cls: Callable[..., Any],
) -> Hashable:
    """What a launch depends on."""
    try:
        return looks_of(inputs), options
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        check(inputs, options_cls(*options))
        raise


class CudaBackward:
    """The CUDA implementation of the backward, likewise."""

    def __init__(self) -> None:
        self.known: Known[Any] = Known()

    def __call__(self, *arguments: Any) -> Result:
        """The gradients, as the operator returns them."""
        end = len(PackedBwdInputs._fields)
        inputs, options = PackedBwdInputs(*arguments[:end]), arguments[end:]
        if is_determinism_enforced():
            options = tuple(BwdOptions(*options)._replace(deterministic=True))
        launch = self.launch_of(inputs, options)
        dout, q, k, v, out = inputs[:5]
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v, out=out)
        if dout.data_ptr() & ALIGNMENT_MASK:
            inputs = inputs._replace(dout=compacted(dout))
        if reads_values():
            check_values(inputs.forward, complete=True)
        return launch(inputs)

    def launch_of(self, inputs: PackedBwdInputs, options: tuple[Any, ...]) -> Any:
        """The launch of a call, which is checked for all but the addresses of its tensors and what they say."""
        call = call_of(inputs, options, check_packed_bwd, BwdOptions)
        last, launch = self.known.last
        return launch if call == last else self.known.find(call, self.plan, inputs, options)

    def plan(self, inputs: PackedBwdInputs, options: tuple[Any, ...]) -> Any:
        """A new launch."""
        return bwd_launch(inputs, BwdOptions(*options))


def _check(*arguments: Any) -> None:
    *tensors, sinks, options = arguments
    check_packed(PackedInputs(*tensors), options)
    check_sinks(tensors[0], sinks)


def _check_flat(tensors: tuple[Any, ...], options: FwdOptions) -> None:
    count = len(PackedInputs._fields)
    _check(*tensors[:count], tensors[count] if len(tensors) > count else None, options)


def _check_backward(*arguments: Any) -> None:
    *tensors, options = arguments
    check_packed_bwd(PackedBwdInputs(*tensors), options)


def _fake(*arguments: Any, has_lse: bool) -> Result:
    _check(*arguments)
    q, _, v, *_, options = arguments
    check_target(q, options.family)
    rows, heads, _ = q.shape
    o = q.new_empty((rows, heads, v.shape[2]))
    return (o, q.new_empty((heads, rows), dtype=lse_dtype(q))) if has_lse else o


def _cpu(*arguments: Any, has_lse: bool) -> Result:
    """One sequence after the other through the reference."""
    _check(*arguments)
    *tensors, sinks, options = arguments
    inputs = PackedInputs(*tensors)
    q, k, v = inputs[:3]
    check_alignment(q, k, v)
    check_values(inputs, complete=reads_values())
    rows, heads, head_dim = q.shape
    o = q.new_zeros(rows, heads, v.shape[2])
    lse = q.new_full((heads, rows), float("-inf"), dtype=lse_dtype(q))
    definition = options.definition(head_dim)
    for of_q, of_k in spans(inputs):
        o_part, lse_part = flash_attention_2(q[None, of_q], k[None, of_k], v[None, of_k], **definition, sinks=sinks)
        o[of_q], lse[:, of_q] = o_part[0], lse_part[0]
    return (o, lse) if has_lse else o


def _bwd_fake(*arguments: Any) -> Result:
    _check_backward(*arguments)
    _, q, k, v, *_, options = arguments
    check_target(q, options.family)
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _bwd_cpu(*arguments: Any) -> Result:
    """One sequence after the other through the reference; the gradients of all other rows are 0."""
    _check_backward(*arguments)
    *tensors, options = arguments
    inputs = PackedBwdInputs(*tensors)
    dout, q, k, v, out, lse = inputs[:6]
    check_alignment(q, k, v, out=out)
    check_values(inputs.forward, complete=reads_values())
    definition = options.definition(q.shape[2])
    dq, dk, dv = gradients = tuple(x.new_zeros(x.shape) for x in (q, k, v))
    for of_q, of_k in spans(inputs.forward):
        parts = flash_attention_2_backward(
            dout[None, of_q],
            q[None, of_q],
            k[None, of_k],
            v[None, of_k],
            out[None, of_q],
            lse[None, :, of_q],
            None if inputs.dlse is None else inputs.dlse[None, :, of_q],
            **definition,
        )
        dq[of_q], dk[of_k], dv[of_k] = (part[0] for part in parts)
    return gradients


def spans(inputs: PackedInputs) -> Iterator[tuple[slice, slice]]:
    """The rows of each sequence that count, those of its queries and those of its keys."""
    sides = []
    for cu_seqlens, used in ((inputs.cu_seqlens_q, inputs.seqused_q), (inputs.cu_seqlens_k, inputs.seqused_k)):
        ends = cu_seqlens.tolist()
        lengths = differences(ends) if used is None else used.tolist()
        sides.append([slice(begin, begin + length) for begin, length in zip(ends, lengths, strict=False)])
    return zip(*sides, strict=True)


def register_packed_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast, the count of operations, and vmap: one call after the other, as lengths may be mapped, too."""
    register_one_by_one(library, op)
    register_autocast(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def register_packed_backward_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Likewise of a backward, which runs in the dtype of its forward and has no rule for autocast."""
    register_one_by_one(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_backward_flops)


def count_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any, out_val: Any = None, **named: Any
) -> int:
    """Floating-point operations of a forward: two for each product of Q K^T and of P V, whatever the mask leaves out.

    Reads the lengths, see `pairs`.
    """
    return 2 * q.shape[1] * pairs(q, k, cu_q, cu_k) * (q.shape[2] + v.shape[2])


def count_backward_flops(*tensors: Any, out_val: Any = None, **named: Any) -> int:
    """Floating-point operations of a backward: Q K^T again, dS K and dS^T Q, then dO V^T and P^T dO."""
    _, q, k, v, _, _, cu_q, cu_k, *_ = tensors
    count: int = 2 * q.shape[1] * pairs(q, k, cu_q, cu_k) * (3 * q.shape[2] + 2 * v.shape[2])
    return count


def pairs(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> int:
    """Pairs of a query and a key of the same sequence. Lengths of fake tensors are taken to be equal."""
    if type(cu_q) is Tensor and cu_q.device.type != "meta":
        return int((cu_q.diff().long() * cu_k.diff().long()).sum())
    return q.shape[0] * k.shape[0] // max(cu_q.shape[0] - 1, 1)


def _differentiable_forward(
    implementation: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    used_q: Tensor | None = None,
    used_k: Tensor | None = None,
    *options: Any,
    has_lse: bool,
) -> Result:
    options, sinks = without_sinks(options)
    if sinks is not None:
        route = DispatchedSinks(implementation, "varlen_sink_bwd", options, has_lse)
        return attend_sinks(q, k, v, route, sinks, cu_q, cu_k, used_q, used_k)
    return attend_packed(q, k, v, Dispatched(implementation, varlen_bwd, options, has_lse), cu_q, cu_k, used_q, used_k)


def _forward(
    name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool, with_gradients: Operator | None = None
) -> Operator:
    return Operator(
        name=name,
        tensors=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
        optional=("seqused_q", "seqused_k"),
        options=FwdOptions,
        trailing=("sinks",),
        returns=returns,
        check=_check,
        cuda=cuda,
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        differentiable=functools.partial(_differentiable_forward, has_lse=has_lse),
        transforms=register_packed_transforms,
        with_gradients=with_gradients,
    )


varlen_fwd_cuda, varlen_fwd_lse_cuda = CudaForward(has_lse=False), CudaForward(has_lse=True)
varlen_bwd_cuda = CudaBackward()
VARLEN_BWD = Operator(
    name="varlen_bwd",
    tensors=("dout", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"),
    optional=("seqused_q", "seqused_k", "dlse"),
    options=BwdOptions,
    returns=tuple[Tensor, Tensor, Tensor],
    check=_check_backward,
    cuda=varlen_bwd_cuda,
    cpu=_bwd_cpu,
    fake=_bwd_fake,
    transforms=register_packed_backward_transforms,
)
VARLEN_FWD_LSE = _forward("varlen_fwd_lse", tuple[Tensor, Tensor], varlen_fwd_lse_cuda, has_lse=True)
VARLEN_FWD = _forward("varlen_fwd", Tensor, varlen_fwd_cuda, has_lse=False, with_gradients=VARLEN_FWD_LSE)
varlen_bwd, varlen_fwd_lse, varlen_fwd = define(VARLEN_BWD), define(VARLEN_FWD_LSE), define(VARLEN_FWD)


def attend_plain_packed(inputs: PackedInputs, options: tuple[Any, ...], has_lse: bool) -> Result:
    """A forward with gradients past the dispatcher, for plain CUDA tensors."""
    return varlen_fwd_lse_cuda.with_gradients(inputs, options, has_lse)
