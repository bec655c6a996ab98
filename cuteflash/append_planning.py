"""From a call of the operators that append and rotate on a GPU to its launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuteflash.append_problem import (
    ITEMS_MAX,
    AppendOptions,
    AppendProblem,
    AppendTensors,
    RotaryDtype,
    RotaryOptions,
    Rows,
)
from cuteflash.compile import compiled
from cuteflash.dispatch import current_target
from cuteflash.planning import DTYPE_NAMES
from cuteflash.problem import Dtype
from cuteflash.strides import compacted
from cuteflash.traits.append import AppendTraits, units
from cuteflash.traits.arch import get_arch
from cuteflash.validate import ALIGNMENT
from cuteflash.validate_append import FP8, AppendInputs, RotaryInputs, check_append, check_rotary

TABLE_NAMES: dict[torch.dtype, RotaryDtype] = {torch.float32: "fp32", **DTYPE_NAMES}
CACHE_NAMES: dict[torch.dtype, Dtype] = {FP8: "e4m3", **DTYPE_NAMES}
FP8_CAPABILITY = 8, 9  # whose instructions round to e4m3


def append_problem(inputs: AppendInputs, options: AppendOptions) -> AppendProblem:
    """What the kernel of a checked append is generated for."""
    cos = inputs.rotary_cos
    return AppendProblem(
        dtype=DTYPE_NAMES[inputs.k.dtype],
        head_dim=inputs.k.shape[-1],
        head_dim_v=inputs.v.shape[-1],
        cache_dtype=CACHE_NAMES[inputs.k_cache.dtype],
        q="none" if inputs.q is None else _rows(inputs.cu_seqlens_q),
        k=_rows(inputs.cu_seqlens_k_new),
        is_paged=inputs.page_table is not None,
        has_batch_idx=inputs.cache_batch_idx is not None,
        has_rotary_seqlens=inputs.rotary_seqlens is not None,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        rotary_interleaved=cos is not None and options.rotary_interleaved,
        rotary_dtype="fp32" if cos is None else TABLE_NAMES[cos.dtype],
    )


def rotary_problem(inputs: RotaryInputs, options: RotaryOptions) -> AppendProblem:
    """What the kernel of a checked rotation is generated for."""
    return AppendProblem(
        dtype=DTYPE_NAMES[inputs.x.dtype],
        head_dim=inputs.x.shape[-1],
        q=_rows(inputs.cu_seqlens),
        has_seqlens=inputs.seqlen_offsets is not None,
        rotary_dim=2 * inputs.cos.shape[1],
        rotary_interleaved=options.interleaved,
        rotary_dtype=TABLE_NAMES[inputs.cos.dtype],
    )


def kernel_of(problem: AppendProblem, target: str) -> Callable[..., Any]:
    """The compiled kernel of a problem.

    Raises:
        NotImplementedError: the target has no instruction that rounds to 8 bits, and the caches have such elements.
    """
    from cuteflash.kernels.common.append_kv import AppendKv  # imports the compiler

    if problem.quantises and get_arch(target).capability < FP8_CAPABILITY:
        raise NotImplementedError(f"the GPU's target is {target}; caches of {FP8} are written on sm_89 or later")
    return compiled(AppendKv, AppendTraits(), problem, target)


def append_launch(inputs: AppendInputs, options: AppendOptions, *, counts: bool = False) -> Callable[..., Any]:
    """A checked launch for this call and all whose tensors look the same; it holds none of them.

    It takes `AppendInputs` and returns the rotated queries, None if there are none; if it `counts`, also how many
    tokens each sequence has after the call, (batch,) int32.

    Raises:
        TypeError, ValueError, NotImplementedError: as `check_append` and `kernel_of` do.
    """
    check_append(inputs, options)
    given = [x for x in (inputs.q, inputs.k, inputs.v) if x is not None]
    check_sizes(*given)
    is_empty = not any(x.numel() for x in given)
    problem = dataclasses.replace(append_problem(inputs, options), counts=counts and inputs.k.numel() > 0)
    kernel = None if is_empty else kernel_of(problem, current_target(inputs.k.device.index))
    scalars = 0, 0 if options.fixed_q else 1, 1.0
    batch, heads = inputs.batch, inputs.k_cache.shape[2]
    is_compact = inputs.q is not None and inputs.q.is_contiguous()
    copies = not all(x is None or has_aligned_rows(x) for x in (inputs.rotary_cos, inputs.rotary_sin))

    def launch(inputs: AppendInputs) -> Any:
        (
            k_cache, v_cache, k, v, seqlens, page_table, batch_idx, ends_k, cos, sin, rotary_seqlens, k_descale,
            v_descale, q, ends_q,
        ) = inputs  # fmt: skip
        q_out = q
        if q is not None:
            q_out = torch.empty_like(q) if is_compact else q.new_empty(q.shape)  # the first in half the time
        after = None
        if counts:
            # Without a new token no block of K is there to count.
            after = torch.empty_like(seqlens) if problem.counts else lengths_after(seqlens, k, ends_k)
        if kernel is None:
            return (q_out, after) if counts else q_out
        if cos is not None and sin is not None and (copies or (cos.data_ptr() | sin.data_ptr()) % ALIGNMENT):
            cos, sin = addressable(cos), addressable(sin)
        if k_descale is not None and v_descale is not None:
            k_descale, v_descale = k_descale.expand(batch, heads), v_descale.expand(batch, heads)
        kernel(
            q, q_out, k, v, k_cache, v_cache, seqlens, rotary_seqlens, ends_q, ends_k, page_table, batch_idx, cos, sin,
            k_descale, v_descale, after if problem.counts else None, *scalars,
        )  # fmt: skip  # in the order of AppendTensors
        return (q_out, after) if counts else q_out

    return launch


def lengths_after(cache_seqlens: Tensor, k: Tensor, cu_seqlens_k_new: Tensor | None) -> Tensor:
    """(batch,) tokens of each sequence once the new ones are appended."""
    return cache_seqlens + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1])


def rotary_launch(inputs: RotaryInputs, options: RotaryOptions) -> Callable[[RotaryInputs], Tensor]:
    """Likewise, of the operator that rotates."""
    check_rotary(inputs, options)
    check_sizes(inputs.x)
    is_empty = not inputs.x.numel()
    kernel = None if is_empty else kernel_of(rotary_problem(inputs, options), current_target(inputs.x.device.index))
    scalars = options.offset, 0 if options.fixed else 1, -1.0 if options.inverse else 1.0

    is_compact = inputs.x.is_contiguous()

    def launch(inputs: RotaryInputs) -> Tensor:
        x, cos, sin, offsets, ends = inputs
        out = torch.empty_like(x) if is_compact else x.new_empty(x.shape)
        if kernel is not None:
            cos, sin = addressable(cos), addressable(sin)
            kernel(*AppendTensors(x, out, cache_seqlens=offsets, cu_seqlens_q=ends, cos=cos, sin=sin), *scalars)
        return out

    return launch


def check_sizes(*tensors: Tensor) -> None:
    """Raise ValueError if tensors have too many rows for the numbers of a kernel's threads."""
    items = sum(x.shape[:-1].numel() * units(x.shape[-1]) for x in tensors)
    if items > ITEMS_MAX:
        raise ValueError(f"the new tokens have {items} pieces of 16 columns; allowed: up to {ITEMS_MAX} in a call")


def addressable(table: Tensor) -> Tensor:
    """Cosines or sines as the kernel loads them, 16 bytes at a time."""
    return table if has_aligned_rows(table) and not table.data_ptr() % ALIGNMENT else compacted(table)


def has_aligned_rows(table: Tensor) -> bool:
    """Whether all rows of cosines or sines begin on 16 bytes if the first one does."""
    row, column = table.stride()
    return column == 1 and not row * table.element_size() % ALIGNMENT


def _rows(ends: Tensor | None) -> Rows:
    return "dense" if ends is None else "packed"
