"""What torch's transforms and modes make of a forward operator. All but the first two are registered with torch.

forward-mode AD    refused if an input has a tangent: without a formula torch would take the result's for zero
functorch's grad   refused, as are vjp and jacrev: they ask for the backward
vmap               the mapped dimension joins the batch, and one call serves all
autocast           q, k and v in autocast's dtype, as torch's own scaled_dot_product_attention takes them
FlopCounterMode    two matrix products over all scores, also masked ones, as torch counts its own attention
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from cuteflash import torch_internals
from cuteflash.arguments import FwdOptions
from cuteflash.torch_internals import OpOverload
from cuteflash.validate import check_fwd

NO_BACKWARD = "cuteflash has no backward kernels in this release"


def check_derivatives(tensors: Mapping[str, Tensor], needs_grad: bool) -> None:
    """Raise NotImplementedError if a result would need a derivative before anybody can call `backward()`."""
    if torch_internals.is_forward_ad_active() and torch_internals.is_fwd_grad_enabled():
        for name, tensor in tensors.items():
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(
                    f"{name} has a tangent (of torch.func.jvp, jacfwd, hessian, linearize, or as a dual tensor), and "
                    f"cuteflash has no forward-mode derivatives in this release; allowed: tensors without one, as "
                    f"{name}.detach() is"
                )
    if needs_grad and torch_internals.are_functorch_transforms_active():
        *names, last = tensors
        raise NotImplementedError(
            f"torch.func.grad, vjp, jacrev and hessian need a backward, and {NO_BACKWARD}; allowed: calls under "
            f"torch.no_grad(), and {', '.join(names)} and {last} that are detached"
        )


def register_transforms(library: torch.library.Library, op: OpOverload) -> None:
    """Register vmap, autocast and the count of operations of a forward operator."""
    torch.library.register_vmap(op.name(), _vmap_rule(op), lib=library)
    register_autocast(library, op)
    register_flop_formula(op.overloadpacket)(count_flops)


def register_autocast(library: torch.library.Library, op: OpOverload) -> None:
    """Register autocast of an operator whose first three arguments are q, k and v."""
    for device_type, key in torch_internals.AUTOCAST_KEYS.items():
        library.impl(op, _autocast_rule(op, device_type), key.name)


def _vmap_rule(op: OpOverload) -> Callable[..., Any]:
    def mapped(info: Any, in_dims: tuple[int | None, ...], q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        size = info.batch_size
        stacked = tuple(_stacked(x, dim, size) for x, dim in zip((q, k, v), in_dims[:3], strict=True))
        if size:  # errors name the shapes that the mapped function sees
            q, k, v = (x[0] for x in stacked)
            check_fwd(q, k, v, FwdOptions(*options))
        result = op(*(x.flatten(0, 1) for x in stacked), *options)
        results = (result,) if isinstance(result, Tensor) else result
        unfolded = tuple(x.reshape(size, stacked[0].shape[1], *x.shape[1:]) for x in results)
        return (unfolded[0], 0) if isinstance(result, Tensor) else (unfolded, (0,) * len(unfolded))

    return mapped


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
