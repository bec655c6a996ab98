"""The operators of 8-bit operands, `torch.ops.cuteflash.fp8_fwd` and `fp8_fwd_lse`.

They differ from `cuteflash.ops` in what they are given: q, k and v of 8 bits, a scale of each for every KV head, and
V's mean if it was taken out. There is no gradient: tensors that need one are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import Fp8Options
from cuteflash.autograd import NO_GRADIENT
from cuteflash.calls import Known
from cuteflash.fp8_planning import TORCH_DTYPES, Fp8Planner, check_target
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.planning import Launch, Result
from cuteflash.reference import fp8_attention, stored_rows
from cuteflash.torch_internals import OpOverload
from cuteflash.transforms import register_autocast, register_vmap
from cuteflash.validate import check_alignment, reads_values
from cuteflash.validate_fp8 import Fp8Inputs, check_descale_values, check_fp8

TENSORS = Fp8Inputs._fields


def cuda_forward(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    planner = Fp8Planner(has_lse)
    known: Known[Launch] = Known()

    def plan(inputs: Fp8Inputs, options: tuple[Any, ...]) -> Launch:
        return planner.launch(inputs, Fp8Options(*options))

    def cuda(*arguments: Any) -> Result:
        inputs, options = Fp8Inputs(*arguments[: len(TENSORS)]), arguments[len(TENSORS) :]
        try:
            looks = tuple(x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs)
        except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
            check_fp8(inputs, Fp8Options(*options))
            raise
        call = looks, options
        last, launch = known.last
        if call != last:
            launch = known.find(call, plan, inputs, options)
        q, k, v = inputs[:3]
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        if reads_values():
            check_descale_values(inputs.descales)
        return launch(inputs)

    return cuda


def _split(arguments: tuple[Any, ...]) -> tuple[Fp8Inputs, Fp8Options]:
    *tensors, options = arguments
    return Fp8Inputs(*tensors), options


def _check(*arguments: Any) -> None:
    check_fp8(*_split(arguments))


def _check_flat(*arguments: Any) -> None:
    check_fp8(Fp8Inputs(*arguments[: len(TENSORS)]), Fp8Options(*arguments[len(TENSORS) :]))


def _fake(*arguments: Any, has_lse: bool) -> Result:
    inputs, options = _split(arguments)
    check_fp8(inputs, options)
    q = inputs.q
    check_target(q, options.family)
    b, s_q, h, _ = q.shape
    o = q.new_empty((b, s_q, h, inputs.head_dim_v(options)), dtype=TORCH_DTYPES[options.out_dtype])
    return (o, q.new_empty((b, h, s_q), dtype=torch.float32)) if has_lse else o


def _cpu(*arguments: Any, has_lse: bool) -> Result:
    inputs, options = _split(arguments)
    check_fp8(inputs, options)
    q, k, v = inputs[:3]
    check_alignment(q, k, v)
    check_descale_values(inputs.descales)
    rows = stored_rows(v, k.shape[1]) if options.transposed_v else v
    result = fp8_attention(
        q,
        k,
        rows,
        inputs.descales.values(),
        **options.definition(q.shape[3]),
        v_mean=inputs.v_mean,
        out_dtype=TORCH_DTYPES[options.out_dtype],
    )
    return result if has_lse else result[0]


def refuse_gradient(
    name: str, tensors: tuple[str, ...], implementation: Callable[..., Any], *arguments: Any
) -> NoReturn:
    """Refuse a call that needs a gradient, and name the tensor."""
    needs_one = next(n for n, x in zip(tensors, arguments, strict=False) if x is not None and x.requires_grad)
    raise NotImplementedError(f"{needs_one}.requires_grad is True; {NO_GRADIENT.format(name)}")


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap, autocast and the count of operations."""
    register_autocast(library, op, casts=False)
    register_vmap(library, op, len(TENSORS), check=_check_flat)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def count_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **named: Any) -> int:
    """Floating-point operations: two for each product of Q K^T and of P V, whatever the mask leaves out."""
    o = out_val[0] if isinstance(out_val, tuple) else out_val
    batch, seqlen_q, heads, head_dim = q.shape
    return int(2 * batch * heads * seqlen_q * k.shape[1] * (head_dim + o.shape[3]))


def _forward(name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=TENSORS[:-1],
        optional=TENSORS[-1:],
        options=Fp8Options,
        returns=returns,
        check=_check,
        cuda=cuda,
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        differentiable=functools.partial(refuse_gradient, name, TENSORS),
        transforms=_register_transforms,
    )


fp8_fwd_cuda, fp8_fwd_lse_cuda = cuda_forward(has_lse=False), cuda_forward(has_lse=True)
FP8_FWD = _forward("fp8_fwd", Tensor, fp8_fwd_cuda, has_lse=False)
FP8_FWD_LSE = _forward("fp8_fwd_lse", tuple[Tensor, Tensor], fp8_fwd_lse_cuda, has_lse=True)
fp8_fwd, fp8_fwd_lse = define(FP8_FWD), define(FP8_FWD_LSE)
