"""What quantising asks of whole heads: parts of a head are measured, then put together, see `quantize_parts`.

Those are two launches, or, if a head has few parts, one. Elements that are not finite are left out: they do not change
how others are rounded.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.kernels.common.quantize_centred import (
    EXTREMES,
    add_extremes,
    add_rows,
    add_tile,
    nothing_of,
    replace_missing,
    take_extremes,
)
from cuteflash.kernels.common.quantize_held import PAIRS, Held, half_of
from cuteflash.kernels.common.quantize_parts import Parts
from cuteflash.kernels.common.quantize_products import Identity
from cuteflash.kernels.common.quantize_rotate import RotatedHeads
from cuteflash.kernels.common.quantize_shared import SharedHeads, shared_tiles
from cuteflash.kernels.common.quantize_tile import (
    Rows,
    Tile,
    block_max,
    copy_of,
    descale_of,
    part_of,
    shared_numbers,
)
from cuteflash.kernels.common.quantize_work import (
    HeadTiles,
    Place,
    Span,
    Work,
    choose,
    packing_of,
    packing_of_keys,
    seqlen_of,
)
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import COLUMNS, WARP, QuantizeTraits

SCALE_THREADS = 256
NAN_PAIR = 0x7FFF7FFF  # no number: every extreme with it is the other one


class Measure:
    """The two kernels before the one that converts."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem
        self.parts = Parts(traits, problem)
        self.rotated = RotatedHeads(traits, problem)
        self.shared = SharedHeads(traits, problem)

    def launch(self, tensors: QuantizeTensors, stream) -> None:
        """Launch both: afterwards the descales and V's mean that have to be computed are there."""
        work, blocks = self.parts.work(tensors), self.blocks(tensors)
        kv_heads = tensors.v.shape[-2]
        batch = tensors.v.shape[0] if const_expr(not self.problem.is_packed) else tensors.cu_k.shape[0] - 1
        self.measure.set_name_prefix("flash_quantize_measure", remove_cutlass_symbol=True)
        self.measure(tensors, work, blocks).launch(
            grid=(blocks.size(), 1, 1),
            block=(self.traits.num_threads, 1, 1),
            min_blocks_per_mp=self.traits.measuring,
            preferred_smem_carveout=self.traits.measuring_carveout(self.problem),
            stream=stream,
            use_pdl=True,
        )
        if const_expr(self.problem.folds):
            return
        self.scale.set_name_prefix("flash_quantize_scale", remove_cutlass_symbol=True)
        self.scale(tensors, work).launch(
            grid=(kv_heads, batch, 1), block=(SCALE_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    def blocks(self, tensors: QuantizeTensors) -> Work:
        """The blocks that measure them: one of Q or K has the same part of several heads."""
        work, visits = self.parts.work(tensors), self.traits.measured
        if self.problem.shares_angles and self.problem.measures_heads:
            return work.shared(shared_tiles(tensors, work.q.tiles, 1, self.traits.measuring))
        q, k = (HeadTiles.of(x.batch, x.tiles, cute.ceil_div(x.heads, visits)) for x in (work.q, work.k))
        blocks = dataclasses.replace(work, q=q, k=k)
        return blocks.mixed() if self.traits.mixes else blocks

    @cute.kernel
    def measure(self, tensors: QuantizeTensors, work: Work, blocks: Work):
        cute.arch.griddepcontrol_wait()  # for whatever is launched before, which may make Q, K and V
        cute.arch.griddepcontrol_launch_dependents()  # the next launch may begin where blocks end, and then waits
        number = blocks.number(cute.arch.block_idx()[0])
        memory = shared_numbers(self.traits.measuring_bytes(self.problem))
        if const_expr(self.problem.measures_heads):
            if number < blocks.first_v():
                if const_expr(self.problem.shares_angles):
                    self.shared.measure(tensors, work, blocks, number, memory)
                elif const_expr(self.problem.rotary_dim):
                    self.measure_heads(tensors, work, blocks, number, memory)
                else:
                    self.measure_qk(tensors, work, number)
            else:
                self.measure_v(tensors, work, work.first_v() + number - blocks.first_v(), memory)
        else:
            self.measure_v(tensors, work, number, memory)

    @cute.jit
    def measure_qk(self, tensors: QuantizeTensors, work: Work, number: Int32):
        """The largest magnitude of a part of a head of Q or K."""
        problem = self.problem
        is_q, place = work.place(number)
        span = self.span(tensors, is_q, place)
        tiles = self.tiles(span)
        source = choose(is_q, *(Rows.of(x, span.origin, place.head) for x in (tensors.q, tensors.k)))
        peak = self.largest_held(source, span, tiles, problem.head_dim, problem.hadamard)
        self.put_magnitude(tensors, number, peak * problem.hadamard_scale)

    @cute.jit
    def largest_held(
        self,
        source: Rows,
        span: Span,
        tiles: Int32,
        head_dim: cutlass.Constexpr[int],
        hadamard: cutlass.Constexpr[int],
    ):
        """The largest finite magnitude of a thread's rows of some tiles; infinities are rare."""
        peak = Float32(0.0)
        for i in cutlass.range(tiles, unroll=1):
            tile = span.tile(span.first + i * self.traits.tokens, head_dim, self.traits.quads)
            peak = cute.arch.fmax(peak, Held.load(source, tile, self.problem.dtype, hadamard).largest())
        if cute.arch.vote_any_sync(peak == Float32.inf):
            peak = Float32(0.0)
            for i in cutlass.range(tiles, unroll=1):
                tile = span.tile(span.first + i * self.traits.tokens, head_dim, self.traits.quads)
                peak = cute.arch.fmax(peak, Held.load(source, tile, self.problem.dtype, hadamard).largest_finite())
        return peak

    @cute.jit
    def measure_heads(
        self, tensors: QuantizeTensors, work: Work, blocks: Work, number: Int32, memory: cute.Tensor | None
    ):
        """The largest magnitudes of a part of several heads of Q or K."""
        traits, problem = self.traits, self.problem
        is_q, place = blocks.place(number)
        span = self.span(tensors, is_q, place)
        first = place.head * traits.measured
        count = cutlass.min(traits.measured, choose(is_q, work.q.heads, work.k.heads) - first)
        tiles = copy_of(self.tiles(span), number)  # a loop, also of one tile, takes fewer registers
        peaks = self.rotated.sizes(tensors, is_q, span, (first, count), tiles, memory)
        warps = -(-traits.num_threads // WARP)
        numbers = SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARP, traits.measured)))
        is_q, place = blocks.place(copy_of(number, tiles))  # not kept, which would take registers
        first, end = place.head * traits.measured, choose(is_q, work.q.heads, work.k.heads)
        for h in range(traits.measured):
            peak = block_max(peaks[h], numbers[None, h], warps) * problem.hadamard_scale
            if cute.arch.thread_idx()[0] == 0 and first + h < end:
                tensors.workspace[work.number_of(is_q, Place(place.batch, place.tile, first + h))] = peak

    @cute.jit
    def measure_v(self, tensors: QuantizeTensors, work: Work, number: Int32, memory: cute.Tensor | None):
        """The largest magnitude of a part of a head of V, or sum and extremes of its columns."""
        traits, problem = self.traits, self.problem
        place = work.v.place(number - work.first_v())
        span = self.span(tensors, None, place)
        tiles = self.tiles(span, is_v=True)
        if const_expr(problem.smooths_v):
            sums = cute.make_rmem_tensor(COLUMNS, Float32)
            sums.fill(0.0)
            extremes = cute.make_rmem_tensor((PAIRS, len(EXTREMES)), Uint32)
            extremes.fill(NAN_PAIR)
            identity = Identity.of(problem.dtype, span.rows)
            for i in cutlass.range(tiles, unroll=1):
                held = self.values(tensors, span, place, i)
                is_whole = held.tile.first + traits.tokens <= held.tile.last + 1
                if const_expr(problem.measures_heads):
                    if not is_whole:
                        replace_missing(held, NAN_PAIR)
                    take_extremes(extremes, held)
                if not is_whole:
                    replace_missing(held, 0)
                add_tile(sums, held, identity)
            if not cute.arch.vote_all_sync(nothing_of([sums[e] for e in range(COLUMNS)]) == Float32(0.0)):
                self.measure_again(tensors, span, place, tiles, sums, extremes)
            tile = span.tile(span.first, problem.head_dim_v, traits.quads)
            self.put_columns(tensors, work, number, tile, (sums, extremes), memory)
        else:
            source = Rows.of(tensors.v, span.origin, place.head)
            self.put_magnitude(tensors, number, self.largest_held(source, span, tiles, problem.head_dim_v, 0))

    def values(self, tensors: QuantizeTensors, span: Span, place: Place, i: Int32) -> Held:
        """A thread's rows of tile `i` of a part of V."""
        tile = span.tile(span.first + i * self.traits.tokens, self.problem.head_dim_v, self.traits.quads)
        return Held.load(Rows.of(tensors.v, span.origin, place.head), tile, self.problem.dtype)

    @cute.jit
    def measure_again(
        self, tensors: QuantizeTensors, span: Span, place: Place, tiles: Int32, sums: cute.Tensor, extremes: cute.Tensor
    ):
        """Sums and extremes of a part's columns without elements that are not finite."""
        sums.fill(0.0)
        extremes.fill(NAN_PAIR)
        for i in cutlass.range(tiles, unroll=1):
            held = self.values(tensors, span, place, i)
            add_rows(sums, held)
            if const_expr(self.problem.measures_heads):
                add_extremes(extremes, held)

    def span(self, tensors: QuantizeTensors, is_q: Boolean | None, place: Place) -> Span:
        """The rows of a part of Q or K; `is_q` is None for one of V."""
        rows = self.traits.part_rows(is_v=is_q is None)
        if self.problem.is_packed:
            packing = packing_of_keys(tensors) if is_q is None else packing_of(tensors, is_q)
            return packing.span(place.tile, rows, rows)
        seqlen = Int32(tensors.v.shape[1]) if is_q is None else seqlen_of(tensors, is_q)
        return Span(place.batch, place.batch, place.tile * rows, seqlen)

    def tiles(self, span: Span, is_v: bool = False) -> Int32:
        """How many tiles of a part have rows that count, none if that is not positive."""
        count = self.traits.tiles_of_v_part if is_v else self.traits.tiles_of_part
        tokens = self.traits.tokens
        return cutlass.min((span.rows - span.first + tokens - 1) // tokens, count)

    @cute.jit
    def put_magnitude(self, tensors: QuantizeTensors, number: Int32, peak: Float32):
        """Write the largest magnitude of part `number`, of which each thread has seen some elements."""
        numbers = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARP))
        peak = block_max(peak, numbers, -(-self.traits.num_threads // WARP))
        if cute.arch.thread_idx()[0] == 0:
            tensors.workspace[number] = peak

    @cute.jit
    def put_columns(
        self, tensors: QuantizeTensors, work: Work, number: Int32, tile: Tile, found, memory: cute.Tensor | None
    ):
        """Put the statistics of a part's columns together, in a fixed order, and write them.

        `found` are the sums and extremes of the thread's columns; an extreme is NaN without a finite element.
        """
        sums, extremes = found
        quads, head_dim = self.traits.quads, self.problem.head_dim_v
        if const_expr(memory is None):
            memory = shared_numbers(4 * quads * head_dim)
        stage = part_of(memory, 0, (head_dim, quads))
        target = self.parts.columns_of(work, number - work.first_v())
        for statistic in cutlass.range_constexpr(self.problem.statistics):
            if tile.is_own:
                for e in cutlass.range_constexpr(COLUMNS):
                    stage[tile.lane * COLUMNS + e, tile.quad] = self.column(sums, extremes, e, statistic)
            cute.arch.sync_threads()
            column = cute.arch.thread_idx()[0]
            while column < head_dim:
                value = stage[column, 0]
                for q in cutlass.range_constexpr(1, quads):
                    value = combine(statistic, value, stage[column, q])
                tensors.workspace[target + statistic * head_dim + column] = value
                column += self.traits.num_threads
            cute.arch.sync_threads()

    def column(self, sums: cute.Tensor, extremes: cute.Tensor, e: int, statistic: int) -> Float32:
        """A statistic of a thread's column."""
        return half_of(extremes[e // 2, statistic - 1], e % 2, self.problem.dtype) if statistic else sums[e]

    @cute.kernel
    def scale(self, tensors: QuantizeTensors, work: Work):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        head, batch, _ = cute.arch.block_idx()
        peak_v = Float32(0.0)
        if const_expr(self.problem.smooths_v):
            peak_v = self.finish_columns(tensors, work, batch, head)
        if const_expr(self.problem.measures_heads):
            grouped = tensors.q.shape[-2] // tensors.k.shape[-2]
            threads = cute.arch.thread_idx()[0], SCALE_THREADS
            of_q, of_k = (
                self.parts.of_entry(work.q, tensors.cu_q, batch),
                self.parts.of_entry(work.k, tensors.cu_k, batch),
            )
            peaks = [
                self.parts.largest(tensors, of_q, Int32(0), (head * grouped, grouped), threads),
                self.parts.largest(tensors, of_k, work.q.size(), (head, 1), threads),
                peak_v,
            ]
            if const_expr(not self.problem.smooths_v):
                of_v = self.parts.of_entry(work.v, tensors.cu_k, batch, is_v=True)
                peaks[2] = self.parts.largest(tensors, of_v, work.first_v(), (head, 1), threads)
            self.put_descales(tensors, batch, head, peaks)

    @cute.jit
    def put_descales(self, tensors: QuantizeTensors, batch: Int32, head: Int32, peaks):
        """Write the descales of a KV head, of whose largest magnitudes each thread has seen some."""
        warps = SCALE_THREADS // WARP
        numbers = SmemAllocator().allocate_tensor(Float32, cute.make_layout((warps, 3)))
        targets = tensors.q_descale, tensors.k_descale, tensors.v_descale
        for x in cutlass.range_constexpr(3):
            peak = block_max(peaks[x], numbers[None, x], warps)
            if cute.arch.thread_idx()[0] == 0:
                targets[x][batch, head] = descale_of(peak, self.problem.to)

    @cute.jit
    def finish_columns(self, tensors: QuantizeTensors, work: Work, batch: Int32, head: Int32):
        """Write the mean of V's columns; returns the largest magnitude of this thread's column minus its mean."""
        peak = Float32(0.0)
        column = cute.arch.thread_idx()[0]
        if column < self.problem.head_dim_v:
            _, size = self.parts.finish_column(tensors, work, batch, head, column, True)
            peak = cute.arch.fmax(peak, size)
        return peak


def combine(statistic: int, a: Float32, b: Float32) -> Float32:
    """The statistic of two sets of elements from those of each."""
    if statistic == 0:
        return a + b
    return cute.arch.fmin(a, b) if statistic == 1 else cute.arch.fmax(a, b)
