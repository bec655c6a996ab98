"""Blocks that have a tile of some heads of Q and K of all batch entries, which share its cosines and sines.

Those are loaded once for as many heads as make blocks that run at once, in one wave or in several, equally long. Blocks
that run beside each other have heads that are neighbours in memory, at each step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cuteflash.kernels.common.quantize_cluster import ClusterPeaks
from cuteflash.kernels.common.quantize_rotate import RotatedHeads
from cuteflash.kernels.common.quantize_tile import Rows, Tile, part_of
from cuteflash.kernels.common.quantize_work import HeadTiles, Place, Sharing, Span, Work, choose, fast
from cuteflash.quantize_problem import QuantizeTensors
from cuteflash.traits.quantize import MULTIPROCESSORS, ROWS, SHARED_VISITS, WARP


def shared_tiles(
    tensors: QuantizeTensors, tiles: Any, cluster: int, places: int, visits: tuple[int, int] = (SHARED_VISITS, 0)
) -> tuple[HeadTiles, HeadTiles, Sharing]:
    """The blocks of all heads of Q, or of Q and K, and those of K, and how they share them; values of the host's code.

    Args:
        tensors: of the problem.
        tiles: of a head.
        cluster: blocks that have the same KV heads; each has one of their heads of Q.
        places: how many blocks a multiprocessor has at once.
        visits: heads of a block, or KV heads of a cluster, about: at most twice as many; heads of K of a block that has
            no others, or 0.
    """
    batch, heads, kv_heads = tensors.q.shape[0], tensors.q.shape[-2], tensors.k.shape[-2]
    of_group = heads // cutlass.max(kv_heads, 1) + 1  # heads of Q and K for each KV head
    count = batch * kv_heads if cluster > 1 else batch * kv_heads * of_group
    at_once = MULTIPROCESSORS * places // cluster
    most, of_k = visits
    waves = cute.ceil_div(count * tiles, at_once * most)
    groups = cutlass.max(waves * at_once // cutlass.max(tiles, 1), 1)
    each = cutlass.max(cute.ceil_div(count, groups), 1)
    q = HeadTiles.of(1, tiles, cute.ceil_div(count, each) * cluster)
    k = HeadTiles.of(1, tiles, cute.ceil_div(count, of_k) if of_k else 0)
    return q, k, Sharing(count, of_group, fast(of_group), fast(kv_heads))


@dataclasses.dataclass(frozen=True)
class SharedVisit:
    """What a block has of Q and K.

    Attributes:
        sharing: how heads are numbered.
        tile: which tile of them.
        first, stride: the number of its first head, and from one to the next; in a cluster those of KV heads.
        of_q: in a cluster how many KV heads it has: a block visits one head of Q of each, then some of K.
        count: how many heads it visits.
        rank, blocks: which of how many blocks it is that share these heads of K.
        cluster: how many blocks a cluster has.
    """

    sharing: Sharing
    tile: Int32
    first: Int32
    stride: Int32
    of_q: Int32
    count: Int32
    rank: Int32
    blocks: Int32 | int
    cluster: cutlass.Constexpr[int]

    @classmethod
    def of(cls, work: Work, number: Int32, cluster: int = 1, has_k: bool = True) -> SharedVisit:
        """That of block `number`; `has_k` says whether blocks of Q have heads of K."""
        place, heads, blocks = work.q.place(number), work.q.heads, cluster
        is_q: Boolean | None = None
        if not has_k:
            is_q, place = work.place(number)
            heads, blocks = choose(is_q, work.q.heads, work.k.heads), choose(is_q, Int32(cluster), Int32(1))
        first, rank, stride = place.head // blocks, place.head % blocks, heads // blocks
        count = of_q = (work.sharing.count - first + stride - 1) // stride
        if is_q is not None:
            of_q = choose(is_q, count, Int32(0))
        elif cluster > 1:
            count = of_q + (of_q - rank + cluster - 1) // cluster
        return cls(work.sharing, place.tile, first, stride, of_q, count, rank, blocks, cluster)

    def head(self, step: Int32) -> tuple[Boolean, Int32, Place]:
        """Of the head of a step whether it is of Q, which it is, and the place of its scale."""
        if const_expr(self.cluster > 1):
            is_q = step < self.of_q
            number = self.first + self.stride * choose(is_q, step, self.rank + (step - self.of_q) * self.blocks)
            entry, kv_head = divmod(number, self.sharing.per_entry)
            head = choose(is_q, kv_head * self.cluster + self.rank, kv_head)
        else:
            number, member = divmod(self.first + self.stride * step, self.sharing.per_group)
            entry, kv_head = divmod(number, self.sharing.per_entry)
            of_q = self.sharing.of_group - 1
            is_q = member < of_q
            head = choose(is_q, kv_head * of_q + member, kv_head)
        return is_q, head, Place(entry, self.tile, kv_head)

    def rows(self, both: tuple[cute.Tensor, cute.Tensor], step: Int32) -> Rows:
        """The rows of the head of a step, of Q and K or of what is made of them."""
        is_q, head, place = self.head(step)
        return choose(is_q, *(Rows.of(x, place.batch, head) for x in both))


class SharedHeads(RotatedHeads):
    """The parts of such blocks in the kernel that converts, if it finds scales, and in that which measures."""

    def span(self, tensors: QuantizeTensors, visit: SharedVisit) -> Span:
        """The rows of a tile, which are those of Q and of K, of any batch entry."""
        return Span(Int32(0), Int32(0), visit.tile * self.traits.tokens, Int32(tensors.q.shape[1]))

    @cute.jit
    def convert(self, tensors: QuantizeTensors, work: Work, number: Int32, memory: cute.Tensor | None):
        """Convert a tile of some heads, whose scales are found; those of Q by all blocks of a cluster."""
        cluster, scale = self.problem.cluster, self.problem.hadamard_scale
        visit = SharedVisit.of(work, number, cluster, not self.traits.visits_k)
        span, source, target = self.span(tensors, visit), (tensors.q, tensors.k), (tensors.q8, tensors.k8)
        tile = self.tile(span)
        turner = self.turner(tensors, tile, memory)
        words = tile.words()
        self.load(tile, visit.rows(source, Int32(0)), words)
        turner.put_angles()
        numbers, peaks = self.scales.numbers(2), None  # both take turns
        if const_expr(cluster > 1):
            peaks = ClusterPeaks.of(cluster)
            peaks.begin(visit.of_q > 0)
        for step in cutlass.range(visit.count, unroll=1):
            held = self.turned(turner, span, step, words, visit.rows(source, step))
            self.load_following(visit, source, (span, tile), step, words)
            is_q, _, place = visit.head(step)
            size, shared = held.magnitude() * scale, (numbers[None, step & 1], peaks)
            found = self.scales.find_together(tensors, (is_q, place), size, shared, step)
            self.put(visit.rows(target, step), self.again_held(span, held, step), scale / found)

    @cute.jit
    def measure(self, tensors: QuantizeTensors, work: Work, blocks: Work, number: Int32, memory: cute.Tensor):
        """Write the largest magnitudes of a tile of some heads, each of which is a part of `work`."""
        problem, traits = self.problem, self.traits
        visit = SharedVisit.of(blocks, number)
        span, source = self.span(tensors, visit), (tensors.q, tensors.k)
        warps = traits.num_threads // WARP
        peaks = part_of(memory, traits.angles_bytes(problem) // 4, (warps, 2 * SHARED_VISITS))
        if span.first < span.rows:
            tile = self.tile(span)
            turner = self.turner(tensors, tile, memory)
            words = tile.words()
            self.load(tile, visit.rows(source, Int32(0)), words)
            turner.put_angles()
            for step in cutlass.range(visit.count, unroll=1):
                held = self.turned(turner, span, step, words, visit.rows(source, step))
                self.load_following(visit, source, (span, tile), step, words)
                if const_expr(problem.keeps_angles):
                    peak = held.magnitude()
                else:  # all rows together would take registers
                    peak = Float32(0.0)
                    for i in cutlass.range_constexpr(ROWS):
                        peak = cute.arch.fmax(peak, held.only(i).magnitude())
                peaks[cute.arch.warp_idx(), step] = cute.arch.warp_reduction_max(peak)
        cute.arch.sync_threads()
        step = cute.arch.thread_idx()[0]
        if step < visit.count:
            is_q, head, place = visit.head(step)
            peak = Float32(0.0)
            if span.first < span.rows:
                for w in cutlass.range_constexpr(warps):
                    peak = cute.arch.fmax(peak, peaks[w, step])
            part = work.number_of(is_q, Place(place.batch, visit.tile, head))
            tensors.workspace[part] = peak * problem.hadamard_scale

    @cute.jit
    def load_following(
        self,
        visit: SharedVisit,
        source: tuple[cute.Tensor, cute.Tensor],
        of: tuple[Span, Tile],
        step: Int32,
        words: cute.Tensor,
    ):
        """Load a thread's rows of the head after that of a step."""
        if step + 1 < visit.count:
            self.load(self.again(*of, step), visit.rows(source, step + 1), words)
