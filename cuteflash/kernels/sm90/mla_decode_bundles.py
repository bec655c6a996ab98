"""What the roles of the latent-attention decode pass to each other, by subject."""

from __future__ import annotations

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cuteflash.atoms.barriers import arrive, wait_phase
from cuteflash.core.latent import LatentLaunch, LatentPages
from cuteflash.kernels.sm90.mla_decode_merge import MergedParts
from cuteflash.traits.mla_sm90 import PARTS

SLABS_BUT_LAST, LAST_SLAB = 0, 1  # parts of Q
HALF_PARTS = 2  # parts of a half of a page: V's columns of the first warpgroup, then those of the second
ROPE = 4  # the part of a page that is not V's
CONSUMER_WARPS = 4  # of a warpgroup
# Warps that read a half of the first and of the second page. Each warpgroup reads its own page whole, to multiply it
# with Q, and its half of the other one, as V.
READERS = ((CONSUMER_WARPS, 2 * CONSUMER_WARPS), (2 * CONSUMER_WARPS, CONSUMER_WARPS))


FIRST_PAGE, BOTH_PAGES = 1, 3  # bits of `kv_pos` that change when these are used


class MlaBarrier(enum.IntEnum):
    """Hardware barriers in use; 0 is `__syncthreads`."""

    P_READY = 1  # + warpgroup: the exponentials of its page and the rows' maxima are in shared memory
    BOTH = 3  # both warpgroups
    OWN = 4  # + warpgroup: all of its threads
    TURN = 6  # the first warpgroup has issued the scores of its page


@dataclasses.dataclass(frozen=True)
class MlaTma:
    """TMA descriptors and the coordinate tensors they are sliced with."""

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    gQ: cute.Tensor  # (rows, 576, batch)
    gK: cute.Tensor  # (rows of an entry, 576, entries)


@dataclasses.dataclass(frozen=True)
class MlaTiles:
    """Shared-memory tensors. P of the second warpgroup lies over the last slab of Q."""

    sQ: cute.Tensor  # (64, 576)
    sQ_slabs: cute.Tensor  # (64, 64, 9), the same data
    sK: cute.Tensor  # (64 keys, 576, 2)
    sK_slabs: cute.Tensor  # (64 keys, 64, 2 x 9), the same data
    sVt: tuple[cute.Tensor, cute.Tensor]  # (256, 64 keys, 2): the left and the right columns of V, the same data
    sP: tuple[cute.Tensor, cute.Tensor]  # (64, 64 keys) of each warpgroup
    pages: cute.Pointer  # the bytes of sK
    maxima: cute.Tensor  # (64, 2) fp32: the rows' maxima after a page of each warpgroup
    sums: cute.Tensor  # (64, 2) fp32: the rows' sums of each warpgroup


@dataclasses.dataclass(frozen=True)
class MlaRings:
    """mbarriers of Q and of the two pages.

    Each warpgroup owns one of the two, and every other page of a tile; so the pages that one holds are counted for
    themselves. `kv_pos` holds the parities of both counts, a bit each.

    Attributes:
        q_full, q_empty: of Q, first of all slabs but the last one, then of that one.
        full: of each page its groups of slabs.
        empty: of each page its parts.
        merged: of what other blocks have of a tile, see `mla_decode_parts.py`.
        groups: groups of slabs of a page.
    """

    q_full: cute.Pointer
    q_empty: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    merged: cute.Pointer
    groups: cutlass.Constexpr[int]

    @classmethod
    def create(cls, barriers: cute.Pointer, groups: int) -> MlaRings:
        """Over mbarriers at `barriers`, as many as the traits count."""
        full = barriers + 4
        empty = full + 2 * groups
        return cls(barriers, barriers + 2, full, empty, empty + 2 * PARTS, groups)

    def init(self) -> None:
        """Initialise the mbarriers; one thread of the block calls it, a fence and a block barrier follow."""
        for part in (SLABS_BUT_LAST, LAST_SLAB):
            cute.arch.mbarrier_init(self.q_full + part, 1)
            cute.arch.mbarrier_init(self.q_empty + part, 2 * CONSUMER_WARPS)
        cute.arch.mbarrier_init(self.merged, 1)
        for i in range(2 * self.groups):
            cute.arch.mbarrier_init(self.full + i, 1)
        for page, halves in enumerate(READERS):
            for part in range(PARTS):
                warps = CONSUMER_WARPS if part == ROPE else halves[part // HALF_PARTS]
                cute.arch.mbarrier_init(self.empty + PARTS * page + part, warps)

    def wait_group(self, page: int, group: int, phase: Int32) -> None:
        """Consumer: wait until a group of slabs is there."""
        wait_phase(self.full + page * self.groups + group, phase)

    def release(self, page: int, part: int) -> None:
        """Consumer warp: it has finished reading a part of a page."""
        arrive(self.empty + PARTS * page + part)


def parity(kv_pos: Int32, page: Int32 | int) -> Int32:
    """The parity of a page's phase at its next use."""
    return (kv_pos >> page) & 1


@dataclasses.dataclass(frozen=True)
class MlaBlock:
    """The values that all warps of a block use."""

    tma: MlaTma
    tiles: MlaTiles
    rings: MlaRings
    launch: LatentLaunch
    gO: cute.Tensor  # (rows, 512, batch)
    pages: LatentPages
    mLSE: cute.Tensor  # (batch, 1, (heads, tokens))
    parts: MergedParts | None  # of split keys
