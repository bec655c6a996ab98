"""How the tensors of a launch lie in memory: what kernels can address, and new tensors."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new tensor; no size is 0."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_like_new(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether `empty_like` of a tensor is a new tensor of a shape, in half the time; no size is 0."""
    return tuple(tensor.shape) == tuple(shape) and tensor.stride() == contiguous_strides(shape)


def usable_strides(strides: tuple[int, ...], step: int) -> tuple[int, ...] | None:
    """Strides for the kernel if a dimension of size 1 has one that is not a multiple of 16 bytes (`step` elements).

    Such a stride is never used to address, but a TMA descriptor cannot hold it. None if there is none.
    """
    if all(stride % step == 0 for stride in strides[:-1]):
        return None
    return (*(stride if stride % step == 0 else step for stride in strides[:-1]), strides[-1])


def compacted(tensor: Tensor) -> Tensor:
    """A copy with the strides of a new tensor, also of dimensions of size 1, and on an aligned address."""
    return tensor.clone(memory_format=torch.contiguous_format)


def fp32_template(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """`template` of fp32."""
    return template(shape, torch.float32, device)


def template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `empty_like` makes contiguous tensors from, in half the time that it takes from a shape.

    All templates of a device and an element type share the memory of one element.
    """
    element, size = _element(dtype, device), math.prod(shape)
    # Elements that overlap tell `empty_like` nothing about strides. A single one does not overlap.
    return element.expand(shape) if size > 1 else element[:size].view(shape)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)
