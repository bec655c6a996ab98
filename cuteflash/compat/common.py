"""What the compatible functions share: how the other libraries treat strides, head dims and windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash import kvcache_api
from cuteflash.problem import HEAD_DIM_MAX, HEAD_DIM_STEP
from cuteflash.renaming import NAMING, rename
from cuteflash.validate import FP8_DTYPES


def attend(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    lengths: Sequence[Any] = (),
    *,
    names: Mapping[str, str],
    softmax_scale: float | None,
    window_size: Any,
    **options: Any,
) -> Any:
    """Call a public function as FlashAttention-2 and 3 treat their inputs.

    - A tensor whose last dimension is not contiguous is copied.
    - A head dim that is not a multiple of 8 is padded with zeros, which changes no score, and cut off the output; of
      8-bit tensors it is left to the function's own check, which wants a multiple of 16, as FlashAttention-3 does.
    - A negative side of a window, or None, is unbounded.

    Args:
        function: takes `tensors`, `lengths` and options.
        tensors: q, k and v, or packed ones; the head dim comes last.
        lengths: the arguments between the tensors and the options.
        names: of the function's arguments that have others here; errors have these.
        softmax_scale: None is ``1 / sqrt(head_dim)``, of the head dim before padding.
        window_size: (left, right).
        options: further ones of `function`.
    """
    rows = [_contiguous_rows(x) for x in tensors]
    padding = _padding(rows)
    if padding:
        head_dim = rows[0].shape[-1]
        softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        rows = [F.pad(x, (0, padding)) for x in rows]
    window = window_of_others(window_size)
    try:
        result = function(*rows, *lengths, softmax_scale=softmax_scale, window_size=window, **options)
    except NAMING as error:
        rename(error, names)
        raise
    if not padding:
        return result
    if isinstance(result, Tensor):
        return result[..., :head_dim]
    return result[0][..., :head_dim], *result[1:]


def attend_cached(
    q: Tensor,
    caches: Sequence[Tensor],
    new: Sequence[Tensor | None],
    *,
    names: Mapping[str, str],
    softmax_scale: float | None,
    window_size: Any,
    **options: Any,
) -> Any:
    """Call `flash_attn_with_kvcache` likewise. Caches that are written to are never copied, and so never padded."""
    function = kvcache_api.flash_attn_with_kvcache
    options |= {"softmax_scale": softmax_scale}
    if all(x is None for x in new):
        return attend(function, (q, *caches), names=names, window_size=window_size, **options)
    q, *tokens = (_contiguous_rows(x) for x in (q, *new))
    try:
        return function(q, *caches, *tokens, window_size=window_of_others(window_size), **options)
    except NAMING as error:
        rename(error, names)
        raise


def _contiguous_rows(x: Any) -> Any:
    """A tensor with a contiguous last dimension; what is not one is left to the function's own check."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or not x.dim():
        return x
    return x.contiguous() if x.stride(-1) != 1 else x


def _padding(tensors: Sequence[Tensor]) -> int:
    """Columns that bring the head dim to a multiple of 8; 0 for those that are not supported, and if they differ."""
    if any(isinstance(x, Tensor) and x.dtype in FP8_DTYPES for x in tensors):
        return 0
    dims = {x.shape[-1] if isinstance(x, Tensor) and x.dim() else None for x in tensors}
    dim = dims.pop()
    return 0 if dims or dim is None or dim > HEAD_DIM_MAX else -dim % HEAD_DIM_STEP


def window_of_others(window_size: Any) -> Any:
    """`window_size` with -1 for a side that is unbounded; what is not a pair is left to the function's own check."""
    if not isinstance(window_size, (tuple, list)):
        return window_size
    return tuple(-1 if side is None or (isinstance(side, int) and side < 0) else side for side in window_size)
