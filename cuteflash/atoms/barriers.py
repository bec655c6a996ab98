"""Barriers of the warp-specialised kernels: mbarrier rings for tiles that TMA brings."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cuteflash.atoms.sm90 import bulk_load


@cute.jit
def wait_phase(barrier: cute.Pointer, phase: Int32):
    """Wait until the mbarrier's phase of this parity is complete; the thread sleeps only if a first try fails."""
    if not cute.arch.mbarrier_try_wait(barrier, phase):
        cute.arch.mbarrier_wait(barrier, phase)


@dataclasses.dataclass(frozen=True)
class Ring:
    """`stages` shared-memory tiles that are filled, and drained by warps.

    Positions count tiles from 0 for ever; tile `p` lives in stage `p % stages` and completes phase `p // stages`.

    Attributes:
        full: mbarriers, one a stage; a phase completes when the tile is there.
        empty: mbarriers, one a stage; a phase completes when every draining warp has released the tile.
        stages: tiles in flight.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr[int]

    def init_for(self, filling: int, draining_warps: int) -> None:
        """Initialise the mbarriers; one thread of the block calls it, a fence and a block barrier follow."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, filling)
            cute.arch.mbarrier_init(self.empty + stage, draining_warps)

    def stage(self, position: Int32) -> Int32:
        """The stage that tile `position` lives in."""
        return Int32(Uint32(position) % self.stages)  # unsigned: a bit mask if `stages` is a power of two

    def phase(self, position: Int32) -> Int32:
        """The parity of the phase that completes when tile `position` is there."""
        return Int32(Uint32(position) // self.stages & 1)

    def wait_free(self, position: Int32) -> None:
        """Whoever fills: wait until the stage of tile `position` is free."""
        wait_phase(self.empty + self.stage(position), self.phase(position) ^ 1)

    def wait(self, position: Int32) -> None:
        """Whoever drains: wait until tile `position` is there."""
        wait_phase(self.full + self.stage(position), self.phase(position))

    def release(self, position: Int32) -> None:
        """Draining warp: it has finished reading tile `position`."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage(position))

    def release_loaded(self, position: Int32) -> None:
        """`release` of a tile that every lane has loaded into registers, and that TMA fills.

        An arrival does not wait for loads that are on their way, and TMA writes shared memory on a way of its own:
        loads that are held up, as when a block of another launch begins on the multiprocessor, find the next tile.
        """
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.release(position)


@dataclasses.dataclass(frozen=True)
class TmaRing(Ring):
    """A ring that one TMA warp fills.

    Attributes:
        tile_bytes: bytes TMA writes per tile.
    """

    tile_bytes: cutlass.Constexpr[int]

    @staticmethod
    def create(barriers: cute.Pointer, stages: int, tile_bytes: int) -> TmaRing:
        """A ring over `2 * stages` mbarriers at `barriers` (initialised by `init`)."""
        return TmaRing(barriers, barriers + stages, stages, tile_bytes)

    def init(self, consumer_warps: int) -> None:
        """Initialise the mbarriers, see `init_for`."""
        self.init_for(1, consumer_warps)

    @cute.jit
    def acquire(self, position: Int32) -> cute.Pointer:
        """Producer warp: wait until the stage is free, announce the bytes; returns the mbarrier for the copy."""
        stage = self.stage(position)
        self.wait_free(position)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, self.tile_bytes)
        return self.full + stage


@dataclasses.dataclass(frozen=True)
class StageRing(Ring):
    """A ring that warps fill."""

    @staticmethod
    def create(barriers: cute.Pointer, stages: int) -> StageRing:
        """A ring over `2 * stages` mbarriers at `barriers` (initialised by `init_for`)."""
        return StageRing(barriers, barriers + stages, stages)

    def publish(self, position: Int32) -> None:
        """Filling warp: its part of the tile is written, and visible to whoever drains."""
        arrive(self.full + self.stage(position))


@dataclasses.dataclass(frozen=True)
class CopyRing(Ring):
    """A ring that threads fill by cp.async, all of a tile's before its phase completes; products read it by WGMMA."""

    @staticmethod
    def create(barriers: cute.Pointer, stages: int) -> CopyRing:
        """A ring over `2 * stages` mbarriers at `barriers` (initialised by `init_for`, with the filling threads)."""
        return CopyRing(barriers, barriers + stages, stages)

    def wait(self, position: Int32) -> None:
        """See `Ring.wait`. What threads copied is made visible to the async proxy, by which products read."""
        wait_phase(self.full + self.stage(position), self.phase(position))
        cute.arch.fence_view_async_shared()

    def publish(self, position: Int32) -> None:
        """Filling thread: its part of the tile is complete once the copies that it has issued are."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + self.stage(position))


@dataclasses.dataclass(frozen=True)
class Handover:
    """One shared-memory buffer that warps fill and one thread drains, again and again.

    Attributes:
        full: mbarrier; a phase completes when every filling warp has written.
        empty: mbarrier; a phase completes when the buffer has been read.
    """

    full: cute.Pointer
    empty: cute.Pointer

    def init(self, filling_warps: int) -> None:
        """Initialise the mbarriers; one thread of the block calls it, a fence and a block barrier follow."""
        cute.arch.mbarrier_init(self.full, filling_warps)
        cute.arch.mbarrier_init(self.empty, 1)

    def acquire(self, position: Int32) -> None:
        """Filling thread: wait until what was written at `position - 1` has been read."""
        wait_phase(self.empty, (position & 1) ^ 1)

    def publish(self) -> None:
        """Filling warp: its part is written, and visible to the async proxy."""
        arrive(self.full)

    def wait(self, position: Int32) -> None:
        """Draining thread: wait until the buffer is written for the `position`-th time."""
        wait_phase(self.full, position & 1)

    def release(self) -> None:
        """Draining thread: the buffer has been read."""
        cute.arch.mbarrier_arrive(self.empty)

    def release_with(self, buffer: cute.Pointer, source: cute.Pointer, nbytes: int) -> None:
        """Draining thread: the buffer has been read, and is empty for whoever fills it once it holds what is loaded."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.empty, nbytes)
        bulk_load(buffer, source, nbytes, self.empty)


def arrive(barrier: cute.Pointer) -> None:
    """A warp arrives at an mbarrier once all of its lanes are here."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
