"""How tiles are handed out, run on the host: a thread for each warp, mbarriers that make threads wait."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cuteflash.core.lengths import Sequence
from cuteflash.core.schedule import PROBES
from cuteflash.dispatch import choose_shipped
from cuteflash.kernels.sm90.bwd import FlashBwdSm90
from cuteflash.kernels.sm90.bwd_bundles import Rings
from cuteflash.problem import BwdProblem, Storage
from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.sm90 import HANDED_BYTES, HANDED_TILES
from tests.kernel_store import KernelStore
from tests.test_schedule import untraced

HANG_SECONDS = 2  # a test does not take one
KV_STAGE = 2


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.count = self.pending = 1
        self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self) -> None:
        with self.condition:
            self.pending -= 1
            assert self.pending >= 0
            if self.pending == 0:
                self.pending, self.phase = self.count, self.phase + 1
                self.condition.notify_all()

    def wait(self, parity: int) -> None:
        """Wait until the current phase is not the one of this parity: with two phases in between it would hang."""
        with self.condition:
            assert self.condition.wait_for(lambda: self.phase % 2 != parity % 2, HANG_SECONDS), "hangs"


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Mbarriers in memory."""

    barriers: list[Barrier]
    start: int = 0

    @classmethod
    def to(cls, count: int, arrivals: int = 1) -> Pointer:
        pointer = cls([Barrier() for _ in range(count)])
        for barrier in pointer.barriers:
            barrier.init(arrivals)
        return pointer

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.barriers, self.start + offset)

    @property
    def barrier(self) -> Barrier:
        return self.barriers[self.start]


class Words:
    """Words of tiles in shared memory."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], int] = {}

    def __getitem__(self, place: tuple[int, int]) -> int:
        return self.at.get(place, 0)

    def __setitem__(self, place: tuple[int, int], word: int) -> None:
        self.at[place] = word


@pytest.fixture
def module(selects_now: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under test as plain Python; a warp is one thread."""
    module = untraced("cuteflash.kernels.sm90.handout")
    for name in ("hand_out", "tiles_ahead", "await_taken", "each_handed_tile"):
        setattr(module, name, inspect.unwrap(getattr(module, name)))
    for name, plain in (("Int32", int), ("Boolean", bool), ("wait_phase", lambda at, phase: at.barrier.wait(phase))):
        monkeypatch.setattr(module, name, plain)
    arch = module.cute.arch
    monkeypatch.setattr(arch, "mbarrier_init", lambda at, count: at.barrier.init(count))
    monkeypatch.setattr(arch, "mbarrier_arrive", lambda at: at.barrier.arrive())
    monkeypatch.setattr(arch, "make_warp_uniform", lambda value: value)
    monkeypatch.setattr(arch, "sync_warp", lambda: None)
    monkeypatch.setattr(arch, "elect_one", contextlib.nullcontext)
    return module


class Order:
    """Numbers of tiles, each of which blocks draw once; every fifth belongs to no tile."""

    def __init__(self, size: int, draws_first: bool = False) -> None:
        self.numbers, self.count, self.closed = itertools.count(), size, 0
        self.draws_first = draws_first

    def holds(self, index: int) -> bool:
        return index < self.count

    def draw(self) -> int:
        return next(self.numbers)

    first = draw

    def drawn(self, count: int) -> int:
        return count

    def tile(self, index: int, hint: int) -> tuple[int, int, int]:
        assert index >= hint
        return index % 5, 0, index

    def close(self, index: int) -> None:
        self.closed += 1


@dataclasses.dataclass(frozen=True)
class Launch:
    """Tiles that visit so many rows, of sequences of three keys."""

    order: Order
    rows: Callable[[int], int]
    tile_n: int = 4

    def sequence(self, number: int) -> Sequence:
        return Sequence(number, 1, 2, 3)

    def tile_of(self, block: int, head: int, number: int, sequence: Sequence) -> Any:
        assert sequence == Sequence(number, 1, 2, 3)
        return SimpleNamespace(number=number, exists=lambda: block < 4)

    def rows_visited(self, tile: Any) -> int:
        return self.rows(tile.number)


ROWS = {"short": lambda n: 0, "long": lambda n: 5000, "mixed": lambda n: (0, 300, 5000)[n * 7 % 11 % 3]}


def run(warps: list[Callable[[], Any]]) -> None:
    """Run all warps to their ends."""
    failures: list[BaseException] = []

    def guarded(warp: Callable[[], Any]) -> None:
        try:
            warp()
        except BaseException as error:  # of a thread, for the test
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(warp,), daemon=True) for warp in warps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANG_SECONDS)
        if failures:
            raise failures[0]
        assert not thread.is_alive(), "hangs"


def ring(module: Any, readers: int, most_ahead: int) -> Any:
    handout = module.Handout(Pointer.to(HANDED_TILES), Pointer.to(HANDED_TILES), Words(), most_ahead)
    handout.init(readers)
    return handout


def dawdle(pick: random.Random) -> None:
    if pick.random() < 0.3:
        time.sleep(pick.random() * 1e-3)


@pytest.mark.parametrize("rows", ROWS)
def test_every_warp_visits_the_tiles_of_its_block(module: Any, rows: str) -> None:
    size, readers, blocks = 60, 3, 3
    launch = Launch(Order(size), ROWS[rows])
    visits: list[list[int]] = []
    warps: list[Callable[[], Any]] = []
    for block in range(blocks):
        handout = ring(module, readers, HANDED_TILES)
        warps.append(
            functools.partial(module.hand_out, handout, launch, functools.partial(module.await_taken, handout), 0)
        )
        for reader in range(readers):
            seen: list[int] = []
            visits.append(seen)
            pick = random.Random(10 * block + reader)

            def visit(tile: Any, q_pos: int, kv_pos: int, seen: list[int] = seen, pick: Any = pick) -> int:
                assert q_pos == len(seen) and kv_pos == 2 * len(seen)
                seen.append(tile.number)
                dawdle(pick)
                return kv_pos + 2

            warps.append(functools.partial(module.each_handed_tile, handout, launch, visit))
    run(warps)
    assert all(len({tuple(seen) for seen in visits[b * readers : (b + 1) * readers]}) == 1 for b in range(blocks))
    assert all(seen == sorted(seen) for seen in visits)
    assert sorted(n for seen in visits[::readers] for n in seen) == [n for n in range(size) if n % 5 < 4]
    assert launch.order.closed == blocks


class Block:
    """A block of a deterministic backward: a tile's dQ is added after that of each tile before it in the order.

    Four warps: one loads K, one gives gradients in its place, one adds dQ, one hands out tiles and stores gradients.
    """

    def __init__(self, module: Any, launch: Launch, added: list[int], turn: threading.Condition, seed: int) -> None:
        self.handout = ring(module, 3, HANDED_TILES - 1)
        self.module, self.launch, self.added, self.turn = module, launch, added, turn
        self.k = SimpleNamespace(stage=lambda n: n % KV_STAGE, phase=lambda n: n // KV_STAGE % 2)
        self.rings = SimpleNamespace(k=self.k, gradients=Pointer.to(KV_STAGE))
        self.full, self.empty, self.dq = (Pointer.to(KV_STAGE) for _ in range(3))
        self.visited: list[int] = []
        self.stored: list[int] = []
        self.steps = Pointer.to(1)
        self.awaited: list[int] = []
        self.awaited_steps: list[int] = []
        self.seed = seed

    def gradients(self, wave: int) -> Barrier:
        return Rings.gradients_of(self.rings, wave).barrier  # type: ignore[arg-type,attr-defined]

    def warps(self) -> Iterator[Callable[[], Any]]:
        for role in (self.load, self.consume, self.add):
            visit = functools.partial(role, random.Random(f"{role.__name__} {self.seed}"))
            yield functools.partial(self.module.each_handed_tile, self.handout, self.launch, visit)
        yield functools.partial(self.module.hand_out, self.handout, self.launch, self.store_until, 0, self.await_steps)

    def load(self, pick: random.Random, tile: Any, wave: int, start: int) -> int:
        (self.empty + self.k.stage(wave)).barrier.wait(self.k.phase(wave) ^ 1)
        (self.full + self.k.stage(wave)).barrier.arrive()
        return start

    def consume(self, pick: random.Random, tile: Any, wave: int, start: int) -> int:
        (self.full + self.k.stage(wave)).barrier.wait(self.k.phase(wave))
        self.visited.append(tile.number)
        dawdle(pick)
        self.steps.barrier.arrive()
        dawdle(pick)
        self.gradients(wave).arrive()
        return start

    def add(self, pick: random.Random, tile: Any, wave: int, start: int) -> int:
        with self.turn:
            before = sum(n % 5 < 4 for n in range(tile.number))
            assert self.turn.wait_for(lambda: len(self.added) == before, HANG_SECONDS), "hangs"
            self.added.append(tile.number)
            self.turn.notify_all()
        dawdle(pick)
        return start

    def await_steps(self, position: int) -> None:
        self.awaited_steps.append(position)
        self.steps.barrier.wait(position % 2)
        assert len(self.visited) == position + 1

    def store_until(self, done: int, position: int) -> int:
        assert done == len(self.stored)
        self.awaited.append(position)
        while done < position:
            tile = self.module.tile_of_words(self.launch, self.handout.handed(done))
            self.gradients(done).wait(self.k.phase(done))
            self.stored.append(tile.number)
            (self.empty + self.k.stage(done)).barrier.arrive()
            done += 1
        return done


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_warp_that_hands_out_and_stores_stops_nobody(module: Any, blocks: int, rows: str) -> None:
    launch = Launch(Order(80), ROWS[rows])
    added: list[int] = []
    turn = threading.Condition()
    all_blocks = [Block(module, launch, added, turn, seed) for seed in range(blocks)]
    run([warp for block in all_blocks for warp in block.warps()])
    assert all(block.stored == block.visited for block in all_blocks)
    assert added == sorted(n for block in all_blocks for n in block.stored) == [n for n in range(80) if n % 5 < 4]


@pytest.mark.parametrize(
    ("tile_n", "stored", "steps"), [(2, list(range(8)), list(range(8))), (4, list(range(-2, 6)), [])]
)
def test_a_tile_for_which_others_wait_is_drawn_after_the_steps_of_the_one_before(
    module: Any, tile_n: int, stored: list[int], steps: list[int]
) -> None:
    """If blocks take turns, and a sequence has more keys than a tile; of short ones three tiles may wait."""
    launch = Launch(Order(10, draws_first=True), ROWS["short"], tile_n)
    block = Block(module, launch, [], threading.Condition(), seed=0)
    run(list(block.warps()))
    assert block.awaited == [*stored, 8] and block.stored == [n for n in range(10) if n % 5 < 4]
    assert block.awaited_steps == steps


@pytest.mark.parametrize("rows", ROWS)
def test_blocks_that_take_turns_end(module: Any, rows: str) -> None:
    launch = Launch(Order(80, draws_first=True), ROWS[rows], tile_n=2)
    added: list[int] = []
    turn = threading.Condition()
    all_blocks = [Block(module, launch, added, turn, seed) for seed in range(4)]
    run([warp for block in all_blocks for warp in block.warps()])
    assert added == sorted(n for block in all_blocks for n in block.stored) == [n for n in range(80) if n % 5 < 4]


class TurningBlock:
    """A block of a forward whose producer turns V: one warp loads, three read what is handed out, all four turn it.

    Tiles have 0 to 3 blocks of keys.
    """

    def __init__(self, module: Any, launch: Launch, seed: int) -> None:
        self.module, self.launch = module, launch
        self.handout = ring(module, 4, HANDED_TILES - 1)  # three that turn, one that consumes
        self.stored_full, self.turned_empty = (Pointer.to(KV_STAGE) for _ in range(2))
        self.stored_empty, self.turned_full = (Pointer.to(KV_STAGE, arrivals=4) for _ in range(2))
        self.turned: list[list[int]] = [[] for _ in range(4)]
        self.picks = [random.Random(f"{seed} {warp}") for warp in range(5)]

    def warps(self) -> Iterator[Callable[[], Any]]:
        for visit in (self.load_and_turn, functools.partial(self.turn, 2), functools.partial(self.turn, 3)):
            yield functools.partial(self.module.each_handed_tile, self.handout, self.launch, visit)
        yield functools.partial(self.module.hand_out, self.handout, self.launch, self.turn_until, (0, 0))
        yield functools.partial(self.module.each_handed_tile, self.handout, self.launch, self.consume)

    def load_and_turn(self, tile: Any, q_pos: int, kv_pos: int) -> int:
        for position in range(kv_pos, kv_pos + tile.number % 4):
            wait(self.stored_empty, position, 1)
            (self.stored_full + position % KV_STAGE).barrier.arrive()
            self.turn_block(0, tile.number, position)
        return kv_pos + tile.number % 4

    def turn(self, warp: int, tile: Any, q_pos: int, kv_pos: int) -> int:
        for position in range(kv_pos, kv_pos + tile.number % 4):
            self.turn_block(warp, tile.number, position)
        return kv_pos + tile.number % 4

    def turn_until(self, done: tuple[int, int], position: int) -> tuple[int, int]:
        tiles, kv_pos = done
        while tiles < position:
            kv_pos = self.turn(1, self.module.tile_of_words(self.launch, self.handout.handed(tiles)), tiles, kv_pos)
            tiles += 1
        return tiles, kv_pos

    def turn_block(self, warp: int, number: int, position: int) -> None:
        wait(self.stored_full, position, 0)
        wait(self.turned_empty, position, 1)
        dawdle(self.picks[warp])
        self.turned[warp].append(number)
        (self.turned_full + position % KV_STAGE).barrier.arrive()
        (self.stored_empty + position % KV_STAGE).barrier.arrive()

    def consume(self, tile: Any, q_pos: int, kv_pos: int) -> int:
        for position in range(kv_pos, kv_pos + tile.number % 4):
            wait(self.turned_full, position, 0)
            dawdle(self.picks[4])
            (self.turned_empty + position % KV_STAGE).barrier.arrive()
        return kv_pos + tile.number % 4


def wait(barriers: Pointer, position: int, flipped: int) -> None:
    """Wait for a stage of a ring to be full, or with `flipped` 1 to be empty."""
    (barriers + position % KV_STAGE).barrier.wait(position // KV_STAGE % 2 ^ flipped)


@pytest.mark.parametrize("rows", ROWS)
def test_a_warp_that_hands_out_and_turns_stops_nobody(module: Any, rows: str) -> None:
    launch = Launch(Order(80), ROWS[rows])
    blocks = [TurningBlock(module, launch, seed) for seed in range(2)]
    run([warp for block in blocks for warp in block.warps()])
    assert all(turned == block.turned[0] for block in blocks for turned in block.turned)
    expected = [n for n in range(80) if n % 5 < 4 for _ in range(n % 4)]
    assert sorted(n for block in blocks for n in block.turned[0]) == expected


def test_gradients_of_two_tiles_may_wait_for_the_warp_that_stores() -> None:
    rings: Any = SimpleNamespace(k=SimpleNamespace(stage=lambda n: n % KV_STAGE), gradients=Pointer.to(KV_STAGE))
    for wave in range(KV_STAGE):
        Rings.gradients_of(rings, wave).barrier.arrive()  # type: ignore[attr-defined]
    Rings.gradients_of(rings, 0).barrier.wait(0)  # type: ignore[attr-defined]


def test_gradients_of_handed_tiles_are_stored_in_order_and_their_queries_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = untraced("cuteflash.kernels.sm90.bwd_load")
    stored: list[tuple[str, int]] = []
    monkeypatch.setattr(loads, "tile_of_words", lambda launch, words: words)
    monkeypatch.setattr(loads, "store_tile", lambda kernel, block, tile, wave: stored.append((tile, wave)))
    block: Any = SimpleNamespace(launch=None, handout=SimpleNamespace(handed=lambda position: f"tile {position}"))
    store_until: Any = inspect.unwrap(loads.store_until)
    assert store_until(None, block, 2, 4) == 4 == store_until(None, block, 4, 3)
    assert stored == [("tile 2", 2), ("tile 3", 3)]


@pytest.mark.parametrize(("rows", "expected"), [(0, 3), (255, 3), (256, 2), (1023, 2), (1024, 1), (1 << 20, 1)])
def test_fewer_tiles_wait_behind_a_longer_one(module: Any, rows: int, expected: int) -> None:
    assert module.tiles_ahead(rows, 3) == expected


@pytest.mark.parametrize("head_dim", [32, 64])
def test_tiles_that_are_handed_out_have_memory_of_their_own(head_dim: int) -> None:
    problem = dataclasses.replace(BwdProblem.dense("bf16", head_dim, head_dim), storage=Storage("varlen", "varlen"))
    traits: Any = choose_shipped(problem, "sm_90a", "sm90", "short").traits
    assert isinstance(traits, BwdTraitsSm90) and traits.persistent and traits.check(get_arch("sm_90a")) is None
    barriers, words = traits.smem_handout
    others = [region for name, region in traits.smem_plan.items() if name != "handout"]
    assert max(region.end for region in others) <= barriers.start < barriers.end <= words.start
    assert words.end == traits.smem_bytes
    assert (barriers.nbytes, words.nbytes) == (2 * 8 * HANDED_TILES, HANDED_BYTES * HANDED_TILES)
    assert "handout" not in dataclasses.replace(traits, persistent=False, kv_stage=1).smem_plan


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96])
def test_packed_blocks_search_once(head_dim: int, kernels: KernelStore) -> None:
    problem = dataclasses.replace(
        BwdProblem.dense("bf16", head_dim, head_dim, "window", deterministic=True),
        storage=Storage("varlen", "varlen", used_q=True, used_k=True),
    )
    traits: Any = choose_shipped(problem, "sm_90a", "sm90", "short").traits
    compiled = kernels(FlashBwdSm90, traits, problem, "sm_90a")
    compiled.assert_clean()
    searches = 2 + 1  # in the kernels before and after, and in this one
    votes = compiled.times(r"vote\.sync\.ballot")
    assert votes == searches * PROBES + traits.persistent  # one more near the last sequence
    assert not compiled.count("SR_LTMASK")  # ptxas would add for several lanes at once, and wait for a drawn number
