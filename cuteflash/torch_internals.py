"""The private names of torch that this package uses, and what takes their place in a torch that lacks them.

Most save microseconds of each call, or let an error come earlier; without them the same is computed. A few have no
public substitute: without those this module cannot be imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch._C import (  # what torch.library.register_autograd is made of, which itself would drop tangents silently
    DispatchKey,
    DispatchKeySet,
    _after_autograd_keyset,  # type: ignore[attr-defined]
    _AutoDispatchBelowAutograd,
)
from torch._ops import OpOverload
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling

__all__ = [  # with those that other modules would have to import from a private one
    "AUTOCAST_KEYS",
    "DispatchKeySet",
    "OpOverload",
    "are_functorch_transforms_active",
    "below_autocast",
    "below_autograd",
    "current_stream",
    "direct_node",
    "is_forward_ad_active",
    "is_fwd_grad_enabled",
    "is_plain_backward",
    "is_plain_cuda_call",
    "is_seen",
    "nested_tensor_class",
    "plain_keys",
    "seen_by_outer_levels",
    "single_level_autograd",
]


def _private(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


_len_dispatch_stack = _private(torch._C, "_len_torch_dispatch_stack")
_is_tracing = _private(torch._C, "_is_tracing")
_is_key_included = _private(torch._C, "_dispatch_tls_is_dispatch_key_included")
_is_torch_function_mode_enabled = _private(torch._C, "_is_torch_function_mode_enabled")
_are_functorch_transforms_active = _private(torch._C, "_are_functorch_transforms_active")
_is_fwd_grad_enabled = _private(torch._C, "_is_fwd_grad_enabled")
_set_fwd_grad_enabled = _private(forward_ad, "_set_fwd_grad_enabled")
_exclude_key = _private(torch._C, "_ExcludeDispatchKeyGuard")
_raw_stream = _private(torch._C, "_cuda_getCurrentRawStream")

KNOWS_FORWARD_AD_LEVEL = hasattr(forward_ad, "_current_level")
KNOWS_MODES = KNOWS_FORWARD_AD_LEVEL and None not in (
    _len_dispatch_stack,
    _is_tracing,
    _is_key_included,
    _is_torch_function_mode_enabled,
    _are_functorch_transforms_active,
)

_PYTHON_DISPATCHER, _FUNCTIONALIZE = DispatchKey.PythonDispatcher, DispatchKey.Functionalize  # looked up slowly
AUTOCAST_KEYS = {"cuda": DispatchKey.AutocastCUDA, "cpu": DispatchKey.AutocastCPU}


def nested_tensor_class() -> type[Tensor] | None:
    """The class of jagged nested tensors, which do not reach an operator's own implementations; None if unknown."""
    try:
        from torch.nested._internal.nested_tensor import NestedTensor
    except ImportError:
        return None
    return NestedTensor


def is_forward_ad_active() -> bool:
    """Whether tensors may have tangents at all; True if that is unknown. Costs no more than a look at a global."""
    return not KNOWS_FORWARD_AD_LEVEL or forward_ad._current_level >= 0


def is_fwd_grad_enabled() -> bool:
    """Whether forward-mode AD follows tangents; True if that is unknown."""
    return _is_fwd_grad_enabled is None or bool(_is_fwd_grad_enabled())


def are_functorch_transforms_active() -> bool:
    """Whether a transform of `torch.func` is active; False if that is unknown, and torch then refuses gradients."""
    return _are_functorch_transforms_active is not None and bool(_are_functorch_transforms_active())


def single_level_autograd() -> contextlib.AbstractContextManager[Any]:
    """A transform of `torch.func` lets its level have autograd nodes made in Python.

    Raises:
        NotImplementedError: this torch lacks the names that it takes.
    """
    from torch._functorch import utils

    allow = _private(utils, "enable_single_level_autograd_function")
    if allow is None or _set_fwd_grad_enabled is None:
        raise NotImplementedError(
            f"cuteflash has no gradients under torch.func's transforms with torch {torch.__version__}; "
            "torch.autograd has them"
        )
    allowed: contextlib.AbstractContextManager[Any] = allow()
    return allowed


def seen_by_outer_levels(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """What runs inside an autograd node of one level, differentiated by the levels around it as well."""

    def differentiated(*arguments: Any) -> Any:
        with torch.enable_grad(), _set_fwd_grad_enabled(True):  # both of which the node turns off
            return implementation(*arguments)

    return differentiated


def direct_node(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without what torch runs in Python around `forward` and, with every gradient, `backward`.

    `Function.apply` would refuse `torch.func`'s transforms, which come through the dispatcher level by level, and takes
    2 us to find out that there is none. The node takes another to look up which function its `backward` is.
    """
    node = _private(function, "_backward_cls")
    if node is not None:
        node.apply = function.backward
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
    return apply


def below_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Calls go past a device's autocast."""
    if _exclude_key is None:
        return torch.autocast(device_type, enabled=False)
    guard: contextlib.AbstractContextManager[Any] = _exclude_key(DispatchKeySet(AUTOCAST_KEYS[device_type]))
    return guard


def current_stream(device: torch.device) -> tuple[int, int]:
    """A CUDA device's number and the handle of its current stream, without the object that costs 2 us to make."""
    if _raw_stream is None:
        stream = torch.cuda.current_stream(device)
        return stream.device_index, stream.cuda_stream
    return device.index, _raw_stream(device.index)


def below_autograd(op: OpOverload, keyset: DispatchKeySet, *arguments: Any) -> Any:
    """What the dispatcher calls after the implementation for autograd."""
    with _AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _after_autograd_keyset, *arguments)


def plain_keys(device: str) -> int:
    """What `DispatchKeySet.raw_repr` says of a call with plain tensors of a device, "CUDA" or "CPU", and no mode."""
    device_key, autograd_key = (getattr(DispatchKey, name) for name in (device, f"Autograd{device}"))
    keys: int = (DispatchKeySet(device_key) | DispatchKeySet(autograd_key)).raw_repr()
    return keys


def is_seen() -> Any:
    """Whether one of torch's modes, transforms or tracers is active, which all have to see every call.

    Each adds a key to the dispatcher's. To ask for them one after the other takes half the time of getting all keys.
    """
    return (
        _len_dispatch_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _is_key_included(_PYTHON_DISPATCHER)  # comes with modes that see calls before autograd
        or _is_key_included(_FUNCTIONALIZE)
    )


def is_watched() -> bool:
    """`is_seen`; True if that is unknown."""
    return not KNOWS_MODES or bool(is_seen())


def _is_plain_cuda_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher would take a call straight to autograd and the CUDA implementation, which costs it 3 us.

    It would not under `torch.compile`, a dispatch or function mode or a functorch transform, if tensors may have
    tangents, if one is negated lazily, or if autocast changes a dtype.
    """
    return (
        not is_dynamo_compiling()  # while an export traces, tensors are not plain either
        and type(q) is type(k) is type(v) is Tensor
        and q.is_cuda
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and forward_ad._current_level < 0  # is_forward_ad_active, without the call
        and not (is_autocast_enabled() and not q.dtype is k.dtype is v.dtype is torch.get_autocast_dtype("cuda"))
        and not _is_torch_function_mode_enabled()
        and not is_seen()
    )


def _is_plain_backward(dout: Tensor) -> bool:
    """`is_plain_cuda_call` of a backward whose forward was one, and which is not differentiated itself.

    Autograd gives it gradients of the forward's devices and dtypes, and modes do not see what is called from C++.
    """
    return (
        type(dout) is Tensor
        and not is_grad_enabled()
        and not dout.is_neg()
        and forward_ad._current_level < 0
        and not is_seen()
    )


def _never(*tensors: Tensor) -> bool:
    """Every call goes through the dispatcher, as it cannot be told which ones need not."""
    return False


is_plain_cuda_call: Callable[[Tensor, Tensor, Tensor], bool] = _is_plain_cuda_call if KNOWS_MODES else _never
is_plain_backward: Callable[[Tensor], bool] = _is_plain_backward if KNOWS_MODES else _never
