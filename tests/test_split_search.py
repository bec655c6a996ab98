"""Which tiles each block finds if only the device knows the lengths: the kernels' code, on a warp's lanes as arrays."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import types
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cuteflash.core.lengths import Sequence
from tests.test_schedule import untraced

LANES = np.arange(32)
COUNTS = (1, 31, 32, 33, 127, 128, 129, 256, 257, 700)  # of sequences: a window has 128
LEAST_OF_SHARE = 2  # units: those of 128 keys
TILE_N = 64


def lanes_up(values: Any, offset: int, mask_and_clamp: int) -> Any:
    """Each lane has the value of the one `offset` before it; the first ones their own."""
    return np.where(offset <= LANES, np.roll(values, offset), values)


def reduced(values: Any, kind: str) -> int:
    """What all lanes get."""
    return int({"add": np.sum, "max": np.max}[kind](np.broadcast_to(values, LANES.shape)))


@dataclasses.dataclass
class Grid:
    """The block that calls."""

    block: int = 0

    def namespaces(self) -> dict[str, Any]:
        """What takes the place of the DSL in a module."""
        arch = types.SimpleNamespace(
            lane_idx=lambda: LANES,
            block_idx=lambda: (self.block, 0, 0),
            shuffle_sync_up=lanes_up,
            warp_redux_sync=reduced,
        )
        cutlass = types.SimpleNamespace(min=np.minimum, max=np.maximum, select_=np.where)
        same = {"Int32": lambda value: value, "const_expr": lambda value: value, "computed_here": lambda value: value}
        return {"cute": types.SimpleNamespace(arch=arch), "cutlass": cutlass, **same}


GRID = Grid()
split, latent = untraced("cuteflash.core.split"), untraced("cuteflash.core.latent")
for name in ("start_of", "each_part", "tile_at"):
    setattr(split, name, inspect.unwrap(getattr(split, name)))
for name in ("size", "find", "following"):
    setattr(split.Line, name, inspect.unwrap(getattr(split.Line, name)))
for module in (split, latent):
    vars(module).update(GRID.namespaces())
vars(latent).update(start_of=split.start_of, share_of_tile=split.share_of_tile)
each_latent_part = inspect.unwrap(latent.each_latent_part)


@dataclasses.dataclass
class Tile:
    """What a block visits."""

    m_block: int
    head: int
    sequence: int
    share: Any = None
    m_blocks: int = 0

    def exists(self) -> bool:
        return self.m_block < self.m_blocks


class Launch:
    """A launch of sequences with so many query tiles a head and so many key blocks each; 0 blocks count as one.

    Without `is_packed` all have one query tile. The last `tile_cost` units of a tile are no key blocks.
    """

    tile_tokens = 1
    tile_m, tile_n = 64, TILE_N

    def __init__(self, tiles: list[tuple[int, int]], line: Any, is_packed: bool, tile_cost: int = 0) -> None:
        self.counts, self.line, self.tile_cost = np.array(tiles), line, tile_cost
        self.lengths = types.SimpleNamespace(cu_q=object() if is_packed else None)

    def sequence(self, index: Any) -> Sequence:
        assert np.all(index >= 0) and np.all(index < len(self.counts))
        return Sequence(0, self.counts[index, 0], 0, self.counts[index, 1] * TILE_N)

    def mask_of(self, sequence: Sequence) -> Any:
        return types.SimpleNamespace(most_blocks=lambda tokens, tile_n: np.maximum(sequence.seqlen_k // tile_n, 1))

    def tile_of(self, m_block: int, head: int, number: int, sequence: Sequence) -> Tile:
        return Tile(int(m_block), int(head), int(number), m_blocks=int(sequence.seqlen_q))


class LatentLine(split.Line):  # type: ignore[misc, name-defined]
    """That of the kernels, whose own one is a subclass of the traced class."""

    tiles = latent.LatentLine.tiles


def tiles_of(choose: random.Random, count: int, is_packed: bool) -> list[tuple[int, int]]:
    """(query tiles of a head, key blocks) of sequences, of which some have none; long ones are few."""
    lengths = choose.choice(((0, 1, 2), (0, 1, 5, 300), (7,), (0, 0, 0, 40)))
    found = [(choose.choice((0, 1, 1, 3)) if is_packed else 1, choose.choice(lengths)) for _ in range(count)]
    return [*found[:-1], (1, max(found[-1][1], 1))]


def visits(each: Any, launch: Launch, blocks: int) -> list[list[Tile]]:
    """What each block visits, with the positions in order."""
    found: list[list[Tile]] = []
    for GRID.block in range(blocks):
        own: list[Tile] = []

        def visit(tile: Tile, q_pos: int, kv_pos: int, own: list[Tile] = own) -> int:
            assert q_pos == len(own) == kv_pos
            own.append(tile)
            return kv_pos + 1

        each(launch, visit)
        found.append(own)
    return found


def check_parts(found: list[list[Tile]], widths: dict[tuple[int, int, int], int], cost: int = 0) -> None:
    """Each tile's key blocks are visited once, in order, by the seats that its parts name."""
    units: dict[tuple[int, int, int], list[int]] = {place: [] for place in widths}
    seats: dict[tuple[int, int, int], list[int]] = {place: [] for place in widths}
    parts = sorted((tile for own in found for tile in own), key=lambda tile: tile.share.seat)
    for tile in parts:
        place = tile.sequence, tile.head, tile.m_block
        units[place] += range(tile.share.first, min(tile.share.last, widths[place] - cost))
        seats[place].append(tile.share.seat)
    for tile in parts:
        place = tile.sequence, tile.head, tile.m_block
        assert seats[place] == list(range(tile.share.owner, tile.share.last_owner + 1))
    assert units == {place: list(range(width - cost)) for place, width in widths.items()}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_tiles_of_unequal_sequences(count: int, is_packed: bool) -> None:
    choose = random.Random(f"{count} {is_packed}")
    for heads, lanes, shares, most_parts in ((1, 1, 132, 1 << 30), (2, 3, 44, 1 << 30), (3, 1, 7, 4)):
        tiles = tiles_of(choose, count, is_packed)
        line = split.Line(count, heads, lanes, shares, most_parts, lanes, shares, most_parts - 1)
        launch = Launch(tiles, line, is_packed)
        widths = {
            (number, head, m_block): max(blocks, 1)
            for number, (m_blocks, blocks) in enumerate(tiles)
            for head, m_block in itertools.product(range(heads * lanes), range(m_blocks))
        }
        units = [m_blocks * max(blocks, 1) * heads for m_blocks, blocks in tiles]
        begins = [0, *itertools.accumulate(units)]
        widest = max(max(blocks, 1) for _, blocks in tiles)
        share = split.share_size(begins[-1], shares, widest, most_parts, LEAST_OF_SHARE)
        for block in range(shares * lanes):
            found = split.start_of(launch, block)
            assert (found.share, found.total) == (share, begins[-1])
            at = block // lanes * share
            if at < begins[-1]:
                sequence = next(i for i in range(count) if begins[i] <= at < begins[i + 1])
                assert (found.sequence, found.begin) == (sequence, begins[sequence])
        check_parts(visits(split.each_part, launch, shares * lanes), widths)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("count", COUNTS[::3])
def test_starts_that_were_computed_before(count: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks visit what they would find themselves; by starts of other lengths, nothing that does not exist."""
    choose = random.Random(f"{count} {is_packed}")
    heads, lanes, shares, most_parts = 2, 2, 40, 5
    blocks = shares * lanes
    line = split.Line(count, heads, lanes, shares, most_parts, lanes, shares, most_parts - 1)
    launch, other = (Launch(tiles_of(choose, count, is_packed), line, is_packed) for _ in range(2))
    expected = visits(split.each_part, launch, blocks)
    starts = [[split.start_of(x, block) for block in range(blocks)] for x in (launch, other)]
    monkeypatch.setattr(split, "given_start", lambda starts, block: starts[block])
    launch.line = dataclasses.replace(line, starts=starts[0])
    assert visits(split.each_part, launch, blocks) == expected
    launch.line = dataclasses.replace(line, starts=starts[1])
    with np.errstate(divide="ignore"):  # a sequence without queries has no tiles to count by
        found = visits(split.each_part, launch, blocks)
    for tile in itertools.chain(*found):
        assert 0 <= tile.head < heads * lanes and 0 <= tile.m_block < launch.counts[tile.sequence, 0]


@pytest.mark.parametrize("cost", [0, 2, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_tiles_of_latents(count: int, cost: int) -> None:
    choose = random.Random(f"{count} {cost}")
    for lanes, shares in ((1, 132), (2, 66), (1, 5)):
        tiles = tiles_of(choose, count, False)
        line = LatentLine(count, 1, lanes, shares, 1 << 30, lanes, shares, (1 << 30) - 1)
        launch = Launch(tiles, line, False, cost)
        widths = {
            (number, 0, lane): max(blocks, 1) + cost
            for number, (_, blocks) in enumerate(tiles)
            for lane in range(lanes)
        }
        launch.tile_of = lambda m_block, head, number, sequence: Tile(int(head), 0, int(number))  # type: ignore[method-assign]
        check_parts(visits(each_latent_part, launch, shares * lanes), widths, cost)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 5), (40, 4, 1)])
def test_tiles_of_equal_sequences(sizes: tuple[int, int, int]) -> None:
    """By what the host knows, no device memory being read."""
    count, heads, m_blocks = sizes
    for width, lanes, shares in ((1, 1, 132), (9, 2, 66), (128, 1, 17)):
        total = m_blocks * width * heads * count
        share = split.share_size(total, shares, width, 1 << 30, LEAST_OF_SHARE)
        alike = split.Alike(m_blocks, width, total, share, m_blocks, width, share, heads)
        line = split.Line(count, heads, lanes, shares, 1 << 30, lanes, shares, (1 << 30) - 1, alike)
        widths = dict.fromkeys(itertools.product(range(count), range(heads * lanes), range(m_blocks)), width)
        check_parts(visits(split.each_part, Launch([(m_blocks, width)] * count, line, False), shares * lanes), widths)
