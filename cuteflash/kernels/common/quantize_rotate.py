"""Blocks of Q and K whose rows `quantize_mixed` rotates: a tile of several heads, one after the other.

Heads share the cosines and sines of the tile. While a head's rows are measured or written, the next one's are loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from cuteflash.kernels.common.quantize_mixed import MixedTile, Mixer, all_finite, eight_bits, size_of
from cuteflash.kernels.common.quantize_scales import Scales
from cuteflash.kernels.common.quantize_tile import Rows, part_of, put_first_rows, put_row, thread_again
from cuteflash.kernels.common.quantize_work import HeadRows, Place, Span, Work, choose, rotary_of, tile_span
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import ANGLES_BYTES, QuantizeTraits


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

    def kv_head(self, number: Int32) -> Int32:
        """The KV head of the block's head `number`, if heads that share a scale are all of the block's."""
        return cutlass.select_(self.sharing == 1, self.first + number, self.place.head)

    def is_listed(self, scales: Scales, tensors: QuantizeTensors) -> Boolean | bool:
        """Whether the tile has a scale."""
        return scales.has_qk(tensors, self.is_q, self.place)


class RotatedHeads:
    """The parts of blocks of Q and K in the kernel that converts and in that which measures."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.scales = Scales(traits, problem)

    def visits(self, tensors: QuantizeTensors) -> tuple[Any, Any]:
        """How many heads of Q and of K a block visits: with one scale all that share it, otherwise some."""
        sharing = self.problem.is_grouped
        return tensors.q.shape[-2] // tensors.k.shape[-2] if sharing else self.traits.visits, self.traits.visits

    def visit(self, tensors: QuantizeTensors, work: Work, number: Int32) -> Visit:
        """What block `number` converts."""
        is_q, place = work.place(number)
        heads = choose(is_q, Int32(tensors.q.shape[-2]), Int32(tensors.k.shape[-2]))
        visits = choose(is_q, *(Int32(x) for x in self.visits(tensors)))
        span = tile_span(self.problem, self.traits, tensors, is_q, place)
        first = place.head * visits
        return Visit(
            is_q=is_q,
            place=place,
            span=span,
            first=first,
            count=cutlass.min(visits, heads - first),
            sharing=choose(is_q, Int32(tensors.q.shape[-2]) // Int32(tensors.k.shape[-2]), Int32(1)),
            source=HeadRows.of(is_q, (tensors.q, tensors.k), span.origin, first),
            target=HeadRows.of(is_q, (tensors.q8, tensors.k8), span.origin, first),
        )

    def tile(self, span: Span, thread: Int32 | None = None) -> MixedTile:
        """The calling thread's part of the first tile of `span`."""
        return MixedTile.at(span, self.problem.head_dim, self.traits.tokens, thread)

    @cute.jit
    def convert(self, tensors: QuantizeTensors, work: Work, number: Int32, memory: cute.Tensor):
        """Convert a tile of some heads; `memory` is that of the block, see `QuantizeTraits.shared_bytes`."""
        problem = self.problem
        visit = self.visit(tensors, work, number)
        span = visit.span
        tile = self.tile(span)
        mixer = Mixer.of(tile, problem.dtype, self.traits, memory)
        words = [tile.words() for _ in range(tile.rows)]
        self.load(visit.source[Int32(0)], tile, words)
        mixer.put_angles(rotary_of(problem, tensors))
        if const_expr(problem.scales_by_block):
            self.convert_blocks(tensors, visit, mixer, words)
        else:
            kv_head = visit.first // visit.sharing
            rest = visit.first - kv_head * visit.sharing  # heads before the next one that share its KV head
            for step in cutlass.range(visit.count, unroll=1):
                place = Place(span.entry, visit.place.tile, kv_head)
                factor = problem.hadamard_scale / self.scales.of_qk(tensors, visit.is_q, place)[0]
                rows = [mixer.row(words[i], i) for i in range(tile.rows)]
                is_fine = all_finite(rows)
                results = self.results(tile, rows, factor)
                if step + 1 < visit.count:
                    self.load(visit.source[step + 1], tile, words)
                self.put(visit, step, mixer, results, factor, is_fine)
                is_last = rest + 1 == visit.sharing
                kv_head, rest = kv_head + cutlass.select_(is_last, 1, 0), cutlass.select_(is_last, 0, rest + 1)

    @cute.jit
    def convert_blocks(self, tensors: QuantizeTensors, visit: Visit, mixer: Mixer, words: list[cute.Tensor]):
        """The same with scales of blocks, which are found.

        Heads that share a scale come twice, and the second time out of L2: all but the last one, whose rows the block
        still has.
        """
        problem, tile, count = self.problem, mixer.tile, visit.count
        numbers = self.scales.numbers(2)  # steps take turns, so that one barrier suffices
        is_alone, steps = visit.sharing == 1, count
        if const_expr(problem.is_grouped):
            steps = Int32(cutlass.select_(is_alone, count, 2 * count - 1))
        peak, factor = Float32(0.0), Float32(1.0)
        for step in cutlass.range(steps, unroll=1):
            head = self.head_of(step, count)
            rows = [mixer.row(words[i], i) for i in range(tile.rows)]
            is_fine = all_finite(rows)
            size = size_of(rows)
            if step + 1 < steps:  # not sooner, or the compiler computes some of the rows later
                self.load(visit.source[self.head_of(step + 1, count)], tile, words)
            if const_expr(not problem.is_grouped):
                factor = self.find_factor(tensors, visit, head, tile, size, numbers[None, step & 1])
                mixer_again = self.mixer_again(visit.span, mixer, step)
                results = self.results(mixer_again.tile, rows, factor)
                self.put(visit, head, mixer_again, results, factor, is_fine)
            else:
                peak = cutlass.select_(is_alone, size, cute.arch.fmax(peak, size))
                if is_alone or step == count - 1:
                    factor = self.find_factor(tensors, visit, head, tile, peak, numbers[None, step & 1])
                if is_alone or step >= count - 1:
                    mixer_again = self.mixer_again(visit.span, mixer, step)
                    results = self.results(mixer_again.tile, rows, factor)
                    self.put(visit, head, mixer_again, results, factor, is_fine)

    def head_of(self, step: Int32, count: Int32) -> Int32:
        """The head that comes at a step, counted from the first one that the block visits."""
        return Int32(cutlass.select_(step < count, step, step - count)) if self.problem.is_grouped else step

    def find_factor(
        self, tensors: QuantizeTensors, visit: Visit, head: Int32, tile: MixedTile, size: Float32, numbers: cute.Tensor
    ) -> Float32:
        """What rows are multiplied with, from the largest magnitude of a thread's; writes their scale."""
        found = self.scales.find(size * self.problem.hadamard_scale, tile, numbers)
        place = Place(visit.span.entry, visit.place.tile, visit.kv_head(head))
        self.scales.put(self.scales.of_qk(tensors, visit.is_q, place), found, visit.is_listed(self.scales, tensors))
        return self.problem.hadamard_scale / found

    @cute.jit
    def put(
        self, visit: Visit, head: Int32, mixer: Mixer, results: list[cute.Tensor], factor: Float32, is_fine: Boolean
    ):
        """Write a thread's rows of a head; `is_fine` says whether all of their elements were finite."""
        target = visit.target[head]
        put_first_rows(target, mixer.tile, results)
        if not cute.arch.vote_all_sync(is_fine):
            self.put_again(visit.source[head], target, mixer, factor)

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
        shape = traits.num_threads, traits.visits
        of_angles = traits.num_threads * ANGLES_BYTES // 4
        found = part_of(memory, of_angles, shape)[cute.arch.thread_idx()[0], None]
        found.fill(0.0)
        tile = self.tile(span)
        mixer = Mixer.of(tile, problem.dtype, traits, memory)
        words = [tile.words() for _ in range(tile.rows)]
        for t in cutlass.range(tiles, unroll=1):
            tile = dataclasses.replace(tile, first=span.first + t * traits.tokens)
            mixer = dataclasses.replace(mixer, tile=tile)
            self.load(source[Int32(0)], tile, words)
            mixer.put_angles(rotary_of(problem, tensors))
            for step in cutlass.range(count, unroll=1):
                rows = [mixer.row(words[i], i) for i in range(tile.rows)]
                if step + 1 < count:
                    self.load(source[step + 1], tile, words)
                found[step] = cute.arch.fmax(found[step], size_of(rows))
        return found

    def load(self, source: Rows, tile: MixedTile, words: list[cute.Tensor]) -> None:
        """Load a thread's rows."""
        for i, row in enumerate(words):
            tile.load_words(source, i, row, self.problem.dtype)

    def mixer_again(self, span: Span, mixer: Mixer, step: Int32) -> Mixer:
        """The same; of packed sequences with a tile that is found once more: to keep it would take registers."""
        return dataclasses.replace(mixer, tile=self.tile(span, thread_again(step))) if self.problem.is_packed else mixer

    def results(self, tile: MixedTile, rows: list[cute.Tensor], factor: Float32) -> list[cute.Tensor]:
        """Words of 8 bits of a thread's rows, see `rounded`."""
        return [self.rounded(tile, mixed, factor, i) for i, mixed in enumerate(rows)]

    def rounded(self, tile: MixedTile, mixed: cute.Tensor, factor: Float32, i: int | Int32) -> cute.Tensor:
        """Words of 8 bits of a thread's row `i`, times a factor; zeros if it does not count."""
        words = eight_bits(mixed, factor, self.problem.to)
        if self.problem.is_packed:
            for w in range(cute.size(words)):
                words[w] = cutlass.select_(tile.has(i), words[w], Uint32(0))
        return words

    @cute.jit
    def put_again(self, source: Rows, target: Rows, mixer: Mixer, factor: Float32):
        """Write a thread's rows once more, rotated so that infinities and NaN stay what they are."""
        tile = mixer.tile
        for i in cutlass.range(tile.rows, unroll=1):
            words = tile.words()
            tile.load_words(source, i, words, self.problem.dtype)
            mixed = mixer.row(words, i, is_careful=True)
            put_row(target, tile, i, self.rounded(tile, mixed, factor, i))
