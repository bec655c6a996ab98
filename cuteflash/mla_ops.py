"""The operator of latent attention's decoding, `torch.ops.cuteflash.mla_decode`: inference only.

Each token of a sequence has one cached row, the key of all query heads, whose first columns are its value, too. The
host reads no length and no table, so that a CUDA graph replays with other lengths and pages. Entries of the table after
a sequence's last row are not looked up, and rows after it are not read. A cache of e4m3 has a descale, in fp32.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuteflash.autograd import NO_GRADIENT
from cuteflash.calls import Known
from cuteflash.mla_planning import CudaMlaDecode
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.packed_ops import call_of
from cuteflash.reference import latent_decode
from cuteflash.torch_internals import OpOverload
from cuteflash.traits.arch import Family
from cuteflash.transforms import register_autocast, register_one_by_one
from cuteflash.validate import check_alignments, lse_dtype, reads_values
from cuteflash.validate_mla import MlaInputs, MlaOptions, check_mla, check_mla_values

NAME = "mla_decode"
*TENSORS, TRAILING = MlaInputs._fields  # the last one comes after the options, of which few calls have it
FIRST_TRAILING = len(TENSORS) + len(MlaOptions._fields)
Results = tuple[Tensor, Tensor]


class CudaDecode:
    """The CUDA implementation: checks calls that look alike once, then launches."""

    def __init__(self) -> None:
        self.known: Known[bool] = Known()
        self.decode = CudaMlaDecode()

    def __call__(self, *arguments: Any) -> Results:
        """O and LSE, as the operator returns them."""
        inputs, options = split(arguments)
        call = call_of(inputs, options, _check_flat, MlaOptions)
        if call != self.known.last[0]:
            self.known.find(call, _checked, inputs, options)
        if (inputs.q.data_ptr() | inputs.kv_cache.data_ptr()) & ALIGNMENT_MASK:
            _check_alignment(inputs)
        if reads_values():
            check_mla_values(inputs)
        if is_empty(inputs):
            return without_rows(inputs, options)
        q, kv_cache, cache_seqlens, page_table, descale = inputs
        return self.decode(
            q,
            kv_cache,
            page_table,
            cache_seqlens,
            head_dim_v=options.head_dim_v,
            softmax_scale=options.scale(q.shape[-1]),
            causal=options.causal,
            num_splits=options.num_splits,
            family=cast(Family | None, options.family),
            descale=descale,
        )


def split(arguments: tuple[Any, ...]) -> tuple[MlaInputs, MlaOptions]:
    """The tensors and the options of a call's flat arguments, of which trailing defaults may be left out."""
    options = MlaOptions(*arguments[len(TENSORS) : FIRST_TRAILING])
    return MlaInputs(*arguments[: len(TENSORS)])._replace(**dict(zip([TRAILING], arguments[FIRST_TRAILING:]))), options


def is_empty(inputs: MlaInputs) -> bool:
    """Whether no query sees a row, whatever the lengths and the mask."""
    return inputs.q.numel() == 0 or inputs.capacity == 0 or inputs.kv_cache.numel() == 0


def without_rows(inputs: MlaInputs, options: MlaOptions) -> Results:
    """What queries get that see no row."""
    o, lse = empty_results(inputs, options)
    return o.zero_(), lse.fill_(float("-inf"))


def empty_results(inputs: MlaInputs, options: MlaOptions) -> Results:
    """O and LSE, uninitialised."""
    q = inputs.q
    batch, seqlen_q, heads, _ = q.shape
    o = q.new_empty(batch, seqlen_q, heads, options.head_dim_v)
    return o, q.new_empty(batch, heads, seqlen_q, dtype=lse_dtype(q))


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_mla(MlaInputs(*tensors), options)


def _check_flat(inputs: MlaInputs, options: MlaOptions) -> None:
    check_mla(inputs, options)


def _checked(inputs: MlaInputs, options: MlaOptions) -> bool:
    check_mla(inputs, options)
    return True


def _check_alignment(inputs: MlaInputs) -> None:
    check_alignments({"q": inputs.q, "kv_cache": inputs.kv_cache})


def _fake(*arguments: Any) -> Results:
    _check(*arguments)
    *tensors, options = arguments
    return empty_results(MlaInputs(*tensors), options)


def _cpu(*arguments: Any) -> Results:
    _check(*arguments)
    *tensors, options = arguments
    inputs = MlaInputs(*tensors)
    _check_alignment(inputs)
    check_mla_values(inputs)
    q, kv_cache, cache_seqlens, page_table, descale = inputs
    return latent_decode(
        q,
        kv_cache,
        page_table,
        cache_seqlens,
        head_dim_v=options.head_dim_v,
        softmax_scale=options.scale(q.shape[-1]),
        causal=options.causal,
        descale=descale,
    )


def _not_differentiable(implementation: Any, *arguments: Any) -> NoReturn:
    tensors = zip((*TENSORS, TRAILING), (*arguments[: len(TENSORS)], *arguments[FIRST_TRAILING:]), strict=False)
    needs_one = next(name for name, x in tensors if x is not None and x.requires_grad)
    raise NotImplementedError(f"{needs_one}.requires_grad is True; {NO_GRADIENT.format(NAME)}")


def _register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast, the count of operations, and vmap: one call after the other."""
    register_one_by_one(library, op)
    register_autocast(library, op)
    register_flop_formula(op.overloadpacket, get_raw=True)(count_flops)


def count_flops(*arguments: Any, out_val: Any = None, **named: Any) -> int:
    """Floating-point operations: two for each product of Q C^T and of P V, with whole caches, without a mask."""
    *tensors, options = MLA_DECODE.split(arguments, **named)
    inputs = MlaInputs(*tensors)
    rows = inputs.q.numel() // max(inputs.q.shape[-1], 1)
    return 2 * rows * inputs.capacity * (inputs.q.shape[-1] + int(options.head_dim_v))


mla_decode_cuda = CudaDecode()
MLA_DECODE = Operator(
    name=NAME,
    tensors=tuple(TENSORS[:3]),
    optional=tuple(TENSORS[3:]),
    trailing=(TRAILING,),
    options=MlaOptions,
    returns=tuple[Tensor, Tensor],
    check=_check,
    cuda=mla_decode_cuda,
    cpu=_cpu,
    fake=_fake,
    differentiable=_not_differentiable,
    transforms=_register_transforms,
)
mla_decode = define(MLA_DECODE)
