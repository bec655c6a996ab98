"""What the DSL itself says of a kernel's layouts, copies and products: evaluated by compiled host code on the CPU."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import numpy.typing as npt
import torch
from cutlass.cute.runtime import from_dlpack

from layouts import dsl

Offsets = npt.NDArray[np.int32]
Coordinates = npt.NDArray[np.int64]
# Many rows share a layout, a product or a copy: each is asked for once, by its text.
_offsets: dict[tuple[str, str, int], Offsets] = {}
_coordinates: dict[tuple[str, int, str, tuple[int, int]], Coordinates] = {}


@cute.jit
def fill_offsets(
    out: cute.Tensor, kernel: cutlass.Constexpr, tensor: cutlass.Constexpr[str], width: cutlass.Constexpr[int]
):
    """Byte offset of every element of `width` bytes of a shared-memory tile, in colexicographic order."""
    layout = getattr(kernel, f"smem_layout_{tensor}")()
    if cutlass.const_expr(kernel.family == "sm90"):  # the swizzle acts on the byte address
        scaled = cute.make_layout(layout.outer.shape, stride=_scaled(layout.outer.stride, width))
        layout = cute.make_composed_layout(layout.inner, 0, scaled)
    scale = 1 if cutlass.const_expr(kernel.family == "sm90") else width
    for i in cutlass.range(cute.size(out)):
        out[i] = cutlass.Int32(layout(i)) * scale


def _scaled(stride: Any, factor: int) -> Any:
    return tuple(_scaled(one, factor) for one in stride) if isinstance(stride, tuple) else factor * stride


def smem_offsets(kernel: Any, target: str, tensor: str, width: int = 2) -> Offsets:
    """Byte offset of every element of `width` bytes of a tile such as "q", in the kernel's colexicographic order."""
    with dsl.context(target):
        layout = getattr(kernel, f"smem_layout_{tensor}")()
        text, size = str(layout), cute.size(layout)
    key = (kernel.family, text, width)
    if key not in _offsets:
        out = torch.full((size,), -1, dtype=torch.int32)
        fill_offsets(from_dlpack(out), kernel, tensor, width)
        _offsets[key] = out.numpy()
    return _offsets[key]


def owned_by(mma: Any, thread: int, operand: str, tile: tuple[int, int]) -> Coordinates:
    """(values, 2): the coordinates of a thread's share of operand "A", "B" or "C", in the order of its partition."""
    return _partition(mma, thread, operand, tile)


def copied_by(copy: Any, thread: int, side: str, tile: tuple[int, int]) -> Coordinates:
    """(values, 2): the coordinates that a thread's slice of a tiled copy has on side "S" or "D", in partition order."""
    return _partition(copy, thread, side, tile)


def _partition(tiled: Any, thread: int, part: str, tile: tuple[int, int]) -> Coordinates:
    """The DSL's partition, whose layout ours evaluates: fast, and test_algebra.py holds ours to the DSL's.

    `tiled`'s text has all its layouts, and those of its atom.
    """
    key = (str(tiled), thread, part, tile)
    if key not in _coordinates:
        mine = getattr(tiled.get_slice(thread), f"partition_{part}")(cute.make_identity_tensor(tile))
        steps = [dsl.coordinates(mine.layout, axis).indices() for axis in ((1, 0), (0, 1))]
        _coordinates[key] = np.array(mine[0], np.int64) + np.stack(steps, axis=-1)
        assert tuple(_coordinates[key][-1]) == mine[cute.size(mine) - 1]
    return _coordinates[key]
