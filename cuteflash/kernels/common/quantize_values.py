"""Blocks of V in the kernel that converts."""

from __future__ import annotations

import functools
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from cuteflash.core.signature import ALIGN_ELEMENTS
from cuteflash.kernels.common.quantize_centred import Centred, Eight
from cuteflash.kernels.common.quantize_held import Held
from cuteflash.kernels.common.quantize_scales import Scales
from cuteflash.kernels.common.quantize_tile import CHUNKS, WORDS, Rows, Tile, own_columns, put_columns, put_row, rounded
from cuteflash.kernels.common.quantize_work import Place, Work, tile_span
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import COLUMNS, ROWS, QuantizeTraits


class Values:
    """The parts of blocks of V."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.scales = Scales(traits, problem)

    @cute.jit
    def convert(self, tensors: QuantizeTensors, work: Work, number: Int32):
        """Convert a tile of a head."""
        problem, traits = self.problem, self.traits
        place = work.v.place(number - work.first_v())
        span = tile_span(problem, traits, tensors, None, place)
        tile = span.tile(span.first, problem.head_dim_v, traits.quads)
        held = Held.load(Rows.of(tensors.v, span.origin, place.head), tile, problem.dtype)
        mean = None
        if const_expr(problem.smooths_v):
            cute.arch.griddepcontrol_wait()
            mean = own_columns(tensors.v_mean[span.entry, place.head, None], tile)
        descale = self.scales.at(tensors.v_descale, Place(span.entry, place.tile, place.head))
        if const_expr(problem.scales_by_block):
            size, is_finite = self.size(held, mean)
            found = self.scales.find(size, tile, self.scales.numbers()[None, 0])
            self.scales.put(descale, found, self.scales.has(tensors.v_descale, place))
            words = self.words(held, mean, 1.0 / found, is_finite)
        else:
            words = self.words(held, mean, 1.0 / descale[0], None)
        if const_expr(problem.transposes_v):
            if const_expr(problem.is_packed):
                target, first_key = tensors.v8[place.head, None, None], place.tile * traits.tokens
            else:
                target, first_key = tensors.v8[place.batch, place.head, None, None], None
            put_columns(target, tile, words, traits, problem.head_dim_v, first_key)
        else:
            self.put_rows(Rows.of(tensors.v8, span.origin, place.head), tile, words)

    @cute.jit
    def size(self, held: Held, mean: cute.Tensor | None):
        """The largest magnitude of a thread's finite elements, minus their mean if there is one.

        With a mean also whether all elements of the warp are finite.
        """
        size, is_finite = Float32(0.0), Boolean(True)
        if const_expr(mean is None):
            size = held.magnitude()
        else:
            size = Centred.of(held, mean).size()
            is_finite = cute.arch.vote_all_sync(size < Float32.inf)
            if not is_finite:
                size = held.magnitude(mean)
        return size, is_finite

    @cute.jit
    def words(self, held: Held, mean: cute.Tensor | None, factor: Float32, is_finite: Boolean | None):
        """(16,) a thread's elements, minus their mean if there is one, times a factor in 8 bits.

        A word has four neighbouring elements: of a column if V is transposed, of a row otherwise.
        """
        if const_expr(mean is None):
            words = self.rounded(functools.partial(loaded, held, None), factor)
        else:
            centred = Centred.of(held, mean)
            words = self.rounded(centred.eight, -factor)
            if const_expr(is_finite is None):
                is_finite = cute.arch.vote_all_sync(centred.nothing() == Float32(0.0))
            if not is_finite:
                words.store(self.rounded(functools.partial(loaded, held, mean), factor).load())
        return self.counted(held, words)

    def rounded(self, eight: Eight, factor: Float32) -> cute.Tensor:
        """Words of elements in fp32."""
        words = cute.make_rmem_tensor(COLUMNS, Uint32)
        for j in range(CHUNKS):
            rows = eight(j)
            for x in range(ALIGN_ELEMENTS):
                if self.problem.transposes_v:
                    of_word, place = [row[x] for row in rows], ALIGN_ELEMENTS * j + x
                else:
                    i, w = x // 2, x % 2
                    of_word, place = rows[i][4 * w : 4 * w + 4], WORDS * i + 2 * j + w
                words[place] = rounded(*(value * factor for value in of_word), self.problem.to)
        return words

    def counted(self, held: Held, words: cute.Tensor) -> cute.Tensor:
        """The same with zeros in place of rows that do not count, if there is a place for these."""
        has = [held.tile.has(i) for i in range(ROWS)]
        if self.problem.transposes_v:
            of_rows = (cutlass.select_(has[i], Uint32(0xFF << 8 * i), Uint32(0)) for i in range(ROWS))
            mask = functools.reduce(operator.or_, of_rows)
            for e in range(COLUMNS):
                words[e] = words[e] & mask
        elif self.problem.is_packed:
            for x in range(COLUMNS):
                words[x] = cutlass.select_(has[x // WORDS], words[x], Uint32(0))
        return words

    def put_rows(self, target: Rows, tile: Tile, words: cute.Tensor) -> None:
        """Write a thread's rows."""
        for i, row in enumerate(cute.zipped_divide(words, (WORDS,))[None, i] for i in range(ROWS)):
            put_row(target, tile, i, row)


def loaded(held: Held, mean: cute.Tensor | None, j: int) -> list[list[Float32]]:
    """Of each row the eight columns of load `j`, fp32, minus their mean if there is one."""
    columns = range(ALIGN_ELEMENTS * j, ALIGN_ELEMENTS * (j + 1))
    return [[held.value(e, i, mean) for e in columns] for i in range(ROWS)]
