"""Blocks of V in the kernel that converts."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.core.signature import ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_centred import less_than_mean, size_of_values
from cuteflash.kernels.common.quantize_held import Held
from cuteflash.kernels.common.quantize_parts import Parts
from cuteflash.kernels.common.quantize_scales import Scales
from cuteflash.kernels.common.quantize_tile import (
    NUMBERS,
    WORDS,
    Rows,
    Tile,
    block_max,
    descale_of,
    own_columns,
    part_of,
    put_columns,
    put_row,
    rounded,
    thread_again,
)
from cuteflash.kernels.common.quantize_work import Place, Span, Work, tile_span, tiles_of
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import COLUMNS, ROWS, WARP, QuantizeTraits

Value = Callable[[int, int], Float32]  # an element in fp32, of a thread's column and row


class Values:
    """The parts of blocks of V."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.scales = Scales(traits, problem)
        self.parts = Parts(traits, problem)

    @cute.jit
    def convert(self, tensors: QuantizeTensors, work: Work, number: Int32, memory: cute.Tensor | None):
        """Convert a tile of a head, or several; `memory` is that of the block, see `QuantizeTraits.shared_bytes`."""
        problem = self.problem
        place = work.v.place(number - work.first_v())
        if const_expr(self.traits.centres_v):
            self.convert_tiles(tensors, work, place, memory)
        else:
            span = tile_span(problem, self.traits, tensors, None, place)
            tile = span.tile(span.first, problem.head_dim_v, self.traits.quads)
            held = Held.load(Rows.of(tensors.v, span.origin, place.head), tile, problem.dtype)
            mean = known = None
            if const_expr(problem.folds):
                mean, known = self.found(tensors, work.parts, place, tile)
            elif const_expr(problem.smooths_v):
                mean = self.mean(tensors, span, place, tile)
            elif const_expr(problem.measures_heads):
                cute.arch.griddepcontrol_wait()  # they bring the scale, too
            size = held.magnitude(mean) if problem.scales_by_block else None
            factor = self.factor(tensors, span, place, tile, size, self.scales.numbers()[None, 0], known)
            value = functools.partial(held.value, mean=mean)
            if const_expr(problem.transposes_v):
                words = [self.column(value, factor, e) for e in range(COLUMNS)]
                self.put_columns(tensors, place, tile, words)
            else:
                self.put_rows(Rows.of(tensors.v8, span.origin, place.head), tile, value, factor)

    @cute.jit
    def convert_tiles(self, tensors: QuantizeTensors, work: Work, place: Place, memory: cute.Tensor):
        """Transpose tiles of a head that follow each other: while one is written, the next one is loaded.

        Elements minus their mean stay fp32 in between.
        """
        problem, traits = self.problem, self.traits
        first = place.tile * traits.tiles_of_v
        span = tile_span(problem, traits, tensors, None, Place(place.batch, first, place.head))
        tile = span.tile(span.first, problem.head_dim_v, traits.quads)
        rows = Rows.of(tensors.v, span.origin, place.head)
        held = Held.load(rows, tile, problem.dtype)
        stage = part_of(memory, 0, (traits.quads, problem.head_dim_v), Uint32)
        known = None
        if const_expr(problem.folds):
            mean, known = self.found(tensors, work.parts, Place(place.batch, first, place.head), tile)
        else:
            mean = self.mean(tensors, span, place, tile)
        mean = self.kept(mean, memory, traits.quads * problem.head_dim_v)
        numbers = self.scales.numbers(2)  # tiles take turns, so that one barrier suffices
        count = cutlass.min(traits.tiles_of_v, self.tiles(tensors) - first)
        for step in cutlass.range(count, unroll=1):
            tile = dataclasses.replace(tile, first=span.first + step * traits.tokens)
            following = dataclasses.replace(tile, first=tile.first + traits.tokens)
            values = less_than_mean(dataclasses.replace(held, tile=tile), rows, mean)
            if step + 1 < count:
                held.load_again(rows, following, 0)
            size = None
            if const_expr(problem.scales_by_block):
                size = size_of_values(values)
            else:
                cute.arch.sync_threads()  # what the last tile had in shared memory is read
            own = Place(place.batch, first + step, place.head)
            factor = -self.factor(tensors, span, own, tile, size, numbers[None, step & 1], known)
            value = functools.partial(value_of, values)
            words = [self.column(value, factor, e) for e in range(ALIGN_ELEMENTS)]
            if step + 1 < count:  # not sooner, which would take registers
                held.load_again(rows, following, 1)
            words += [self.column(value, factor, e) for e in range(ALIGN_ELEMENTS, COLUMNS)]
            thread = thread_again(step)
            again = span.tile(tile.first, problem.head_dim_v, traits.quads, thread=thread)
            self.put_columns(tensors, own, again, words, stage, thread)

    def tiles(self, tensors: QuantizeTensors) -> Int32:
        """How many tiles a head has."""
        if self.problem.transposes_v:
            return cute.ceil_div(tensors.v8.shape[-1], self.traits.tokens)
        return tiles_of(tensors, tensors.v.shape[-3], self.traits.tokens, BLOCK_TOKENS)

    def mean(self, tensors: QuantizeTensors, span: Span, place: Place, tile: Tile) -> cute.Tensor:
        """(columns,) of a thread; other kernels bring it."""
        cute.arch.griddepcontrol_wait()
        return own_columns(tensors.v_mean[span.entry, place.head, None], tile)

    @cute.jit
    def found(self, tensors: QuantizeTensors, parts: Work, place: Place, tile: Tile):
        """(V's mean, (columns,) of a thread, or None; the head's descale) of what is measured of parts.

        The blocks of a head's first tile write them.
        """
        problem, traits = self.problem, self.traits
        cute.arch.griddepcontrol_wait()
        thread, peak = cute.arch.thread_idx()[0], Float32(0.0)
        mean = None
        columns = SmemAllocator().allocate_tensor(Float32, cute.make_layout(problem.head_dim_v), byte_alignment=16)
        if const_expr(problem.smooths_v):
            if thread < problem.head_dim_v:
                columns[thread], size = self.parts.finish_column(
                    tensors, parts, place.batch, place.head, thread, place.tile == 0
                )
                peak = cute.arch.fmax(peak, size)
        else:
            of_v = self.parts.of_entry(parts.v, None, place.batch, is_v=True)
            threads = thread, traits.num_threads
            peak = self.parts.largest(tensors, of_v, parts.first_v(), (place.head, 1), threads)
        peak = block_max(peak, self.scales.numbers()[None, 0], traits.num_threads // WARP)
        descale = descale_of(peak, problem.to)
        self.scales.put(self.scales.at(tensors.v_descale, place), descale, place.tile == 0)
        if const_expr(problem.smooths_v):
            mean = cute.make_rmem_tensor(COLUMNS, Float32)
            for e in cutlass.range_constexpr(COLUMNS):
                mean[e] = columns[tile.lane * COLUMNS + e]
        return mean, descale

    def kept(self, mean: cute.Tensor, memory: cute.Tensor, first: int) -> cute.Tensor:
        """(4, columns / 4) of a thread in shared memory, where they take no registers beside a tile."""
        shape = NUMBERS, self.traits.num_threads, COLUMNS // NUMBERS
        target = part_of(memory, first, shape)[None, cute.arch.thread_idx()[0], None]
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
        known: Float32 | None = None,
    ) -> Float32:
        """What a tile's elements are multiplied with: that of a scale which is there, or is found and written.

        Args:
            size: if it is to be found, the largest magnitude that a thread has seen.
            numbers: see `Scales.numbers`.
            known: the descale, if `found` gave it.
        """
        if known is not None:
            return 1.0 / known
        descale = self.scales.at(tensors.v_descale, Place(span.entry, place.tile, place.head))
        if size is None:
            return 1.0 / descale[0]
        found = self.scales.find(size, tile, numbers)
        self.scales.put(descale, found, self.scales.has(tensors.v_descale, place))
        return 1.0 / found

    def column(self, value: Value, factor: Float32, e: int) -> Uint32:
        """A thread's four elements of a column times a factor, in 8 bits."""
        return rounded(*(value(e, i) * factor for i in range(ROWS)), self.problem.to)

    def put_columns(
        self,
        tensors: QuantizeTensors,
        place: Place,
        tile: Tile,
        words: list[Uint32],
        stage: cute.Tensor | None = None,
        thread: Int32 | None = None,
    ) -> None:
        """Write a tile of V^T, zeros in place of rows that do not count."""
        of_rows = (cutlass.select_(tile.has(i), Uint32(0xFF << 8 * i), Uint32(0)) for i in range(ROWS))
        mask = functools.reduce(operator.or_, of_rows)
        words = [word & mask for word in words]
        traits, head_dim = self.traits, self.problem.head_dim_v
        if self.problem.is_packed:
            first_key = place.tile * traits.tokens
            put_columns(tensors.v8[place.head, None, None], tile, words, traits, head_dim, first_key)
        else:
            target = tensors.v8[place.batch, place.head, None, None]
            put_columns(target, tile, words, traits, head_dim, None, stage, thread)

    def put_rows(self, target: Rows, tile: Tile, value: Value, factor: Float32) -> None:
        """Write a tile, likewise if the result has a place for such rows."""
        for i in range(ROWS):
            words = cute.make_rmem_tensor(WORDS, Uint32)
            for w in range(WORDS):
                four = (value(e, i) * factor for e in range(ROWS * w, ROWS * (w + 1)))
                words[w] = rounded(*four, self.problem.to)
                if self.problem.is_packed:
                    words[w] = cutlass.select_(tile.has(i), words[w], Uint32(0))
            put_row(target, tile, i, words)


def value_of(values: cute.Tensor, e: int, i: int) -> Float32:
    """Column `e` of row `i` of what `less_than_mean` gives."""
    return values[e % ALIGN_ELEMENTS, i, e // ALIGN_ELEMENTS]
