"""The operator of attention to keys in two parts, `torch.ops.cuteflash.mla_prefill`.

Each head has columns of K of its own, and the last 64 are one tensor that all heads share, as in the plain form of
latent attention. On Hopper the kernel loads the parts into one tile, if the first has a multiple of 64 columns.
Otherwise, and in the backward of every device, they are put together in memory first, and the operators of whole keys
run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.flop_counter import register_flop_formula

from cuteflash.arguments import bwd_options
from cuteflash.calls import Known
from cuteflash.mla_prefill_planning import forward_options, loads_two_parts, prefill_launch
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK, FWD_LSE, bwd, check_target, fwd_lse_cuda
from cuteflash.packed_ops import VARLEN_FWD_LSE, call_of, pairs, varlen_bwd, varlen_fwd_lse_cuda
from cuteflash.torch_internals import OpOverload, direct_node
from cuteflash.transforms import register_autocast, register_one_by_one
from cuteflash.validate import check_alignments, lse_dtype, reads_values
from cuteflash.validate_mla import ROPE_DIM
from cuteflash.validate_mla_prefill import PrefillInputs, PrefillOptions, check_prefill, check_prefill_values

TENSORS = PrefillInputs._fields
REQUIRED = 4
Results = tuple[Tensor, Tensor]


def whole_keys(k: Tensor, k_rope: Tensor) -> Tensor:
    """The keys in one tensor, (.., heads, head_dim)."""
    return torch.cat((k, k_rope.expand(*k.shape[:-1], ROPE_DIM)), dim=-1)


def parts_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both parts of keys, from those of whole ones: the shared part's is the sum over heads."""
    own, shared = keys[..., :-ROPE_DIM], keys[..., -ROPE_DIM:]
    dtype = torch.promote_types(shared.dtype, torch.float32)
    return own, shared.sum(dim=-2, keepdim=True, dtype=dtype).to(shared.dtype)


def plan(inputs: PrefillInputs, options: PrefillOptions) -> Callable[[PrefillInputs], Results]:
    """A checked launch for calls that look the same."""
    check_prefill(inputs, options)
    is_empty = inputs.q.numel() == 0 or inputs.v.numel() == 0
    if not is_empty and loads_two_parts(inputs):
        return prefill_launch(inputs, options)
    forward = forward_options(options)

    def launch(inputs: PrefillInputs) -> Results:
        keys = whole_keys(inputs.k, inputs.k_rope)
        results: Results
        if inputs.is_packed:
            results = varlen_fwd_lse_cuda(*inputs.packed(keys), *forward)
        else:
            results = fwd_lse_cuda(inputs.q, keys, inputs.v, *forward)
        return results

    return launch


class CudaPrefill:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""

    def __init__(self) -> None:
        self.known: Known[Any] = Known()

    def __call__(self, *arguments: Any) -> Results:
        """O and LSE, as the operator returns them."""
        inputs, options = PrefillInputs(*arguments[: len(TENSORS)]), PrefillOptions(*arguments[len(TENSORS) :])
        call = call_of(inputs, options, check_prefill, PrefillOptions)
        last, launch = self.known.last
        if call != last:
            launch = self.known.find(call, plan, inputs, options)
        q, k, k_rope, v = inputs[:4]
        if (q.data_ptr() | k.data_ptr() | k_rope.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            _check_alignment(inputs)
        if reads_values():
            check_prefill_values(inputs, complete=True)
        results: Results = launch(inputs)
        return results


def _check_alignment(inputs: PrefillInputs) -> None:
    check_alignments({"q": inputs.q, "k": inputs.k, "k_rope": inputs.k_rope, "v": inputs.v})


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_prefill(PrefillInputs(*tensors), options)


def _fake(*arguments: Any) -> Results:
    _check(*arguments)
    q, _, _, v, *_ = arguments
    check_target(q, None)
    *rows, heads, _ = q.shape
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty((*rows[:-1], heads, rows[-1]), dtype=lse_dtype(q))


def _cpu(*arguments: Any) -> Results:
    _check(*arguments)
    *tensors, options = arguments
    inputs, forward = PrefillInputs(*tensors), forward_options(options)
    _check_alignment(inputs)
    check_prefill_values(inputs, complete=reads_values())
    keys = whole_keys(inputs.k, inputs.k_rope)
    results: Results
    if inputs.is_packed:
        results = VARLEN_FWD_LSE.cpu(*inputs.packed(keys), None, forward)
    else:
        results = FWD_LSE.cpu(inputs.q, keys, inputs.v, None, forward)
    return results


class Prefill(Function):
    """The node of a call: it keeps the parts of K, and puts them together for the backward."""

    @staticmethod
    def forward(ctx: Any, implementation: Callable[..., Results], *arguments: Any) -> Results:
        """O and LSE."""
        count = len(TENSORS)
        out, lse = implementation(*arguments)
        ctx.save_for_backward(*PrefillInputs(*arguments[:count]), out, lse)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.count = PrefillOptions(*arguments[count:]), len(arguments)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        """The gradients of q, k, k_rope and v."""
        nothing = (None,) * (ctx.count - REQUIRED)
        if dout is None and dlse is None:
            return None, *(None,) * REQUIRED, *nothing
        *tensors, out, lse = ctx.saved_tensors
        inputs, options = PrefillInputs(*tensors), bwd_options(tuple(forward_options(ctx.options)))
        keys = whole_keys(inputs.k, inputs.k_rope)
        dout = torch.zeros_like(out) if dout is None else dout
        if inputs.is_packed:
            q, keys, v, *vectors = inputs.packed(keys)
            dq, dk, dv = varlen_bwd(dout, q, keys, v, out, lse, *vectors, dlse, *options)
        else:
            dq, dk, dv = bwd(dout, inputs.q, keys, inputs.v, out, lse, dlse, *options)
        return None, dq, *parts_of(dk), dv, *nothing


prefill_node = direct_node(Prefill)


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast, the count of operations, and vmap: one call after the other."""
    register_one_by_one(library, op)
    register_autocast(library, op, tensors=REQUIRED)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def count_flops(*arguments: Any, out_val: Any = None, **named: Any) -> int:
    """Floating-point operations: two for each product of Q K^T and of P V, whatever the mask leaves out."""
    *tensors, _ = MLA_PREFILL.split(arguments, **named)
    q, k, _, v, cu_q, cu_k = PrefillInputs(*tensors)
    seen = q.shape[0] * q.shape[1] * k.shape[1] if cu_q is None or cu_k is None else pairs(q, k, cu_q, cu_k)
    count: int = 2 * q.shape[-2] * seen * (q.shape[-1] + v.shape[-1])
    return count


mla_prefill_cuda = CudaPrefill()
MLA_PREFILL = Operator(
    name="mla_prefill",
    tensors=TENSORS[:REQUIRED],
    optional=TENSORS[REQUIRED:],
    options=PrefillOptions,
    returns=tuple[Tensor, Tensor],
    check=_check,
    cuda=mla_prefill_cuda,
    cpu=_cpu,
    fake=_fake,
    differentiable=prefill_node,
    transforms=_register_transforms,
)
mla_prefill = define(MLA_PREFILL)
