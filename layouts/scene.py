"""The scene of one kernel row: its tiles, fragments, steps and budgets, as plain values.

Axes are m (query row), n (key row), d (column of Q and K), r (of latent attention, those of their columns that V does
not have) and e (column of V and O); a tensor is a pair of them, and its gradient has the same. An element of a tile or
fragment is the number `row + rows * col`. The readers (`layouts/read_*.py`) fill a scene from the kernel's own classes;
pages and pictures are made from `as_dict`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from .algebra import ComposedLayout, Layout, Swizzle

Axis = Literal["m", "n", "d", "r", "e"]
Space = Literal["global", "shared"]
Phase = Literal["prologue", "loop", "epilogue"]
Kind = Literal[
    "tma",
    "cp.async",
    "ldmatrix",
    "mma",
    "wgmma",
    "softmax",
    "fixed softmax",
    "repair",
    "convert",
    "permute",
    "rescale",
    "add",
    "exponentials",
    "differentiate",
    "stmatrix",
    "bulk add",
    "red",
    "st.shared",
    "ld.shared",
    "st.global",
]

Named = TypeVar("Named", "Tile", "Fragment", "Step")

_AXES: dict[str, tuple[Axis, Axis]] = {
    "Q": ("m", "d"),
    "K": ("n", "d"),
    "S": ("m", "n"),
    "P": ("m", "n"),
    "V": ("n", "e"),
    "O": ("m", "e"),
    "Qr": ("m", "r"),
    "Kr": ("n", "r"),
}
AXES = _AXES | {f"d{tensor}": axes for tensor, axes in _AXES.items()}
# The tensors that a page draws together, in the order of its lanes and sections.
LANES: dict[str, tuple[tuple[str, ...], ...]] = {
    "mla": (("Q", "Qr"), ("K", "Kr"), ("S", "P"), ("V",), ("O",)),
    "fwd": (("Q",), ("K",), ("S", "P"), ("V",), ("O",)),
    "bwd": (("Q",), ("K",), ("S", "P"), ("V",), ("dO",), ("dP", "dS"), ("dV",), ("dK",), ("dQ",)),
}
AXIS_LABELS: dict[Axis, str] = {
    "m": "query",
    "n": "key",
    "d": "column of Q and K",
    "r": "column of Q and K beside V's",
    "e": "column of V and O",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A block's tile of a tensor in global or shared memory.

    Attributes:
        layout: (row, col) or (row, col, stage) to element offset, before the swizzle.
        swizzle: on element offsets; None if there is none.
        base: byte address of the tile: in the block's shared memory, or 0.
        valid: rows and columns that exist in global memory; the others are filled with zeros.
        element_bytes: 2, 1 of 8-bit operands, or 4 of sums in fp32.
    """

    id: str
    tensor: str
    space: Space
    shape: tuple[int, int]
    layout: Layout
    swizzle: Swizzle | None = None
    base: int = 0
    stages: int = 1
    valid: tuple[int, int] | None = None
    note: str = ""
    element_bytes: int = 2

    def offsets(self, swizzled: bool = True) -> npt.NDArray[np.int64]:
        """Element offset of every element, (cols, rows) or (stages, cols, rows): colexicographic order, reversed."""
        layout = ComposedLayout(self.swizzle, 0, self.layout) if self.swizzle and swizzled else self.layout
        rows, cols = self.shape
        stages = (self.stages,) if self.layout.rank == 3 else ()
        return layout.indices().reshape(*stages, cols, rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """A tensor in the registers of many threads.

    Attributes:
        operand: which operand of its product it is; empty if it is on the way from one memory to another.
        first_thread: thread of the block that thread 0 of `tv` is.
        tv: (thread, register element) to element. A thread mode of stride 0 means copies.
        registers: 32-bit registers a thread.
        place_of: the fragment whose registers it takes over; empty if it has its own.
        live: 32-bit registers a thread that are live at a time, of all accumulators that take turns; 0 is `registers`.
        tv_swizzle: as of `Touch`.
    """

    id: str
    tensor: str
    shape: tuple[int, int]
    operand: Literal["A", "B", "C", ""]
    dtype: str
    first_thread: int
    tv: Layout
    registers: int
    place_of: str = ""
    live: int = 0
    note: str = ""
    tv_swizzle: Swizzle | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Touch:
    """The elements of a tile or fragment that one step reads or writes.

    Attributes:
        tv: (thread, value, instruction) to element; value runs over what one thread moves by one instruction.
        first_thread: index i of the thread mode is thread `first_thread + i` of the block. If whole warpgroups
            issue, all their threads have the same elements.
        lane_bytes: bytes that a lane accesses in shared memory; None if no bank is involved.
        tv_swizzle: on the element numbers of `tv`, whose first bits are the row's; None if there is none.
    """

    id: str
    mode: Literal["read", "write"]
    tv: Layout
    first_thread: int = 0
    lane_bytes: int | None = None
    tv_swizzle: Swizzle | None = None

    def elements(self) -> npt.NDArray[np.int64]:
        """(instructions, values, threads) numbers of the elements."""
        threads, values, instructions = (mode.size() for mode in self.tv.modes())
        named = self.tv.indices() if self.tv_swizzle is None else self.tv_swizzle(self.tv.indices())
        return named.reshape(instructions, values, threads)


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """A WGMMA operand in shared memory, as its 64-bit matrix descriptor describes it.

    Attributes:
        major: "K" if the product's k extent is contiguous, else "MN".
        swizzle_bytes: 128, 64, 32 or 0.
        leading_bytes, stride_bytes: the descriptor's two byte offsets; with a swizzled K-major operand the hardware
            ignores the leading one, and the compiler leaves it at 16.
        starts: start address of each instruction, in bytes from the tile's.
        core: (row, element, core matrix) to element of the tile: the core matrices, 8 rows of 16 bytes, of the first
            instruction.
    """

    tile: str
    major: Literal["K", "MN"]
    swizzle_bytes: int
    leading_bytes: int
    stride_bytes: int
    starts: tuple[int, ...]
    core: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One kind of instruction that moves or computes data of a tile.

    Attributes:
        role: who issues it; `repeat`: how often.
        instructions: how many each issuing thread, warp or warpgroup issues every time.
        descriptor: of operands "a" and "b" that are in shared memory.
        box: (rows, columns) that one TMA instruction moves.
    """

    id: str
    title: str
    kind: Kind
    instruction: str
    role: str
    repeat: str
    phase: Phase
    touches: tuple[Touch, ...]
    note: str = ""
    descriptor: Mapping[str, Descriptor | None] | None = None
    box: tuple[int, int] | None = None

    @property
    def instructions(self) -> int:
        return self.touches[0].tv.mode(2).size()


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """Threads of a block that run the same code."""

    name: str
    first_thread: int
    threads: int
    does: str


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """All data of one row that is drawn.

    Attributes:
        id: unique among the rows, usable as a file name.
        kernel: name, module, operation, family, arch, dtype, head dims, mask, traits and where they come from.
        sizes: extent of each axis in one tile.
        loop: what the loop of a tile runs over, "key blocks", "query blocks" or "pages".
        budget: see `layouts.budget`.
    """

    id: str
    title: str
    kernel: Mapping[str, Any]
    sizes: Mapping[Axis, int]
    loop: str
    roles: tuple[Role, ...]
    tiles: tuple[Tile, ...]
    fragments: tuple[Fragment, ...]
    steps: tuple[Step, ...]
    budget: Mapping[str, Any]

    def tile(self, id: str) -> Tile:
        """The tile of that id; KeyError if there is none."""
        return _named(self.tiles, id)

    def fragment(self, id: str) -> Fragment:
        """The fragment of that id; KeyError if there is none."""
        return _named(self.fragments, id)

    def step(self, id: str) -> Step:
        """The step of that id; KeyError if there is none."""
        return _named(self.steps, id)

    def _lanes(self) -> tuple[tuple[str, ...], ...]:
        """The operation's lanes that this scene has tensors of."""
        drawn = {tile.tensor for tile in self.tiles} | {fragment.tensor for fragment in self.fragments}
        return tuple(lane for lane in LANES[self.kernel["operation"]] if not drawn.isdisjoint(lane))

    def as_dict(self) -> dict[str, Any]:
        """The scene as JSON values; layouts are {"shape", "stride"}, swizzles [bits, base, shift]."""
        return {
            "id": self.id,
            "title": self.title,
            "kernel": dict(self.kernel) | {"roles": _json(self.roles)},
            "loop": self.loop,
            "lanes": self._lanes(),
            "axes": {axis: {"label": AXIS_LABELS[axis], "size": size} for axis, size in self.sizes.items()},
            "tiles": [_json(tile) | {"axes": AXES[tile.tensor]} for tile in self.tiles],
            "fragments": [_json(fragment) | {"axes": AXES[fragment.tensor]} for fragment in self.fragments],
            "steps": [_json(step) | {"instructions": step.instructions} for step in self.steps],
            "budget": dict(self.budget),
        }


def _named(items: tuple[Named, ...], id: str) -> Named:
    for item in items:
        if item.id == id:
            return item
    raise KeyError(f"{id}; there are {', '.join(item.id for item in items)}")


def _json(value: Any) -> Any:
    if isinstance(value, Layout):
        return {"shape": value.shape, "stride": value.stride}
    if isinstance(value, Swizzle):
        return [value.bits, value.base, value.shift]
    if dataclasses.is_dataclass(value):
        return {field.name: _json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _json(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_json(part) for part in value]
    return value
