"""A tile of tokens in the registers of a block: loaded, measured, rounded to 8 bits.

Each thread has 16 neighbouring columns of 4 rows. The rows are those whose keys lie side by side in V^T (`Tile.row`),
so that one thread fills whole words of it; neighbouring threads have the other columns of the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.memory import SmemAllocator

from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS
from cuteflash.core.views import aligned
from cuteflash.problem import FP8_MAX, Fp8Dtype
from cuteflash.traits.quantize import COLUMNS, ROWS, WARP, QuantizeTraits

Numeric = type[cutlass.Numeric]

CHUNKS = COLUMNS // ALIGN_ELEMENTS  # loads of 16 bytes of a thread in a row of 16-bit elements
WORDS = COLUMNS // ROWS  # of a thread in a row of 8-bit elements
NUMBERS = ALIGN_BYTES // 4  # of fp32 in 16 bytes
TINY = 2.0**-126  # the smallest normal number of fp32
MOST_THREADS = 1024  # of a block
ROUND_PAIR = "cvt.rn.satfinite.{}x2.f32"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one head in global memory.

    Attributes:
        address: of the first row's first byte.
        stride: bytes from a row to the next.
    """

    address: Int64
    stride: Int64

    @classmethod
    def of(cls, tensor: cute.Tensor, first: Int32, head: Int32) -> Rows:
        """Of a (batch, seqlen, heads, head_dim) or (rows, heads, head_dim) tensor.

        Args:
            tensor: which it is.
            first: the batch entry, or the row at which a packed sequence begins.
            head: which one.
        """
        nbytes = tensor.element_type.width // 8
        of_first, *_, of_head, _ = tensor.stride
        offset = Int64(of_first) * first + Int64(of_head) * head
        return cls(tensor.iterator.toint() + offset * nbytes, Int64(tensor.stride[-3]) * nbytes)

    @classmethod
    def of_table(cls, tensor: cute.Tensor) -> Rows:
        """Of a (seqlen, columns) tensor."""
        return cls(tensor.iterator.toint(), Int64(tensor.stride[0]) * (tensor.element_type.width // 8))

    def piece(self, row: Int32, offset: Int32, dtype: Numeric, nbytes: int = ALIGN_BYTES) -> cute.Tensor:
        """16 bytes, or `nbytes`, of a row from byte `offset` on, as elements of `dtype`."""
        address = self.address + self.stride * row + offset
        pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=nbytes)
        return cute.make_tensor(pointer, cute.make_layout(nbytes * 8 // dtype.width))


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a thread has of a tile.

    Attributes:
        first, last: the tile's first row, and the last row of its sequence that counts.
        lane: the thread's columns begin at 16 times this.
        quad: which four rows of the tile it has.
        is_own: no thread before it has the same; the threads beyond a tile's last quad repeat that.
        end: of packed sequences, whose last rows may not count, where their rows end; None if all count.
        rows: how many rows a thread has.
        parts: of how many times 16 columns each.
    """

    first: Int32
    last: Int32
    lane: Int32
    quad: Int32
    is_own: Boolean
    end: Int32 | None = None
    rows: cutlass.Constexpr[int] = ROWS
    parts: cutlass.Constexpr[int] = 1

    @classmethod
    def of(cls, first: Int32, seqlen: Int32, head_dim: int, quads: int, thread: Int32 | None = None) -> Tile:
        """The part of the calling thread in a tile of `head_dim` columns, which begins at row `first`."""
        thread, lanes = own_thread(thread), head_dim // COLUMNS
        quad = thread // lanes
        return cls(first, seqlen - 1, thread % lanes, cutlass.min(quad, quads - 1), quad < quads)

    def row(self, i: int) -> Int32:
        """The thread's row `i`. In V^T position 4t + 2j + b of 16 holds key 8j + 2t + b: a quad has a t's four."""
        return self.first + self.quad // 4 * 16 + self.quad % 4 * 2 + (i >> 1) * 8 + (i & 1)

    def has(self, i: int) -> Boolean:
        """Whether the thread's row `i` exists."""
        return self.row(i) <= self.last

    def is_written(self, i: int) -> Boolean:
        """Whether the result has the thread's row `i`, which is 0 if it does not count."""
        return self.has(i) if self.end is None else self.row(i) < self.end

    def any(self) -> Boolean:
        """Whether some row of the tile counts."""
        return self.first <= self.last

    def nearest(self, i: int) -> Int32:
        """The thread's row `i`, or one that is there to be loaded in its place; of nothing that counts the first."""
        row = cutlass.min(self.row(i), self.last)
        return row if self.end is None else cutlass.max(row, 0)

    def load(self, rows: Rows, offsets: tuple[Int32, ...], dtype: Numeric) -> cute.Tensor:
        """(elements, rows) of each of the thread's rows 16 bytes from each of some byte offsets on.

        A row after the last is loaded as the last: without branches all loads are in flight together.
        """
        loaded = cute.make_rmem_tensor((ALIGN_BYTES * 8 // dtype.width * len(offsets), self.rows), dtype)
        for i in range(self.rows):
            self.load_row(rows, offsets, i, loaded[None, i])
        return loaded

    def words(self) -> cute.Tensor:
        """(pairs of columns, rows) for the thread's 16-bit elements."""
        return cute.make_rmem_tensor((self.parts * COLUMNS // 2, self.rows), Uint32)

    def load_words(self, rows: Rows, words: cute.Tensor, dtype: Numeric) -> None:
        """Load the thread's elements, of a type `dtype` of 16 bits, likewise."""
        offsets = tuple(chunk * ALIGN_BYTES for chunk in self.chunks())
        for i in range(self.rows):
            self.load_row(rows, offsets, i, cute.recast_tensor(words[None, i], dtype))

    def load_row(self, rows: Rows, offsets: tuple[Int32, ...], i: int, target: cute.Tensor) -> None:
        """Load of the thread's row `i` 16 bytes from each of some byte offsets on."""
        self.load_pieces(rows, offsets, self.nearest(i), target)

    def load_pieces(self, rows: Rows, offsets: tuple[Int32, ...], row: Int32, target: cute.Tensor) -> None:
        """Load of a row 16 bytes from each of some byte offsets on."""
        atom = cute.make_copy_atom(CopyUniversalOp(), target.element_type, num_bits_per_copy=ALIGN_BYTES * 8)
        pieces = cute.zipped_divide(target, (ALIGN_BYTES * 8 // target.element_type.width,))
        for j, offset in enumerate(offsets):
            cute.copy(atom, rows.piece(row, offset, target.element_type), pieces[None, j])

    def store_row(self, target: Rows, i: int, words: cute.Tensor) -> None:
        """Write the thread's row `i` of 8-bit elements, given as 4 words."""
        atom = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=COLUMNS * 8)
        cute.copy(atom, words, target.piece(self.row(i), self.lane * COLUMNS, Uint32, COLUMNS))

    def chunks(self) -> tuple[Int32, ...]:
        """The thread's columns of a row of 16-bit elements, counted in 16 bytes."""
        return tuple(self.lane * CHUNKS + j for j in range(CHUNKS))


def shared_numbers(nbytes: int) -> cute.Tensor | None:
    """(numbers,) shared memory of a block, None if it needs none."""
    if not nbytes:
        return None
    layout = cute.make_layout(nbytes // Float32.width * 8)
    return SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=ALIGN_BYTES)


def part_of(memory: cute.Tensor, first: int, shape: tuple[int, ...], dtype: Numeric = Float32) -> cute.Tensor:
    """A tensor in shared memory that begins `first` numbers after `memory` does."""
    pointer = (memory.iterator + first).align(ALIGN_BYTES)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=dtype), cute.make_layout(shape))


def own_thread(thread: Int32 | None) -> Int32:
    """The calling thread's number, if it is not at hand."""
    return cute.arch.thread_idx()[0] if thread is None else thread


def thread_again(step: Int32) -> Int32:
    """The calling thread's number, of which the compiler does not know that it is the same at each step.

    So nothing that follows from it takes registers from one step to the next.
    """
    return copy_of(cute.arch.thread_idx()[0], step) & (MOST_THREADS - 1)  # it is not negative


def copy_of(value: Int32, step: Int32) -> Int32:
    """A number, of which the compiler does not know that it is the same at each step."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0}; // {$r1}", write_only_types=[Int32], read_only_args=[value, step]
    )


def own_columns(vector: cute.Tensor, tile: Tile) -> cute.Tensor:
    """(columns,) of a (head_dim,) fp32 vector, which begins on 16 bytes, those that the thread has of a tile."""
    values = cute.make_rmem_tensor(COLUMNS, Float32)
    nbytes = COLUMNS * Float32.width // 8
    offsets = tuple(tile.lane * nbytes + first for first in range(0, nbytes, ALIGN_BYTES))
    tile.load_pieces(Rows(vector.iterator.toint(), Int64(0)), offsets, Int32(0), values)
    return values


@cute.jit
def put_row(target: Rows, tile: Tile, i: int | Int32, words: cute.Tensor):
    """Write a thread's row `i` if the result has it."""
    if tile.is_written(i):
        tile.store_row(target, i, words)


@cute.jit
def put_first_rows(target: Rows, tile: Tile, rows: list[cute.Tensor]):
    """Write as many of a thread's rows, those that the result has: with one branch if that has all."""
    if tile.is_written(len(rows) - 1):
        for i in cutlass.range_constexpr(len(rows)):
            tile.store_row(target, i, rows[i])
    else:
        for i in cutlass.range_constexpr(len(rows) - 1):
            put_row(target, tile, i, rows[i])


def widened(row: cute.Tensor) -> cute.Tensor:
    """A copy in fp32."""
    values = cute.make_rmem_tensor_like(row, Float32)
    values.store(row.load().to(Float32))
    return values


def peak_of(sizes: Iterable[Float32]) -> Float32:
    """The largest of some magnitudes that is a number, at least 0."""
    peaks = [Float32(0.0)] * ROWS  # independent chains
    for i, size in enumerate(sizes):
        peaks[i % ROWS] = cute.arch.fmax(peaks[i % ROWS], size)
    return cute.arch.fmax(cute.arch.fmax(peaks[0], peaks[1]), cute.arch.fmax(peaks[2], peaks[3]))


def descale_of(size: Float32, to: Fp8Dtype) -> Float32:
    """The scale that a largest magnitude asks for: positive and normal, 1 for a magnitude of 0."""
    descale = cute.arch.fmax(size / Float32(FP8_MAX[to]), Float32(TINY))
    return cutlass.select_(size > Float32(0.0), descale, Float32(1.0))


def block_max(value: Float32, numbers: cute.Tensor, warps: int) -> Float32:
    """The largest value of a block's threads, in all of them; `numbers` is shared memory for one of each warp."""
    numbers[cute.arch.warp_idx()] = cute.arch.warp_reduction_max(value)
    cute.arch.sync_threads()
    peak = numbers[0]
    for i in range(1, warps):
        peak = cute.arch.fmax(peak, numbers[i])
    return peak


def rounded(a: Float32, b: Float32, c: Float32, d: Float32, to: Fp8Dtype) -> Uint32:
    """Four values in 8 bits, the first in the lowest byte. What is too large becomes the largest, an infinity, too."""
    pair = ROUND_PAIR.format(to)
    return cute.arch.inline_ptx(
        f"{{.reg .b16 low, high; {pair} low, {{$r1}}, {{$r0}}; {pair} high, {{$r3}}, {{$r2}}; "
        "mov.b32 {$w0}, {low, high};}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def put_columns(
    target: cute.Tensor,
    tile: Tile,
    words: list[Uint32],
    traits: cutlass.Constexpr[QuantizeTraits],
    head_dim: cutlass.Constexpr[int],
    first_key: Int32 | None = None,
    stage: cute.Tensor | None = None,
    thread: Int32 | None = None,
):
    """Write a tile of 8-bit rows into V^T, by way of shared memory.

    Args:
        target: (head_dim, keys) of one head.
        words: of each of the thread's columns its four rows, the first in the lowest byte.
        head_dim: columns of the tile.
        first_key: where the tile's rows begin in `target`; None is where they begin in their sequence.
        stage: (quads, head_dim) words in shared memory, if there is a place for them.
        thread: the calling thread's number, if it is at hand.
    """
    first = tile.first if const_expr(first_key is None) else first_key
    if const_expr(stage is None):
        stage = SmemAllocator().allocate_tensor(Uint32, cute.make_layout((traits.quads, head_dim)), byte_alignment=16)
    for e in cutlass.range_constexpr(COLUMNS):
        stage[tile.quad ^ bank_turn(tile.lane, traits, head_dim), tile.lane * COLUMNS + e] = words[e]
    cute.arch.sync_threads()
    atom = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=ALIGN_BYTES * 8)
    pieces = traits.quads // WORDS  # of 16 keys in a column
    piece, total = own_thread(thread), pieces * head_dim
    for _ in cutlass.range_constexpr(-(-total // traits.num_threads)):
        if piece < total:
            column, group = piece // pieces, piece % pieces
            place = (group * WORDS) ^ bank_turn(column // COLUMNS, traits, head_dim)
            found = cute.make_rmem_tensor(WORDS, Uint32)
            source = aligned(stage.iterator + column * traits.quads + place, ALIGN_BYTES)
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(WORDS)), found)
            address = target[column, None].iterator.toint() + first + group * COLUMNS
            pointer = cute.make_ptr(Uint32, address, AddressSpace.gmem, assumed_align=ALIGN_BYTES)
            cute.copy(atom, found, cute.make_tensor(pointer, cute.make_layout(WORDS)))
        piece += traits.num_threads


def bank_turn(lane: Int32, traits: QuantizeTraits, head_dim: int) -> Int32:
    """What the words of 16 columns are XORed with in shared memory, so that a warp's writes are in many banks."""
    lanes = head_dim // COLUMNS
    step = max(WORDS, WARP // (1 << (lanes - 1).bit_length()))
    return lane * step % traits.quads
