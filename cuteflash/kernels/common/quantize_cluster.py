"""The largest magnitude that the blocks of a cluster have seen, each sending its own to all of them.

Numbers are sent with what counts their bytes at the other block (`st.async`), so that nobody waits for anything else: a
barrier of the cluster would wait for everything that threads have written.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.memory import SmemAllocator

TURNS = 2  # of what is sent: a block is at most one step ahead of another


@dataclasses.dataclass(frozen=True)
class ClusterPeaks:
    """Shared memory of a block.

    Attributes:
        peaks: (blocks, 2) those of all blocks, in turns.
        barriers: one for each turn.
        blocks: how many there are.
    """

    peaks: cute.Tensor
    barriers: cute.Pointer
    blocks: cutlass.Constexpr[int]

    @classmethod
    def of(cls, blocks: int) -> ClusterPeaks:
        """For a cluster of so many blocks."""
        allocator = SmemAllocator()
        peaks = allocator.allocate_tensor(Float32, cute.make_layout((blocks, TURNS)), byte_alignment=16)
        return cls(peaks, allocator.allocate_array(cutlass.Int64, TURNS), blocks)

    @cute.jit
    def begin(self, is_needed: Boolean):
        """All threads of all blocks of a cluster, once, if they need what others have seen: then peaks may be sent."""
        if is_needed:
            if cute.arch.thread_idx()[0] == 0:
                for turn in cutlass.range_constexpr(TURNS):
                    cute.arch.mbarrier_init(self.barriers + turn, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def largest(self, peak: Float32, is_needed: Boolean, step: Int32 | int = 0):
        """The largest of the blocks' peaks in a step, if they need it; `peak` is the own one, in all threads."""
        if is_needed:
            peak = self.merged(peak, Int32(step))
        return peak

    @cute.jit
    def merged(self, peak: Float32, step: Int32):
        """The same, needed."""
        thread, turn = cute.arch.thread_idx()[0], step % TURNS
        barrier, peaks = self.barriers + turn, self.peaks[None, turn]
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.blocks * Float32.width // 8)
        if thread < self.blocks:
            own = peaks.iterator.toint() + cute.arch.block_idx_in_cluster() * (Float32.width // 8)
            cute.arch.inline_ptx(
                "{.reg .b32 place, barrier; mapa.shared::cluster.u32 place, {$r0}, {$r2}; "
                "mapa.shared::cluster.u32 barrier, {$r1}, {$r2}; "
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], {$r3}, [barrier];}",
                read_only_args=[Int32(own), Int32(barrier.toint()), thread, peak],
            )
        cute.arch.mbarrier_wait(barrier, step // TURNS % 2)
        found = peaks[0]
        for block in cutlass.range_constexpr(1, self.blocks):
            found = cute.arch.fmax(found, peaks[block])
        return found
