"""The rotary embedding of a thread's rows of Q and K, in fp32; the result has 16 bits again, as the modules' own.

A thread that has both columns of each pair keeps cosines and sines in shared memory, for all heads that a block visits.
Otherwise it loads them for each head, and the other columns as well, which a neighbouring thread loads, too: all are in
the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp

from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS, CUTE_DTYPES
from cuteflash.kernels.common.quantize_held import PAIRS, Held, half_of, signs_if_mixed
from cuteflash.kernels.common.quantize_products import PTX_TYPES
from cuteflash.kernels.common.quantize_signature import TABLE_DTYPES
from cuteflash.kernels.common.quantize_tile import NUMBERS, WORDS, Numeric, Rows, Tile, part_of, widened
from cuteflash.problem import Dtype
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import COLUMNS, ROWS, QuantizeTraits

TABLES = 2  # cosines and sines

Numbers = Sequence[Float32] | cute.Tensor


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Cosines and sines of an embedding, (seqlen, rotary_dim / 2).

    Attributes:
        last: the last row of both; what packed sequences' vectors of lengths say may exceed it.
        is_packed: whether there are such vectors.
    """

    cos: Rows
    sin: Rows
    last: Int32
    dtype: cutlass.Constexpr[Numeric]
    is_packed: cutlass.Constexpr[bool]

    @classmethod
    def of(cls, problem: QuantizeProblem, tensors: QuantizeTensors) -> Rotary:
        """That of a problem with one."""
        tables = (Rows.of_table(x) for x in (tensors.cos, tensors.sin))
        dtype = TABLE_DTYPES[problem.rotary_dtype]
        return cls(*tables, Int32(tensors.cos.shape[0]) - 1, dtype, problem.is_packed)

    def tables(self, tile: Tile, columns: tuple[Int32, ...], i: int) -> tuple[cute.Tensor, cute.Tensor]:
        """8 neighbouring cosines and sines from each of `columns` on, for row `i`, fp32."""
        nbytes = self.dtype.width // 8
        steps = range(0, ALIGN_ELEMENTS * nbytes, ALIGN_BYTES)
        offsets = tuple(column * nbytes + step for column in columns for step in steps)
        tables = tuple(cute.make_rmem_tensor(ALIGN_ELEMENTS * len(columns), self.dtype) for _ in range(TABLES))
        row = tile.nearest(i)
        if self.is_packed:
            row = cutlass.min(row, self.last)
        for rows, table in zip((self.cos, self.sin), tables, strict=True):
            tile.load_pieces(rows, offsets, row, table)
        cos, sin = (widened(table) for table in tables)
        return cos, sin


@dataclasses.dataclass(frozen=True)
class Turner:
    """Rotates rows of a tile.

    Attributes:
        problem: what is asked for.
        tile: which one: a `SplitTile` if `problem.splits_columns`.
        rotary: the tables.
        signs: see `Held`.
        angles: if `problem.keeps_angles`, (4, threads, 16 bytes of a thread) fp32 cosines and sines, in shared memory.
    """

    problem: cutlass.Constexpr[QuantizeProblem]
    tile: Tile
    rotary: Rotary
    signs: Uint32 | None
    angles: cute.Tensor | None

    @classmethod
    def of(
        cls,
        problem: QuantizeProblem,
        traits: QuantizeTraits,
        tensors: QuantizeTensors,
        tile: Tile,
        memory: cute.Tensor | None,
    ) -> Turner:
        """For a tile; `put_angles` is still to be called. `memory` begins with that for the angles."""
        angles = None
        if problem.keeps_angles:
            shape = NUMBERS, traits.num_threads, TABLES * ROWS * ALIGN_ELEMENTS // NUMBERS
            angles = part_of(memory, 0, shape)
        signs = signs_if_mixed(problem.dtype, problem.hadamard)
        return cls(problem, tile, Rotary.of(problem, tensors), signs, angles)

    def put_angles(self) -> None:
        """Bring cosines and sines of all rows: each thread what it needs itself, or threads of a row for each other."""
        if self.angles is None:
            return
        if self.problem.loads_angles_by_rows:
            self._put_rows()
            return
        parts, last = self.tile.parts, self.problem.rotary_dim // 2 // ALIGN_ELEMENTS - 1
        columns = tuple(cutlass.min(self.tile.lane * parts + j, last) * ALIGN_ELEMENTS for j in range(parts))
        tables = [self.rotary.tables(self.tile, columns, i) for i in range(self.tile.rows)]
        for i, of_row in enumerate(tables):
            for which, table in enumerate(of_row):
                for j in range(parts):
                    for piece, target in enumerate(self._pieces(i, which, j)):
                        for x in range(NUMBERS):
                            target[x] = table[ALIGN_ELEMENTS * j + NUMBERS * piece + x]

    def _put_rows(self) -> None:
        """Bring them by requests of whole sectors; a warp's threads wait for each other."""
        thread, slots, lanes, lane = cute.arch.thread_idx()[0], self._slots, self._lanes, self.tile.lane
        cute.arch.sync_warp()  # what was there before is read
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=ALIGN_BYTES * 8)
        loaded = []
        for i in range(self.tile.rows):
            row = self.tile.nearest(i)
            if self.rotary.is_packed:
                row = cutlass.min(row, self.rotary.last)
            for which, rows in enumerate((self.rotary.cos, self.rotary.sin)):
                for k in range(slots):
                    piece = cute.make_rmem_tensor(NUMBERS, Float32)
                    cute.copy(atom, rows.piece(row, (k * lanes + lane) * ALIGN_BYTES, Float32), piece)
                    loaded.append((k, (i * TABLES + which) * slots, piece))
        for k, first, piece in loaded:
            place, slot = written(thread, lane, k, (lanes, slots))
            cute.autovec_copy(piece, self.angles[None, place, first + slot])
        cute.arch.sync_warp()

    @property
    def _slots(self) -> int:
        """16 bytes that a thread keeps of a row of cosines."""
        return self.tile.parts * ALIGN_ELEMENTS // NUMBERS

    @property
    def _lanes(self) -> int:
        """Threads of a row."""
        return self.problem.head_dim // COLUMNS // self.tile.parts

    def turned(self, words: cute.Tensor, rows: Rows) -> Held:
        """A thread's rows after the embedding, still to be mixed.

        Args:
            words: its elements, see `Tile.words`; none if it does not keep angles.
            rows: of the head that they are from.
        """
        held = self.held()
        for i in range(self.tile.rows):
            self.turn(held, words, rows, i)
        return held

    def held(self) -> Held:
        """Registers for a thread's rows."""
        found = cute.make_rmem_tensor((PAIRS, ROWS), Uint32)
        return Held(found, self.tile, self.problem.dtype, self.problem.hadamard, self.signs)

    def turn(self, held: Held, words: cute.Tensor, rows: Rows, i: int) -> None:
        """Row `i` of what `turned` gives."""
        if not self.problem.keeps_angles:
            turned: Iterable[Uint32] = self._turn_columns(rows, i)
        else:
            turned = (self._turn_halves if self.problem.splits_columns else self._turn_neighbours)(words, i)
        for at, word in enumerate(turned):
            row, place = divmod(i * self.tile.parts * PAIRS + at, PAIRS)
            held.words[place, row] = word

    def _turn_halves(self, words: cute.Tensor, i: int) -> list[Uint32]:
        """Row `i` of a `SplitTile`."""
        tile, parts, dtype = self.tile, self.tile.parts, self.problem.dtype
        found: dict[int, Uint32] = {}
        for j in range(parts):
            cos, sin = (self._table(i, which, j) for which in range(TABLES))
            for w in range(WORDS):
                places = [(h * parts + j) * WORDS + w for h in range(2)]
                (a, c), (b, d) = ([half_of(words[at, i], x, dtype) for x in range(2)] for at in places)
                both = turned_pair(a, b, cos, sin, 2 * w), turned_pair(c, d, cos, sin, 2 * w + 1)
                for at, pair in zip(places, zip(*both, strict=True), strict=True):
                    found[at] = pair_of(*pair, dtype)
                    if not tile.is_whole:
                        found[at] = cutlass.select_(tile.is_turned(), found[at], words[at, i])
        return [found[at] for at in sorted(found)]

    def _turn_neighbours(self, words: cute.Tensor, i: int) -> Iterator[Uint32]:
        """Row `i`, whose pairs are words."""
        dtype = self.problem.dtype
        cos, sin = (self._table(i, which, 0) for which in range(TABLES))
        is_turned = self.tile.lane * COLUMNS < self.problem.rotary_dim
        for w in range(PAIRS):
            word = words[w, i]
            turned = turned_pair(*(half_of(word, x, dtype) for x in range(2)), cos, sin, w)
            yield cutlass.select_(is_turned, pair_of(*turned, dtype), word)

    def _turn_columns(self, rows: Rows, i: int) -> Iterator[Uint32]:
        """Row `i`, which is loaded, as are its pairs' other columns."""
        dtype, half = self.problem.dtype, self.problem.rotary_dim // 2 // ALIGN_ELEMENTS
        tile = self.tile
        for j, chunk in enumerate(tile.chunks()):
            if j == 0 or self.problem.scales_by_block:  # whose rows are kept beside these
                cute.arch.sync_threads()  # the next loads before that would take registers
            is_first, is_turned = chunk < half, chunk < 2 * half
            other = cutlass.select_(is_first, chunk + half, cutlass.select_(is_turned, chunk - half, chunk))
            both = cute.make_rmem_tensor(2 * WORDS, Uint32)  # the thread's columns and the others
            offsets = chunk * ALIGN_BYTES, other * ALIGN_BYTES
            tile.load_row(rows, offsets, i, cute.recast_tensor(both, CUTE_DTYPES[dtype]))
            cos, sin = self.rotary.tables(tile, (chunk % half * ALIGN_ELEMENTS,), i)
            for w in range(WORDS):
                word = both[w]
                turned = [
                    half_of(word, x, dtype) * cos[2 * w + x]
                    + half_of(both[WORDS + w], x, dtype) * cutlass.select_(is_first, -sin[2 * w + x], sin[2 * w + x])
                    for x in range(2)
                ]
                yield cutlass.select_(is_turned, pair_of(*turned, dtype), word)

    def _pieces(self, i: int, which: int, j: int) -> list[cute.Tensor]:
        """Both 16 bytes of a part's cosines (0) or sines (1) in row `i`."""
        assert self.angles is not None
        count, thread = ALIGN_ELEMENTS // NUMBERS, cute.arch.thread_idx()[0]
        first, found = (i * TABLES + which) * self._slots, []
        for slot in range(j * count, (j + 1) * count):
            place = thread
            if self.problem.loads_angles_by_rows:
                place = kept(thread, slot, (self._lanes, self._slots))
            found.append(self.angles[None, place, first + slot])
        return found

    def _table(self, i: int, which: int, j: int) -> Numbers:
        """8 cosines (0) or sines (1) of a thread's row `i`."""
        found = cute.make_rmem_tensor(ALIGN_ELEMENTS, Float32)
        targets = cute.zipped_divide(found, (NUMBERS,))
        for piece, source in enumerate(self._pieces(i, which, j)):
            cute.autovec_copy(source, targets[None, piece])
        return found


def kept(thread: Int32, slot: int, sizes: tuple[int, int]) -> Int32:
    """Whose place in shared memory a thread's piece `slot` of a row is in, if threads load for each other.

    For each slot other threads of the row change places: those that write side by side what one of them keeps use
    different banks, as do those that read the same slot. `sizes` are threads of a row, and slots, which divide them.
    """
    lanes, slots = sizes
    return thread ^ (slot * (lanes // slots))


def written(thread: Int32, lane: Int32, k: int, sizes: tuple[int, int]) -> tuple[Int32, Int32]:
    """The place and the slot of a row's piece `k * lanes + lane`, which thread `lane` of the row loads for another."""
    lanes, slots = sizes
    slot = lane % slots
    return thread - lane + lane // slots + (slot ^ k) * (lanes // slots), slot


def turned_pair(a: Float32, b: Float32, cos: Numbers, sin: Numbers, e: int) -> tuple[Float32, Float32]:
    """A pair of columns by angle `e`."""
    return a * cos[e] - b * sin[e], a * sin[e] + b * cos[e]


def pair_of(a: Float32, b: Float32, dtype: Dtype) -> Uint32:
    """Two numbers rounded to 16 bits, the first one in the low half."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{PTX_TYPES[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )
