"""A scene's tiles and fragments, evaluated: addresses, banks, owners. Takes scenes as the JSON values of a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..algebra import Layout, Swizzle
from ..banks import BANKS, WORD

Json = Mapping[str, Any]
Numbers = npt.NDArray[np.int64]

CORE_CELLS = 64  # elements of a core matrix of 8 rows of 16 bytes
NONE = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Owners:
    """The threads that hold or move the cells of a part; grids of (rows, cols), NONE in cells without an owner.

    Attributes:
        thread, value: the first owner.
        count: how many (thread, value) there are.
        threads, values: the extents of the thread and value modes.
        step: title of the step that moves a tile's cells; empty for a fragment's own threads.
    """

    thread: Numbers
    value: Numbers
    count: Numbers
    threads: int
    values: int
    step: str


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tile or fragment of a scene; `spec` is its own JSON value."""

    scene: Json
    kind: Literal["tile", "fragment"]
    spec: Json

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.spec["shape"]
        return rows, cols

    @property
    def shared(self) -> bool:
        """Whether it is in shared memory, so that its elements have banks."""
        return self.spec.get("space") == "shared"

    @property
    def stages(self) -> int:
        return int(self.spec.get("stages") or 1)

    @property
    def valid(self) -> tuple[int, int]:
        """Rows and columns that exist; the rest of a tile is read as zeros."""
        rows, cols = self.spec.get("valid") or self.shape
        return rows, cols

    def addresses(self, stage: int = 0, swizzled: bool = True) -> Numbers:
        """Byte addresses of a tile's elements in one stage, (rows, cols): in the block's shared memory or from the
        tile's first byte in global memory.
        """
        cells = self.shape[0] * self.shape[1]
        offsets = Layout(**self.spec["layout"]).indices()[stage * cells : (stage + 1) * cells]
        if swizzled and self.spec.get("swizzle"):
            offsets = Swizzle(*self.spec["swizzle"])(offsets)
        addresses: Numbers = (self.spec.get("base") or 0) + self.spec["element_bytes"] * offsets
        return addresses.reshape(self.shape, order="F")

    def owners(self) -> Owners | None:
        """Owners of the cells: a fragment's threads, else those of the first step that writes, or touches, the tile."""
        if self.kind == "fragment":
            return _owners(self.spec, self.shape, "")
        touches = [(step, touch) for step in self.scene["steps"] for touch in step["touches"]]
        mine = [(step, touch) for step, touch in touches if touch["id"] == self.spec["id"]]
        if not mine:
            return None
        step, touch = next((pair for pair in mine if pair[1]["mode"] == "write"), mine[0])
        return _owners(touch, self.shape, step["title"])

    def core_matrices(self) -> Numbers | None:
        """Which core matrix of the first instruction reads a cell, (rows, cols); None if no descriptor says it."""
        for step in self.scene["steps"]:
            for descriptor in (step.get("descriptor") or {}).values():
                if descriptor and descriptor["tile"] == self.spec["id"]:
                    cells = Layout(**descriptor["core"]).indices()
                    numbers = np.full(self.shape[0] * self.shape[1], NONE)
                    numbers[cells] = np.arange(cells.size) // CORE_CELLS
                    return numbers.reshape(self.shape, order="F")
        return None


def panels(scene: Json) -> list[str]:
    """Names of the scene's tiles, then of its fragments."""
    return [part["id"] for part in (*scene["tiles"], *scene["fragments"])]


def part_of(scene: Json, panel: str) -> Part:
    """The tile or fragment of that name; the ValueError for another name lists those that exist."""
    for tile in scene["tiles"]:
        if tile["id"] == panel:
            return Part(scene, "tile", tile)
    for fragment in scene["fragments"]:
        if fragment["id"] == panel:
            return Part(scene, "fragment", fragment)
    raise ValueError(f"panel is {panel!r}; {scene['id']} has: {', '.join(panels(scene))}")


def banks(addresses: Numbers) -> Numbers:
    """Shared-memory banks of byte addresses."""
    found: Numbers = addresses // WORD % BANKS
    return found


def _owners(spec: Json, shape: tuple[int, int], step: str) -> Owners:
    cells = shape[0] * shape[1]
    layout = Layout(**spec["tv"])
    threads, values = (mode.size() for mode in layout.modes()[:2])
    swizzle = spec.get("tv_swizzle")
    at = Swizzle(*swizzle)(layout.indices()) if swizzle else layout.indices()
    positions = np.flatnonzero(at < cells)  # a layout may reach beyond the part's end
    first = np.full(cells, NONE)
    first[at[positions][::-1]] = positions[::-1]  # backwards: of several writes to one cell the first owner remains
    unowned = first == NONE
    block_thread = spec["first_thread"] + spec.get("thread_step", 1) * (first % threads)
    thread = np.where(unowned, NONE, block_thread)
    value = np.where(unowned, NONE, first // threads % values)
    count = np.bincount(at[positions], minlength=cells)
    thread, value, count = (grid.reshape(shape, order="F") for grid in (thread, value, count))
    return Owners(thread, value, count, threads, values, step)
