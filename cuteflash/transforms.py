"""What torch's transforms and modes make of an operator. All but the first are registered with torch.

forward-mode AD    refused if an input has a tangent: without a formula torch would take the result's for zero
vmap               the mapped dimension joins the batch, and one call serves all; mapped sinks, packed sequences and
                   caches take one call each; refused of operators that write to their tensors
autocast           q, k and v in autocast's dtype, as torch's own scaled_dot_product_attention takes them; a backward
                   has no rule, since it runs in the dtype of its forward
FlopCounterMode    two matrix products of a forward, five of a backward, over all scores, also masked ones, as torch
                   counts its own attention

Gradients, `torch.func`'s among them, are in `cuteflash.autograd`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from cuteflash import torch_internals
from cuteflash.arguments import BwdOptions, FwdOptions, without_sinks
from cuteflash.torch_internals import OpOverload
from cuteflash.validate import check_bwd, check_fwd


def check_no_tangents(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise NotImplementedError if a tensor has a tangent that forward-mode AD follows."""
    if not (torch_internals.is_forward_ad_active() and torch_internals.is_fwd_grad_enabled()):
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} has a tangent (of torch.func.jvp, jacfwd, hessian, linearize, or as a dual tensor), and "
                f"cuteflash has no forward-mode derivatives in this release; allowed: tensors without one, as "
                f"{name}.detach() is"
            )


def register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap, autocast and the count of operations of a forward operator."""
    register_vmap(library, op, 3, check=_check_forward)
    register_autocast(library, op)
    register_flop_formula(op.overloadpacket)(count_flops)


def register_backward_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap and the count of operations of a backward operator."""
    register_vmap(library, op, 7, check=_check_backward)
    register_flop_formula(op.overloadpacket)(count_backward_flops)


def _check_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> None:
    options, sinks = without_sinks(options)
    check_fwd(q, k, v, FwdOptions(*options), sinks)


def _check_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None, *options: Any
) -> None:
    check_bwd(dout, q, k, v, out, lse, dlse, BwdOptions(*options))


def register_autocast(library: torch.library.Library, op: OpOverload, *, casts: bool = True, tensors: int = 3) -> None:
    """Register autocast of an operator whose first arguments are q, k and v, or as many `tensors` as it says.

    Without `casts` they are taken as they are, and what the operator calls is not cast either.
    """
    for device_type, key in torch_internals.AUTOCAST_KEYS.items():
        library.impl(op, _autocast_rule(op, device_type, casts, tensors), key.name)


def register_vmap(library: torch.library.Library, op: OpOverload, tensors: int, check: Callable[..., None]) -> None:
    """Register vmap of an operator whose results and first arguments are tensors that have the batch first.

    Args:
        library: where it is registered.
        op: the operator.
        tensors: how many arguments are tensors.
        check: takes all arguments; raises as the operator does.
    """

    def mapped(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        if any(dim is not None for dim in in_dims[tensors:]):
            return one_by_one(op, info, in_dims, *arguments)
        size, options = info.batch_size, arguments[tensors:]
        mapped_tensors = zip(arguments[:tensors], in_dims[:tensors], strict=True)
        stacked: list[Any] = [x if x is None else _stacked(x, dim, size) for x, dim in mapped_tensors]
        if size:  # errors name the shapes that the mapped function sees
            check(*(x if x is None else x[0] for x in stacked), *options)
        batch = stacked[0].shape[1]
        result = op(*(x if x is None else x.flatten(0, 1) for x in stacked), *options)
        if isinstance(result, Tensor):
            return result.unflatten(0, (size, batch)), 0
        return tuple(x.unflatten(0, (size, batch)) for x in result), (0,) * len(result)

    torch.library.register_vmap(op.name(), mapped, lib=library)


def register_one_by_one(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap alone: one call after the other."""
    torch.library.register_vmap(op.name(), functools.partial(one_by_one, op), lib=library)


def refuse_vmap(library: torch.library.Library, op: OpOverload, names: Sequence[str]) -> None:
    """Register that vmap is refused, of an operator that writes to its tensors; `names` are those of its tensors."""

    def refused(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> NoReturn:
        name = next(name for name, dim in zip(names, in_dims, strict=False) if dim is not None)
        raise NotImplementedError(
            f"{name} is mapped by torch.vmap, and cuteflash does not map what writes to a cache; allowed: one call "
            "whose batch has what is mapped"
        )

    torch.library.register_vmap(op.name(), refused, lib=library)


def one_by_one(op: OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """The rule of vmap for what cannot share a call: one call after the other."""
    if not info.batch_size:
        raise ValueError(f"the mapped dimension has size 0; allowed: 1 or more for {op.overloadpacket}")
    calls = (
        op(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    )
    results = list(calls)
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(x) for x in zip(*results, strict=True)), (0,) * len(results[0])


def _stacked(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with the mapped dimension first; `dim` is None if all share one."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _autocast_rule(op: OpOverload, device_type: str, casts: bool, tensors: int) -> Callable[..., Any]:
    def cast(tensor: Tensor) -> Tensor:
        """As torch does: every floating-point type but fp64, and those of 8 bits, which have scales."""
        if (
            casts
            and tensor.device.type == device_type
            and tensor.is_floating_point()
            and tensor.dtype is not torch.float64
            and tensor.element_size() > 1
        ):
            return tensor.to(torch.get_autocast_dtype(device_type))
        return tensor

    def cast_half(argument: Any) -> Any:
        """Sinks of 16 bits have q's dtype; fp32 is always allowed."""
        is_half = isinstance(argument, Tensor) and argument.dtype is not torch.float32
        return cast(argument) if is_half else argument

    def autocast(*arguments: Any) -> Any:
        with torch_internals.below_autocast(device_type):
            return op(*map(cast, arguments[:tensors]), *map(cast_half, arguments[tensors:]))

    return autocast


def count_flops(
    q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *options: Any, out_shape: Any = None, **named: Any
) -> int:
    """Floating-point operations of a forward: two for each product of Q K^T and of P V, whatever the mask leaves out.

    Torch counts its own attention without regard to masks, so numbers compare; causal ones are twice what is computed.
    """
    batch, seqlen_q, heads, head_dim = q_shape
    return 2 * batch * heads * seqlen_q * k_shape[1] * (head_dim + v_shape[3])


def count_backward_flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    *others: Any,
    out_shape: Any = None,
    **named: Any,
) -> int:
    """Floating-point operations of a backward: Q K^T again, dS K and dS^T Q, then dO V^T and P^T dO."""
    batch, seqlen_q, heads, head_dim = q_shape
    return 2 * batch * heads * seqlen_q * k_shape[1] * (3 * head_dim + 2 * v_shape[3])
