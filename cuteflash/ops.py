"""The forward operators, `torch.ops.cuteflash.fwd` and `fwd_lse`, and what runs behind them on each device.

    CUDA      a plan, looked up by everything a call's launch depends on; building one checks the arguments, chooses
              traits and compiles, using one allocates the output and launches. No host read, no synchronisation.
    CPU       the same checks, then the reference (FlashAttention-2 in torch).
    fake      the same checks on possibly symbolic sizes, and empty results with the strides of the real ones.
    autograd  nothing without gradients; with them a node whose backward says that there is none in this release.

What vmap, autocast and other transforms and modes of torch do with them is in `cuteflash.transforms`.
Two operators, so that a call without LSE never allocates one. They are defined through `torch.library.Library`, whose
call costs a third of what the `custom_op` decorator's does. A CUDA graph can capture a call once an earlier one with
the same problem and length class (`cuteflash.traits.length_class`) has compiled its kernel. The class is found when a
plan is built, whose key has the lengths: no call pays for it, and nothing that traces symbolic lengths asks for it.
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

from cuteflash.compile import compiled
from cuteflash.dispatch import choose, current_target
from cuteflash.problem import LENGTH_MAX, PACK_GQA_MAX, UNBOUNDED, Dtype, FwdProblem, mask_of_window
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.traits.length_class import length_class_of
from cuteflash.transforms import (
    NO_BACKWARD,
    autocast_changes,
    check_derivatives,
    is_forward_ad_active,
    register_transforms,
)
from cuteflash.validate import ALIGNMENT, FwdOptions, check_alignment, check_fwd

Result = Any  # Tensor from `fwd`, (Tensor, Tensor) from `fwd_lse`
Launch = Callable[[Tensor, Tensor, Tensor], Result]

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? softmax_scale=None, int window_left=-1, int window_right=-1, "
    "float softcap=0.0, bool? pack_gqa=None, str? family=None"
)
DTYPE_NAMES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
ALIGNMENT_MASK = ALIGNMENT - 1
PLANS_MAX = 4096  # a serving process sees ever new lengths; a plan is about 1 kB and 50 us, so starting over is cheap

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


def should_pack(seqlen_q: int, heads_per_kv: int, tile_m: int) -> bool:
    """Whether folding a KV head's query heads into the rows of a tile pays (the `pack_gqa=None` heuristic).

    Each row block of a head reads all of K and V. Apart, the heads need ``heads_per_kv * ceil(seqlen_q / tile_m)``
    blocks, which for a short `seqlen_q` are mostly padding; packed, every 64 rows of a tile hold as many whole tokens
    as fit. Packed rows are gathered from several heads, so packing has to save a tenth of the blocks.
    """
    if heads_per_kv == 1 or heads_per_kv > PACK_GQA_MAX or seqlen_q * heads_per_kv > LENGTH_MAX:
        return False
    tokens = tile_m // PACK_GQA_MAX * (PACK_GQA_MAX // heads_per_kv)
    return 10 * -(-seqlen_q // tokens) <= 9 * heads_per_kv * -(-seqlen_q // tile_m)


def plan_fwd(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Launch:
    """Check the arguments and prepare a launch for every call that agrees with this one in `cuda_forward`'s key."""
    check_fwd(q, k, v, options)
    o_shape = (*q.shape[:3], v.shape[3])
    if q.numel() == 0 or k.shape[1] == 0:
        return _without_kernel(o_shape, has_lse)
    target = current_target(q.device.index)
    mask, left, right = mask_of_window(options.window_left, options.window_right, q.shape[1])
    problem = FwdProblem.dense(
        DTYPE_NAMES[q.dtype], q.shape[3], v.shape[3], mask, softcap=options.softcap > 0, lse=has_lse
    )
    heads_per_kv = q.shape[2] // k.shape[2]
    shape = length_class_of(q.shape[1], k.shape[1])
    choice = choose(problem, target, options.family, shape)
    pack = options.pack_gqa
    if pack or (pack is None and should_pack(q.shape[1], heads_per_kv, choice.traits.tile_m)):
        problem = problem.packed(heads_per_kv)
        choice = choose(problem, target, options.family, shape)
    kernel = compiled(choice.kernel_cls, choice.traits, problem, target)
    scale = q.shape[3] ** -0.5 if options.softmax_scale is None else float(options.softmax_scale)
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    return bind_fwd(kernel, (q, k, v), has_lse, (scale, float(options.softcap), left, right, num_sms))


def bind_fwd(
    kernel: Callable[..., object],
    inputs: tuple[Tensor, Tensor, Tensor],
    has_lse: bool,
    scalars: tuple[float, float, int, int, int],
) -> Launch:
    """A launch of `kernel` for tensors shaped and strided as `inputs`, of which it keeps none."""
    q, _, v = inputs
    o_shape = (*q.shape[:3], v.shape[3])
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    # empty_like is 0.5 us faster than new_empty, and the same thing where q is laid out as the output is.
    like_q = q.shape == o_shape and q.stride() == _contiguous_strides(o_shape)
    strides = tuple(_usable_strides(x) for x in inputs)
    restride = any(strides)

    def launch(q: Tensor, k: Tensor, v: Tensor) -> Result:
        o = torch.empty_like(q) if like_q else q.new_empty(o_shape)
        if restride:
            q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip((q, k, v), strides, strict=True))
        if not has_lse:
            kernel(q, k, v, o, None, *scalars)
            return o
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        kernel(q, k, v, o, lse, *scalars)
        return o, lse

    return launch


def _without_kernel(o_shape: tuple[int, ...], has_lse: bool) -> Launch:
    """The results where no query sees a key: O = 0 and LSE = -inf, both possibly empty."""
    b, s_q, h, _ = o_shape

    def fill(q: Tensor, k: Tensor, v: Tensor) -> Result:
        o = q.new_zeros(o_shape)
        return (o, q.new_full((b, h, s_q), float("-inf"), dtype=torch.float32)) if has_lse else o

    return fill


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _usable_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides for the kernel where a dimension of size 1 has one that is no multiple of 16 bytes, else None.

    Such a stride is never used to address, but a TMA descriptor holds it and cannot.
    """
    step = ALIGNMENT // tensor.element_size()
    strides = tensor.stride()
    if all(stride % step == 0 for stride in strides[:-1]):
        return None
    return (*(stride if stride % step == 0 else step for stride in strides[:-1]), strides[-1])


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Result:
    check_fwd(q, k, v, options)
    b, s_q, h, _ = q.shape
    o = q.new_empty((b, s_q, h, v.shape[3]))
    return (o, q.new_empty((b, h, s_q), dtype=torch.float32)) if has_lse else o


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Result:
    check_fwd(q, k, v, options)
    check_alignment(q, k, v)
    scale = q.shape[3] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    left, right = (min(side, UNBOUNDED) for side in (options.window_left, options.window_right))
    result = flash_attention_2(q, k, v, scale, left, right, options.softcap)
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
    """The CUDA implementation: look a plan up, or make it, and launch."""
    plans: dict[Hashable, Launch] = {}

    def cuda(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        try:
            key = (
                q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
                q.get_device(), k.get_device(), v.get_device(), options,
            )  # fmt: skip
        except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
            check_fwd(q, k, v, FwdOptions(*options))
            raise
        launch = plans.get(key)
        if launch is None:
            launch = plan_fwd(q, k, v, FwdOptions(*options), has_lse)
            if len(plans) >= PLANS_MAX:
                plans.clear()
            plans[key] = launch
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
