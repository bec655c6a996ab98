"""Blocks of Q and K with a rotary embedding: a tile of several heads, one after the other.

Heads share the cosines and sines of the tile. While a head's rows are measured or written, the next one's are loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.core.signature import CUTE_DTYPES
from cuteflash.kernels.common.quantize_held import Held
from cuteflash.kernels.common.quantize_parts import Parts
from cuteflash.kernels.common.quantize_scales import Scales
from cuteflash.kernels.common.quantize_split import SplitTile
from cuteflash.kernels.common.quantize_tile import Rows, Tile, copy_of, descale_of, part_of, put_row, thread_again
from cuteflash.kernels.common.quantize_turn import Turner
from cuteflash.kernels.common.quantize_work import HeadRows, Place, Span, Work, choose, tile_span
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import ANGLES_BYTES, ROWS, QuantizeTraits


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a block has of Q or K.

    Attributes:
        is_q: whether it is of Q.
        place, span: the tile.
        first, count: the first head, and how many there are.
        sharing: how many heads that follow each other share a KV head.
        source, target: the heads, from the first one on.
    """

    is_q: Boolean
    place: Place
    span: Span
    first: Int32
    count: Int32
    sharing: Int32
    source: HeadRows
    target: HeadRows

    def kv_heads(self) -> tuple[Int32, Int32]:
        """Whose heads these are: the first KV head, and how many there are."""
        first = self.first // self.sharing
        return first, (self.first + self.count - 1) // self.sharing - first + 1

    def is_listed(self, scales: Scales, tensors: QuantizeTensors) -> Boolean | bool:
        """Whether the tile has a scale."""
        return scales.has_qk(tensors, self.is_q, self.place)


class RotatedHeads:
    """The parts of blocks of Q and K in the kernel that converts and in that which measures."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.scales = Scales(traits, problem)
        self.parts = Parts(traits, problem)

    def visits(self, tensors: QuantizeTensors) -> tuple[Any, Any]:
        """How many heads of Q and of K a block visits: of those that share a scale which it finds alone, all."""
        visits: Any = self.traits.visits
        if not self.problem.is_grouped:
            return visits, visits
        sharing = tensors.q.shape[-2] // tensors.k.shape[-2]
        return cutlass.max(visits // sharing, 1) * sharing, visits

    def visit(self, tensors: QuantizeTensors, work: Work, number: Int32) -> Visit:
        """What block `number` converts."""
        is_q, place = work.place(number)
        visits = choose(is_q, *(Int32(x) for x in self.visits(tensors)))
        span = tile_span(self.problem, self.traits, tensors, is_q, place)
        first = place.head * visits
        return Visit(
            is_q=is_q,
            place=place,
            span=span,
            first=first,
            count=self.count(tensors, is_q, first),
            sharing=choose(is_q, Int32(tensors.q.shape[-2]) // Int32(tensors.k.shape[-2]), Int32(1)),
            source=HeadRows.of(is_q, (tensors.q, tensors.k), span.origin, first),
            target=HeadRows.of(is_q, (tensors.q8, tensors.k8), span.origin, first),
        )

    def count(self, tensors: QuantizeTensors, is_q: Boolean, first: Int32) -> Int32:
        """How many heads the block visits whose first one this is."""
        heads = choose(is_q, Int32(tensors.q.shape[-2]), Int32(tensors.k.shape[-2]))
        return cutlass.min(choose(is_q, *(Int32(x) for x in self.visits(tensors))), heads - first)

    def tile(self, span: Span, thread: Int32 | None = None) -> Tile:
        """The calling thread's part of the first tile of `span`."""
        if self.problem.splits_columns:
            return SplitTile.at(span, (self.problem.head_dim, self.problem.rotary_dim), self.traits.tokens, thread)
        return span.tile(span.first, self.problem.head_dim, self.traits.quads, thread)

    @cute.jit
    def convert(self, tensors: QuantizeTensors, work: Work, number: Int32, memory: cute.Tensor | None):
        """Convert a tile of some heads; `memory` is that of the block, see `QuantizeTraits.shared_bytes`."""
        problem = self.problem
        peaks = self.parts.peaks() if problem.folds else None
        visit = self.visit(tensors, work, number)
        span = visit.span
        tile = self.tile(span)
        turner = self.turner(tensors, tile, memory)
        words = tile.words()
        self.load(tile, visit.source[Int32(0)], words)
        turner.put_angles()
        if const_expr(problem.measures_heads):
            cute.arch.griddepcontrol_wait()  # other kernels bring the scales, or what they follow from
        peak = Float32(0.0)
        if const_expr(problem.folds):
            peak = self.parts.begin(tensors, work.parts, visit.is_q, span.entry, visit.kv_heads())
        if const_expr(problem.scales_by_block):
            self.convert_blocks(tensors, visit, turner, words)
        else:
            for step in cutlass.range(visit.count, unroll=1):
                known = self.known_factor(tensors, visit, step)
                if const_expr(problem.keeps_angles):
                    held = turner.turned(words, visit.source[step])
                    if const_expr(self.traits.loads_ahead):
                        self.load_next(visit, tile, step, words)
                    factor = self.factor(tensors, visit, step, known, peak, peaks)
                    self.put(visit.target[step], self.again_held(span, held, step), factor)
                    if const_expr(not self.traits.loads_ahead):
                        self.load_next(visit, tile, step, words)
                else:
                    factor = self.factor(tensors, visit, step, known, peak, peaks)
                    again = dataclasses.replace(turner, tile=self.again(span, tile, step))
                    held = again.held()
                    for i in cutlass.range_constexpr(ROWS):
                        again.turn(held, words, visit.source[step], i)
                        put_row(visit.target[step], again.tile, i, held.eight_bits(i, factor, problem.to))

    def known_factor(self, tensors: QuantizeTensors, visit: Visit, step: Int32) -> Float32 | None:
        """What rows of the head of a step are multiplied with; None if its scale is not there yet."""
        if self.problem.folds:
            return None
        place = Place(visit.span.entry, visit.place.tile, (visit.first + step) // visit.sharing)
        return self.problem.hadamard_scale / self.scales.of_qk(tensors, visit.is_q, place)[0]

    def factor(
        self,
        tensors: QuantizeTensors,
        visit: Visit,
        step: Int32,
        known: Float32 | None,
        peak: Float32,
        peaks: cute.Tensor | None,
    ) -> Float32:
        """The same if its scale is not there, either: then by the largest magnitude of its KV head."""
        if known is not None:
            return known
        self.finish_scales(tensors, visit, step, peak, peaks)
        kv_head = (visit.first + step) // visit.sharing - visit.kv_heads()[0]
        return self.problem.hadamard_scale / descale_of(peaks[kv_head], self.problem.to)

    @cute.jit
    def finish_scales(self, tensors: QuantizeTensors, visit: Visit, step: Int32, peak: Float32, peaks: cute.Tensor):
        """Put together the largest magnitudes of the KV heads in the first step.

        The blocks of the first tile write their descales.
        """
        if step == 0:
            first, count = visit.kv_heads()
            self.parts.finish(peak, count, peaks)
            thread = cute.arch.thread_idx()[0]
            if visit.place.tile == 0 and thread < count:
                place = Place(visit.span.entry, visit.place.tile, first + thread)
                descale = self.scales.of_qk(tensors, visit.is_q, place)
                descale[0] = descale_of(peaks[thread], self.problem.to)

    @cute.jit
    def load_next(self, visit: Visit, tile: Tile, step: Int32, words: cute.Tensor):
        """Load a thread's rows of the head after that of a step."""
        if step + 1 < visit.count:
            self.load(self.again(visit.span, tile, step), visit.source[step + 1], words)

    def load(self, tile: Tile, source: Rows, words: cute.Tensor) -> None:
        """Load a thread's rows of a head, unless `Turner.turned` does."""
        if self.problem.keeps_angles:
            tile.load_words(source, words, CUTE_DTYPES[self.problem.dtype])

    @cute.jit
    def convert_blocks(self, tensors: QuantizeTensors, visit: Visit, turner: Turner, words: cute.Tensor):
        """The same with scales of blocks, which are found.

        Heads that share a scale come twice, and the second time out of L2: all but the last one, whose rows the block
        still has. So `sharing` heads take 2 * `sharing` - 1 steps.
        """
        tile, sharing = turner.tile, visit.sharing
        numbers = self.scales.numbers(2)  # scales take turns, so that one barrier suffices
        last = 2 * sharing - 2
        peak, factor = Float32(0.0), Float32(1.0)
        first, step, is_there = Int32(0), Int32(0), visit.count > 0
        while is_there:
            head = first + cutlass.select_(step < sharing, step, step - sharing)
            held = self.turned(turner, visit.span, step, words, visit.source[head])
            is_last = step == last
            following = first + cutlass.select_(
                is_last, sharing, cutlass.select_(step + 1 < sharing, step + 1, step + 1 - sharing)
            )
            is_there = following < self.count(tensors, visit.is_q, copy_of(visit.first, step))
            if is_there:
                self.load(self.again(visit.span, tile, step), visit.source[following], words)
            if step < sharing:
                peak = cute.arch.fmax(peak, held.magnitude())
            if step == sharing - 1:
                kv_head = (visit.first + first) // sharing
                factor = self.find_factor(tensors, visit, kv_head, tile, peak, numbers[None, kv_head & 1])
                peak = Float32(0.0)
            if step >= sharing - 1:
                self.put(visit.target[head], self.again_held(visit.span, held, step), factor)
            first = cutlass.select_(is_last, first + sharing, first)
            step = cutlass.select_(is_last, 0, step + 1)

    def find_factor(
        self, tensors: QuantizeTensors, visit: Visit, kv_head: Int32, tile: Tile, peak: Float32, numbers: Any
    ) -> Float32:
        """What rows of a KV head are multiplied with, from the largest magnitude of a thread's; writes their scale."""
        found = self.scales.find(peak * self.problem.hadamard_scale, tile, numbers)
        place = Place(visit.span.entry, visit.place.tile, kv_head)
        self.scales.put(self.scales.of_qk(tensors, visit.is_q, place), found, visit.is_listed(self.scales, tensors))
        return self.problem.hadamard_scale / found

    def put(self, target: Rows, held: Held, factor: Float32) -> None:
        """Write a thread's rows of a head."""
        for i in range(held.tile.rows):
            put_row(target, held.tile, i, held.eight_bits(i, factor, self.problem.to))

    @cute.jit
    def sizes(
        self,
        tensors: QuantizeTensors,
        is_q: Boolean,
        span: Span,
        heads: tuple[Int32, Int32],
        tiles: Int32,
        memory: cute.Tensor,
    ):
        """(heads,) the largest magnitude that a thread has seen in the first `tiles` tiles of `span`, of each head.

        `heads` are the first one and how many there are, `memory` is that of the block.
        """
        first, count = heads
        problem, traits = self.problem, self.traits
        source = HeadRows.of(is_q, (tensors.q, tensors.k), span.origin, first)
        shape = traits.num_threads, traits.measured
        of_angles = traits.num_threads * ANGLES_BYTES // 4 if problem.keeps_angles else 0
        found = part_of(memory, of_angles, shape)[cute.arch.thread_idx()[0], None]
        found.fill(0.0)
        words = self.tile(span).words()
        for t in cutlass.range(tiles, unroll=1):
            tile = dataclasses.replace(self.tile(span), first=span.first + t * traits.tokens)
            turner = self.turner(tensors, tile, memory)
            self.load(tile, source[Int32(0)], words)
            turner.put_angles()
            for step in cutlass.range(count, unroll=1):
                held = self.turned(turner, span, step, words, source[step])
                if step + 1 < count:
                    self.load(self.again(span, tile, step), source[step + 1], words)
                if const_expr(problem.keeps_angles):
                    found[step] = cute.arch.fmax(found[step], held.magnitude())
                else:  # all rows together would take registers
                    for i in cutlass.range_constexpr(ROWS):
                        found[step] = cute.arch.fmax(found[step], held.only(i).magnitude())
        return found

    def turner(self, tensors: QuantizeTensors, tile: Tile, memory: cute.Tensor | None) -> Turner:
        """What rotates rows of a tile, see `Turner.of`."""
        return Turner.of(self.problem, self.traits, tensors, tile, memory)

    def turned(self, turner: Turner, span: Span, step: Int32, words: cute.Tensor, rows: Rows) -> Held:
        """A thread's rows of a head after the embedding."""
        if not self.problem.keeps_angles:  # addresses of tables would take registers
            turner = dataclasses.replace(turner, tile=self.again(span, turner.tile, step))
        return turner.turned(words, rows)

    def again(self, span: Span, tile: Tile, step: Int32) -> Tile:
        """The same tile, found once more: to keep what follows from it would take registers."""
        return dataclasses.replace(self.tile(span, thread_again(step)), first=tile.first)

    def again_held(self, span: Span, held: Held, step: Int32) -> Held:
        """The same rows, of the tile that `again` gives."""
        return dataclasses.replace(held, tile=self.again(span, held.tile, step))
