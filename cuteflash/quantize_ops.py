"""The operators that quantise for FP8 attention, `torch.ops.cuteflash.quantize_qkv` and `quantize_qkv_varlen`.

The latter is given packed sequences, which lie as those of `cuteflash.packed_ops` do.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuteflash.calls import Known
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.packed_ops import call_of, spans
from cuteflash.quantize_planning import Result, empty_results, launch_of
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.reference.quantize import quantize, quantize_packed
from cuteflash.transforms import register_one_by_one
from cuteflash.validate import check_alignment, reads_values
from cuteflash.validate_quantize import QuantizeInputs, check_descale_values, check_lengths, check_quantize

VECTORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
SCALES = QuantizeInputs._fields[3 : -len(VECTORS)]
DENSE, PACKED = ("q", "k", "v", *SCALES), ("q", "k", "v", *VECTORS, *SCALES)  # the tensors of each operator
SIGN_LESS = 0x7F  # bits of an 8-bit number without its sign
known: Known[Any] = Known()


def _inputs(names: tuple[str, ...], tensors: tuple[Any, ...]) -> QuantizeInputs:
    return QuantizeInputs(*tensors) if names is DENSE else QuantizeInputs(**dict(zip(names, tensors, strict=False)))


def quantize_cuda(*arguments: Any, names: tuple[str, ...] = DENSE) -> Result:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    inputs, options = _inputs(names, arguments[: len(names)]), arguments[len(names) :]
    looks = call_of(inputs, options, check_quantize, QuantizeOptions)
    last, launch = known.last
    if looks != last:
        launch = known.find(looks, launch_of, inputs, QuantizeOptions(*options))
    q, k, v = inputs[:3]
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
        check_alignment(q, k, v)
    result: Result
    if not reads_values():
        result = launch(inputs)
        return result
    check_lengths(inputs, complete=True)
    check_descale_values(inputs)
    result = launch(inputs)
    warn_of_saturation(inputs, result)
    return result


def warn_of_saturation(inputs: QuantizeInputs, results: Result) -> None:
    """Warn of each result that has the largest number, up to its sign, with a scale that was given. Reads it."""
    if inputs.descales is None:
        return
    for name, x in zip("qkv", results, strict=False):
        largest = torch.full((), torch.finfo(x.dtype).max).to(x.dtype).view(torch.uint8).item()
        count = int(((x.view(torch.uint8) & SIGN_LESS) == largest).sum())
        if count:
            warnings.warn(
                f"{count} of {x.numel()} elements of {name} are as large as {x.dtype} can be, "
                f"{torch.finfo(x.dtype).max:g} times {name}_descale: what is larger was cut",
                stacklevel=2,
            )


def _check(*arguments: Any, names: tuple[str, ...]) -> None:
    *tensors, options = arguments
    check_quantize(_inputs(names, tuple(tensors)), options)


def _fake(*arguments: Any, names: tuple[str, ...]) -> Result:
    _check(*arguments, names=names)
    *tensors, options = arguments
    return empty_results(_inputs(names, tuple(tensors)), options)


def _cpu(*arguments: Any, names: tuple[str, ...]) -> Result:
    _check(*arguments, names=names)
    *tensors, options = arguments
    inputs = _inputs(names, tuple(tensors))
    check_alignment(*inputs[:3])
    check_lengths(inputs, complete=reads_values())
    check_descale_values(inputs)
    results = empty_results(inputs, options)
    if inputs.packed is not None:
        of_sequences = spans(inputs.packed)
        quantize_packed(inputs[:3], of_sequences, inputs.descales, inputs.tables, options, results)
    else:
        computed = quantize(*inputs[:3], inputs.descales, inputs.tables, options)
        for result, value in zip(results, computed, strict=True):
            if value is not None and result.numel():  # not a descale that was given
                result.copy_(value)
    if reads_values():
        warn_of_saturation(inputs, results)
    return results


def _operator(name: str, names: tuple[str, ...], required: int, cuda: Callable[..., Result]) -> Operator:
    return Operator(
        name=name,
        tensors=names[:required],
        optional=names[required:],
        options=QuantizeOptions,
        returns=tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        check=functools.partial(_check, names=names),
        cuda=cuda,
        cpu=functools.partial(_cpu, names=names),
        fake=functools.partial(_fake, names=names),
        transforms=register_one_by_one,  # autocast has nothing to cast 16-bit tensors to
    )


quantize_varlen_cuda = functools.partial(quantize_cuda, names=PACKED)
QUANTIZE = _operator("quantize_qkv", DENSE, DENSE.index("v") + 1, quantize_cuda)
QUANTIZE_VARLEN = _operator("quantize_qkv_varlen", PACKED, PACKED.index("seqused_q"), quantize_varlen_cuda)
quantize_qkv_op, quantize_qkv_varlen_op = define(QUANTIZE), define(QUANTIZE_VARLEN)
