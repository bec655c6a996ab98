"""Kinds of inputs: their names, and that scores are what the names say, for any shape, type and number of heads."""

from __future__ import annotations

import pytest
import torch

from cuteflash.problem import MASK_KINDS, FwdProblem, MaskKind
from cuteflash.traits.candidates import SM90_TILE_N
from cuteflash.traits.row import TableKey
from cuteflash.traits.tables import TABLES
from cuteflash.tune.cells import Cell, parse_cell
from cuteflash.tune.cuda_backend import gate_cells
from cuteflash.tune.inputs import OUTLIERS, Kind, of_kind, parse_kind
from cuteflash.tune.operations import SPECS
from cuteflash.tune.plan import SINK

SEQLEN = 400
# Of the lengths that a sweep of the forward times if nobody says which.
RACED = [parse_cell(f"64:{text}:full") for text in SPECS["fwd"].lengths.split(",")]


def plain(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 50, heads, head_dim), (2, SEQLEN, kv_heads, head_dim), (2, SEQLEN, kv_heads, 48)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def scores(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """(batch, heads, seqlen_q, seqlen_k), in nats."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * (scale or q.shape[3] ** -0.5)


@pytest.mark.parametrize(
    ("text", "kind", "canonical"),
    [
        ("plain", Kind("plain"), "plain"),
        ("sink:12", Kind("sink", 12.0), "sink:12"),
        ("sink:30:middle", Kind("sink", 30.0, "middle"), "sink:30:middle"),
        (" sink:7.50", Kind("sink", 7.5), "sink:7.5"),
        ("ramp:-60", Kind("ramp", -60.0), "ramp:-60"),
        ("peaked:half", Kind("peaked", option="half"), "peaked:half"),
        ("outliers", Kind("outliers"), "outliers"),
    ],
)
def test_kinds_parse_from_text_and_have_one_text(text: str, kind: Kind, canonical: str) -> None:
    assert parse_kind(text) == kind
    assert str(kind) == canonical
    assert parse_kind(canonical) == kind


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sink",
        "sink:",
        "sink:x",
        "sink:0",
        "sink:-3",
        "sink:nan",
        "sink:inf",
        "ramp:2000",
        "peaked:2",
        "plain:1",
        "sink:3:half",
        "sink:middle",
        "ramp:3:middle",
        "sink:3:middle:",
        "peaked:middle",
        "plain:",
        "outliers:half",
    ],
)
def test_what_is_no_kind_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"inputs is .*allowed: plain, sink:NATS"):
        parse_kind(text)


def test_plain_inputs_are_left_alone() -> None:
    q, k, v = plain()
    assert all(made is given for made, given in zip(of_kind("plain", q, k, v), (q, k, v), strict=True))


@pytest.mark.parametrize("place", [0, 123, -1])
@pytest.mark.parametrize("head_dim", [8, 64, 256])
@pytest.mark.parametrize("nats", [8.0, 30.0, 400.0])
def test_a_sink_scores_so_many_nats_above_the_others_for_every_query(nats: float, head_dim: int, place: int) -> None:
    q, k, _ = of_kind(f"sink:{nats}", *plain(head_dim=head_dim), place=place)
    found = scores(q, k)
    sink = found[..., place]
    others = torch.cat([found[..., :place], found[..., place + 1 :]], -1) if place >= 0 else found[..., :-1]
    assert (sink - nats).abs().max() < 5
    assert abs(sink.mean().item() - nats) < 0.5
    assert abs(others.mean().item()) < 0.1
    assert 0.9 < others.std().item() < 1.1


def test_a_sink_in_the_middle_is_at_the_middle_key_wherever_other_sinks_are() -> None:
    q, k, _ = of_kind("sink:30:middle", *plain(), place=3)
    at_the_middle, _, _ = of_kind("sink:30", *plain(), place=SEQLEN // 2)
    assert torch.equal(q, at_the_middle)
    means = scores(q, k).mean(dim=(0, 1, 2))
    assert means.argmax() == SEQLEN // 2 and abs(means[SEQLEN // 2].item() - 30) < 0.5
    assert abs(means[3].item()) < 1


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_the_gates_sinks_in_the_middle_lie_in_blocks_that_every_query_sees_whole(mask: MaskKind) -> None:
    """Not in a tile's first block or one that a mask cuts: their maxima move anyway, and nothing is repaired."""
    cells = [cell for cell in gate_cells(FwdProblem.dense("bf16", 64, 64, mask)) if cell.inputs.endswith("middle")]
    assert len(cells) == 2
    for cell in cells:
        sink, block, first_own = cell.seqlen // 2, max(SM90_TILE_N), cell.seqlen - cell.seqlen_q
        left, right = cell.window
        assert max(0, cell.seqlen - 1 - left) + block <= sink
        assert sink <= min(cell.seqlen, first_own + right) - block


@pytest.mark.parametrize("cell", [cell for cell in RACED if cell.lengths != "brief"], ids=lambda cell: cell.label)
def test_sinks_of_races_lie_beyond_the_block_that_a_tile_begins_with(cell: Cell) -> None:
    assert SINK == "sink:12:middle"
    assert cell.seqlen // 2 >= max(SM90_TILE_N)


@pytest.mark.parametrize("cell", RACED, ids=lambda cell: cell.label)
def test_sinks_of_races_lie_beyond_the_block_that_a_tile_of_a_shipped_row_begins_with(cell: Cell) -> None:
    """Of brief sequences, too, which the widest candidates take in one block or two."""
    widths = [
        row.traits.tile_n
        for row in TABLES[TableKey("fwd", "sm_90a", "sm90")]
        if cell.lengths in row.lengths and getattr(row.traits, "fixed_max", False)
    ]
    assert widths and cell.seqlen // 2 >= max(widths)


def test_a_sink_knows_the_scale() -> None:
    q, k, _ = of_kind("sink:30", *plain(), scale=0.5)
    assert abs(scores(q, k, 0.5)[..., 0].mean().item() - 30) < 1


def test_a_ramp_rises_evenly_to_the_first_or_to_the_last_key() -> None:
    for text, first, last in (("ramp:60", 60, 0), ("ramp:-60", 0, 60)):
        means = scores(*of_kind(text, *plain())[:2]).mean(dim=(0, 1, 2))
        expected = torch.linspace(first, last, SEQLEN)
        assert (means - expected).abs().max() < 1


def test_peaked_heads_spread_three_times_as_wide() -> None:
    for text, spreads in (("peaked", (3, 3, 3, 3)), ("peaked:half", (3, 1, 3, 1))):
        found = scores(*of_kind(text, *plain())[:2]).std(dim=(0, 2, 3))
        torch.testing.assert_close(found, torch.tensor(spreads).double(), rtol=0.1, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_outliers_are_large_channels_with_scores_of_a_sane_spread(head_dim: int) -> None:
    q, k, v = of_kind("outliers", *plain(head_dim=head_dim))
    low, _ = OUTLIERS
    for tensor, count in ((q, 4 * head_dim // 64), (k, 2 * head_dim // 64)):
        large = tensor.mean(dim=(0, 1)).abs() > low / 2
        assert large.sum() == count
        assert tensor.abs().max() > low
    assert (v.std(dim=(0, 1)) > low / 2).sum() == 2
    found = scores(q, k)
    spread = (found - found.mean(-1, keepdim=True)).std().item()
    assert 1.5 < spread < 3.5


@pytest.mark.parametrize("kind", ["sink:30", "ramp:60", "peaked", "outliers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kinds_keep_shapes_and_types_and_are_the_same_every_time(kind: str, dtype: torch.dtype) -> None:
    given = plain(heads=6, kv_heads=2, dtype=dtype)
    first, second = of_kind(kind, *given), of_kind(kind, *given)
    for one, other, like in zip(first, second, given, strict=True):
        assert torch.equal(one, other)
        assert (one.shape, one.dtype) == (like.shape, like.dtype)
        assert torch.isfinite(one).all()
    assert all(torch.equal(tensor, other) for tensor, other in zip(given, plain(6, 2, dtype=dtype), strict=True))


def test_a_place_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="place is 400; allowed: an index of one of the 400 keys"):
        of_kind("sink:8", *plain(), place=SEQLEN)
