"""The pages of a K/V cache: which are free, how many requests hold each, and which prefix of tokens each full one has.

A page that nobody holds keeps its prefix until the page is needed; the one that was released first goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

SCRATCH = 0  # the page that padding rows of a batch write to; never handed out
ROOT = b""


def page_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full page: of its tokens and all before them. `previous` is the page before it, `ROOT` if none."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Hands out the pages 1 to `pages` - 1.

    Args:
        pages: how many there are, with the scratch page; at least 2.
        page_size: tokens of a page, positive.
        keeps_prefixes: whether full pages are found again.

    Raises:
        ValueError: one of the sizes is not allowed.
    """

    def __init__(self, pages: int, page_size: int, keeps_prefixes: bool = True) -> None:
        if pages < 2:
            raise ValueError(f"pages is {pages}; allowed: 2 and more, since the first is scratch")
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; allowed: positive numbers")
        self.pages, self.page_size, self.keeps_prefixes = pages, page_size, keeps_prefixes
        self.evictions = 0
        self._free = list(range(pages - 1, SCRATCH, -1))
        self._holders = [0] * pages
        self._digests: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by nobody, with a prefix; oldest first

    @property
    def capacity(self) -> int:
        """Pages that requests can hold at the same time."""
        return self.pages - 1

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_size)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix; they are not held by this."""
        found = []
        for digest in digests:
            page = self._known.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds: holding them takes them from what is available."""
        return sum(page in self._idle for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """One more request holds each of `pages`."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def allocate(self, count: int) -> list[int]:
        """`count` pages for one holder; their contents are undefined.

        Raises:
            ValueError: fewer are available.
        """
        if count > self.available:
            raise ValueError(f"count is {count}; allowed: up to {self.available}, the pages available")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._known[self._digests.pop(page)]
                self.evictions += 1
            self._holders[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """One request holds `pages`, in their order in its sequence, no more."""
        for page in reversed(pages):  # the end of a prefix is evicted before its beginning
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digests:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def remember(self, page: int, digest: bytes) -> None:
        """`page` is full and has the prefix `digest`. The first page of a prefix is the one that is found."""
        if self.keeps_prefixes and digest not in self._known and page not in self._digests:
            self._known[digest] = page
            self._digests[page] = digest
