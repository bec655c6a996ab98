"""From a kernel's DSL objects to the parts of a scene: the code that all kernels share."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal

from cuteflash.problem import DTYPE_BYTES

from .algebra import ComposedLayout, Layout, Swizzle, composition, concatenate, right_inverse
from .dsl import coordinates, extents, layout_of, plain
from .scene import AXES, Axis, Fragment, Tile, Touch

SMEM_ALIGN = 1024  # bytes: the period of the widest swizzle
EXAMPLE_HEADS = 16  # of the (batch, seqlen, heads, head_dim) tensor that a global tile is cut from
OPERAND_AXES = {"A": (0, 2), "B": (1, 2), "C": (0, 1)}  # of a product's (M, N, K)
Operand = Literal["A", "B", "C"]
ELEMENT_BYTES = DTYPE_BYTES["bf16"]  # of fp16, too
WORD = 2  # bytes of an e4m3 cache that are moved as one element
REGISTER_TYPES = {"Float32": "f32", "Float16": "f16", "BFloat16": "bf16", "Float8E4M3FN": "e4m3"}
Strides = tuple[int, int]  # steps in a copy's or product's two coordinates, in elements of the whole tile


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One operand of a tiled product, placed in the block's tile.

    Attributes:
        operand: which one.
        tensor: whose tile.
        transposed: the operand's rows are the tile's columns.
        threads: thread of the consumers to element.
        values: (atom values, and the two of (tiles of M, tiles of N, k-blocks) that the operand has) to element.
        order: if the product takes the tile's elements in another order than the tile, number in that order to element.
    """

    operand: Operand
    tensor: str
    transposed: bool
    threads: Layout
    values: Layout
    order: Layout | None = None

    @property
    def is_turned(self) -> bool:
        """Whether the tile's columns are rows in memory: a row then has the product's k extent, in its order."""
        return self.transposed and self.order is not None

    @property
    def is_mn_major(self) -> bool:
        """Of an operand in shared memory: whether its M or N extent is contiguous, not that of k."""
        return self.transposed and not self.is_turned

    def touch(self, id: str, mode: Literal["read", "write"], counts: Sequence[int], first_thread: int) -> Touch:
        """The elements that the product's instructions touch; instructions count (tiles of M, tiles of N, k-blocks)."""
        atom, *moving = self.values.modes()
        steps = [Layout(count, 0) for count in counts]
        for axis, moved in zip(OPERAND_AXES[self.operand], moving):
            steps[axis] = moved
        return Touch(id, mode, concatenate(self.threads, atom, concatenate(*steps)), first_thread)

    def touch_k_blocks(self, id: str, mode: Literal["read", "write"], first_thread: int) -> Touch:
        """All of its elements once, its last mode outermost, by an instruction for each atom."""
        atom, *moving = self.values.modes()
        return Touch(id, mode, concatenate(self.threads, atom, concatenate(*moving)), first_thread)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A block's tile and the consumers that divide it.

    Attributes:
        sizes: extent of each axis.
        groups: warpgroups that divide the tile; 1 on sm80, whose tiled MMA spans all warps.
        first_thread: of the first consumer.
        group_threads: threads of one group.
        split: the axis that the groups divide equally; None if each has the whole.
    """

    sizes: dict[Axis, int]
    groups: int
    first_thread: int
    group_threads: int
    split: Axis | None = "m"

    def shape(self, tensor: str) -> tuple[int, int]:
        """(rows, cols) of a tensor's tile."""
        row, col = AXES[tensor]
        return self.sizes[row], self.sizes[col]

    def part(self, tensor: str) -> tuple[int, int]:
        """(rows, cols) of one group's part of a tensor's tile."""
        rows, cols = (self.sizes[axis] // (self.groups if axis == self.split else 1) for axis in AXES[tensor])
        return rows, cols

    def all_groups(self, threads: Layout, tensor: str) -> Layout:
        """The thread mode of all groups, derived from that of one; groups share tensors without the split axis."""
        if self.groups == 1:
            return threads
        row, col = AXES[tensor]
        rows, cols = self.part(tensor)
        step = rows if row == self.split else cols * self.shape(tensor)[0] if col == self.split else 0
        return concatenate(threads, Layout(self.groups, step))

    def placed(
        self, mma: Any, operand: Operand, tensor: str, transposed: bool = False, order: Layout | None = None
    ) -> Placed:
        """An operand of a tiled MMA; `transposed` if its rows are the tile's columns, as V's in PV; `order`: as of
        `Placed`."""
        import cutlass.cute as cute

        tile, strides = self.oriented(tensor, transposed)
        tv = plain(getattr(mma, f"tv_layout_{operand}_tiled"))
        sizes = [mma.get_tile_size(axis) for axis in OPERAND_AXES[operand]]
        partition = getattr(mma.get_slice(0), f"partition_{operand}")(cute.make_identity_tensor(tile))
        threads = self.all_groups(composition(Layout(tuple(sizes), strides), tv.mode(0)), tensor)
        values = coordinates(partition.layout, strides)
        if order is not None:
            threads, values = composition(order, threads), composition(order, values)
        return Placed(operand, tensor, transposed, threads, values, order)

    def copy(self, tv: Any, tiler: Any, tensor: str, transposed: bool = False, everyone: bool = False) -> Layout:
        """(thread, value, instruction) to element of a tiled copy's source or destination.

        Args:
            tv: the DSL's (thread, (atom values, rest)) layout over the tiler.
            tiler: the DSL's tiler.
            transposed: the copy's rows are the tile's columns.
            everyone: the copy spans the whole tile, not one group's rows.
        """
        tile, strides = self.oriented(tensor, transposed, everyone)
        sizes = extents(tiler)
        block = Layout(sizes, strides)
        threads, values = plain(tv).modes()
        atom, rest = values.modes()
        repeats = [
            Layout(extent // size, size * stride if extent > size else 0)
            for extent, size, stride in zip(tile, sizes, strides, strict=True)
        ]
        thread_mode = composition(block, threads)
        return concatenate(
            thread_mode if everyone else self.all_groups(thread_mode, tensor),
            composition(block, atom),
            concatenate(composition(block, rest), *repeats),
        )

    def oriented(self, tensor: str, transposed: bool, everyone: bool = False) -> tuple[tuple[int, int], Strides]:
        """A tile's extents in the coordinates of a copy or product, and the elements that a step in each advances."""
        rows, cols = self.shape(tensor) if everyone else self.part(tensor)
        step = self.shape(tensor)[0]
        return ((cols, rows), (step, 1)) if transposed else ((rows, cols), (1, step))

    def fragment(self, id: str, placed: Placed, registers: Any, note: str, place_of: str = "") -> Fragment:
        """A register tensor of the kernel; value v of a thread is element v of its registers."""
        values = composition(placed.values, right_inverse(plain(registers.layout)))
        width = registers.element_type.width
        return Fragment(
            id=id,
            tensor=placed.tensor,
            shape=self.shape(placed.tensor),
            operand=placed.operand,
            dtype=REGISTER_TYPES[registers.element_type.__name__],
            first_thread=self.first_thread,
            tv=concatenate(placed.threads, values),
            registers=values.size() * width // 32,
            place_of=place_of,
            note=note,
        )

    def row_touch(self, id: str, mode: Literal["read", "write"], acc: Placed) -> Touch:
        """An accumulator row by row of each thread, as the softmax goes through it: one "instruction" is one row.

        The atom's values are (2 columns, 2 rows[, column groups]) on both families; see `cuteflash.core.views`. They
        are (2 rows, 2 columns) if the product's rows are the tile's columns.
        """
        atom, m, n = acc.values.modes()
        pair, row, *groups = atom.modes()
        if acc.transposed:
            (pair, row), (m, n) = (row, pair), (n, m)
        return Touch(
            id, mode, concatenate(acc.threads, concatenate(pair, *groups, n), concatenate(row, m)), self.first_thread
        )


def products(frame: Frame, kernel: Any) -> dict[str, Placed]:
    """The operands of a forward kernel's products by tensor: S = Q K^T and O += P V."""
    qk, pv = kernel.tiled_mma_qk(), kernel.tiled_mma_pv()
    return {
        "Q": frame.placed(qk, "A", "Q"),
        "K": frame.placed(qk, "B", "K"),
        "S": frame.placed(qk, "C", "S"),
        "P": frame.placed(pv, "A", "P"),
        "V": frame.placed(pv, "B", "V", transposed=True),
        "O": frame.placed(pv, "C", "O"),
    }


def fragment_order(tv: Layout, shape: tuple[int, int], threads: int, chunk: int) -> Layout:
    """(row, col) to offset of a tile in memory that lies as threads hold it: parts of `threads` threads one after the
    other, in each `chunk` elements of a thread beside those of the next one.

    `tv` is (thread, register element) to element of the tile, of all threads that hold it together.
    """
    holders, values = (mode.size() for mode in tv.modes())
    parts, chunks = holders // threads, values // chunk
    memory = Layout(((threads, parts), (chunk, chunks)), ((chunk, threads * values), (1, chunk * threads)))
    return composition(composition(memory, right_inverse(tv)), Layout(shape))


def ptx_type(dtype: str) -> str:
    """An element type as PTX spells it."""
    return {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3"}[dtype]


def no_launch(packed_heads: int) -> Any:
    """A stand-in for the run-time part of a problem, from which a kernel's fragments take scales and heads."""
    from cutlass import Float32, Int32

    scale = Float32(1)
    return types.SimpleNamespace(
        scale_log2=scale, inner_scale=scale, packed_heads=packed_heads, heads_per_kv=Int32(1), tree=None
    )


def smem_start() -> Any:
    """A pointer to the start of a block's shared memory."""
    import cutlass
    import cutlass.cute as cute

    return cute.make_ptr(cutlass.Uint8, 0, cute.AddressSpace.smem, assumed_align=SMEM_ALIGN)


def global_tile(frame: Frame, tensor: str, head_dim: int, note: str, element_bytes: int = ELEMENT_BYTES) -> Tile:
    """A block's tile of a contiguous (batch, seqlen, heads, head_dim) tensor of EXAMPLE_HEADS heads."""
    rows, cols = frame.shape(tensor)
    return Tile(
        id=f"g{tensor}",
        tensor=tensor,
        space="global",
        shape=(rows, cols),
        layout=Layout((rows, cols), (EXAMPLE_HEADS * head_dim, 1)),
        valid=(rows, head_dim),
        note=f"{note} Drawn for a (batch, seqlen, {EXAMPLE_HEADS} heads, {head_dim}) tensor, whose rows are "
        f"{EXAMPLE_HEADS * head_dim * element_bytes} bytes apart.",
        element_bytes=element_bytes,
    )


def shared_tile(
    tensor: str,
    smem: Any,
    base: int,
    swizzle_bytes: bool,
    note: str,
    parts: int = 1,
    element_bytes: int = ELEMENT_BYTES,
) -> Tile:
    """A shared-memory tensor of the kernel from its composed layout, (rows, cols) or (rows, cols, parts x stages).

    Args:
        base: byte offset in the block's shared memory.
        swizzle_bytes: the swizzle counts bytes (sm90), not elements (sm80).
        parts: of a tile's query rows, one for each warpgroup; they lie one after the other in every stage.
    """
    found = layout_of(smem)
    if not isinstance(found, ComposedLayout):
        raise TypeError(f"{tensor}: {found} has no swizzle")
    shift = element_bytes.bit_length() - 1 if swizzle_bytes else 0
    swizzle = Swizzle(found.swizzle.bits, found.swizzle.base - shift, found.swizzle.shift)
    layout = found.layout
    if layout.rank == 3 and AXES[tensor][0] == "m":
        rows, cols, tail = layout.modes()
        part, stage = composition(tail, Layout((parts, tail.size() // parts), (1, parts))).modes()
        tile = (concatenate(rows, part), cols)
        layout = concatenate(*tile, stage) if stage.size() > 1 else concatenate(*tile)
    return Tile(
        id=f"s{tensor}",
        tensor=tensor,
        space="shared",
        shape=(layout.mode(0).size(), layout.mode(1).size()),
        layout=layout,
        swizzle=swizzle,
        base=base,
        stages=layout.mode(2).size() if layout.rank == 3 else 1,
        note=note,
        element_bytes=element_bytes,
    )


def shuffled(placed: Placed, shape: tuple[int, int], of_16: Layout) -> Placed:
    """An operand of a product that counts each 16 columns of the tile in another order: its number to the column."""
    rows, columns = shape
    modes = of_16.flat_modes()
    size, steps = of_16.size(), (rows * step for _, step in modes)
    extents = (extent for extent, _ in modes)
    order = Layout((rows, *extents, columns // size), (1, *steps, size * rows))
    threads, values = (composition(order, numbers) for numbers in (placed.threads, placed.values))
    return dataclasses.replace(placed, threads=threads, values=values, order=order)


def byte_tile(id: str, tensor: str, smem: Any, base: int, note: str, swizzle_bytes: bool = True) -> Tile:
    """A tile of e4m3 from the kernel's layout of pairs of bytes, byte by byte; the arguments are `shared_tile`'s."""
    pairs = shared_tile(tensor, smem, base, swizzle_bytes, note)
    rows, cols, *stages = (composition(Layout(mode.cosize(), WORD), mode) for mode in pairs.layout.modes())
    assert pairs.swizzle is not None
    bits, first, shift = dataclasses.astuple(pairs.swizzle)
    return dataclasses.replace(
        pairs,
        id=id,
        shape=(rows.size(), WORD * cols.size()),
        layout=concatenate(rows, concatenate(Layout(WORD, 1), cols), *stages),
        swizzle=Swizzle(bits, first + 1, shift),
        element_bytes=1,
    )
