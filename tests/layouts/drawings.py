"""What tests read out of a scene: the elements that a touch names, the descriptors of its products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from layouts.scene import Descriptor, Scene, Touch

if TYPE_CHECKING:
    from tests.kernel_record import Kernel

WARPGROUP = 128
ENCODED = r"or\.b64\s[^;]*,\s(-?\d{16,})"
LIMITED = r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)"


def elements(touch: Touch) -> np.ndarray[Any, Any]:
    """(instructions, values, threads) elements that a touch names."""
    return touch.elements()


def by_issuer(touch: Touch) -> np.ndarray[Any, Any]:
    """The same with one entry for each warpgroup where its threads issue together."""
    named = elements(touch)
    together = named.shape[2] % WARPGROUP == 0 and (named[:, :, 0] == named[:, :, 1]).all()
    return named[:, :, ::WARPGROUP] if together else named


def byte_addresses(scene: Scene, touch: Touch) -> npt.NDArray[np.int64]:
    """(instructions, threads): where each lane's access begins, in bytes from the tile's start."""
    tile = scene.tile(touch.id)
    return tile.offsets().reshape(-1)[touch.elements()[:, 0, :]] * tile.element_bytes


def assert_operands_covered(scene: Scene) -> None:
    """Each step touches every element of its tiles and fragments, and nothing beside them."""
    parts = {part.id: part.shape for part in (*scene.tiles, *scene.fragments)}
    for step in scene.steps:
        assert len({touch.tv.mode(2).size() for touch in step.touches}) == 1  # threads
        for touch in step.touches:
            rows, cols = parts[touch.id]
            assert set(touch.elements().reshape(-1)) == set(range(rows * cols)), (step.id, touch.id)


def descriptors_of(scene: Scene) -> set[int]:
    """The constant fields of the matrix descriptors of all products."""
    found = [step.descriptor[side] for step in scene.steps if step.descriptor for side in "ab"]
    return {constant(descriptor) for descriptor in found if descriptor}


def descriptors_in(kernel: Kernel) -> set[int]:
    """The constant fields of the matrix descriptors that a kernel's PTX makes."""
    return {int(text) % (1 << 64) for text in kernel.found(ENCODED)}


def limits_in(kernel: Kernel) -> set[int]:
    """The registers a thread that warps of a kernel ask for."""
    return {int(text) for text in kernel.found(LIMITED)}


def constant(descriptor: Descriptor) -> int:
    """The fields of a matrix descriptor that do not depend on the address: PTX ISA, "Matrix descriptor"."""
    mode = {128: 1, 64: 2, 32: 3}[descriptor.swizzle_bytes]
    return mode << 62 | (descriptor.stride_bytes >> 4) << 32 | (descriptor.leading_bytes >> 4) << 16
