"""Hopper's instructions as steps of a scene: TMA boxes, WGMMA products with their descriptors, stmatrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cuteflash.problem import DTYPE_BYTES, Dtype
from cuteflash.traits.sm90 import WARPGROUP, WGMMA_K, WGMMA_M

from .algebra import Layout, composition, concatenate
from .dsl import coordinates, plain
from .read import ELEMENT_BYTES, EXAMPLE_HEADS, Frame, Placed, ptx_type
from .scene import Descriptor, Phase, Step, Tile, Touch

TMA_LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
TMA_STORE = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
STMATRIX_TRANS = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
WGMMA = "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype}"
MATRIX_ROWS = "Lane i gives the address of a row of 8 elements; a phase is the 8 rows of one matrix."
CONSUMERS = "every consumer warp"
WARPGROUPS = "every consumer warpgroup"
EXAMPLE_TOKENS = 4096
UNIT = 16  # bytes that descriptors count in
CORE_ROWS = 8  # a core matrix is 8 rows of 16 bytes


def example_tensor(dtype: Any, head_dim: int) -> Any:
    """A contiguous (batch, seqlen, heads, head_dim) tensor, for the kernel's TMA atoms."""
    import cutlass.cute as cute

    shape = (1, EXAMPLE_TOKENS, EXAMPLE_HEADS, head_dim)
    stride = (EXAMPLE_TOKENS * EXAMPLE_HEADS * head_dim, EXAMPLE_HEADS * head_dim, head_dim, 1)
    start = cute.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout(shape, stride=stride))


def example_vt(dtype: Any, head_dim: int) -> Any:
    """A contiguous (batch, heads, head_dim, keys) V^T, likewise."""
    import cutlass.cute as cute

    shape = (1, EXAMPLE_HEADS, head_dim, EXAMPLE_TOKENS)
    stride = (EXAMPLE_HEADS * head_dim * EXAMPLE_TOKENS, head_dim * EXAMPLE_TOKENS, EXAMPLE_TOKENS, 1)
    start = cute.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout(shape, stride=stride))


@dataclasses.dataclass(frozen=True, slots=True)
class When:
    """When a step runs, and who issues it."""

    phase: Phase
    repeat: str
    role: str = CONSUMERS


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """An operand of a product.

    Attributes:
        part: the tile or fragment that holds it.
        view: the kernel's fragment of descriptors; None if it is in registers.
    """

    placed: Placed
    part: str
    view: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What TMA moves between a tensor's tiles in global and shared memory, `g{tensor}` and `s{tensor}`.

    Attributes:
        atom, coords: the kernel's TMA atom and coordinate tensor.
        smem: its shared-memory tensor.
        rows: of the kernel's copy; all boxes of a tile have as many.
        target: id of the tile in shared memory, if that is another one.
        width: elements of the tile that are moved as one.
        order: if the tensor in memory has the tile's columns as rows, in an order of its own: number in memory's order
            to element, as of `Placed`.
    """

    tensor: str
    atom: Any
    coords: Any
    smem: Any
    rows: int
    target: str = ""
    width: int = 1
    order: Layout | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HopperSteps:
    """The instructions of one kernel.

    Attributes:
        frame: the tile as the consumers divide it.
        tiles: the shared-memory tiles by id.
        dtype: element type of the operands.
    """

    frame: Frame
    tiles: Mapping[str, Tile]
    dtype: Dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return DTYPE_BYTES[self.dtype]

    @property
    def k_block(self) -> int:
        """The k extent of a product's instruction."""
        return WGMMA_K * ELEMENT_BYTES // self.element_bytes

    def load(self, what: Transfer, when: When, note: str) -> Step:
        """A TMA load by one thread."""
        box, slabs, parts = self._boxes(what)
        tv = concatenate(Layout(1, 0), box, concatenate(slabs, parts))
        ends = (f"g{what.tensor}", "global"), (what.target or f"s{what.tensor}", "shared memory")
        return self._transfer("load", what, ends, Touch("", "read", tv), when, note)

    def store(self, what: Transfer, when: When, note: str, by_group: bool = True) -> Step:
        """A TMA store, of every warpgroup's own rows or by one thread for all."""
        box, slabs, parts = self._boxes(what)
        if by_group:
            tv, first = concatenate(self.warpgroups(self.frame, what.tensor), box, slabs), self.frame.first_thread
        else:
            tv, first = concatenate(Layout(1, 0), box, concatenate(slabs, parts)), self.frame.first_thread
        ends = (f"s{what.tensor}", "shared memory"), (f"g{what.tensor}", "global")
        return self._transfer("store", what, ends, Touch("", "read", tv, first), when, note)

    def _boxes(self, what: Transfer) -> tuple[Layout, Layout, Layout]:
        """A box's elements, the boxes beside each other, the copies of `what.rows` rows below each other."""
        import cutlass.cute as cute

        from cuteflash.atoms.sm90 import tma_partition

        rows, cols = self.frame.shape(what.tensor)
        # TMA counts coordinates from the contiguous one: 0 is the column, 1 the row.
        cols, step = cols // what.width, rows * what.width
        tile, steps = ((what.rows, cols), (step, 1)) if what.order is None else ((cols, what.rows), (1, rows))
        boxes = cute.local_tile(what.coords[None, None, 0, 0], tile, (None, 0))
        _, partition = tma_partition(what.atom, what.smem, boxes)
        moved = coordinates(partition.layout, (*steps, 0, 0)).mode(0)
        box, slabs = (moved if what.order is None else composition(what.order, moved)).modes()
        box = box if what.width == 1 else concatenate(Layout(what.width, rows), box)
        return box, slabs, Layout(rows // what.rows, what.rows if rows > what.rows else 0)

    def _transfer(
        self, verb: str, what: Transfer, ends: tuple[tuple[str, str], ...], touch: Touch, when: When, note: str
    ) -> Step:
        (source, origin), (target, goal) = ends
        box_rows = what.rows if what.order is None else self.frame.shape(what.tensor)[1]
        return Step(
            id=f"{verb}_{what.tensor.lower()}",
            title=f"{what.tensor}: {origin} → {goal}",
            kind="tma",
            instruction=TMA_LOAD if verb == "load" else TMA_STORE,
            role=when.role,
            repeat=when.repeat,
            phase=when.phase,
            touches=(
                dataclasses.replace(touch, id=source, mode="read"),
                dataclasses.replace(touch, id=target, mode="write"),
            ),
            note=f"An instruction moves one box; the TMA unit applies the swizzle. {note}".strip(),
            box=(box_rows, touch.tv.mode(1).size() // box_rows),
        )

    def fetch(self, tensor: str, copy: Any, when: When) -> Step:
        """`s{tensor}` to the registers of operand A, `r{tensor}`, by ldmatrix."""
        reads = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor)
        writes = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor)
        return Step(
            id=f"ldmatrix_{tensor.lower()}",
            title=f"{tensor}: shared memory → registers",
            kind="ldmatrix",
            instruction=LDMATRIX,
            role=when.role,
            repeat=when.repeat,
            phase=when.phase,
            touches=(
                Touch(f"s{tensor}", "read", reads, self.frame.first_thread, lane_bytes=16),
                Touch(f"r{tensor}", "write", writes, self.frame.first_thread),
            ),
            note=MATRIX_ROWS,
        )

    def stage(self, tensor: str, copy: Any, source: str, when: When, note: str, transposed: bool = False) -> Step:
        """Registers `source` to `s{tensor}` by stmatrix; `transposed` if the registers hold columns as rows."""
        reads = self.frame.copy(copy.layout_src_tv_tiled, copy.tiler_mn, tensor, transposed)
        writes = self.frame.copy(copy.layout_dst_tv_tiled, copy.tiler_mn, tensor, transposed)
        return Step(
            id=f"stmatrix_{tensor.lower()}",
            title=f"{tensor}: registers → shared memory",
            kind="stmatrix",
            instruction=STMATRIX_TRANS if transposed else STMATRIX,
            role=when.role,
            repeat=when.repeat,
            phase=when.phase,
            touches=(
                Touch(source, "read", reads, self.frame.first_thread),
                Touch(f"s{tensor}", "write", writes, self.frame.first_thread, lane_bytes=16),
            ),
            note=f"{note} {MATRIX_ROWS}".strip(),
        )

    def product(
        self, id: str, title: str, factors: tuple[Factor, Factor, Factor], when: When, note: str, **more: Any
    ) -> Step:
        """A WGMMA of operands A and B and an accumulator: an instruction is one k-block of one tile of N.

        `frame` among `more` divides the product otherwise than the other steps.
        """
        frame: Frame = more.get("frame", self.frame)
        a, b, acc = factors
        counts = (1, b.placed.values.mode(1).size(), a.placed.values.mode(2).size())
        sides = [
            self._from_shared(frame, factor, counts)
            if factor.view is not None
            else factor.placed.touch(factor.part, "read", counts, frame.first_thread)
            for factor in (a, b)
        ]
        n = self._extents(frame, b.placed)[0] // counts[1]
        return Step(
            id=id,
            title=title,
            kind="wgmma",
            instruction=WGMMA.format(n=n, k=self.k_block, dtype=ptx_type(self.dtype)),
            role=when.role,
            repeat=when.repeat,
            phase=when.phase,
            touches=(*sides, acc.placed.touch(acc.part, "write", counts, frame.first_thread)),
            note=f"An instruction is one k-block of {self.k_block}. {note}".strip(),
            descriptor={"a": self._descriptor(frame, a, counts[1]), "b": self._descriptor(frame, b, counts[1])},
        )

    def _from_shared(self, frame: Frame, factor: Factor, counts: tuple[int, int, int]) -> Touch:
        """An operand that the product reads from shared memory: the warpgroup reads it, not single threads."""
        whole = factor.placed.touch(factor.part, "read", counts, frame.first_thread).tv
        threads = self.warpgroups(frame, factor.placed.tensor)
        return Touch(factor.part, "read", concatenate(threads, whole.mode(1), whole.mode(2)), frame.first_thread)

    @staticmethod
    def warpgroups(frame: Frame, tensor: str) -> Layout:
        """A thread mode in which a warpgroup's threads all name the first element of its part."""
        return frame.all_groups(Layout(WARPGROUP, 0), tensor)

    @staticmethod
    def _extents(frame: Frame, placed: Placed) -> tuple[int, int]:
        """(M or N, K) of an operand of one warpgroup's product."""
        rows, cols = frame.part(placed.tensor)
        return (cols, rows) if placed.transposed else (rows, cols)

    def _descriptor(self, frame: Frame, factor: Factor, tiles_n: int) -> Descriptor | None:
        """The matrix descriptor of an operand: starts from the kernel's own fragment, offsets from its layout.

        Canonical layouts of swizzled operands, PTX ISA "Asynchronous warpgroup level matrix instructions": 8 rows of
        one swizzle width are an atom; K-major, atoms follow each other along M or N by the stride offset; MN-major,
        along K by the stride offset and along M or N by the leading one.
        """
        if factor.view is None:
            return None
        tile = self.tiles[factor.part]
        _, n_mode, k_mode = plain(factor.view.layout).modes()[:3]
        if factor.placed.operand == "A":
            n_mode = Layout(tiles_n, 0)
        assert tile.swizzle is not None
        width = UNIT << tile.swizzle.bits
        rows, cols = (mode for mode in tile.layout.modes()[:2])
        if factor.placed.is_turned:
            rows, cols = cols, rows
        atom_step = rows.flat_modes()[1][1] if len(rows.flat_modes()) > 1 else 0
        slabs = [(count, step) for count, step in cols.flat_modes()[1:] if count > 1]
        mn_major = factor.placed.is_mn_major
        several = slabs and self._extents(frame, factor.placed)[0] * self.element_bytes > width
        leading = slabs[0][1] * self.element_bytes if mn_major and several else UNIT
        return Descriptor(
            tile=tile.id,
            major="MN" if mn_major else "K",
            swizzle_bytes=width,
            leading_bytes=leading,
            stride_bytes=atom_step * self.element_bytes,
            starts=tuple(int(start) * UNIT for start in concatenate(n_mode, k_mode).indices().reshape(-1, order="F")),
            core=self._core_matrices(frame, factor.placed, tiles_n),
        )

    def _core_matrices(self, frame: Frame, placed: Placed, tiles_n: int) -> Layout:
        """(row, element, core matrix) to element of the tile, of the first instruction and warpgroup."""
        step, wide = frame.shape(placed.tensor)[0], UNIT // self.element_bytes
        extent = WGMMA_M if placed.operand == "A" else self._extents(frame, placed)[0] // tiles_n
        rows, cols = (self.k_block, extent) if placed.is_mn_major else (extent, self.k_block)
        along, beside = (step, 1) if placed.is_turned else (1, step)  # of memory's rows and columns
        down = Layout(rows // CORE_ROWS, CORE_ROWS * along)
        across = Layout(cols // wide, wide * beside)
        found = concatenate(Layout(CORE_ROWS, along), Layout(wide, beside), concatenate(down, across))
        return found if placed.order is None else composition(placed.order, found)
