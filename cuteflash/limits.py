"""Limits of packed sequences' lengths, as callers give them to a host that does not read the lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from cuteflash.coerce import is_int
from cuteflash.torch_internals import are_functorch_transforms_active, is_watched
from cuteflash.traits.length_class import LengthClass, length_class_of_packed
from cuteflash.validate import reads_values, shown

Longest = int | Tensor | None


def known_limit(name: str, value: object) -> int | None:
    """A checked limit of lengths; None if there is none, or the host does not know it."""
    if type(value) is int and value >= 0:  # first, since it is what most calls have
        return value
    if value is None or isinstance(value, torch.SymInt):
        return None
    allowed = "None, an int of 0 or more, an integer tensor of one element"
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool or value.numel() != 1:
            raise TypeError(f"{name} is a tensor, {value.dtype} of shape {tuple(value.shape)}; allowed: {allowed}")
        return None
    if not is_int(value):
        raise TypeError(f"{name} is {shown(value)}; allowed: {allowed}")
    limit: int = int(value)  # type: ignore[call-overload]
    if limit < 0:
        raise ValueError(f"{name} is {shown(value)}; allowed: {allowed}")
    return limit


def class_of_limits(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, longest_q: int | None, longest_k: int | None
) -> LengthClass | None:
    """The class of sequences with these limits; None if the sizes are not known yet, or not those of a correct call."""
    if longest_q is None or longest_k is None or torch.compiler.is_compiling():
        return None
    try:
        rows_q, rows_k, ends = q.shape[0], k.shape[0], cu_seqlens.shape[0]
    except IndexError:
        return None
    if type(rows_q) is type(rows_k) is type(ends) is int and ends > 1:
        return length_class_of_packed(rows_q, rows_k, ends - 1, longest_q, longest_k)
    return None


def can_read(vector: Tensor) -> bool:
    """Whether a vector's values are there to be checked; those that vmap maps are not."""
    if torch.compiler.is_compiling() or type(vector) is not Tensor:
        return False
    is_readable = vector.device.type == "cpu" or (reads_values() and vector.device.type == "cuda")
    return is_readable and not are_functorch_transforms_active()


def is_free_to_read(vector: Tensor) -> bool:
    """Whether a vector has values that can be checked without a sync, and no mode sees the check's operators."""
    return vector.device.type == "cpu" and vector.numel() > 0 and can_read(vector) and not is_watched()
