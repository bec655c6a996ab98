"""Input checks of the operators: one place, the same for CUDA, CPU and fake tensors, before any launch.

Every error names the argument, what it was and what is allowed. Sizes may be symbolic (`torch.compile` with dynamic
shapes): a check then becomes a guard of the compiled graph, and one that cannot be decided is left to the call itself.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping

import torch
from torch import Tensor

from cuteflash.arguments import BwdOptions, Fp8InferenceOptions, Fp8Options, FwdOptions
from cuteflash.problem import HEAD_DIM_MAX, HEAD_DIM_STEP, LENGTH_MAX, PACK_GQA_MAX
from cuteflash.traits.arch import FAMILIES
from cuteflash.traits.length_class import LENGTH_CLASSES

ALIGNMENT = 16  # bytes of one vectorised load; every row starts on such a boundary
HALF_DTYPES = (torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DEVICES = ("cuda", "cpu", "meta")
CHECK_VARIABLE = "CUTEFLASH_CHECK"
ENCODED_CHECK_VARIABLE = os.fsencode(CHECK_VARIABLE)
Dims = tuple[str, ...]
DIMS: Dims = ("batch", "seqlen", "heads", "head_dim")
PACKED_DIMS: Dims = ("total", "heads", "head_dim")  # of packed sequences, which lie one after the other
# Kernels get scalars in fp32, in which what is under the smallest normal number becomes 0.
FP32_TINY, FP32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
POSITIVE = f"positive number that fp32 holds ({FP32_TINY:.2g} to {FP32_MAX:.2g})"
SPLITS = "0 (a heuristic), 1 (none), or a limit"
SCALES, SOFTCAPS = f"None or a {POSITIVE}", f"0 (none) or a {POSITIVE}"


def check_fwd(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, sinks: Tensor | None = None) -> None:
    """Raise if the forward operators cannot take these arguments on any GPU, or on a CPU; see `check_operands`."""
    check_operands(q, k, v, options, DIMS)
    check_sinks(q, sinks)


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Raise if the sinks, if there are any, are not one logit of fp32 or q's dtype for each head of a checked q."""
    if sinks is None:
        return
    check_strided("sinks", sinks)
    if sinks.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"sinks.dtype is {sinks.dtype}; allowed: torch.float32 or {q.dtype}, that of q")
    check_same_device("sinks", sinks, q)
    if sinks.dim() != 1 or holds(sinks.shape[0] != q.shape[-2]):
        raise ValueError(f"sinks.shape is {tuple(sinks.shape)}; allowed: ({q.shape[-2]},), one for each head of q")


def check_operands(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions | BwdOptions, dims: Dims) -> None:
    """Raise if no kernel and no reference can take these tensors, whose dimensions are `dims`, with these options.

    Raises:
        TypeError: a dtype that is not supported or not that of q.
        ValueError: a shape, stride, device mix or option that is not allowed.
        NotImplementedError: a device or memory layout that is not supported.
    """
    check_options(options)
    tensors = (("q", q), ("k", k), ("v", v))
    for name, tensor in tensors:
        check_kind(name, tensor, dims)
    for name, tensor in tensors[1:]:
        check_same_kind(name, tensor, q)
    check_shapes(q, k, options.pack_gqa if isinstance(options, FwdOptions) else None, dims)
    check_head_dim("v", v, len(dims) - 1)
    for axis in range(len(dims) - 1):
        _check_equal("v", v, axis, "k", k, dims)
    for name, tensor in tensors:
        check_strides(name, tensor)


def check_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: BwdOptions,
) -> None:
    """Raise if the backward operators cannot take these arguments on any GPU, or on a CPU; errors as `check_fwd`.

    The strides of the gradients and of `lse` are free: what a kernel cannot address is copied.
    """
    check_operands(q, k, v, options, DIMS)
    batch, seqlen_q, heads, _ = q.shape
    check_outputs(q, {"out": out, "dout": dout}, (batch, seqlen_q, heads, v.shape[3]), DIMS)
    check_statistics(q, {"lse": lse, "dlse": dlse}, (batch, heads, seqlen_q))


def check_outputs(q: Tensor, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dims: Dims) -> None:
    """Raise if O, named "out", or its gradient is not as a backward takes it; errors as `check_operands`."""
    for name, tensor in tensors.items():
        check_kind(name, tensor, dims)
        check_same_kind(name, tensor, q)
        _check_shape(name, tensor, shape)
    check_strides("out", tensors["out"])


def check_statistics(q: Tensor, tensors: Mapping[str, Tensor | None], shape: tuple[int, ...]) -> None:
    """Likewise of LSE and its gradient, either of which may be missing."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_strided(name, tensor)
            _check_statistic(name, tensor, q)
            _check_shape(name, tensor, shape)


def check_alignment(q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> None:
    """Raise ValueError if a tensor's first element is not on a 16-byte boundary (real tensors only)."""
    check_alignments({"q": q, "k": k, "v": v, **others})


def check_alignments(tensors: Mapping[str, Tensor]) -> None:
    """`check_alignment` of any tensors."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name}.data_ptr() is {tensor.data_ptr():#x}; allowed: multiples of {ALIGNMENT} bytes "
                f"(its storage offset is {tensor.storage_offset()} elements)"
            )


def lse_dtype(q: Tensor) -> torch.dtype:
    """The element type of the log-sum-exp that belongs to `q`."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def shown(value: object) -> str:
    """A value as an error names it: short, also if it holds an integer of more digits than Python prints."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"a {type(value).__name__} with an integer too long to print"


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds: guards on symbolic ones, False if only the call itself can tell."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy: only once tracing has

    return bool(guard_or_false(condition))


def reads_values() -> bool:
    """Whether calls on a GPU are to read and check their small tensors, which waits for it: `CUTEFLASH_CHECK=1`."""
    # Each call asks. `os.environ` encodes a name each time that it looks it up, which costs 0.5 us.
    variables = getattr(os.environ, "_data", os.environ)
    if CHECK_VARIABLE not in variables and ENCODED_CHECK_VARIABLE not in variables:
        return False
    return os.environ[CHECK_VARIABLE] not in ("", "0")


def check_options(options: FwdOptions | Fp8Options | Fp8InferenceOptions | BwdOptions) -> None:
    """Raise ValueError if an option is not allowed, whatever the tensors."""
    scale, softcap = options.softmax_scale, options.softcap
    # Kernels take the row maximum of scores that are not scaled yet, and hide a key by -inf: times 0 that would be NaN.
    if scale is not None and not FP32_TINY <= scale <= FP32_MAX:
        raise ValueError(f"softmax_scale is {scale}; allowed: {SCALES}")
    if softcap != 0 and not FP32_TINY <= softcap <= FP32_MAX:
        raise ValueError(f"softcap is {softcap}; allowed: {SOFTCAPS}")
    for name, side in (("window_left", options.window_left), ("window_right", options.window_right)):
        if side < -1:
            raise ValueError(f"{name} is {side}; allowed: -1 (unbounded) or more")
    chunk = 0 if isinstance(options, (Fp8Options, Fp8InferenceOptions)) else options.attention_chunk
    if chunk < 0:
        raise ValueError(f"attention_chunk is {chunk}; allowed: 0 (none) or more")
    if options.family is not None and options.family not in FAMILIES:
        raise ValueError(f"family is {options.family!r}; allowed: None, {', '.join(map(repr, FAMILIES))}")
    if isinstance(options, FwdOptions) and options.num_splits < 0:
        raise ValueError(f"num_splits is {options.num_splits}; allowed: {SPLITS}")
    if options.lengths is not None and options.lengths not in LENGTH_CLASSES:
        raise ValueError(f"lengths is {options.lengths!r}; allowed: None, {', '.join(map(repr, LENGTH_CLASSES))}")


def check_strided(name: str, tensor: Tensor) -> None:
    """Raise NotImplementedError if a tensor is nested or sparse, or on a device that nothing here runs on."""
    if tensor.is_nested:
        raise NotImplementedError(
            f"{name} is a nested tensor, layout {tensor.layout}; supported: tensors whose sequences have one length"
        )
    if tensor.device.type not in DEVICES:
        raise NotImplementedError(f"{name}.device is {tensor.device}; supported: cuda, cpu")
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"{name}.layout is {tensor.layout}; supported: torch.strided")


def check_kind(name: str, tensor: Tensor, dims: Dims, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Raise if a tensor's device, memory layout, element type or number of dimensions is not allowed.

    Args:
        name, tensor: as the error names it.
        dims: the names of its dimensions.
        dtypes: allowed element types; none are those that the tensor's device takes without scales.
    """
    check_strided(name, tensor)
    allowed = dtypes or (HALF_DTYPES if tensor.device.type == "cuda" else REFERENCE_DTYPES)
    if tensor.dtype not in allowed:
        names = ", ".join(map(str, allowed))
        if tensor.dtype in FP8_DTYPES:
            names += f"; {tensor.dtype} needs q_descale, k_descale and v_descale"
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed on {tensor.device.type}: {names}")
    if tensor.dim() != len(dims):
        layout = f"{len(dims)}, ({', '.join(dims)})"
        raise ValueError(f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; allowed: {layout}")


def check_same_kind(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise if a tensor's element type or device is not that of q."""
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {q.dtype}, that of q")
    check_same_device(name, tensor, q)


def check_same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    """Raise ValueError if a tensor is not on q's device."""
    if tensor.device != q.device:
        raise ValueError(f"{name}.device is {tensor.device}; allowed: {q.device}, that of q")


def _check_statistic(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype != lse_dtype(q):
        raise TypeError(f"{name}.dtype is {tensor.dtype}; allowed: {lse_dtype(q)}, for a q of {q.dtype}")
    check_same_device(name, tensor, q)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(holds(size != other) for size, other in zip(shape, expected, strict=True)):
        raise ValueError(f"{name}.shape is {shape}; allowed: {tuple(expected)}, as q, k and v have it")


def check_head_dim(name: str, tensor: Tensor, axis: int, step: int = HEAD_DIM_STEP) -> None:
    """Raise ValueError if a head dim is not a multiple of `step` up to the largest one."""
    dim = tensor.shape[axis]
    if holds(dim < step) or holds(dim > HEAD_DIM_MAX) or holds(dim % step != 0):
        raise ValueError(f"{name}.shape[{axis}] (head_dim) is {dim}; allowed: multiples of {step} up to {HEAD_DIM_MAX}")


def check_shapes(q: Tensor, k: Tensor, pack_gqa: bool | None, dims: Dims, step: int = HEAD_DIM_STEP) -> None:
    """Raise ValueError if the shapes of q and k are not allowed; `step` as of `check_head_dim`."""
    rows, at_heads, last = range(len(dims))[-3:]
    check_head_dim("q", q, last, step)
    for axis in (last, *range(rows)):
        _check_equal("k", k, axis, "q", q, dims)
    seqlen_q, heads, kv_heads = q.shape[rows], q.shape[at_heads], k.shape[at_heads]
    if (holds(kv_heads == 0) and holds(heads != 0)) or (holds(kv_heads != 0) and holds(heads % kv_heads != 0)):
        raise ValueError(
            f"q.shape[{at_heads}] (heads) is {heads}; allowed: multiples of k.shape[{at_heads}], which is {kv_heads}"
        )
    ratio = heads // kv_heads if pack_gqa and holds(kv_heads != 0) else 1
    if holds(ratio > PACK_GQA_MAX):
        raise ValueError(f"pack_gqa is True with {ratio} query heads for each KV head; allowed: up to {PACK_GQA_MAX}")
    for name, length in (
        (f"q.shape[{rows}] ({dims[rows]}) times packed heads", seqlen_q * ratio),
        (f"k.shape[{rows}]", k.shape[rows]),
    ):
        # Not for symbolic lengths: the guard would bound the dynamic dimension of an exported program.
        if isinstance(length, int) and length > LENGTH_MAX:
            raise ValueError(f"{name} is {length}; allowed: up to {LENGTH_MAX}")


def _check_equal(name: str, tensor: Tensor, dim: int, other_name: str, other: Tensor, dims: Dims) -> None:
    if holds(tensor.shape[dim] != other.shape[dim]):
        raise ValueError(
            f"{name}.shape[{dim}] ({dims[dim]}) is {tensor.shape[dim]}; "
            f"allowed: {other.shape[dim]}, that of {other_name} ({other_name}.shape is {tuple(other.shape)})"
        )


def check_strides(name: str, tensor: Tensor) -> None:
    """Raise ValueError if the rows of a tensor do not all start on 16-byte boundaries, or are not contiguous."""
    strides, last = tensor.stride(), tensor.dim() - 1
    if holds(strides[last] != 1):
        raise ValueError(f"{name}.stride({last}) is {strides[last]}; allowed: 1 (a contiguous head dim)")
    step = ALIGNMENT // tensor.element_size()
    for dim in range(last):
        # The stride of a dimension of size 1 is never used. The stride is asked first: it is often known if a
        # symbolic size is not, and then the size gets no guard.
        if holds(strides[dim] % step != 0) and holds(tensor.shape[dim] > 1):
            raise ValueError(
                f"{name}.stride({dim}) is {strides[dim]}; "
                f"allowed: multiples of {step} elements ({ALIGNMENT} bytes), strides are {tuple(strides)}"
            )
