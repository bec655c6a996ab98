"""The backward operators of attention with sinks, `torch.ops.cuteflash.sink_bwd` and `varlen_sink_bwd`.

They are those of `cuteflash.ops` and `cuteflash.packed_ops` with the sinks as one more tensor, after `lse`, and their
gradient as one more result. The forward operators take sinks as their last argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import BwdOptions
from cuteflash.bwd_planning import BwdPlanner
from cuteflash.calls import Known, bwd_call_of, call_with_sinks
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK, BWD, is_determinism_enforced
from cuteflash.packed_ops import VARLEN_BWD, call_of, count_backward_flops
from cuteflash.packed_planning import bwd_launch
from cuteflash.planning import Launch, Result
from cuteflash.reference import sink_gradient
from cuteflash.strides import compacted
from cuteflash.torch_internals import OpOverload
from cuteflash.transforms import count_backward_flops as count_dense_flops
from cuteflash.transforms import register_one_by_one
from cuteflash.validate import check_alignment, check_sinks, reads_values
from cuteflash.validate_packed import PackedBwdInputs, check_values

PLACE = 6  # of the sinks among the arguments


def without(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor]:
    """(the arguments of the operator without sinks, the sinks)"""
    return arguments[:PLACE] + arguments[PLACE + 1 :], arguments[PLACE]


class CudaSinkBackward:
    """The CUDA implementation for dense batches: look the launch of an equal call up, or plan one."""

    def __init__(self) -> None:
        self.planner = BwdPlanner()
        self.known: Known[Launch] = Known()

    def __call__(self, *arguments: Any) -> Result:
        """The gradients, as the operator returns them."""
        given, sinks = without(arguments)
        count = len(BWD.tensors) + len(BWD.optional)
        dout, q, k, v, out, lse, dlse = (*given, None)[:count]
        options = options_of(given[count:])
        try:
            call = call_with_sinks(bwd_call_of(dout, q, k, v, out, lse, dlse, options), sinks)
        except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
            BWD.check(dout, q, k, v, out, lse, dlse, BwdOptions(*options))
            check_sinks(q, sinks)
            raise
        launch = self.known.find(call, self.planner.launch, call, dout, q, k, v, out, lse, dlse, sinks)
        check_alignment(q, k, v, out=out)
        if dout.data_ptr() & ALIGNMENT_MASK:
            dout = compacted(dout)
        return launch(dout, q, k, v, out, lse, dlse, sinks)


def varlen_cuda() -> Callable[..., Result]:
    """The CUDA implementation for packed sequences, likewise."""
    known: Known[Any] = Known()

    def plan(inputs: PackedBwdInputs, options: tuple[Any, ...], sinks: Tensor) -> Any:
        return bwd_launch(inputs, BwdOptions(*options), sinks)

    def check(tensors: tuple[Any, ...], options: BwdOptions) -> None:
        VARLEN_BWD.check(*tensors[:-1], options)
        check_sinks(tensors[1], tensors[-1])

    def cuda(*arguments: Any) -> Result:
        given, sinks = without(arguments)
        end = len(PackedBwdInputs._fields)
        inputs, options = PackedBwdInputs(*given[:end]), options_of(given[end:])
        call = call_of((*inputs, sinks), options, check, BwdOptions)
        launch = known.find(call, plan, inputs, options, sinks)
        check_alignment(inputs.q, inputs.k, inputs.v, out=inputs.out)
        if inputs.dout.data_ptr() & ALIGNMENT_MASK:
            inputs = inputs._replace(dout=compacted(inputs.dout))
        if reads_values():
            check_values(inputs.forward, complete=True)
        return launch(inputs, sinks)

    return cuda


def options_of(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of a call, as torch's deterministic mode has them."""
    return tuple(BwdOptions(*options)._replace(deterministic=True)) if is_determinism_enforced() else options


def _check(*arguments: Any, base: Operator) -> None:
    given, sinks = without(arguments)
    base.check(*given)
    check_sinks(given[1], sinks)


def _fake(*arguments: Any, base: Operator) -> Result:
    _check(*arguments, base=base)
    given, sinks = without(arguments)
    return *base.fake(*given), sinks.new_empty(sinks.shape)


def _cpu(*arguments: Any, base: Operator) -> Result:
    _check(*arguments, base=base)
    given, sinks = without(arguments)
    dout, out, lse, dlse = given[0], given[4], given[5], given[-2]
    if base is VARLEN_BWD:
        dout, out, lse, dlse = (x if x is None else x[None] for x in (dout, out, lse, dlse))
    return *base.cpu(*given), sink_gradient(dout, out, lse, dlse, sinks).to(sinks.dtype)


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap, one call after the other since each has a gradient of the sinks, and the count of operations."""
    register_one_by_one(library, op)
    if op.name().endswith("varlen_sink_bwd"):
        register_flop_formula(op.overloadpacket, get_raw=True)(_count_flops)
    else:
        register_flop_formula(op.overloadpacket)(count_dense_flops)


def _count_flops(*arguments: Any, out_val: Any = None, **named: Any) -> int:
    return count_backward_flops(*without(arguments)[0])


def _backward(name: str, base: Operator, cuda: Callable[..., Result]) -> Operator:
    return Operator(
        name=name,
        tensors=(*base.tensors[:PLACE], "sinks", *base.tensors[PLACE:]),
        optional=base.optional,
        options=BwdOptions,
        returns=tuple[Tensor, Tensor, Tensor, Tensor],
        check=functools.partial(_check, base=base),
        cuda=cuda,
        cpu=functools.partial(_cpu, base=base),
        fake=functools.partial(_fake, base=base),
        transforms=_register_transforms,
    )


SINK_BWD = _backward("sink_bwd", BWD, CudaSinkBackward())
VARLEN_SINK_BWD = _backward("varlen_sink_bwd", VARLEN_BWD, varlen_cuda())
sink_bwd, varlen_sink_bwd = define(SINK_BWD), define(VARLEN_SINK_BWD)
