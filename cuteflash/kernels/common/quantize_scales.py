"""The scales of tiles: where they are, and how a block finds one."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Float32, Int32
from cutlass.memory import SmemAllocator

from cuteflash.kernels.common.quantize_tile import Tile, block_max, descale_of
from cuteflash.kernels.common.quantize_work import Place, choose
from cuteflash.quantize_problem import BLOCK_TOKENS, QuantizeProblem, QuantizeTensors
from cuteflash.traits.quantize import WARP, QuantizeTraits


class Scales:
    """The scales of a problem's tiles."""

    def __init__(self, traits: QuantizeTraits, problem: QuantizeProblem) -> None:
        self.traits = traits
        self.problem = problem

    def of_qk(self, tensors: QuantizeTensors, is_q: Boolean, place: Place) -> cute.Tensor:
        """(1,) the descale of a tile of Q or K; `place` has its KV head."""
        of_q, of_k = (self.at(x, place) for x in (tensors.q_descale, tensors.k_descale))
        address = choose(is_q, of_q.iterator.toint(), of_k.iterator.toint())
        pointer = cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(1))

    def at(self, descales: cute.Tensor, place: Place) -> cute.Tensor:
        """(1,) a tile's descale among those of its tensor, see `has`."""
        block = place.tile * self.traits.tokens // BLOCK_TOKENS
        if self.problem.granularity == "head":
            at: tuple[Int32, ...] = place.batch, place.head
        elif self.problem.is_packed:
            at = Int32(0), place.head, cutlass.min(block, descales.shape[2] - 1)
        else:
            at = place.batch, place.head, block
        return cute.make_tensor(descales.iterator + cute.crd2idx(at, descales.layout), cute.make_layout(1))

    def has(self, descales: cute.Tensor, place: Place) -> Boolean | bool:
        """Whether a tile has a descale; the last number of packed blocks has none, for no sequence can own it."""
        if self.problem.granularity == "head" or not self.problem.is_packed:
            return True
        return place.tile * self.traits.tokens // BLOCK_TOKENS < descales.shape[2]

    def has_qk(self, tensors: QuantizeTensors, is_q: Boolean, place: Place) -> Boolean | bool:
        """The same of a tile of Q or K."""
        return choose(is_q, *(self.has(x, place) for x in (tensors.q_descale, tensors.k_descale)))

    def numbers(self, count: int = 1) -> cute.Tensor:
        """(32, count) shared memory for `find`, as often as that is called before another barrier."""
        return SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARP, count)))

    def find(self, peak: Float32, tile: Tile, numbers: cute.Tensor) -> Float32:
        """A tile's descale, from the largest magnitude that each thread has seen; 1 if none of its rows counts."""
        if self.problem.is_packed:
            peak = cutlass.select_(tile.any(), peak, Float32(0.0))
        return descale_of(self.of_block(peak, numbers), self.problem.to)

    def find_together(
        self, tensors: QuantizeTensors, of: tuple[Boolean, Place], size: Float32, shared, step: Int32 | int = 0
    ) -> Float32:
        """A tile's descale, which is also written, if blocks of a cluster find that of Q, each from a head of it.

        Args:
            tensors: of the problem.
            of: whether it is Q's, and the tile, with its KV head.
            size: the largest magnitude that each thread has seen.
            shared: memory for `of_block`, and the `ClusterPeaks`, begun; None if each block finds its own.
            step: how many tiles the block has had before.
        """
        (is_q, place), (numbers, peaks) = of, shared
        peak = self.of_block(size, numbers)
        if peaks is not None:
            peak = peaks.largest(peak, is_q, step)
        found = descale_of(peak, self.problem.to)
        self.put(self.of_qk(tensors, is_q, place), found, True)
        return found

    def of_block(self, peak: Float32, numbers: cute.Tensor) -> Float32:
        """The largest magnitude of the block's threads."""
        return block_max(peak, numbers, -(-self.traits.num_threads // WARP))

    @cute.jit
    def put(self, descale: cute.Tensor, found: Float32, is_listed: Boolean):
        """Write a tile's descale if it has a place, see `has`."""
        if cute.arch.thread_idx()[0] == 0 and is_listed:
            descale[0] = found
