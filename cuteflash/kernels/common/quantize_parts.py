"""What is measured of the parts of a head, put together: the largest magnitude, and the mean of V's columns.

    magnitudes   (parts of all heads of Q, then K, then V)   fp32, if each KV head gets a scale
    columns      (parts of V's heads, 1 or 3, head_dim_v)    fp32 sum, if V is smoothed; then its smallest and largest
                                                             element, if each KV head gets a scale as well

The workspace has one after the other; parts are numbered as `Work` does it, and V has only one of the two. Sums are
added in a fixed order. A kernel of its own reads them, or, if they are few, each block that converts.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cuteflash.core.tile_numbers import first_tile
from cuteflash.kernels.common.quantize_work import HeadTiles, Work, batch_of, choose
from cuteflash.quantize_problem import QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import WARP, QuantizeTraits


class Parts:
    """The parts of a problem."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem

    def work(self, tensors: QuantizeTensors) -> Work:
        """All of them."""
        batch, heads, kv_heads = batch_of(tensors), tensors.q.shape[-2], tensors.k.shape[-2]
        if self.problem.is_packed:
            sequences = tensors.cu_q.shape[0] - 1
            of_q, of_k = (self.traits.packed_parts(x.shape[0], sequences) for x in (tensors.q, tensors.k))
            of_v = self.traits.packed_parts(tensors.v.shape[0], sequences, is_v=True)
        else:
            of_q, of_k = (self.traits.parts(x.shape[1]) for x in (tensors.q, tensors.k))
            of_v = self.traits.parts(tensors.v.shape[1], is_v=True)
        if not self.problem.measures_heads:
            heads_q, heads_k = 0, 0
        else:
            heads_q, heads_k = heads, kv_heads
        q, k = HeadTiles.of(batch, of_q, heads_q), HeadTiles.of(batch, of_k, heads_k)
        return Work(q, k, HeadTiles.of(batch, of_v, kv_heads))

    def columns_of(self, work: Work, number: Int32) -> Int64:
        """Where the statistics of the columns of V's part `number` begin."""
        return Int64(work.first_v()) + Int64(number) * (self.problem.statistics * self.problem.head_dim_v)

    def of_entry(self, parts: HeadTiles, cu_seqlens: cute.Tensor | None, batch: Int32, is_v: bool = False):
        """(all parts, the batch entry in their numbers, the first part, how many) of a batch entry or sequence."""
        if cu_seqlens is None:
            return parts, batch, None, parts.tiles
        first, end = (first_tile(cu_seqlens[x], x, self.traits.part_rows(is_v)) for x in (batch, batch + 1))
        return parts, Int32(0), first, end - first

    @cute.jit
    def largest(self, tensors: QuantizeTensors, found, start: Int32, heads, threads: tuple[Int32, Int32 | int]):
        """The largest of those magnitudes of some heads' parts that are this thread's to read.

        `heads` are the first one and how many, `threads` which of how many threads it is.
        """
        parts, batch, first_part, of_head = found
        first, count = heads
        peak = Float32(0.0)
        index, step = threads
        total = of_head * count
        while index < total:
            part = index // count
            if const_expr(first_part is not None):
                part += first_part
            number = start + parts.number(batch, part, first + index % count)
            peak = cute.arch.fmax(peak, tensors.workspace[number])
            index += step
        return peak

    @cute.jit
    def finish_column(
        self, tensors: QuantizeTensors, work: Work, batch: Int32, head: Int32, column: Int32, writes: Boolean | bool
    ):
        """(the mean of a column of V, the largest magnitude of the column minus it); `writes` the mean."""
        head_dim = self.problem.head_dim_v
        parts, entry, first_part, count = self.of_entry(work.v, tensors.cu_k, batch, is_v=True)
        seqlen = tensors.v.shape[1] if const_expr(first_part is None) else self.counted_keys(tensors, batch)
        total, low, high = Float32(0.0), Float32.inf, -Float32.inf
        for index in cutlass.range(count, unroll=8):
            part = index
            if const_expr(first_part is not None):
                part += first_part
            source = self.columns_of(work, parts.number(entry, part, head)) + column
            total = total + tensors.workspace[source]
            if const_expr(self.problem.measures_heads):
                low = cute.arch.fmin(low, tensors.workspace[source + head_dim])
                high = cute.arch.fmax(high, tensors.workspace[source + 2 * head_dim])
        mean = total / Float32(cutlass.max(seqlen, 1))
        if writes:
            tensors.v_mean[batch, head, column] = mean
        return mean, cute.arch.fmax(high - mean, mean - low)

    @cute.jit
    def peaks(self):
        """(visits,) shared memory for the largest magnitudes of the KV heads that a block visits, 0 at first."""
        peaks = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.traits.visits))
        thread = cute.arch.thread_idx()[0]
        if thread < self.traits.visits:
            peaks[thread] = Float32(0.0)
        cute.arch.sync_threads()
        return peaks

    @cute.jit
    def begin(self, tensors: QuantizeTensors, work: Work, is_q: Boolean, entry: Int32, heads: tuple[Int32, Int32]):
        """The largest magnitude of those parts that are this thread's to read.

        Warps have some KV heads of Q or K, the first one and how many `heads` says, in turns. Of parts that are few
        each thread reads one, and waits for none.
        """
        first, (head, number, of_head) = heads[0], self.share(heads[1])
        grouped = choose(is_q, Int32(tensors.q.shape[-2]) // Int32(tensors.k.shape[-2]), Int32(1))
        tiles, in_row = choose(is_q, work.q.tiles, work.k.tiles), choose(is_q, work.q.heads, work.k.heads)
        parts = dataclasses.replace(work.q, tiles=tiles, heads=in_row)
        start, total = choose(is_q, Int32(0), work.q.size()), tiles * grouped
        found = parts, entry, None, tiles
        heads_of = (first + head) * grouped, grouped
        index = cutlass.min(number * WARP + cute.arch.lane_idx(), total - 1)
        peak = tensors.workspace[start + parts.number(entry, index // grouped, heads_of[0] + index % grouped)]
        threads = number * WARP + cute.arch.lane_idx() + of_head * WARP, of_head * WARP
        return cute.arch.fmax(peak, self.largest(tensors, found, start, heads_of, threads))

    def share(self, count: Int32) -> tuple[Int32, Int32, Int32]:
        """(the one of `count` KV heads that a warp has, which of its warps it is, how many warps that has)."""
        warp, warps = cute.arch.warp_idx(), self.traits.num_threads // WARP
        head = warp % count
        return head, warp // count, (warps - head + count - 1) // count

    @cute.jit
    def finish(self, peak: Float32, count: Int32, peaks: cute.Tensor):
        """Put the largest of what `begin` gave into shared memory; all threads of the block call it."""
        peak = cute.arch.warp_reduction_max(peak)
        if cute.arch.lane_idx() == 0:
            place = peaks.iterator + self.share(count)[0]
            cute.arch.inline_ptx(  # magnitudes are in the order of their bits
                "red.shared.max.u32 [{$r0}], {$r1};", read_only_args=[Int32(place.toint()), peak]
            )
        cute.arch.sync_threads()

    def counted_keys(self, tensors: QuantizeTensors, sequence: Int32) -> Int32:
        """How many keys of a packed sequence count."""
        if tensors.used_k is not None:
            return tensors.used_k[sequence]
        return tensors.cu_k[sequence + 1] - tensors.cu_k[sequence]
