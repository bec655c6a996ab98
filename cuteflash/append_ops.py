"""The operators `torch.ops.cuteflash.append_kv`, which writes to its caches, and `apply_rotary`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from cuteflash.append_planning import append_launch, rotary_launch
from cuteflash.append_problem import AppendOptions, RotaryOptions
from cuteflash.calls import Known, looks_of
from cuteflash.operators import Operator, define
from cuteflash.ops import ALIGNMENT_MASK
from cuteflash.reference.append import Tables, Tokens, append, places, rotate, rotated
from cuteflash.transforms import refuse_vmap, register_one_by_one
from cuteflash.validate import ALIGNMENT, reads_values
from cuteflash.validate_append import AppendInputs, RotaryInputs, check_append, check_rotary
from cuteflash.validate_append_values import check_append_values, check_rotary_values

APPEND_TENSORS, ROTARY_TENSORS = len(AppendInputs._fields), len(RotaryInputs._fields)
known_appends: Known[Any] = Known()
known_rotations: Known[Any] = Known()


def append_launch_of(inputs: AppendInputs, options: AppendOptions, *, counts: bool = False) -> Callable[..., Any]:
    """The launch of a call on a GPU, that of an equal call or a new one, checked for all but addresses and values.

    See `append_launch`.
    """
    try:
        call = looks_of(inputs), options, counts
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        check_append(inputs, options)
        raise
    launch: Callable[..., Any]
    last, launch = known_appends.last
    if call != last:
        launch = known_appends.find(call, functools.partial(append_launch, counts=counts), inputs, options)
    return launch


def append_now(inputs: AppendInputs, options: AppendOptions) -> Tensor | None:
    """Append on a GPU. Returns the rotated queries, if any."""
    launch = append_launch_of(inputs, options)
    check_now(inputs, options)
    result: Tensor | None = launch(inputs)
    return result


def append_and_count(inputs: AppendInputs, options: AppendOptions) -> tuple[Tensor | None, Tensor]:
    """Append on a GPU. Returns the rotated queries, if any, and how many tokens each sequence has then."""
    launch = append_launch_of(inputs, options, counts=True)
    check_now(inputs, options)
    result: tuple[Tensor | None, Tensor] = launch(inputs)
    return result


def check_now(inputs: AppendInputs, options: AppendOptions) -> None:
    """Raise ValueError for what may differ between equal calls: addresses and, on request, values."""
    k_cache, v_cache, k, v = inputs[:4]
    addresses = k_cache.data_ptr() | v_cache.data_ptr() | k.data_ptr() | v.data_ptr()
    if (addresses if inputs.q is None else addresses | inputs.q.data_ptr()) & ALIGNMENT_MASK:
        check_addresses(inputs._asdict())
    if reads_values():
        check_append_values(inputs, options)


def rotate_now(inputs: RotaryInputs, options: RotaryOptions) -> Tensor:
    """Rotate on a GPU, likewise."""
    try:
        call = looks_of(inputs), options
    except RuntimeError:
        check_rotary(inputs, options)
        raise
    last, launch = known_rotations.last
    if call != last:
        launch = known_rotations.find(call, rotary_launch, inputs, options)
    if inputs.x.data_ptr() & ALIGNMENT_MASK:
        check_addresses({"x": inputs.x})
    if reads_values():
        check_rotary_values(inputs, options)
    result: Tensor = launch(inputs)
    return result


def check_addresses(tensors: dict[str, Any]) -> None:
    """Raise ValueError if one of the large tensors does not begin on 16 bytes."""
    for name in ("k_cache", "v_cache", "k", "v", "q", "x"):
        x = tensors.get(name)
        if x is not None and x.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}.data_ptr() is {x.data_ptr():#x}; allowed: multiples of {ALIGNMENT} bytes (its storage offset "
                f"is {x.storage_offset()} elements)"
            )


def _append_cuda(*arguments: Any) -> Tensor:
    inputs, options = AppendInputs(*arguments[:APPEND_TENSORS]), AppendOptions(*arguments[APPEND_TENSORS:])
    result = append_now(inputs, options)
    return inputs.k.new_empty(0) if result is None else result


def _rotary_cuda(*arguments: Any) -> Tensor:
    return rotate_now(RotaryInputs(*arguments[:ROTARY_TENSORS]), RotaryOptions(*arguments[ROTARY_TENSORS:]))


def _check_append(*arguments: Any) -> None:
    *tensors, options = arguments
    check_append(AppendInputs(*tensors), options)


def _check_rotary(*arguments: Any) -> None:
    *tensors, options = arguments
    check_rotary(RotaryInputs(*tensors), options)


def _append_fake(*arguments: Any) -> Tensor:
    _check_append(*arguments)
    inputs = AppendInputs(*arguments[:-1])
    return inputs.k.new_empty(0 if inputs.q is None else inputs.q.shape)


def _rotary_fake(*arguments: Any) -> Tensor:
    _check_rotary(*arguments)
    x: Tensor = arguments[0]
    return x.new_empty(x.shape)


def _append_cpu(*arguments: Any) -> Tensor:
    _check_append(*arguments)
    inputs, options = AppendInputs(*arguments[:-1]), arguments[-1]
    check_addresses(inputs._asdict())
    check_append_values(inputs, options)
    tokens = Tokens.of(inputs.k, inputs.cu_seqlens_k_new)
    k, v = (x.reshape(tokens.index.shape[0], *x.shape[-2:]) for x in (inputs.k, inputs.v))
    result = inputs.k.new_empty(0)
    begins = inputs.cache_seqlens if inputs.rotary_seqlens is None else inputs.rotary_seqlens
    if inputs.rotary_cos is not None and inputs.rotary_sin is not None:
        tables = Tables(inputs.rotary_cos, inputs.rotary_sin, options.rotary_interleaved)
        if k.numel():
            k = rotated(k, begins.long()[tokens.sequence] + tokens.index, tables)
        if inputs.q is not None:
            result = rotate(inputs.q, inputs.cu_seqlens_q, begins, tables, options.fixed_q)
    if inputs.batch:
        positions = inputs.cache_seqlens.long()[tokens.sequence] + tokens.index
        slots = inputs.k_cache.shape[1]
        at = places(tokens, positions, inputs.page_table, inputs.cache_batch_idx, slots)
        shape = inputs.batch, inputs.k_cache.shape[2]
        for cache, new, descale in ((inputs.k_cache, k, inputs.k_descale), (inputs.v_cache, v, inputs.v_descale)):
            append(cache, new, tokens, *at, None if descale is None else descale.expand(shape))
    return result


def _rotary_cpu(*arguments: Any) -> Tensor:
    _check_rotary(*arguments)
    inputs, options = RotaryInputs(*arguments[:-1]), arguments[-1]
    check_addresses({"x": inputs.x})
    check_rotary_values(inputs, options)
    x, cos, sin, begins, ends = inputs
    if begins is None:
        batch = x.shape[0] if ends is None else ends.shape[0] - 1
        begins = torch.full((batch,), options.offset, dtype=torch.int32)
    tables = Tables(cos, -sin if options.inverse else sin, options.interleaved)
    return rotate(x, ends, begins, tables, options.fixed)


def _no_gradient(implementation: Callable[..., Any], *arguments: Any) -> NoReturn:
    tensors = zip(AppendInputs._fields, arguments, strict=False)
    name = next(name for name, x in tensors if x is not None and x.requires_grad)
    raise ValueError(
        f"{name} requires grad; allowed: tensors that do not, or a call under torch.no_grad(), as appending to a cache "
        "has no gradient"
    )


class _Rotation(torch.autograd.Function):
    """A rotation's gradient is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, implementation: Callable[..., Any], *arguments: Any) -> Tensor:
        inputs = RotaryInputs(*arguments[:ROTARY_TENSORS])
        ctx.save_for_backward(*inputs[1:])
        ctx.options = RotaryOptions(*arguments[ROTARY_TENSORS:])
        result: Tensor = implementation(*arguments)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        options = ctx.options._replace(inverse=not ctx.options.inverse)
        gradient = apply_rotary_op(gradients[0].contiguous(), *ctx.saved_tensors, *options)
        return None, gradient, *(None for _ in (*ctx.saved_tensors, *options))


def _differentiable(implementation: Callable[..., Any], *arguments: Any) -> Tensor:
    for name, table in zip(("cos", "sin"), arguments[1:3], strict=True):
        if table.requires_grad:
            raise ValueError(f"{name} requires grad; allowed: tables that do not, as they have no gradient here")
    complete = *RotaryInputs(*arguments[:ROTARY_TENSORS]), *RotaryOptions(*arguments[ROTARY_TENSORS:])
    result: Tensor = _Rotation.apply(implementation, *complete)  # type: ignore[no-untyped-call]
    return result


APPEND = Operator(
    name="append_kv",
    tensors=AppendInputs._fields[:5],
    optional=AppendInputs._fields[5:],
    mutates=("k_cache", "v_cache"),
    options=AppendOptions,
    returns=Tensor,
    check=_check_append,
    cuda=_append_cuda,
    cpu=_append_cpu,
    fake=_append_fake,
    differentiable=_no_gradient,
    transforms=functools.partial(refuse_vmap, names=AppendInputs._fields),
)
ROTARY = Operator(
    name="apply_rotary",
    tensors=RotaryInputs._fields[:3],
    optional=RotaryInputs._fields[3:],
    options=RotaryOptions,
    returns=Tensor,
    check=_check_rotary,
    cuda=_rotary_cuda,
    cpu=_rotary_cpu,
    fake=_rotary_fake,
    differentiable=_differentiable,
    transforms=register_one_by_one,  # autocast has nothing to cast
)
append_kv_op, apply_rotary_op = define(APPEND), define(ROTARY)
