"""From a call of `quantize_qkv` on a GPU to its launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuteflash.compile import compiled
from cuteflash.dispatch import current_target
from cuteflash.planning import DTYPE_NAMES
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeOptions, QuantizeProblem, RotaryDtype
from cuteflash.strides import compacted, usable_strides
from cuteflash.traits.quantize import TARGET, traits_of
from cuteflash.validate import ALIGNMENT
from cuteflash.validate_quantize import QuantizeInputs, check_quantize

Result = tuple[Tensor, ...]
FP8 = torch.float8_e4m3fn
TABLE_NAMES: dict[torch.dtype, RotaryDtype] = {torch.float32: "fp32", **DTYPE_NAMES}


def problem_of(inputs: QuantizeInputs, options: QuantizeOptions) -> QuantizeProblem:
    """What the kernels of a checked call are generated for."""
    cos = inputs.rotary_cos
    return QuantizeProblem(
        dtype=DTYPE_NAMES[inputs.q.dtype],
        head_dim=inputs.q.shape[3],
        head_dim_v=inputs.v.shape[3],
        granularity="block" if options.granularity == "block" else "head",
        has_scales=inputs.descales is not None,
        hadamard=options.hadamard,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        rotary_interleaved=cos is not None and options.rotary_interleaved,
        rotary_dtype="fp32" if cos is None else TABLE_NAMES[cos.dtype],
        transposes_v=options.transpose_v,
        smooths_v=options.smooth_v,
    )


def kernel_of(problem: QuantizeProblem) -> Callable[..., Any]:
    """The compiled kernels of a problem, as one callable."""
    from cuteflash.kernels.common.quantize import Quantize  # imports the compiler

    return compiled(Quantize, traits_of(problem), problem, TARGET)


def empty_results(inputs: QuantizeInputs, options: QuantizeOptions) -> Result:
    """The results, not filled: e4m3 of Q, K and V or V^T, the three descales, V's mean.

    A descale that is given, and a mean that is not asked for, has no elements: (batch, 0).
    """
    q, k, v = inputs[:3]
    batch, seqlen, kv_heads, head_dim_v = v.shape
    keys = (seqlen + BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    v_shape = (batch, kv_heads, head_dim_v, keys) if options.transpose_v else v.shape
    none, is_given = (batch, 0), inputs.descales is not None
    shapes = [none] * 3 if is_given else inputs.descale_shapes(options.granularity)
    mean = (batch, kv_heads, head_dim_v) if options.smooth_v else none
    if options.transpose_v and keys == 0:  # without a key V^T has rows that begin on 16 bytes, too
        v8 = v.new_empty((*v_shape[:3], BLOCK_TOKENS), dtype=FP8)[..., :0]
    else:
        v8 = v.new_empty(v_shape, dtype=FP8)
    return (
        *(x.new_empty(x.shape, dtype=FP8) for x in (q, k)),
        v8,
        *(q.new_empty(shape, dtype=torch.float32) for shape in (*shapes, mean)),
    )


def launch_of(inputs: QuantizeInputs, options: QuantizeOptions) -> Callable[[QuantizeInputs], Result]:
    """A checked launch for this call and all whose tensors look the same; it holds none of them.

    Raises:
        TypeError, ValueError, NotImplementedError: as `check_quantize` does, or the GPU is not a Hopper one.
    """
    check_quantize(inputs, options)
    target = current_target(inputs.q.device.index)
    if target != TARGET:
        raise NotImplementedError(f"the GPU's target is {target}; quantize_qkv runs on {TARGET}, and on a CPU")
    problem = problem_of(inputs, options)
    q, k, v = inputs[:3]
    is_empty = q.numel() == 0 and k.numel() == 0
    kernel = None if is_empty else kernel_of(problem)
    restrides = [usable_strides(x.stride(), ALIGNMENT // x.element_size()) for x in (q, k, v)]
    parts = traits_of(problem).parts
    size = traits_of(problem).workspace_size(
        problem, q.shape[0] * q.shape[2], k.shape[0] * k.shape[2], (parts(q.shape[1]), parts(k.shape[1]))
    )

    def launch(inputs: QuantizeInputs) -> Result:
        results = empty_results(inputs, options)
        q8, k8, v8, *computed, v_mean = results
        if kernel is None:
            for x in computed:
                x.fill_(1)
            return results
        q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip(inputs[:3], restrides, strict=True))
        descales = computed if inputs.descales is None else [x.contiguous() for x in inputs.descales]
        mean = v_mean if problem.smooths_v else None
        cos, sin = (None, None) if inputs.tables is None else map(_addressable, inputs.tables)
        workspace = v_mean.new_empty(size) if problem.measures else None
        kernel(q, k, v, q8, k8, v8, *descales, mean, cos, sin, workspace)  # in the order of QuantizeTensors
        return results

    return launch


def _addressable(table: Tensor) -> Tensor:
    """Cosines or sines as a kernel loads them, 16 bytes at a time."""
    row, column = table.stride()
    is_aligned = column == 1 and not (row * table.element_size() | table.data_ptr()) % ALIGNMENT
    return table if is_aligned else compacted(table)
