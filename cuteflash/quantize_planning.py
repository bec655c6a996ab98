"""From a call of `quantize_qkv` on a GPU to its launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, empty_like

from cuteflash.compile import compiled
from cuteflash.dispatch import current_target
from cuteflash.planning import DTYPE_NAMES
from cuteflash.quantize_problem import BLOCK_TOKENS, CLUSTER_MAX, QuantizeOptions, QuantizeProblem, RotaryDtype
from cuteflash.reference.quantize import FP8_TYPES
from cuteflash.strides import compacted, fp32_template, template, usable_strides
from cuteflash.traits.quantize import TARGET, traits_of
from cuteflash.validate import ALIGNMENT
from cuteflash.validate_quantize import QuantizeInputs, check_quantize

SHARED_ANGLES = 4  # heads for which cosines and sines are loaded once, at least, if blocks of a cluster are to pay
FOLDED_COLUMNS = 64  # of the widest rows: narrower ones have fewer warps than a block visits KV heads
FOLDED_TOKENS = 8192  # of a head whose parts each block reads: they grow with it, and so do its blocks
Result = tuple[Tensor, ...]
TABLE_NAMES: dict[torch.dtype, RotaryDtype] = {torch.float32: "fp32", **DTYPE_NAMES}


def problem_of(inputs: QuantizeInputs, options: QuantizeOptions) -> QuantizeProblem:
    """What the kernels of a checked call are generated for."""
    cos = inputs.rotary_cos
    finds_scales = options.granularity == "block" and inputs.descales is None
    sharing = inputs.q.shape[-2] // max(inputs.k.shape[-2], 1)
    # A block of a cluster has one head of each KV head, and those of all batch entries share cosines and sines.
    has_many = cos is None or inputs.batch * inputs.k.shape[-2] >= SHARED_ANGLES
    finds_together = finds_scales and inputs.packed is None and 1 < sharing <= CLUSTER_MAX and has_many
    measures = options.granularity == "head" and inputs.descales is None
    return QuantizeProblem(
        dtype=DTYPE_NAMES[inputs.q.dtype],
        head_dim=inputs.q.shape[-1],
        head_dim_v=inputs.v.shape[-1],
        granularity="block" if options.granularity == "block" else "head",
        has_scales=inputs.descales is not None,
        hadamard=options.hadamard,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        rotary_interleaved=cos is not None and options.rotary_interleaved,
        rotary_dtype="fp32" if cos is None else TABLE_NAMES[cos.dtype],
        transposes_v=options.transpose_v,
        smooths_v=options.smooth_v,
        to="e5m2" if options.to == "e5m2" else "e4m3",
        is_packed=inputs.packed is not None,
        has_used=inputs.seqused_q is not None or inputs.seqused_k is not None,
        is_grouped=finds_scales and sharing != 1 and not finds_together,
        cluster=sharing if finds_together else 1,
        measures_shared=measures and inputs.packed is not None and cos is not None and sharing != 1,
        folds=measures and cos is not None and inputs.packed is None and has_few_parts(inputs),
    )


def has_few_parts(inputs: QuantizeInputs) -> bool:
    """Whether blocks that convert may read what is measured of all parts of a head.

    There are blocks to write each head's descales, and a block has a warp for each KV head that it visits.
    """
    lengths = inputs.q.shape[1], inputs.k.shape[1]
    is_wide = max(inputs.q.shape[-1], inputs.v.shape[-1]) >= FOLDED_COLUMNS
    return min(lengths) > 0 and max(lengths) <= FOLDED_TOKENS and is_wide


def kernel_of(problem: QuantizeProblem) -> Callable[..., Any]:
    """The compiled kernels of a problem, as one callable."""
    from cuteflash.kernels.common.quantize import Quantize  # imports the compiler

    return compiled(Quantize, traits_of(problem), problem, TARGET)


def empty_results(inputs: QuantizeInputs, options: QuantizeOptions) -> Result:
    """The results, not filled: 8 bits of Q, K and V or V^T, the three descales, V's mean.

    A descale that is given, and a mean that is not asked for, has no elements: (batch, 0).
    """
    (q, k, v), batch, dtype = inputs[:3], inputs.batch, FP8_TYPES[options.to]
    *entries, _, kv_heads, head_dim_v = v.shape
    keys = inputs.blocks[2] * BLOCK_TOKENS
    v_shape = (*entries, kv_heads, head_dim_v, keys) if options.transpose_v else v.shape
    none, is_given = (batch, 0), inputs.descales is not None
    shapes = [none] * 3 if is_given else inputs.descale_shapes(options.granularity)
    mean = (batch, kv_heads, head_dim_v) if options.smooth_v else none
    if options.transpose_v and keys == 0:  # without a key V^T has rows that begin on 16 bytes, too
        v8 = v.new_empty((*v_shape[:-1], BLOCK_TOKENS), dtype=dtype)[..., :0]
    else:
        v8 = v.new_empty(v_shape, dtype=dtype)
    return (
        *(x.new_empty(x.shape, dtype=dtype) for x in (q, k)),
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
    is_empty = inputs.batch == 0 or (q.numel() == 0 and k.numel() == 0)
    kernel = None if is_empty else kernel_of(problem)
    restrides = [usable_strides(x.stride(), ALIGNMENT // x.element_size()) for x in (q, k, v)]
    size = _workspace_size(problem, inputs)

    restride, smooths_v = any(restrides), problem.smooths_v
    like_workspace = fp32_template((size,), q.device) if problem.measures else None
    results = empty_results(inputs, options)
    # A V^T without keys has strides of its own.
    templates = [template(tuple(x.shape), x.dtype, x.device) for x in results] if results[2].numel() else None

    def launch(inputs: QuantizeInputs) -> Result:
        results = empty_results(inputs, options) if templates is None else tuple([empty_like(x) for x in templates])
        q8, k8, v8, *computed, v_mean = results
        if kernel is None:
            for x in computed:
                x.fill_(1)
            for x in (q8, k8, v8, v_mean):
                x.view(torch.uint8).zero_()
            return results
        q, k, v, q_descale, _, _, cos, sin, cu_q, cu_k, used_q, used_k = inputs
        if restride:
            q, k, v = (x.as_strided(x.shape, s) if s else x for x, s in zip((q, k, v), restrides, strict=True))
        if cu_q is not None and cu_k is not None:
            cu_q, cu_k, used_q, used_k = _vectors(cu_q, cu_k, used_q, used_k)
            q, k, v, q8, k8, v8 = map(_with_a_row, (q, k, v, q8, k8, v8))
        descales = computed if q_descale is None else [x.contiguous() for x in inputs[3:6] if x is not None]
        if cos is not None and sin is not None:
            cos, sin = _addressable(cos), _addressable(sin)
        mean = v_mean if smooths_v else None
        workspace = None if like_workspace is None else empty_like(like_workspace)
        # In the order of QuantizeTensors.
        kernel(q, k, v, q8, k8, v8, *descales, mean, cos, sin, workspace, cu_q, cu_k, used_q, used_k)
        return results

    return launch


def _workspace_size(problem: QuantizeProblem, inputs: QuantizeInputs) -> int:
    """Elements of the workspace of a call."""
    traits, (q, k) = traits_of(problem), inputs[:2]
    if problem.is_packed:
        rows_q, rows_k = (max(x.shape[0], 1) for x in (q, k))
        of_q, of_k = (traits.packed_parts(rows, inputs.batch) for rows in (rows_q, rows_k))
        of_v = traits.packed_parts(rows_k, inputs.batch, is_v=True)
        return traits.workspace_size(problem, q.shape[1], k.shape[1], (of_q, of_k, of_v))
    parts = traits.parts(q.shape[1]), traits.parts(k.shape[1]), traits.parts(k.shape[1], is_v=True)
    return traits.workspace_size(problem, q.shape[0] * q.shape[2], k.shape[0] * k.shape[2], parts)


def _vectors(cu_q: Tensor, cu_k: Tensor, used_q: Tensor | None, used_k: Tensor | None) -> tuple[Tensor | None, ...]:
    """Where packed sequences begin, and how many rows of each count; both of these or none."""
    if used_q is not None or used_k is not None:
        used_q = cu_q.diff() if used_q is None else used_q
        used_k = cu_k.diff() if used_k is None else used_k
    return cu_q, cu_k, used_q, used_k


def _with_a_row(x: Tensor) -> Tensor:
    """A tensor of packed rows, or another one with a row if it has none: a kernel loads a row in place of none."""
    return x if x.numel() else x.new_empty((1, *x.shape[1:]))


def _addressable(table: Tensor) -> Tensor:
    """Cosines or sines as a kernel loads them, 16 bytes at a time."""
    row, column = table.stride()
    is_aligned = column == 1 and not (row * table.element_size() | table.data_ptr()) % ALIGNMENT
    return table if is_aligned else compacted(table)
