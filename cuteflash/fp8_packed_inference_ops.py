"""Attention of packed sequences of 16 bits through FP8: `torch.ops.cuteflash.fp8_varlen_inference` and `.._lse`.

As `cuteflash.fp8_inference_ops`, with a scale and a mean of V for each sequence. Rows that do not count are neither
measured nor attended to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import Fp8InferenceOptions
from cuteflash.fp8_inference_ops import fp8_options, not_differentiable, quantize_options
from cuteflash.fp8_packed_ops import Route, attend_sequences, cuda_route
from cuteflash.fp8_packed_planning import Fp8PackedPlanner
from cuteflash.fp8_planning import TORCH_DTYPES, check_family, check_target
from cuteflash.operators import Operator, define
from cuteflash.packed_ops import count_flops, spans
from cuteflash.planning import Result
from cuteflash.quantize_planning import empty_results, launch_of
from cuteflash.reference.quantize import quantize_packed
from cuteflash.torch_internals import OpOverload
from cuteflash.transforms import register_autocast, register_one_by_one
from cuteflash.validate import check_alignment, reads_values
from cuteflash.validate_fp8 import Fp8Inputs
from cuteflash.validate_fp8_packed import Fp8PackedInputs
from cuteflash.validate_packed import PackedInputs, check_values
from cuteflash.validate_quantize import QuantizeInputs, check_fp8_packed_inference

FIELDS = PackedInputs._fields
REQUIRED = FIELDS.index("seqused_q")
Launch = Callable[[PackedInputs], Result]


def unquantised(inputs: PackedInputs) -> QuantizeInputs:
    """What the quantiser gets."""
    return QuantizeInputs(**inputs._asdict())


def quantised(inputs: PackedInputs, results: tuple[Tensor, ...]) -> Fp8PackedInputs:
    """What the attention gets of the quantiser's results."""
    return Fp8PackedInputs(**inputs._asdict() | dict(zip(Fp8Inputs._fields, results, strict=True)))


def cuda_inference(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation."""
    planner = Fp8PackedPlanner(has_lse)

    def plan(inputs: PackedInputs, options: Fp8InferenceOptions) -> Launch:
        check_fp8_packed_inference(inputs, options)
        check_family(inputs.q.device, options.family)
        sources, quantizing = unquantised(inputs), quantize_options(options, transpose_v=True)
        quantise = launch_of(sources, quantizing)
        given = quantised(inputs, empty_results(sources, quantizing))
        attend = planner.launch(given, fp8_options(options, inputs.q))

        def launch(inputs: PackedInputs) -> Result:
            return attend(quantised(inputs, quantise(unquantised(inputs))))

        return launch

    check = functools.partial(check_values, complete=True)
    return cuda_route(Route(PackedInputs, Fp8InferenceOptions, check_fp8_packed_inference, check, plan))


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_fp8_packed_inference(PackedInputs(*tensors), options)


def _fake(*arguments: Any, has_lse: bool) -> Result:
    _check(*arguments)
    q, _, v, *_, options = arguments
    check_target(q, options.family)
    rows, heads, _ = q.shape
    o = q.new_empty((rows, heads, v.shape[2]), dtype=TORCH_DTYPES[fp8_options(options, q).out_dtype])
    return (o, q.new_empty((heads, rows), dtype=torch.float32)) if has_lse else o


def _cpu(*arguments: Any, has_lse: bool) -> Result:
    _check(*arguments)
    *tensors, options = arguments
    inputs = PackedInputs(*tensors)
    check_alignment(*inputs[:3])
    check_values(inputs, complete=reads_values())
    sources, quantizing = unquantised(inputs), quantize_options(options, transpose_v=True)
    results = empty_results(sources, quantizing)
    quantize_packed(inputs[:3], spans(inputs), None, None, quantizing, results)
    result = attend_sequences(quantised(inputs, results), fp8_options(options, inputs.q))
    return result if has_lse else result[0]


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap, autocast and the count of operations."""
    register_autocast(library, op)
    register_one_by_one(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def _inference(name: str, returns: Any, has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=FIELDS[:REQUIRED],
        optional=FIELDS[REQUIRED:],
        options=Fp8InferenceOptions,
        returns=returns,
        check=_check,
        cuda=cuda_inference(has_lse),
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        differentiable=functools.partial(not_differentiable, name),
        transforms=_register_transforms,
    )


fp8_varlen_inference = define(_inference("fp8_varlen_inference", Tensor, has_lse=False))
fp8_varlen_inference_lse = define(_inference("fp8_varlen_inference_lse", tuple[Tensor, Tensor], has_lse=True))
