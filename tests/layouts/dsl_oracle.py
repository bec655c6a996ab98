"""What the DSL itself says of a kernel's layouts, copies and products: evaluated by compiled host code on the CPU."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import numpy.typing as npt
import torch
from cutlass.cute.runtime import from_dlpack

from layouts.dsl import context

Offsets = npt.NDArray[np.int32]
_known: dict[tuple[str, str], Offsets] = {}  # many rows share a layout


@cute.jit
def fill_offsets(out: cute.Tensor, kernel: cutlass.Constexpr, tensor: cutlass.Constexpr[str]):
    """Byte offset of every element of a shared-memory tile, in colexicographic order."""
    layout = getattr(kernel, f"smem_layout_{tensor}")()
    if cutlass.const_expr(kernel.family == "sm90"):  # the swizzle acts on the byte address
        scaled = cute.make_layout(layout.outer.shape, stride=_doubled(layout.outer.stride))
        layout = cute.make_composed_layout(layout.inner, 0, scaled)
    scale = 1 if cutlass.const_expr(kernel.family == "sm90") else 2
    for i in cutlass.range(cute.size(out)):
        out[i] = cutlass.Int32(layout(i)) * scale


def _doubled(stride: Any) -> Any:
    return tuple(map(_doubled, stride)) if isinstance(stride, tuple) else 2 * stride


def smem_offsets(kernel: Any, target: str, tensor: str) -> Offsets:
    """Byte offset of every element of tile "q", "k", "v" or "o", in colexicographic order of the kernel's layout."""
    with context(target):
        layout = getattr(kernel, f"smem_layout_{tensor}")()
        text, size = str(layout), cute.size(layout)
    key = (kernel.family, text)
    if key not in _known:
        out = torch.full((size,), -1, dtype=torch.int32)
        fill_offsets(from_dlpack(out), kernel, tensor)
        _known[key] = out.numpy()
    return _known[key]


def owned_by(mma: Any, thread: int, operand: str, tile: tuple[int, int]) -> npt.NDArray[np.int64]:
    """(values, 2): the coordinates of a thread's share of operand "A", "B" or "C", in the order of its partition."""
    mine = getattr(mma.get_slice(thread), f"partition_{operand}")(cute.make_identity_tensor(tile))
    return _coordinates(mine)


def copied_by(copy: Any, thread: int, side: str, tile: tuple[int, int]) -> npt.NDArray[np.int64]:
    """(values, 2): the coordinates that a thread's slice of a tiled copy has on side "S" or "D", in partition order."""
    mine = getattr(copy.get_slice(thread), f"partition_{side}")(cute.make_identity_tensor(tile))
    return _coordinates(mine)


def _coordinates(tensor: Any) -> npt.NDArray[np.int64]:
    return np.array([tensor[i] for i in range(cute.size(tensor))], np.int64)
