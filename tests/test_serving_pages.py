"""The pages of the engine's cache, on random traffic beside a plain model of it."""

from __future__ import annotations

import random

import pytest
from serving.pages import ROOT, SCRATCH, PagePool, page_digest


def digests(*pages: list[int]) -> list[bytes]:
    found, previous = [], ROOT
    for page in pages:
        previous = page_digest(previous, page)
        found.append(previous)
    return found


def test_a_page_is_named_by_all_tokens_up_to_its_end() -> None:
    assert digests([1, 2], [3, 4]) == digests([1, 2], [3, 4])
    names = {*digests([1, 2], [3, 4]), *digests([3, 4], [1, 2]), *digests([1], [2]), *digests([258], [1])}
    assert len(names) == 8


def test_the_scratch_page_is_never_handed_out() -> None:
    pool = PagePool(5, 4)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4] and SCRATCH not in pages
    with pytest.raises(ValueError, match="count is 1; allowed: up to 0"):
        pool.allocate(1)


def test_released_prefixes_are_found_until_their_pages_are_needed() -> None:
    pool = PagePool(6, 2)
    names = digests([1, 2], [3, 4], [5, 6])
    pages = pool.allocate(3)
    for page, name in zip(pages, names, strict=True):
        pool.remember(page, name)
    pool.release(pages)
    assert pool.available == 5 and pool.match(names) == pages
    assert pool.idle_among(pages) == 3
    pool.hold(pages[:1])
    pool.allocate(3)  # two free ones, and the end of the prefix
    assert pool.evictions == 1 and pool.match(names) == pages[:2]


def test_a_prefix_with_a_gap_ends_at_the_gap() -> None:
    pool = PagePool(6, 2)
    names = digests([1, 2], [3, 4], [5, 6])
    pages = pool.allocate(2)
    pool.remember(pages[0], names[0])
    pool.remember(pages[1], names[2])
    assert pool.match(names) == pages[:1]


def test_of_two_pages_with_one_prefix_the_first_is_found() -> None:
    pool = PagePool(4, 2)
    one, other = pool.allocate(2)
    pool.remember(one, b"x")
    pool.remember(other, b"x")
    assert pool.match([b"x"]) == [one]
    pool.release([other])
    pool.release([one])
    assert pool.match([b"x"]) == [one] and pool.available == 3


def test_prefixes_can_be_turned_off() -> None:
    pool = PagePool(4, 2, keeps_prefixes=False)
    pages = pool.allocate(1)
    pool.remember(pages[0], b"x")
    assert pool.match([b"x"]) == []


@pytest.mark.parametrize(("pages", "size", "name"), [(1, 4, "pages"), (4, 0, "page_size")])
def test_wrong_sizes_are_refused(pages: int, size: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        PagePool(pages, size)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic(seed: int) -> None:
    """No page has two owners without sharing a prefix, none is lost, and a found prefix is the one remembered."""
    draw = random.Random(seed)
    pool = PagePool(12, 1)
    contents: dict[int, bytes] = {}
    held: list[list[int]] = []
    for _ in range(300):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
        else:
            names = digests(*([draw.randrange(2)] for _ in range(draw.randrange(1, 6))))
            found = pool.match(names)
            assert [contents[page] for page in found] == names[: len(found)]
            if len(names) - len(found) > pool.available - pool.idle_among(found):
                continue
            pool.hold(found)
            fresh = pool.allocate(len(names) - len(found))
            assert not set(fresh) & {page for pages in held for page in pages} and not set(fresh) & set(found)
            held.append(found + fresh)
            for page, name in zip(held[-1], names, strict=True):
                if page in fresh:
                    contents[page] = name
                    pool.remember(page, name)
        assert pool.available == pool.capacity - len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert pool.available == pool.capacity
