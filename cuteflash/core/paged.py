"""Where the rows of K and V lie in a cache: in the pages that a table names, or in one page a sequence.

A cache is (pages, page size, heads, columns). A sequence's cache entry is a row of the page table or, without one, the
page itself; so a cache without a table is (cache entries, their length, heads, columns).

`Pages` runs on Python ints and torch tensors (in the tests) and on traced values and tensors alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cuteflash.arguments import FwdTensors, PackedTensors
from cuteflash.core.lengths import Index
from cuteflash.problem import Storage
from cuteflash.traits.chunks import swizzle_width


def seqlen_of_caches(tensor: Any, table: Any | None) -> Index:
    """The rows of a cache entry at most, of (pages, page size, ..) K or V; also of others, which have no table."""
    page_size: Index = tensor.shape[1]
    return page_size if table is None else table.shape[1] * page_size


@dataclasses.dataclass(frozen=True)
class Pages:
    """Where the rows of each sequence lie in a cache.

    Attributes:
        table: (cache entries, pages of each), the number of each page; None if an entry is a page.
        entries: (batch,), the cache entry of each sequence; None if it is the sequence's number.
        page_size: rows of a page, as something to divide by; None without a table.
        steps: rows of K, and of V, from one page to the next; None if rows are looked up one by one.
        head_steps: slabs of columns of K, and of V, from one head to the next; None without `wide_boxes`.
    """

    table: Any | None
    entries: Any | None
    page_size: Any | None
    steps: tuple[Index, Index] | None
    head_steps: tuple[Index, Index] | None = None

    @staticmethod
    def of(tensors: FwdTensors, packed: PackedTensors, storage: Storage) -> Pages:
        """Those of a call."""
        caches = tensors.k, tensors.v
        page_size = cute.fast_divmod_create_divisor_v2(tensors.k.shape[1]) if storage.has_page_table else None
        steps = None if storage.gathers else tuple(Int32(x.stride[0] // x.stride[1]) for x in caches)
        head_steps = None
        if storage.wide_boxes:
            head_steps = tuple(Int32(x.stride[2] // swizzle_width(x.shape[3])) for x in caches)
        return Pages(packed.page_table, packed.cache_batch_idx, page_size, steps, head_steps)

    def entry(self, sequence: Index) -> Index:
        """The cache entry of a sequence that has keys; that of others is not to be looked up."""
        return sequence if self.entries is None else self.entries[sequence]

    def place(self, entry: Index, row: Index) -> tuple[Index, Index]:
        """(page, row in the page) of a row that the entry's sequence has: no other is looked up."""
        if self.table is None:
            return entry, row
        slot, in_page = divmod(row, self.page_size)
        return self.table[entry, slot], in_page
