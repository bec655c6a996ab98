"""How the key blocks of all tiles are dealt to blocks, on host integers; the operators' option on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch

import cuteflash
from cuteflash.core.lengths import Sequence
from cuteflash.core.mask import IntervalMask
from cuteflash.core.split import share_of_tile, share_size
from cuteflash.core.split_slots import partials_size, slot_of
from cuteflash.core.tile import KeyBlocks, KeyShare
from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DTYPES, PACKED, FwdProblem, Operands, Scores, Storage
from cuteflash.split_planning import Tiles, lanes_of, shares_of
from cuteflash.traits.arch import get_arch
from cuteflash.traits.base import FwdTraits
from cuteflash.traits.row import ROW_HEAD_DIMS
from cuteflash.traits.tables import MODULES, SPLIT_ROWS


def dealt(
    keys: list[int], shares: int, most_parts: int, least: int, lane: int, cost: int = 0
) -> list[list[tuple[int, KeyShare]]]:
    """For each share of a line the tiles with so many key blocks that it has some of, and its part.

    `cost`: units of a tile beside its key blocks.
    """
    widths = [blocks + cost for blocks in keys]
    begins = list(itertools.accumulate(widths, initial=0))
    share = share_size(begins[-1], shares, max(widths), most_parts, least)
    found: list[list[tuple[int, KeyShare]]] = []
    for number in range(shares):
        at, end = number * share, min((number + 1) * share, begins[-1])
        found.append([])
        while at < end:
            tile = max(i for i, begin in enumerate(begins[:-1]) if begin <= at)
            first = at - begins[tile]
            part = share_of_tile(at, end, first, widths[tile], share, number, lane * shares, cost)
            if first < keys[tile]:
                found[-1].append((tile, part))
            at += part.last - part.first
    return found


def some_widths(choose: random.Random) -> list[int]:
    kind = choose.randrange(3)
    if kind == 0:
        return [choose.randint(1, 40)] * choose.randint(1, 30)
    if kind == 1:
        return [choose.randint(1, 9) for _ in range(choose.randint(1, 60))]
    return [1] * choose.randint(0, 20) + [choose.randint(1, 3000)] + [2] * choose.randint(0, 20)


@pytest.mark.parametrize("seed", range(200))
def test_shares(seed: int) -> None:
    choose = random.Random(seed)
    widths, blocks, lane = some_widths(choose), choose.choice((1, 2, 7, 132)), choose.choice((0, 1, 5))
    most_parts, least, cost = choose.choice((2, 3, 8, 1 << 30)), choose.choice((1, 2, 4)), choose.choice((0, 0, 1, 3))
    shares = dealt(widths, blocks, most_parts, least, lane, cost)
    first_seat = lane * blocks
    units: dict[int, list[int]] = {tile: [] for tile in range(len(widths))}
    owners: dict[int, list[int]] = {tile: [] for tile in units}
    slots = set()
    for seat, parts in enumerate(shares, first_seat):
        for tile, part in parts:
            assert part.seat == seat
            assert part.first < part.last
            units[tile] += range(part.first, min(part.last, widths[tile]))
            owners[tile].append(seat)
            assert part.owner == owners[tile][0]
            assert part.is_whole() == (part.first == 0 and part.last >= widths[tile])
            if part.ends_with_share():
                assert shares[part.last_owner - first_seat][-1][0] == tile
            if not part.is_whole():
                slot = slot_of(seat, int(part.owner == seat))
                assert slot not in slots
                slots.add(slot)
    for tile, width in enumerate(widths):
        assert units[tile] == list(range(width))
        last = next(part.last_owner for other, part in shares[owners[tile][0] - first_seat] if other == tile)
        assert owners[tile] == list(range(owners[tile][0], last + 1))
        assert len(owners[tile]) <= most_parts
    cut = [tile for tile in units if len(owners[tile]) > 1]
    assert len({owners[tile][0] for tile in cut}) == len(cut)  # one counter for each
    assert all(2 * first_seat <= slot < 2 * (first_seat + blocks) for slot in slots)


def test_shares_that_end_with_tiles() -> None:
    """All blocks of a tile find the same, and of tiles that are whole shares each does so."""
    for widths, ends in (([16] * 8, [True] * 8), ([12, 12], [False, True]), ([10, 6, 15], [False, True, False])):
        shares = dealt(widths, 8 * 16, 1 << 30, 4 if ends[0] else 8, 0)
        for tile, expected in enumerate(ends):
            assert {part.ends_with_share() for parts in shares for other, part in parts if other == tile} == {expected}


@pytest.mark.parametrize("seed", range(40))
def test_last_parts_of_latent_tiles_that_end_with_their_share(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mla_parts = pytest.importorskip("cuteflash.kernels.common.mla_parts")
    monkeypatch.setattr(mla_parts, "computed_here", lambda value: value)
    choose = random.Random(seed)
    shares = dealt(
        some_widths(choose), choose.choice((2, 7, 132)), 1 << 30, 2, choose.choice((0, 5)), choose.choice((0, 2))
    )
    for _, part in itertools.chain(*shares):
        joined = part.last_owner <= part.owner + 1
        assert mla_parts.merges_last(part) == (part.ends_with_share() and not joined)


def test_work_is_even() -> None:
    for widths in ([1024] * 8, [64] * 128, [8] * 504 + [1024] * 8):
        work = [sum(part.last - part.first for _, part in parts) for parts in dealt(widths, 132, 1 << 30, 1, 0)]
        assert max(work) == -(-sum(widths) // 132)


def test_what_a_tile_costs_beside_its_keys_is_never_cut_off() -> None:
    """Borders of shares among those units: a part without keys would have to be merged for nothing."""
    parts = dealt([5, 4, 9], 3, 1 << 30, 1, 0, cost=3)  # 27 units: borders behind 9 and 18, tiles end at 8, 15, 27
    assert [[(tile, part.first, part.last, part.is_whole()) for tile, part in share] for share in parts] == [
        [(0, 0, 8, True), (1, 0, 1, False)],
        [(1, 1, 7, False), (2, 0, 3, False)],
        [(2, 3, 12, False)],
    ]
    for second, cost in ((5, 1), (4, 2), (5, 3)):  # the border lies behind 7, 8 and 9 units, the first tile has 7 keys
        first_share, second_share = dealt([7, second], 2, 1 << 30, 1, 0, cost=cost)
        assert [(tile, part.is_whole()) for tile, part in first_share] == [(0, True)]
        assert [(tile, part.is_whole()) for tile, part in second_share] == [(1, True)]


def test_the_key_blocks_of_a_share() -> None:
    for lo, hi in itertools.product(range(3), range(5)):
        blocks = KeyBlocks(lo, max(lo, hi))
        parts = [KeyShare(first, first + 2, 0, 0, 0, 6, 0, 2).of(blocks) for first in range(0, 6, 2)]
        assert [i for part in parts for i in range(part.lo, part.hi)] == list(range(blocks.lo, blocks.hi))


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_most_blocks(kind: str) -> None:
    choose = random.Random(kind)
    for _ in range(500):
        seqlen_q, seqlen_k = choose.randint(1, 40), choose.randint(0, 60)
        tokens, tile_n = choose.randint(1, 16), choose.choice((1, 4, 16))
        mask = IntervalMask(kind, seqlen_q, seqlen_k, choose.choice((0, 5, 1 << 30)), choose.choice((0, 7, 1 << 30)))
        counts = [1]
        for first in range(0, seqlen_q, tokens):
            lo, hi = mask.n_blocks(first, min(first + tokens, seqlen_q) - 1, tile_n)
            counts.append(hi - lo)
        assert max(counts) <= mask.most_blocks(tokens, tile_n) <= max(-(-seqlen_k // tile_n), 1)
        if kind == "full":
            assert max(counts) == mask.most_blocks(tokens, tile_n)


@pytest.mark.parametrize(
    ("heads", "blocks", "lanes"),
    [
        (8, 132, 8),
        (32, 132, 32),
        (1, 132, 1),
        (128, 132, 128),
        (40, 132, 10),
        (19, 132, 1),
        (8, 264, 8),
        (160, 132, 32),
    ],
)
def test_lanes(heads: int, blocks: int, lanes: int) -> None:
    assert lanes_of(heads, blocks) == lanes


@pytest.mark.parametrize(
    ("tiles", "most", "shares"),
    [(16, 16, 16), (16, 33, 32), (64, 33, 32), (1, 16, 16), (8, 132, 128), (5, 16, 16), (9, 16, 16), (1000, 16, 16)],
)
def test_shares_end_where_tiles_end(tiles: int, most: int, shares: int) -> None:
    assert shares_of(tiles, most, math.ceil(0.95 * most)) == shares


def test_partials_hold_all_slots() -> None:
    assert partials_size(132, 64, 129) == 2 * 132 * 64 * 128 + 2 * 132 * 64


@pytest.mark.parametrize(
    ("tiles", "expected"),
    [
        (Tiles(1, 8, 4, 1, 8192), True),
        (Tiles(64, 8, 8, 1, 4096), True),
        (Tiles(1, 8, 4, 1, 128), False),
        (Tiles(1, 8, 4, 128, 8192), True),
        (Tiles(1, 8, 4, 512, 8192), False),
        (Tiles(4, 8, 4, 4096, 4096), False),
        (Tiles(1, 4, 1, 128, 256), False),
    ],
    ids=str,
)
def test_what_is_split(tiles: Tiles, expected: bool) -> None:
    assert tiles.should_split(0, 132) is expected
    assert not tiles.should_split(1, 132)
    assert tiles.should_split(4, 132) is (tiles.seqlen_k > 128)


def some_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, n, h, 16, generator=generator) for n, h in ((3, 4), (50, 2), (50, 2)))


@pytest.mark.parametrize("num_splits", [0, 1, 2, 100])
def test_the_option_changes_no_result(num_splits: int) -> None:
    inputs = some_inputs()
    out, lse = cuteflash.flash_attn_func(*inputs, causal=True, num_splits=num_splits, return_lse=True)
    expected, expected_lse = cuteflash.flash_attn_func(*inputs, causal=True, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    rows = [x.flatten(0, 1) for x in inputs]
    cu_q, cu_k = (torch.tensor((0, n, 2 * n), dtype=torch.int32) for n in (3, 50))
    packed = cuteflash.flash_attn_varlen_func(*rows, cu_q, cu_k, causal=True, num_splits=num_splits)
    torch.testing.assert_close(packed, expected.flatten(0, 1))


def test_gradients_with_splits() -> None:
    gradients = []
    for num_splits in (1, 4):
        inputs = [x.requires_grad_() for x in some_inputs()]
        cuteflash.flash_attn_func(*inputs, num_splits=num_splits, deterministic=True).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), ("2", TypeError), (None, TypeError)])
def test_wrong_splits(value: object, error: type[Exception]) -> None:
    q, k, v = some_inputs()
    with pytest.raises(error, match="num_splits"):
        cuteflash.flash_attn_func(q, k, v, num_splits=value)  # type: ignore[arg-type]
    cu_q, cu_k = (torch.tensor((0, n), dtype=torch.int32) for n in (3, 50))
    with pytest.raises(error, match="num_splits"):
        cuteflash.flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, num_splits=value)  # type: ignore[arg-type]


def test_operands_of_8_bits_are_not_split() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in some_inputs())
    ones = torch.ones(2, 2)
    scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    cuteflash.flash_attn_func(q, k, v, **scales, num_splits=0)
    with pytest.raises(ValueError, match="num_splits"):
        cuteflash.flash_attn_func(q, k, v, **scales, num_splits=2)


FAMILIES = [(key.target, key.family) for key in MODULES if key.operation == "fwd"]
HEAD_DIMS = [*((d, d) for d in ROW_HEAD_DIMS), (192, 128)]


def hardest(head_dims: tuple[int, int]) -> FwdProblem:
    """What asks the most of a row."""
    return FwdProblem(Operands.of("bf16", *head_dims, 4), Scores("window", softcap=True), PACKED, True, is_split=True)


def kernels() -> list[tuple[str, FwdTraits, FwdProblem]]:
    """Each kernel that a target chooses, once."""
    found = {}
    for (target, family), head_dims in itertools.product(FAMILIES, HEAD_DIMS):
        easiest = (FwdProblem(Operands.of(dtype, *head_dims, 4), Scores("full"), is_split=True) for dtype in DTYPES)
        for problem in (hardest(head_dims), *easiest):
            traits = choose_shipped(problem, target, family).traits
            found.setdefault(traits, (target, traits, problem))
    return list(found.values())


@pytest.mark.parametrize(("target", "family"), FAMILIES)
def test_every_head_dim_has_a_row(target: str, family: str) -> None:
    for head_dims in HEAD_DIMS:
        choice = choose_shipped(hardest(head_dims), target, family)
        assert "split" in choice.traits.features
        assert choice.traits.check(get_arch(target)) is None


def test_every_row_is_chosen() -> None:
    chosen = {traits for _, traits, _ in kernels()}
    assert {row.traits for rows in SPLIT_ROWS.values() for row in rows} <= chosen


@pytest.mark.slow
@pytest.mark.parametrize(("target", "traits", "problem"), kernels(), ids=str)
def test_rows_do_not_spill(target: str, traits: FwdTraits, problem: FwdProblem, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.dispatch import kernel_class

    request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, target).assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "storage", "packed_heads"),
    [(256, Storage(), 1), (256, Storage(), 4), (224, Storage("dense", "paged", used_k=True, has_page_table=True), 1)],
)
def test_rows_without_masks_do_not_spill(
    head_dim: int, storage: Storage, packed_heads: int, request: pytest.FixtureRequest
) -> None:
    """Of the sm80 family's widest heads, which leave no register, each of these has spilled once."""
    pytest.importorskip("cutlass")
    from cuteflash.dispatch import kernel_class

    problem = FwdProblem(Operands.of("bf16", head_dim, head_dim, packed_heads), Scores("full"), storage, is_split=True)
    traits = choose_shipped(problem, "sm_90a", "sm80").traits
    request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, "sm_90a").assert_no_complaint()


# Some rows: a kernel compiles for some ten seconds. `tests/test_tree.py` compiles the last two.
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_rows_do_not_spill_if_rows_of_pages_are_looked_up(head_dim: int, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.dispatch import kernel_class
    from tests import test_tree

    problem = test_tree.hardest((head_dim, head_dim), is_split=True)
    traits = choose_shipped(problem, "sm_90a").traits
    compiled = request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, "sm_90a")
    compiled.assert_clean()
    # Four vectors and the page table are asked for.
    assert compiled.times(r"prefetch\.global\.L2", before="griddepcontrol.wait") == 5


@pytest.mark.parametrize("chunk", [None, 7])
def test_tiles_of_a_launch_have_its_whole_mask(chunk: int | None) -> None:
    pytest.importorskip("cutlass")
    from cuteflash.core.launch import Launch

    names = (field.name for field in dataclasses.fields(Launch))
    known = {"mask_kind": "window", "window_left": 3, "window_right": 5, "attention_chunk": chunk}
    launch = Launch(**{name: known.get(name) for name in names})  # type: ignore[arg-type]
    assert launch.mask_of(Sequence(0, 20, 0, 30)) == IntervalMask("window", 20, 30, 3, 5, chunk)
