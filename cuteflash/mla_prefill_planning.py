"""From a call with keys in two parts on a GPU to its launch, see `cuteflash.planning`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from cuteflash.arguments import FwdOptions, PackedTensors, mask_of_window
from cuteflash.compile import compiled
from cuteflash.dispatch import choose, current_target
from cuteflash.packed_planning import SEVERAL, counters
from cuteflash.planning import DTYPE_NAMES, fwd_scalars
from cuteflash.problem import DENSE, SHARED_COLUMNS, FwdProblem, Operands, Scores, Storage
from cuteflash.strides import usable_strides
from cuteflash.traits.arch import get_arch
from cuteflash.traits.length_class import LengthClass, length_class_of, length_class_of_packed
from cuteflash.validate import ALIGNMENT
from cuteflash.validate_mla_prefill import PrefillInputs, PrefillOptions

FAMILY = "sm90"  # whose kernel loads K in two parts
Results = tuple[Tensor, Tensor]
Launch = Callable[[PrefillInputs], Results]


def forward_options(options: PrefillOptions) -> FwdOptions:
    """The same for a forward whose keys are in one part."""
    right = 0 if options.causal else -1
    return FwdOptions(
        options.softmax_scale, window_right=right, deterministic=options.deterministic, lengths=options.lengths
    )


def loads_two_parts(inputs: PrefillInputs) -> bool:
    """Whether a kernel takes the parts as they are: on Hopper, if the first is whole slabs of its tile."""
    columns = inputs.q.shape[-1]
    if columns % SHARED_COLUMNS or columns == SHARED_COLUMNS:
        return False
    return FAMILY in get_arch(current_target(inputs.q.device.index)).families


def prefill_launch(inputs: PrefillInputs, options: PrefillOptions) -> Launch:
    """A launch for checked calls with the same sizes, strides and options; what it keeps holds no tensor."""
    q, k, k_rope, v = inputs[:4]
    forward, storage = forward_options(options), Storage("varlen", "varlen") if inputs.is_packed else DENSE
    *rows, heads, _ = q.shape
    o_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (*rows[:-1], heads, rows[-1])
    length = SEVERAL if inputs.is_packed else rows[-1]
    mask, *window = mask_of_window(forward.window_left, forward.window_right, length, 0)
    operands = Operands.of(DTYPE_NAMES[q.dtype], q.shape[-1], v.shape[-1])
    problem = FwdProblem(dataclasses.replace(operands, shares_k=True), Scores(mask), storage, has_lse=True)
    target = current_target(q.device.index)
    choice = choose(problem, target, FAMILY, _class_of_lengths(inputs, options))
    kernel: Callable[..., Any] = compiled(choice.kernel_cls, choice.traits, problem, target)
    scalars = fwd_scalars(forward, (window[0], window[1]), q.shape[-1], q.device)
    step = ALIGNMENT // q.element_size()
    restrides = [usable_strides(x.stride(), step) for x in (q, k, k_rope, v)]

    def launch(inputs: PrefillInputs) -> Results:
        o = inputs.q.new_empty(o_shape)
        lse = inputs.q.new_empty(lse_shape, dtype=torch.float32)
        tensors = zip(inputs[:4], restrides, strict=True)
        q, k, k_rope, v = (x.as_strided(x.shape, s) if s else x for x, s in tensors)
        vectors: tuple[Any, ...] = ()
        if inputs.is_packed:
            vectors = PackedTensors(inputs.cu_seqlens_q, inputs.cu_seqlens_k, tile_counter=counters.of(o.device))
        kernel(q, k, v, o, lse, *vectors, *scalars, k_rope)
        return o, lse

    return launch


def _class_of_lengths(inputs: PrefillInputs, options: PrefillOptions) -> LengthClass:
    """The class that the options name, or that of the sizes."""
    if options.lengths is not None:
        return cast(LengthClass, options.lengths)
    if inputs.cu_seqlens_q is None:
        return length_class_of(inputs.q.shape[1], inputs.v.shape[1])
    return length_class_of_packed(inputs.q.shape[0], inputs.v.shape[0], inputs.cu_seqlens_q.shape[0] - 1)
