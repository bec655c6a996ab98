"""The operator that quantises for FP8 attention, `torch.ops.cuteflash.quantize_qkv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK, Known
from cuteflash.quantize_planning import Result, empty_results, launch_of
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.reference.quantize import quantize
from cuteflash.torch_internals import OpOverload
from cuteflash.validate import check_alignment, reads_values
from cuteflash.validate_quantize import QuantizeInputs, check_descale_values, check_quantize

TENSORS = len(QuantizeInputs._fields)
known: Known[Any] = Known()


def quantize_cuda(*arguments: Any) -> Result:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    inputs, options = QuantizeInputs(*arguments[:TENSORS]), arguments[TENSORS:]
    try:
        looks = tuple(x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs)
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        check_quantize(inputs, QuantizeOptions(*options))
        raise
    launch = known.find((looks, options), launch_of, inputs, QuantizeOptions(*options))
    q, k, v = inputs[:3]
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
        check_alignment(q, k, v)
    if reads_values():
        check_descale_values(inputs)
    result: Result = launch(inputs)
    return result


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_quantize(QuantizeInputs(*tensors), options)


def _fake(*arguments: Any) -> Result:
    _check(*arguments)
    *tensors, options = arguments
    return empty_results(QuantizeInputs(*tensors), options)


def _cpu(*arguments: Any) -> Result:
    _check(*arguments)
    *tensors, options = arguments
    inputs = QuantizeInputs(*tensors)
    check_alignment(*inputs[:3])
    check_descale_values(inputs)
    results = empty_results(inputs, options)
    computed = quantize(*inputs[:3], inputs.descales, inputs.tables, options)
    for result, value in zip(results, computed, strict=True):
        if value is not None and result.numel():  # not a descale that was given
            result.copy_(value)
    return results


def _no_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Torch refuses vmap of an operator without a rule; autocast has nothing to cast 16-bit tensors to."""


QUANTIZE = Operator(
    name="quantize_qkv",
    tensors=("q", "k", "v"),
    optional=QuantizeInputs._fields[3:],
    options=QuantizeOptions,
    returns=tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    check=_check,
    cuda=quantize_cuda,
    cpu=_cpu,
    fake=_fake,
    transforms=_no_transforms,
)
quantize_qkv_op = define(QUANTIZE)
