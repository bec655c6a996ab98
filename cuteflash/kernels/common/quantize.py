"""Q, K and V to FP8 for attention, in up to three launches, each over all three tensors.

    measure   of each part of a head the largest magnitude, or sum and extremes of V's columns
    scale     of each KV head the descale, its largest magnitude / the largest number, and V's mean
    convert   of each tile of tokens: rotate, subtract V's mean, divide by the descale, round, turn V

The first two run if scales of whole heads, or V's mean, are asked for; what is measured of few parts `convert` puts
together itself, without `scale`. They all do nothing but move memory: a block loads a whole tile before it computes.
If each 128 tokens have a scale, `convert` measures its tile itself. Sums are added in a fixed order, so that results
repeat bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.kernels.common.quantize_cluster import ClusterPeaks
from cuteflash.kernels.common.quantize_held import Held
from cuteflash.kernels.common.quantize_measure import Measure
from cuteflash.kernels.common.quantize_parts import Parts
from cuteflash.kernels.common.quantize_rotate import RotatedHeads
from cuteflash.kernels.common.quantize_scales import Scales
from cuteflash.kernels.common.quantize_shared import SharedHeads, shared_tiles
from cuteflash.kernels.common.quantize_signature import quantize_fake_args
from cuteflash.kernels.common.quantize_tile import (
    Rows,
    Tile,
    put_first_rows,
    put_row,
    shared_numbers,
    thread_again,
)
from cuteflash.kernels.common.quantize_values import Values
from cuteflash.kernels.common.quantize_work import (
    HeadRows,
    HeadTiles,
    Place,
    Span,
    Work,
    batch_of,
    choose,
    tile_span,
    tiles_of,
)
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import ROWS, QuantizeTraits


class Quantize:
    """The kernels for a problem, as one callable."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        if problem.scales_by_block and traits.tokens != BLOCK_TOKENS:
            raise ValueError(f"tokens is {traits.tokens}; allowed with scales by block: {BLOCK_TOKENS}")
        self.traits = traits
        self.problem = problem
        self.scales = Scales(traits, problem)
        self.values = Values(traits, problem)
        self.rotated = (SharedHeads if problem.shares_heads else RotatedHeads)(traits, problem)

    def fake_args(self) -> tuple[Any, ...]:
        """See `quantize_fake_args`."""
        return quantize_fake_args(self.problem)

    @cute.jit
    def __call__(self, *arguments: Any):
        tensors, stream = QuantizeTensors(*arguments[:-1]), arguments[-1]
        if const_expr(self.problem.measures):
            Measure(self.traits, self.problem).launch(tensors, stream)
        work = self.work(tensors)
        if const_expr(self.problem.folds):
            work = dataclasses.replace(work, parts=Parts(self.traits, self.problem).work(tensors))
        self.kernel.set_name_prefix("flash_quantize", remove_cutlass_symbol=True)
        cluster = self.problem.cluster
        blocks = cute.ceil_div(work.size(), cluster) * cluster
        self.kernel(tensors, work, blocks).launch(
            grid=(blocks, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            block=(self.traits.num_threads, 1, 1),
            min_blocks_per_mp=self.traits.resident,
            preferred_smem_carveout=self.carveout(),
            stream=stream,
            use_pdl=self.problem.measures,
        )

    def carveout(self) -> int:
        """See `QuantizeTraits`."""
        has_tile = self.problem.transposes_v and not self.traits.centres_v
        columns = self.problem.head_dim_v if has_tile else 0
        return self.traits.carveout(columns, self.traits.shared_bytes(self.problem))

    def work(self, tensors: QuantizeTensors) -> Work:
        """All tiles; a block of Q or K has the same tile of several heads."""
        tokens, batch, heads, kv_heads = self.traits.tokens, batch_of(tensors), tensors.q.shape[-2], tensors.k.shape[-2]
        visits_q, visits_k = self.visits(tensors)
        of_q, of_k = (tiles_of(tensors, x.shape[-3], tokens, BLOCK_TOKENS) for x in (tensors.q, tensors.k))
        of_v = cute.ceil_div(self.values.tiles(tensors), self.traits.tiles_of_v)
        work = Work(
            q=HeadTiles.of(batch, of_q, cute.ceil_div(heads, visits_q * self.problem.cluster) * self.problem.cluster),
            k=HeadTiles.of(batch, of_k, cute.ceil_div(kv_heads, visits_k)),
            v=HeadTiles.of(batch, of_v, kv_heads),
        )
        if self.problem.shares_heads:
            visits = self.traits.shared_visits, self.traits.visits_k
            return work.shared(shared_tiles(tensors, of_q, self.problem.cluster, self.traits.resident, visits))
        return work.mixed() if self.traits.mixes else work

    def visits(self, tensors: QuantizeTensors) -> tuple[Any, Any]:
        """How many heads of Q and of K a block visits: with cosines and sines in common, or a scale that it finds."""
        if self.problem.rotary_dim:
            return self.rotated.visits(tensors)
        return tensors.q.shape[-2] // tensors.k.shape[-2] if self.problem.is_grouped else 1, 1

    @cute.kernel
    def kernel(self, tensors: QuantizeTensors, work: Work, blocks: Int32):
        if const_expr(self.problem.measures_heads and not self.problem.rotary_dim):
            cute.arch.griddepcontrol_wait()
        place = cute.arch.block_idx()[0]
        if const_expr(self.problem.cluster > 1 and self.traits.backwards):
            place -= blocks - work.size()  # so that heads of Q that share a scale are those of a cluster
        number = work.number(place, self.traits.backwards)
        memory = shared_numbers(self.traits.shared_bytes(self.problem))
        if number < work.first_v():
            if const_expr(self.problem.rotary_dim):
                self.rotated.convert(tensors, work, number, memory)
            else:
                self.convert_held(tensors, work, number)
        elif self.has_work(work, number):
            self.values.convert(tensors, work, number, memory)

    def has_work(self, work: Work, number: Int32) -> Boolean | bool:
        """Whether a block has a part; the last cluster may not be full."""
        return number < work.size() if self.problem.cluster > 1 else True

    @cute.jit
    def convert_held(self, tensors: QuantizeTensors, work: Work, number: Int32):
        """Convert a tile of a head of Q or K, or of those that share its scale, without a rotary embedding."""
        problem = self.problem
        is_q, place = work.place(number)
        grouped = choose(is_q, Int32(tensors.q.shape[-2]) // Int32(tensors.k.shape[-2]), Int32(1))
        span = tile_span(self.problem, self.traits, tensors, is_q, place)
        tile = span.tile(span.first, problem.head_dim, self.traits.quads)
        if const_expr(problem.is_grouped):
            if grouped == 1:
                self.convert_alone(tensors, is_q, place, span, tile, grouped)
            else:
                self.convert_group(tensors, is_q, place, span, tile, grouped)
        else:
            self.convert_alone(tensors, is_q, place, span, tile, grouped)

    def convert_alone(
        self, tensors: QuantizeTensors, is_q: Boolean, place: Place, span: Span, tile: Tile, grouped: Int32
    ) -> None:
        """Convert a tile of a head."""
        held = self.held(choose(is_q, *(Rows.of(x, span.origin, place.head) for x in (tensors.q, tensors.k))), tile)
        if self.problem.scales_by_block:
            if self.problem.cluster > 1:
                factor = self.find_together(tensors, is_q, Place(place.batch, place.tile, place.head // grouped), held)
            else:
                factor = self.find_factor(tensors, is_q, place, tile, held.magnitude())
            held = dataclasses.replace(held, tile=self.tile_again(span, place.tile))
        else:
            descale = self.scales.of_qk(tensors, is_q, Place(span.entry, place.tile, place.head // grouped))
            factor = self.problem.hadamard_scale / descale[0]
        target = choose(is_q, *(Rows.of(x, span.origin, place.head) for x in (tensors.q8, tensors.k8)))
        self.put_held(target, held, factor)

    @cute.jit
    def convert_group(
        self, tensors: QuantizeTensors, is_q: Boolean, place: Place, span: Span, tile: Tile, grouped: Int32
    ):
        """Convert a tile of several heads that share a scale, two at a time, whose loads are then in flight together.

        Afterwards all but the last two, whose rows the block still has, are loaded again, out of L2.
        """
        first, rest = place.head * grouped, grouped - 2  # the heads but for the last two
        source = HeadRows.of(is_q, (tensors.q, tensors.k), span.origin, first)
        target = HeadRows.of(is_q, (tensors.q8, tensors.k8), span.origin, first)
        peak = Float32(0.0)
        for head in cutlass.range(0, rest, 2, unroll=1):
            pair = [self.held(source[h], tile) for h in (head, head + 1)]
            peak = cute.arch.fmax(peak, cute.arch.fmax(pair[0].largest(), pair[1].largest()))
        cute.arch.sync_warp()  # loads of the last heads before the others' would take registers
        pair = [self.held(source[h], tile) for h in (rest, rest + 1)]
        peak = cute.arch.fmax(peak, cute.arch.fmax(pair[0].largest(), pair[1].largest()))
        if cute.arch.vote_any_sync(peak == Float32.inf):
            peak = Float32(0.0)
            for head in cutlass.range(grouped, unroll=1):
                peak = cute.arch.fmax(peak, self.held(source[head], self.tile_again(span, head)).largest_finite())
            for h in cutlass.range_constexpr(2):  # what was not kept meanwhile
                pair[h].words.store(self.held(source[rest + h], self.tile_again(span, grouped)).words.load())
        factor = self.find_factor(tensors, is_q, place, tile, peak)
        again = self.tile_again(span, rest)
        for h in cutlass.range_constexpr(2):
            self.put_held(target[rest + h], dataclasses.replace(pair[h], tile=again), factor)
        for head in cutlass.range(0, rest, 2, unroll=1):
            pair = [self.held(source[h], again) for h in (head, head + 1)]
            for h in cutlass.range_constexpr(2):
                self.put_held(target[head + h], pair[h], factor)

    def tile_again(self, span: Span, number: Int32) -> Tile:
        """The calling thread's part of a tile, found once more: to keep it would take registers beside the rows."""
        return span.tile(span.first, self.problem.head_dim, self.traits.quads, thread=thread_again(number))

    def held(self, source: Rows, tile: Tile) -> Held:
        """A thread's rows of a tile of Q or K."""
        return Held.load(source, tile, self.problem.dtype, self.problem.hadamard)

    def find_factor(self, tensors: QuantizeTensors, is_q: Boolean, place: Place, tile: Tile, peak: Float32) -> Float32:
        """What a block's rows are multiplied with, from the largest magnitude of a thread's; writes their scale."""
        found = self.scales.find(peak * self.problem.hadamard_scale, tile, self.scales.numbers()[None, 0])
        listed = self.scales.has_qk(tensors, is_q, place)
        self.scales.put(self.scales.of_qk(tensors, is_q, place), found, listed)
        return self.problem.hadamard_scale / found

    def find_together(self, tensors: QuantizeTensors, is_q: Boolean, place: Place, held: Held) -> Float32:
        """The same if blocks of a cluster find it, each from a head of Q; `place` has the KV head."""
        peaks = ClusterPeaks.of(self.problem.cluster)
        peaks.begin(is_q)
        size = held.magnitude() * self.problem.hadamard_scale
        shared = self.scales.numbers()[None, 0], peaks
        return self.problem.hadamard_scale / self.scales.find_together(tensors, (is_q, place), size, shared)

    def put_held(self, target: Rows, held: Held, factor: Float32) -> None:
        """Round a thread's rows of a tile, rotated, times a factor."""
        rows = []
        for i in range(ROWS):
            words = held.eight_bits(i, factor, self.problem.to)
            if self.problem.is_grouped:
                rows.append(words)
            else:  # with 64 registers one after the other
                put_row(target, held.tile, i, words)
        if rows:
            put_first_rows(target, held.tile, rows)
