"""Blocks of V in the kernel that converts."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.core.signature import ALIGN_BYTES, ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_centred import less_than_mean, size_of_values
from cuteflash.kernels.common.quantize_held import Held
from cuteflash.kernels.common.quantize_scales import Scales
from cuteflash.kernels.common.quantize_tile import (
    CHUNKS,
    NUMBERS,
    WORDS,
    Rows,
    Tile,
    own_columns,
    put_columns,
    put_first_rows,
    rounded,
    thread_again,
)
from cuteflash.kernels.common.quantize_work import Place, Span, Work, tile_span, tiles_of
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import COLUMNS, ROWS, QuantizeTraits

Value = Callable[[int, int], Float32]  # an element in fp32, of a thread's column and row


class Values:
    """The parts of blocks of V."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.scales = Scales(traits, problem)

    @cute.jit
    def convert(self, tensors: QuantizeTensors, work: Work, number: Int32):
        """Convert a tile of a head, or several."""
        place = work.v.place(number - work.first_v())
        if const_expr(self.traits.centres_v):
            self.convert_tiles(tensors, place)
        else:
            span = tile_span(self.problem, self.traits, tensors, None, place)
            tile = span.tile(span.first, self.problem.head_dim_v, self.traits.quads)
            held = Held.load(Rows.of(tensors.v, span.origin, place.head), tile, self.problem.dtype)
            mean = None
            if const_expr(self.problem.smooths_v):
                mean = self.mean(tensors, span, place, tile)
            size = held.magnitude(mean) if self.problem.scales_by_block else None
            factor = self.factor(tensors, span, place, tile, size, self.scales.numbers()[None, 0])
            words = cute.make_rmem_tensor(COLUMNS, Uint32)
            for j in cutlass.range_constexpr(CHUNKS):
                self.put_words(words, functools.partial(held.value, mean=mean), factor, j)
            self.put(tensors, span, place, tile, words, None)

    @cute.jit
    def convert_tiles(self, tensors: QuantizeTensors, place: Place):
        """Convert tiles of a head that follow each other: while one is written, the next one is loaded.

        Elements minus their mean stay fp32 in between.
        """
        problem, traits = self.problem, self.traits
        first = place.tile * traits.tiles_of_v
        span = tile_span(problem, traits, tensors, None, Place(place.batch, first, place.head))
        tile = span.tile(span.first, problem.head_dim_v, traits.quads)
        rows = Rows.of(tensors.v, span.origin, place.head)
        held = Held.load(rows, tile, problem.dtype)
        mean = self.kept(self.mean(tensors, span, place, tile))
        numbers = self.scales.numbers(2)  # tiles take turns, so that one barrier suffices
        count = cutlass.min(traits.tiles_of_v, self.tiles(tensors) - first)
        for step in cutlass.range(count, unroll=1):
            tile = dataclasses.replace(tile, first=span.first + step * traits.tokens)
            values = less_than_mean(dataclasses.replace(held, tile=tile), rows, mean)
            following = dataclasses.replace(tile, first=tile.first + traits.tokens)
            if step + 1 < count:
                held.load_again(rows, following, 0)
            size = None
            if const_expr(problem.scales_by_block):
                size = size_of_values(values)
            else:
                cute.arch.sync_threads()  # what the last tile had in shared memory is read
            own = Place(place.batch, first + step, place.head)
            factor = -self.factor(tensors, span, own, tile, size, numbers[None, step & 1])
            words = cute.make_rmem_tensor(COLUMNS, Uint32)
            for j in cutlass.range_constexpr(CHUNKS):
                self.put_words(words, functools.partial(value_of, values), factor, j)
                if const_expr(j + 1 < CHUNKS):
                    if step + 1 < count:  # not sooner, which would take registers
                        held.load_again(rows, following, j + 1)
            thread = thread_again(step)
            again = span.tile(tile.first, problem.head_dim_v, traits.quads, thread=thread)
            self.put(tensors, span, own, again, words, thread)

    def tiles(self, tensors: QuantizeTensors) -> Int32:
        """How many tiles a head has."""
        if self.problem.transposes_v:
            return cute.ceil_div(tensors.v8.shape[-1], self.traits.tokens)
        return tiles_of(tensors, tensors.v.shape[-3], self.traits.tokens, BLOCK_TOKENS)

    def mean(self, tensors: QuantizeTensors, span: Span, place: Place, tile: Tile) -> cute.Tensor:
        """(columns,) of a thread; other kernels bring it."""
        cute.arch.griddepcontrol_wait()
        return own_columns(tensors.v_mean[span.entry, place.head, None], tile)

    def kept(self, mean: cute.Tensor) -> cute.Tensor:
        """A thread's columns in shared memory, where they take no registers beside a tile."""
        shape = cute.make_layout((NUMBERS, self.traits.num_threads, COLUMNS // NUMBERS))
        stage = SmemAllocator().allocate_tensor(Float32, shape, byte_alignment=ALIGN_BYTES)
        target = stage[None, cute.arch.thread_idx()[0], None]
        for e in range(COLUMNS):
            target[e % NUMBERS, e // NUMBERS] = mean[e]
        return target

    def factor(
        self,
        tensors: QuantizeTensors,
        span: Span,
        place: Place,
        tile: Tile,
        size: Float32 | None,
        numbers: cute.Tensor,
    ) -> Float32:
        """What a tile's elements are multiplied with: that of a scale which is there, or is found and written.

        Args:
            size: if it is to be found, the largest magnitude that a thread has seen.
            numbers: see `Scales.numbers`.
        """
        descale = self.scales.at(tensors.v_descale, Place(span.entry, place.tile, place.head))
        if size is None:
            return 1.0 / descale[0]
        found = self.scales.find(size, tile, numbers)
        self.scales.put(descale, found, self.scales.has(tensors.v_descale, place))
        return 1.0 / found

    def put_words(self, words: cute.Tensor, value: Value, factor: Float32, j: int) -> None:
        """Elements of load `j` times a factor in 8 bits, four in a word: of a column if V is transposed, else of a row.

        All 16 words are those of a thread's columns, or of its rows.
        """
        for x in range(COLUMNS):
            if self.problem.transposes_v:
                places = [(x, i) for i in range(ROWS)]
            else:
                places = [(x % WORDS * ROWS + b, x // WORDS) for b in range(4)]
            if places[0][0] // ALIGN_ELEMENTS == j:
                words[x] = rounded(*(value(e, i) * factor for e, i in places), self.problem.to)

    @cute.jit
    def put(
        self, tensors: QuantizeTensors, span: Span, place: Place, tile: Tile, words: cute.Tensor, thread: Int32 | None
    ):
        """Write a tile, zeros in place of rows that do not count."""
        problem, traits = self.problem, self.traits
        has = [tile.has(i) for i in range(ROWS)]
        if const_expr(problem.transposes_v):
            of_rows = [cutlass.select_(has[i], Uint32(0xFF << 8 * i), Uint32(0)) for i in range(ROWS)]
            mask = functools.reduce(operator.or_, of_rows)
            columns = [words[e] & mask for e in range(COLUMNS)]
            if const_expr(problem.is_packed):
                target, first_key = tensors.v8[place.head, None, None], place.tile * traits.tokens
            else:
                target, first_key = tensors.v8[place.batch, place.head, None, None], None
            put_columns(target, tile, columns, traits, problem.head_dim_v, first_key, thread)
        else:
            target = Rows.of(tensors.v8, span.origin, place.head)
            put_first_rows(target, tile, [self.row(words, i, has[i]) for i in range(ROWS)])

    def row(self, words: cute.Tensor, i: int, has: Boolean) -> cute.Tensor:
        """(words,) of row `i` alone."""
        row = cute.make_rmem_tensor(WORDS, Uint32)
        for w in range(WORDS):
            word = words[WORDS * i + w]
            row[w] = cutlass.select_(has, word, Uint32(0)) if self.problem.is_packed else word
        return row


def value_of(values: cute.Tensor, e: int, i: int) -> Float32:
    """Column `e` of row `i` of what `less_than_mean` gives."""
    return values[e % ALIGN_ELEMENTS, i, e // ALIGN_ELEMENTS]
