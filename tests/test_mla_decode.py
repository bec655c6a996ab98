"""The latent-attention decode of the sm90 family without a GPU: what it compiles to, its traits, masks and shares."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch

from cuteflash.core.latent import LatentLine, LatentMask, LatentPages
from cuteflash.core.lengths import Sequence
from cuteflash.core.tile import QueryTile
from cuteflash.dispatch import choose_mla
from cuteflash.kernels.common.mla_parts import QUAD, LatentParts, columns_at
from cuteflash.kernels.common.octets import OCTET
from cuteflash.kernels.sm90.mla_decode import FlashMlaDecodeSm90
from cuteflash.kernels.sm90.mla_decode_bundles import BOTH_PAGES, FIRST_PAGE, READERS, parity
from cuteflash.kernels.sm90.mla_decode_load import parts_from
from cuteflash.kernels.sm90.mla_decode_merge import LINES_OF_ROW, Staged
from cuteflash.mla_planning import PART_COST, CudaMlaDecode, Shares, check_served, row_strides
from cuteflash.mla_problem import MlaProblem
from cuteflash.traits.arch import ARCHS, get_arch
from cuteflash.traits.mla_sm90 import HELD_REGS, ORDER, PART_SLABS, PARTS, MlaTraitsSm90
from cuteflash.traits.rows_mla_sm90 import ROWS
from tests.kernel_store import KernelStore

HOPPER = get_arch("sm_90a")
# Every pair of values of each two of the three. A kernel compiles for some ten seconds.
COMPILED = [
    MlaProblem("bf16"),
    MlaProblem("fp16", is_paged=False),
    MlaProblem("fp16", is_split=False),
    MlaProblem("bf16", is_paged=False, is_split=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("problem", COMPILED, ids=str)
def test_kernels_neither_spill_nor_serialise_their_products(kernels: KernelStore, problem: MlaProblem) -> None:
    traits = choose_mla(problem, 128, "sm_90a")
    assert isinstance(traits, MlaTraitsSm90)
    compiled = kernels(FlashMlaDecodeSm90, traits, problem, "sm_90a")
    compiled.assert_clean()
    # Columns of K in steps of 16, of each warpgroup's page. Keys of V for each half of a warpgroup's columns: of either
    # page, and by the second warpgroup once more for the last page of an odd number.
    assert compiled.count("HGMMA.64x64x16") == 2 * 36
    assert compiled.count("HGMMA.64x128x16") == (4 + 1) * 8
    assert compiled.count("UTMALDG.3D")
    assert compiled.count("UTMAPF.L2.3D")
    # Stores of 16 bytes, at least (code around shuffles may be there twice), by the one code of both warpgroups: 16 for
    # the half of a tile that 128 threads have, 64 x 256; of parts, which are fp16, as many again.
    assert compiled.count(r"STG\.E\.128") >= 16 * (2 if problem.is_split else 1)
    # Parts to merge, their rows' statistics and lines; of a second part likewise.
    assert compiled.count("UBLKCP") == (4 if problem.is_split else 0)
    # Parts are stored for L2 to keep, and forgotten where one is joined and where up to 32 are merged.
    assert compiled.times(r"st\.global\.L2::cache_hint\.v4") == (16 if problem.is_split else 0)
    assert compiled.times(r"discard\.global\.L2") == (2 if problem.is_split else 0)
    assert not compiled.count(r"STG\.E\.64")
    # Lengths and page table are asked for.
    assert compiled.times(r"prefetch\.global\.L2", before="griddepcontrol.wait") == 1 + problem.is_paged


def test_rows_run_on_hopper_only() -> None:
    for row, arch in itertools.product(ROWS, ARCHS.values()):
        assert (row.check(arch) is None) == (arch.name == "sm_90a")
    with pytest.raises(ValueError, match="dtype is 'e4m3'; allowed: fp16, bf16"):
        MlaProblem("e4m3")  # type: ignore[arg-type]


def test_shared_memory_is_planned_without_overlaps() -> None:
    traits = MlaTraitsSm90()
    plan = traits.smem_plan
    assert traits.smem_bytes == 232_448 <= HOPPER.smem_per_block
    apart = sorted(
        (plan[name] for name in ("barriers", "statistics", "q", "pages", "p0", "beside")), key=lambda one: one.start
    )
    assert all(one.end <= other.start for one, other in itertools.pairwise(apart))
    assert all(plan[name].start % 1024 == 0 for name in ("q", "p1", "pages", "p0"))
    # P of the second warpgroup over the last columns of Q, which are in registers by then.
    assert plan["p1"].end == plan["q"].end and plan["p1"].nbytes == plan["p0"].nbytes == 64 * 64 * 2
    assert HELD_REGS == 128 + 32 + 16 + 16
    assert traits.barriers * 8 <= plan["statistics"].start


@pytest.mark.parametrize("rows", [*range(1, 65)])
def test_what_a_block_merges_fits_where_q_and_pages_were(rows: int) -> None:
    plan = MlaTraitsSm90().smem_plan
    room = plan["p0"].end - plan["q"].start
    # More parts than a GPU has multiprocessors; the block with the last one merges, or does not.
    for parts, without_last in itertools.product(range(3, 400), (0, 1)):
        merging = min(parts - without_last, rows * LINES_OF_ROW)
        for number in {0, 1, merging // 2, merging - 1} & set(range(merging)):
            first, end = (n * rows * LINES_OF_ROW // merging for n in (number, number + 1))
            staged = Staged.of(None, first, end)  # type: ignore[arg-type]
            assert (
                staged.first_row * LINES_OF_ROW <= first < end <= staged.end_row * LINES_OF_ROW <= rows * LINES_OF_ROW
            )
            assert staged.part_bytes == 16 * (staged.end_row - staged.first_row) + 256 * (end - first)
            assert parts * staged.part_bytes <= room
    # Of two parts the second one: its O where Q was, but for its last columns, which P takes.
    assert plan["p1"].start - plan["q"].start == 64 * 1024 and plan["beside"].nbytes == 64 * 16


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"groups": (4, 4)}, "groups (4, 4) are not 9 slabs"),
        ({"groups": (4, 0, 5)}, "groups (4, 0, 5) are not"),
        ({"headroom": 9.0}, "headroom 9.0 is not 0 to 8"),
        ({"mma_regs": 236}, "are not multiples of 8 from 24 to 256"),
        ({"mma_regs": 240}, "are more than the 64512 that a block is launched with"),
        ({"mma_regs": 208}, "mma_regs 208 do not hold 192 and 24 for addresses"),
    ],
)
def test_traits_say_why_they_do_not_fit(changed: dict[str, object], complaint: str) -> None:
    assert complaint in str(dataclasses.replace(MlaTraitsSm90(), **changed).check(HOPPER))  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [(1, 2, 2, 2, 2), (3, 6), (1,) * 9, (2, 2, 5)])
def test_groups_of_slabs_make_a_page(groups: tuple[int, ...]) -> None:
    traits = MlaTraitsSm90(groups=groups)
    assert traits.check(HOPPER) is None
    assert tuple(map(len, traits.slabs_of_groups)) == groups
    assert sum(traits.slabs_of_groups, ()) == ORDER and sorted(ORDER) == list(range(9))
    for who in range(2):  # each warpgroup waits for what it reads of the other one's page, and for no other group
        read = {4 * who + i for i in range(4)}
        waited = [set(traits.slabs_of_groups[group]) for group in traits.groups_of_half(who)]
        assert read <= set().union(*waited) and all(read & slabs for slabs in waited)
    assert sorted(part for slabs in traits.slabs_of_groups for part in parts_from(slabs)) == list(range(PARTS))
    parts = [slab // PART_SLABS for slab in ORDER]
    assert [part for part, _ in itertools.groupby(parts)] == list(dict.fromkeys(parts))  # a part is waited for once


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (16, 1), (16, 5), (40, 3), (128, 2)])
def test_rows_see_the_keys_of_their_token(heads: int, tokens: int) -> None:
    """Which pages a tile reads, which of them are masked, and the mask: all from the definition of each row."""
    rows = heads * tokens
    for length, step in itertools.product((0, 1, 2, 63, 64, 65, 66, 130), (0, 1)):
        mask = LatentMask("causal", rows, length, 0, 0, heads=heads, step=step)
        seen = [
            [key <= length - tokens + row // heads if step else True for key in range(length)] for row in range(rows)
        ]
        for row in range(rows):
            lo, hi = mask.kv_bounds(row)
            assert [lo <= key < hi for key in range(length)] == seen[row]
        for first in range(0, rows, 64):
            of_tile = seen[first : first + 64]
            lo, hi = mask.n_blocks(first, min(first + 64, rows) - 1, 64)
            _, full = mask.full_n_blocks(first, min(first + 64, rows) - 1, 64)
            needed = [
                page for page in range(-(-length // 64)) if any(any(r[64 * page : 64 * page + 64]) for r in of_tile)
            ]
            assert lo == 0 and list(range(hi)) == needed
            assert all(all(row[: 64 * full]) and 64 * full <= length for row in of_tile)
        assert mask.most_blocks(rows, 64) == max(-(-length // 64), 1)
    assert mask.kv_bounds(rows + 63)[1] <= length  # a row past the last one sees no key past the last one


def test_a_line_has_pages_and_behind_them_what_a_tile_costs() -> None:
    for length, pages in ((0, 1), (1, 1), (64, 1), (65, 2), (640, 10)):
        mask = LatentMask("causal", 40, length, 0, 0, heads=40)
        launch = types.SimpleNamespace(mask_of=lambda sequence, mask=mask: mask, tile_m=64, tile_n=64, tile_cost=3)
        line = LatentLine(1, 1, 1, 1, 2, 1, 1, 1)
        assert line.tiles(launch, Sequence(0, 40, 0, length)) == (1, pages + 3)


def test_pages_of_several_times_64_rows() -> None:
    pages = LatentPages([[7, 3], [5, 9]], 4)
    table = {(0, 0): 7, (0, 1): 3, (1, 0): 5, (1, 1): 9}

    class Table:
        def __getitem__(self, at: tuple[int, int]) -> int:
            return table[at]

    pages = LatentPages(Table(), 4)
    assert [pages.place(1, page) for page in (0, 3, 4, 6)] == [(0, 5), (3, 5), (0, 9), (2, 9)]
    assert LatentPages(None, None).place(1, 6) == (6, 1)


def test_positions_are_parities_of_what_each_page_was_used() -> None:
    position, uses = 0, [0, 0]
    for count in (1, 2, 0, 5, 4, 1, 1, 7):
        for number in range(count):  # as the producer counts
            page = number % 2
            assert parity(position, page) == uses[page] % 2
            uses[page] += 1
            position ^= FIRST_PAGE << page
    assert BOTH_PAGES == FIRST_PAGE | FIRST_PAGE << 1  # as the consumers count a pair
    assert READERS == ((4, 8), (8, 4))  # the left half of a first page is warpgroup 0's alone, and so on


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((128, 1, 128), 128),  # a sequence each; to cut all of them for 132 would cost more
        ((128, 2, 128), 64),
        ((66, 2, 128), 66),
        ((32, 1, 64), 128),  # four equal parts
        ((100, 1, 64), 132),
        ((1, 1, 2048), 128),
        ((1, 2, 2048), 64),
        ((1, 300, 10), 1),
        ((7, 1, 1), 7),
    ],
)
def test_blocks_get_equal_shares(sizes: tuple[int, int, int], count: int) -> None:
    batch, m_blocks, pages = sizes
    shares = Shares.of(batch, m_blocks, pages, 0, 132)
    assert shares.count == count and shares.is_split == (count > 1)  # all in one share: nothing is merged
    assert not shares.is_split or count * m_blocks <= 132  # blocks that may wait for each other run at the same time
    whole = Shares.of(batch, m_blocks, pages, 1, 132)
    assert not whole.is_split and whole.count <= max(132 // m_blocks, 1)
    rounds = -(-batch // whole.count)
    assert rounds == -(-batch // max(132 // m_blocks, 1))  # as few as can be
    assert -(-batch * pages // count) <= rounds * pages + 2 * PART_COST
    assert Shares.of(batch, m_blocks, pages, 3, 132).most_parts == 3


@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_blocks_that_meet_merge_each_line_once(rows: int) -> None:
    """A row is four lines of 128 columns. Blocks without a line are not counted: they would be waited for."""
    parts = LatentParts(None, None, None, None, None, 512, 64, 512, 32)  # type: ignore[arg-type]
    lines = parts.lines(types.SimpleNamespace(rows=lambda: rows))  # type: ignore[arg-type]
    assert (lines, parts.lane_groups) == (4 * rows, 1)
    for mates, warps in itertools.product((1, 2, 3, 7, 63, 64, 65, 131, 263), (4, 8)):
        firsts = [
            [line for warp in range(warps) for line in range(number + mates * warp, lines, mates * warps)]
            for number in range(min(mates, lines))
        ]
        assert all(firsts) and sorted(itertools.chain(*firsts)) == list(range(lines))


@pytest.mark.parametrize("size", [QUAD, OCTET])
def test_places_of_partial_results_are_those_of_lanes(size: int) -> None:
    """Four lanes have two columns each of a group of 8; a lane's of some groups are next to each other."""
    found = {
        place + 2 * pair: column for place in range(0, 512, 4) for pair, column in enumerate(columns_at(place, size))
    }
    expected = {}
    for groups, lane, pair in itertools.product(range(128 // size), range(4), range(size // 2)):
        expected[4 * size * groups + size * lane + 2 * pair] = 4 * size * groups + 8 * pair + 2 * lane
    assert found == expected and sorted(found) == sorted(found.values()) == list(range(0, 512, 2))


def test_rows_of_queries_without_a_copy() -> None:
    q = torch.empty(2, 3, 16, 576)
    assert row_strides(q) == (3 * 16 * 576, 576)
    assert row_strides(torch.empty(2, 3, 16, 640)[..., :576]) == (3 * 16 * 640, 640)
    assert row_strides(q.transpose(1, 2)) is None
    assert row_strides(q.transpose(1, 2)[:, :1]) == (3 * 16 * 576, 16 * 576)
    assert row_strides(q[:, :, :1]) == (3 * 16 * 576, 16 * 576)


@pytest.mark.parametrize(
    ("q", "cache", "head_dim_v", "complaint"),
    [
        ((1, 1, 16, 192), (4, 64, 1, 576), 512, "q has 192 columns"),
        ((1, 1, 16, 576), (4, 64, 2, 576), 512, "kv_cache \\(2, 576\\) heads and columns"),
        ((1, 1, 16, 576), (4, 64, 1, 576), 128, "V 128; allowed: 576, \\(1, 576\\), 512"),
        ((1, 1, 129, 576), (4, 64, 1, 576), 512, "heads\\) is 129; allowed: 1 to 128"),
        ((1, 1, 16, 576), (4, 48, 1, 576), 512, "page_size\\) is 48; allowed: multiples of 64"),
    ],
)
def test_sizes_that_are_not_served(q: tuple[int, ...], cache: tuple[int, ...], head_dim_v: int, complaint: str) -> None:
    table, lengths = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    tensors = torch.empty(q, dtype=torch.bfloat16), torch.empty(cache, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=complaint):
        CudaMlaDecode()(*tensors, table, lengths, head_dim_v=head_dim_v, softmax_scale=0.1, causal=True, num_splits=0)
    with pytest.raises(ValueError, match=complaint):
        check_served(*tensors, table, head_dim_v)


def test_a_tile_of_rows_is_one_of_queries() -> None:
    mask = LatentMask("causal", 80, 100, 0, 0, heads=40, step=1)
    tile = QueryTile(1, 0, 0, 0, 0, 1, 0, 0, 64, mask, 64, 64, 1)
    assert tile.rows() == 16
    blocks = tile.visited_blocks()
    assert (blocks.lo, blocks.hi, tile.full_blocks()[1]) == (0, 2, 1)
