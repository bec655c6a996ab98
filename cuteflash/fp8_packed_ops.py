"""The operators of packed sequences of 8-bit operands, `torch.ops.cuteflash.fp8_varlen_fwd` and `fp8_varlen_fwd_lse`.

Sequences lie as those of `cuteflash.packed_ops` do, scales are as those of `cuteflash.fp8_ops`, one for every KV head
of a sequence. There is no gradient: tensors that need one are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import Fp8Options
from cuteflash.calls import Known
from cuteflash.core.tile_numbers import first_tile
from cuteflash.fp8_ops import refuse_gradient
from cuteflash.fp8_packed_planning import Fp8PackedPlanner
from cuteflash.fp8_planning import TORCH_DTYPES, check_target
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.packed_ops import call_of, pairs, spans
from cuteflash.planning import Result
from cuteflash.quantize_problem import BLOCK_TOKENS
from cuteflash.reference import fp8_attention, stored_rows
from cuteflash.torch_internals import OpOverload
from cuteflash.transforms import register_autocast, register_one_by_one
from cuteflash.validate import check_alignment, reads_values
from cuteflash.validate_fp8 import check_descale_values
from cuteflash.validate_fp8_packed import Fp8PackedInputs, check_fp8_packed, first_key
from cuteflash.validate_packed import check_values

TENSORS = Fp8PackedInputs._fields
REQUIRED = TENSORS.index("seqused_q")


class Route(NamedTuple):
    """What a CUDA implementation on packed sequences is made from.

    Attributes:
        inputs, options: the classes of the operator's tensors and of its options.
        check: takes both; raises if no kernel can take them.
        check_values: takes the tensors; raises if what their vectors and scales say is wrong. Reads them.
        plan: takes both; returns what takes tensors and launches.
    """

    inputs: type[Any]
    options: type[Any]
    check: Callable[..., None]
    check_values: Callable[[Any], None]
    plan: Callable[..., Callable[[Any], Result]]


def cuda_route(route: Route) -> Callable[..., Result]:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    known: Known[Callable[[Any], Result]] = Known()
    count = len(route.inputs._fields)

    def plan(inputs: Any, options: tuple[Any, ...]) -> Callable[[Any], Result]:
        return route.plan(inputs, route.options(*options))

    def cuda(*arguments: Any) -> Result:
        inputs, options = route.inputs(*arguments[:count]), arguments[count:]
        call = call_of(inputs, options, route.check, route.options)
        last, launch = known.last
        if call != last:
            launch = known.find(call, plan, inputs, options)
        q, k, v = inputs[:3]
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        if reads_values():
            route.check_values(inputs)
        result: Result = launch(inputs)
        return result

    return cuda


def cuda_forward(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation of a forward."""
    plan = Fp8PackedPlanner(has_lse).launch
    return cuda_route(Route(Fp8PackedInputs, Fp8Options, check_fp8_packed, _check_values, plan))


def _check_values(inputs: Fp8PackedInputs) -> None:
    check_values(inputs.packed, complete=True)
    check_descale_values(inputs.descales)


def _split(arguments: tuple[Any, ...]) -> tuple[Fp8PackedInputs, Fp8Options]:
    *tensors, options = arguments
    return Fp8PackedInputs(*tensors), options


def _check(*arguments: Any) -> None:
    check_fp8_packed(*_split(arguments))


def _fake(*arguments: Any, has_lse: bool) -> Result:
    inputs, options = _split(arguments)
    check_fp8_packed(inputs, options)
    q = inputs.q
    check_target(q, options.family)
    rows, heads, _ = q.shape
    o = q.new_empty((rows, heads, inputs.head_dim_v(options)), dtype=TORCH_DTYPES[options.out_dtype])
    return (o, q.new_empty((heads, rows), dtype=torch.float32)) if has_lse else o


def _cpu(*arguments: Any, has_lse: bool) -> Result:
    inputs, options = _split(arguments)
    check_fp8_packed(inputs, options)
    check_alignment(*inputs[:3])
    check_values(inputs.packed, complete=reads_values())
    check_descale_values(inputs.descales)
    result = attend_sequences(inputs, options)
    return result if has_lse else result[0]


def attend_sequences(inputs: Fp8PackedInputs, options: Fp8Options) -> tuple[Tensor, Tensor]:
    """O and LSE of one sequence after the other through the reference."""
    q, k, v = inputs[:3]
    rows, heads, head_dim = q.shape
    o = q.new_zeros(rows, heads, inputs.head_dim_v(options), dtype=TORCH_DTYPES[options.out_dtype])
    lse = q.new_full((heads, rows), float("-inf"), dtype=torch.float32)
    definition = options.definition(head_dim)
    for i, (of_q, of_k) in enumerate(spans(inputs.packed)):
        values = _stored(v, i, of_k) if options.transposed_v else v[None, of_k]
        o_part, lse_part = fp8_attention(
            q[None, of_q],
            k[None, of_k],
            values,
            _scales_of(inputs, i, of_q, of_k),
            **definition,
            v_mean=None if inputs.v_mean is None else inputs.v_mean[i : i + 1],
            out_dtype=o.dtype,
        )
        o[of_q], lse[:, of_q] = o_part[0], lse_part[0]
    return o, lse


def _scales_of(inputs: Fp8PackedInputs, sequence: int, of_q: slice, of_k: slice) -> list[Tensor]:
    """The scales of a sequence, a batch of one."""
    scales = inputs.descales.values()
    if not inputs.has_block_scales:
        return [scale[sequence : sequence + 1] for scale in scales]
    firsts = (first_tile(rows.start, sequence, BLOCK_TOKENS) for rows in (of_q, of_k, of_k))
    return [scale[..., first:] for scale, first in zip(scales, firsts, strict=True)]


def _stored(vt: Tensor, sequence: int, keys: slice) -> Tensor:
    """V of a sequence as rows, a batch of one, of Vᵀ; its keys are the rows `keys` of K."""
    start, length = first_key(keys.start, sequence), keys.stop - keys.start
    return stored_rows(vt[None, ..., start : start + first_key(length, 1)], length)


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast, which leaves 8 bits alone, vmap and the count of operations."""
    register_autocast(library, op, casts=False)
    register_one_by_one(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def count_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any, out_val: Any = None, **named: Any
) -> int:
    """Floating-point operations: two for each product of Q K^T and of P V, whatever the mask leaves out.

    Reads the lengths, see `pairs`.
    """
    o = out_val[0] if isinstance(out_val, tuple) else out_val
    return int(2 * q.shape[1] * pairs(q, k, cu_q, cu_k) * (q.shape[2] + o.shape[2]))


def _forward(name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=TENSORS[:REQUIRED],
        optional=TENSORS[REQUIRED:],
        options=Fp8Options,
        returns=returns,
        check=_check,
        cuda=cuda,
        cpu=functools.partial(_cpu, has_lse=has_lse),
        fake=functools.partial(_fake, has_lse=has_lse),
        differentiable=functools.partial(refuse_gradient, name, TENSORS),
        transforms=_register_transforms,
    )


fp8_varlen_fwd_cuda, fp8_varlen_fwd_lse_cuda = cuda_forward(has_lse=False), cuda_forward(has_lse=True)
FP8_VARLEN_FWD = _forward("fp8_varlen_fwd", Tensor, fp8_varlen_fwd_cuda, has_lse=False)
FP8_VARLEN_FWD_LSE = _forward("fp8_varlen_fwd_lse", tuple[Tensor, Tensor], fp8_varlen_fwd_lse_cuda, has_lse=True)
fp8_varlen_fwd, fp8_varlen_fwd_lse = define(FP8_VARLEN_FWD), define(FP8_VARLEN_FWD_LSE)
