"""Traits of the kernel that appends to a KV cache: how many threads a block has, and what each works on."""

from __future__ import annotations

import dataclasses

COLUMNS = 16  # of one thread: two pieces of 8 columns, which the rotary embedding may rotate into each other
CHUNK = 8  # columns of a piece: 16 bytes of 16-bit elements


@dataclasses.dataclass(frozen=True, slots=True)
class AppendTraits:
    """One way to run the kernel.

    Attributes:
        num_threads: threads of a block.
        smem_bytes: shared memory of a block.
    """

    num_threads: int = 128
    smem_bytes: int = 0

    def blocks(self, items: int) -> int:
        """Blocks for so many items, one a thread; also for traced values."""
        return (items + self.num_threads - 1) // self.num_threads


def units(head_dim: int) -> int:
    """How many threads a row of `head_dim` columns takes."""
    return -(-head_dim // COLUMNS)
