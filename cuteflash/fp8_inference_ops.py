"""Attention of 16-bit tensors through FP8, `torch.ops.cuteflash.fp8_inference` and `fp8_inference_lse`.

    q, k, v ──quantise──► e4m3, scales, Vᵀ less its mean ──FP8 attention──► O, in q's dtype

V is always turned and smoothed: the quantiser holds it in registers anyway, and measures it before. One operator makes
both launches, so that everything is checked before the first. There is no gradient: tensors that need one are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import Fp8InferenceOptions, Fp8Options
from cuteflash.autograd import NO_GRADIENT
from cuteflash.calls import Known, looks_of
from cuteflash.fp8_planning import TORCH_DTYPES, Fp8Planner, check_family
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.planning import DTYPE_NAMES, Launch, Result
from cuteflash.quantize_planning import empty_results, launch_of
from cuteflash.quantize_problem import QuantizeOptions
from cuteflash.reference import fp8_attention
from cuteflash.reference.quantize import quantize
from cuteflash.torch_internals import OpOverload
from cuteflash.transforms import count_flops, register_autocast, register_vmap
from cuteflash.validate import check_alignment
from cuteflash.validate_fp8 import Fp8Inputs
from cuteflash.validate_quantize import QuantizeInputs, check_fp8_inference

TENSORS = ("q", "k", "v")


def quantize_options(options: Fp8InferenceOptions, *, transpose_v: bool) -> QuantizeOptions:
    """How the inputs are quantised."""
    return QuantizeOptions(hadamard=options.hadamard, transpose_v=transpose_v, smooth_v=True)


def fp8_options(options: Fp8InferenceOptions, q: Tensor) -> Fp8Options:
    """The options of the attention of what the quantiser gives."""
    shared = {name: getattr(options, name) for name in Fp8Options._fields if hasattr(options, name)}
    return Fp8Options(**shared)._replace(transposed_v=True, out_dtype=options.out_dtype or DTYPE_NAMES[q.dtype])


def cuda_inference(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation: look the launches of an equal call up, or plan them."""
    planner = Fp8Planner(has_lse)
    known: Known[Launch] = Known()

    def plan(q: Tensor, k: Tensor, v: Tensor, options: Fp8InferenceOptions) -> Launch:
        check_fp8_inference(q, k, v, options)
        check_family(q.device, options.family)
        inputs, quantizing = QuantizeInputs(q, k, v), quantize_options(options, transpose_v=True)
        quantise = launch_of(inputs, quantizing)
        attend = planner.launch(Fp8Inputs(*empty_results(inputs, quantizing)), fp8_options(options, q))

        def launch(q: Tensor, k: Tensor, v: Tensor) -> Result:
            return attend(Fp8Inputs(*quantise(QuantizeInputs(q, k, v))))

        return launch

    def cuda(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        try:
            call = looks_of((q, k, v)), options
        except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
            check_fp8_inference(q, k, v, Fp8InferenceOptions(*options))
            raise
        last, launch = known.last
        if call != last:
            launch = known.find(call, plan, q, k, v, Fp8InferenceOptions(*options))
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        return launch(q, k, v)

    return cuda


def _check_flat(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> None:
    check_fp8_inference(q, k, v, Fp8InferenceOptions(*options))


def _fake(q: Tensor, k: Tensor, v: Tensor, options: Fp8InferenceOptions, *, has_lse: bool) -> Result:
    check_fp8_inference(q, k, v, options)
    if q.device.type == "cuda" and torch.cuda.is_available():  # else traced for another machine's GPU
        check_family(q.device, options.family)
    b, s_q, h, _ = q.shape
    o = q.new_empty((b, s_q, h, v.shape[3]), dtype=TORCH_DTYPES[fp8_options(options, q).out_dtype])
    return (o, q.new_empty((b, h, s_q), dtype=torch.float32)) if has_lse else o


def _cpu(q: Tensor, k: Tensor, v: Tensor, options: Fp8InferenceOptions, *, has_lse: bool) -> Result:
    check_fp8_inference(q, k, v, options)
    check_alignment(q, k, v)
    attending = fp8_options(options, q)
    q8, k8, v8, *descales, v_mean = quantize(q, k, v, None, None, quantize_options(options, transpose_v=False))
    assert q8 is not None and k8 is not None and v8 is not None
    result = fp8_attention(
        q8,
        k8,
        v8,
        [x for x in descales if x is not None],
        **attending.definition(q.shape[3]),
        v_mean=v_mean,
        out_dtype=TORCH_DTYPES[attending.out_dtype],
    )
    return result if has_lse else result[0]


def not_differentiable(name: str, implementation: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Refuse a call that needs a gradient, and name the tensor."""
    needs_one = next(tensor for tensor, x in zip(TENSORS, arguments, strict=False) if x.requires_grad)
    raise NotImplementedError(f"{needs_one}.requires_grad is True; {NO_GRADIENT.format(name)}")


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap, autocast and the count of operations."""
    register_autocast(library, op)
    register_vmap(library, op, len(TENSORS), check=_check_flat)
    register_flop_formula(op.overloadpacket)(count_flops)


def _inference(name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=TENSORS,
        options=Fp8InferenceOptions,
        returns=returns,
        check=check_fp8_inference,
        cuda=cuda,
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        differentiable=functools.partial(not_differentiable, name),
        transforms=_register_transforms,
    )


fp8_inference_cuda, fp8_inference_lse_cuda = cuda_inference(has_lse=False), cuda_inference(has_lse=True)
fp8_inference = define(_inference("fp8_inference", Tensor, fp8_inference_cuda, has_lse=False))
fp8_inference_lse = define(_inference("fp8_inference_lse", tuple[Tensor, Tensor], fp8_inference_lse_cuda, has_lse=True))


def inference_of(q: Tensor, k: Tensor, v: Tensor, is_plain: bool, has_lse: bool) -> Callable[..., Result]:
    """What computes a call: past the dispatcher for plain CUDA tensors (`is_plain`) that need no gradient."""
    if is_plain and not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return fp8_inference_lse_cuda if has_lse else fp8_inference_cuda
    return fp8_inference_lse if has_lse else fp8_inference
