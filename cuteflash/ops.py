"""The forward operators, `torch.ops.cuteflash.fwd` and `fwd_lse`, and what runs behind them on each device.

    CUDA      a launch, looked up by everything that it depends on, or planned (`cuteflash.planning`), which checks the
              arguments and may compile; then the output is allocated and the kernel launched. No host read, no
              synchronisation.
    CPU       the same checks, then the reference (FlashAttention-2 in torch).
    fake      the same checks on possibly symbolic sizes, and empty results with the strides of the real ones.
    autograd  nothing without gradients; with them a node whose backward says that there is none in this release.

What vmap, autocast and other transforms and modes of torch do with them is in `cuteflash.transforms`.
Two operators, so that a call without LSE never allocates one. They are defined through `torch.library.Library`, whose
call costs a third of what the `custom_op` decorator's does. A CUDA graph can capture a call once an earlier one with
the same problem and length class (`cuteflash.traits.length_class`) has compiled its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch._C import (  # what torch.library.register_autograd is itself made of
    DispatchKey,
    DispatchKeySet,
    _after_autograd_keyset,  # type: ignore[attr-defined]
    _AutoDispatchBelowAutograd,
    _dispatch_tls_local_include_set,
    _is_torch_function_mode_enabled,
)
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nested._internal.nested_tensor import NestedTensor

from cuteflash.arguments import FwdOptions
from cuteflash.planning import Launch, Planner, Result, call_of, table_of
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.transforms import (
    NO_BACKWARD,
    autocast_changes,
    check_derivatives,
    is_forward_ad_active,
    register_transforms,
)
from cuteflash.validate import ALIGNMENT, check_alignment, check_fwd

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
    "float softcap=0.0, bool? pack_gqa=None, str? family=None"
)
ALIGNMENT_MASK = ALIGNMENT - 1
LAUNCHES_MAX = (
    4096  # a serving process sees ever new lengths; a launch is about 1 kB and 10 us, so starting over is cheap
)

_library = torch.library.Library("cuteflash", "DEF")


def _without_modes() -> tuple[int, int]:
    """What the dispatcher adds to a call's keys where no mode, transform or tracer is active, also in inference mode.

    Two numbers are compared faster than hashed.
    """
    plain: int = _dispatch_tls_local_include_set().raw_repr()
    with torch.inference_mode():
        return plain, _dispatch_tls_local_include_set().raw_repr()


WITHOUT_MODES = _without_modes()


def is_plain_cuda_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the dispatcher would take a call straight to the CUDA implementation, which costs it 3 us.

    It would not under `torch.compile`, a dispatch or function mode or a functorch transform, with gradients, where
    tensors may have tangents, where one is negated lazily, or where autocast changes a dtype.
    """
    return (
        not is_dynamo_compiling()  # while an export traces, tensors are not plain either
        and type(q) is type(k) is type(v) is Tensor
        and q.is_cuda
        and not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and forward_ad._current_level < 0  # is_forward_ad_active, without the call
        and not (is_autocast_enabled() and autocast_changes(q, k, v))
        and not _is_torch_function_mode_enabled()
        and _dispatch_tls_local_include_set().raw_repr() in WITHOUT_MODES
    )


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Result:
    check_fwd(q, k, v, options)
    if q.device.type == "cuda" and torch.cuda.is_available():  # else traced for another machine's GPU
        table_of(q.device, options.family)
    b, s_q, h, _ = q.shape
    o = q.new_empty((b, s_q, h, v.shape[3]))
    return (o, q.new_empty((b, h, s_q), dtype=torch.float32)) if has_lse else o


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Result:
    check_fwd(q, k, v, options)
    check_alignment(q, k, v)
    result = flash_attention_2(q, k, v, **options.definition(q.shape[3]))
    return result if has_lse else result[0]


class _ForwardOnly(torch.autograd.Function):
    """The autograd node of a forward without a backward: an error where gradients are asked for, not silence."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, keyset: DispatchKeySet, *args: Any) -> Result:
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _after_autograd_keyset, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            f"{NO_BACKWARD}: call it under torch.no_grad() or torch.inference_mode(), or detach q, k and v"
        )


def cuda_forward(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    planner = Planner(has_lse)
    launches: dict[Hashable, Launch] = {}

    def cuda(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        try:
            call = call_of(q, k, v, options)
        except RuntimeError:
            check_fwd(q, k, v, FwdOptions(*options))
            raise
        launch = launches.get(call)
        if launch is None:
            launch = planner.launch(q, k, v, call)
            if len(launches) >= LAUNCHES_MAX:
                launches.clear()
            launches[call] = launch
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        return launch(q, k, v)

    return cuda


def _define(name: str, returns: str, cuda: Callable[..., Result], has_lse: bool) -> OpOverload:
    """Define one forward operator with all its implementations."""
    _library.define(f"{name}({ARGUMENTS}) -> {returns}")
    op: OpOverload = getattr(torch.ops.cuteflash, name).default

    def cpu(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        return _fwd_cpu(q, k, v, FwdOptions(*options), has_lse)

    def fake(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Result:
        return _fwd_fake(q, k, v, FwdOptions(*options, **named), has_lse)

    def elsewhere(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        check_fwd(q, k, v, FwdOptions(*options))
        raise NotImplementedError(f"q.device is {q.device} with {type(q).__name__}; supported: cuda, cpu")

    # Plain tensors with no mode active: what the dispatcher would call next, without the 4 us of asking it again.
    direct = {
        (DispatchKeySet(DispatchKey.CUDA) | DispatchKeySet(DispatchKey.AutogradCUDA)).raw_repr(): cuda,
        (DispatchKeySet(DispatchKey.CPU) | DispatchKeySet(DispatchKey.AutogradCPU)).raw_repr(): cpu,
    }

    def autograd(keyset: DispatchKeySet, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        needs_grad = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if needs_grad or is_forward_ad_active():
            check_derivatives(q, k, v, needs_grad)
        if needs_grad:
            return _ForwardOnly.apply(op, keyset, q, k, v, *options)  # type: ignore[no-untyped-call]
        implementation = direct.get(keyset.raw_repr())
        if implementation is not None:
            return implementation(q, k, v, *options)
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _after_autograd_keyset, q, k, v, *options)

    _library.impl(name, cuda, "CUDA")
    _library.impl(name, cpu, "CPU")
    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):  # the first has no nested tensors
        _library.impl(name, elsewhere, key)
    torch.library.register_torch_dispatch(
        op, NestedTensor, lambda cls, op, types, args, kwargs: elsewhere(*args, **kwargs), lib=_library
    )
    _library.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"cuteflash::{name}", fake, lib=_library)
    register_transforms(_library, op)
    return op


fwd_cuda, fwd_lse_cuda = cuda_forward(has_lse=False), cuda_forward(has_lse=True)
fwd = _define("fwd", "Tensor", fwd_cuda, has_lse=False)
fwd_lse = _define("fwd_lse", "(Tensor, Tensor)", fwd_lse_cuda, has_lse=True)
