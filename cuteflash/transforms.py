"""What torch's transforms and modes make of an operator. All but the first are registered with torch.

forward-mode AD    refused if an input has a tangent: without a formula torch would take the result's for zero
vmap               the mapped dimension joins the batch, and one call serves all
autocast           q, k and v in autocast's dtype, as torch's own scaled_dot_product_attention takes them; a backward
                   has no rule, since it runs in the dtype of its forward
FlopCounterMode    two matrix products of a forward, five of a backward, over all scores, also masked ones, as torch
                   counts its own attention

Gradients, `torch.func`'s among them, are in `cuteflash.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from cuteflash import torch_internals
from cuteflash.torch_internals import OpOverload

Check = Callable[..., None]  # takes an operator's tensors and options, flat


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


def transform_forward(library: torch.library.Library, op: OpOverload, tensors: int, check: Check) -> None:
    """Register vmap, autocast and the count of operations of a forward operator, whose first arguments are tensors."""
    transform_vmap(library, op, tensors, check)
    for device_type, key in torch_internals.AUTOCAST_KEYS.items():
        library.impl(op, _autocast_rule(op, device_type), key.name)
    register_flop_formula(op.overloadpacket)(count_flops)


def transform_backward(library: torch.library.Library, op: OpOverload, tensors: int, check: Check) -> None:
    """Register vmap and the count of operations of a backward operator, whose first arguments are tensors."""
    transform_vmap(library, op, tensors, check)
    register_flop_formula(op.overloadpacket)(count_backward_flops)


def transform_vmap(library: torch.library.Library, op: OpOverload, tensors: int, check: Check) -> None:
    """Register vmap of an operator whose tensors and results all have the batch first."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
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


def _stacked(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with the mapped dimension first; `dim` is None if all share one."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _autocast_rule(op: OpOverload, device_type: str) -> Callable[..., Any]:
    def cast(tensor: Tensor) -> Tensor:
        """As torch does: every floating-point type but fp64."""
        if tensor.device.type == device_type and tensor.is_floating_point() and tensor.dtype is not torch.float64:
            return tensor.to(torch.get_autocast_dtype(device_type))
        return tensor

    def autocast(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        with torch_internals.below_autocast(device_type):
            return op(cast(q), cast(k), cast(v), *options)

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
