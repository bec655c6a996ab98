"""The numbers of the study path: they are the reference's and the kernels' own, not copies of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cuteflash.kernels.sm80 import fwd_mma
from cuteflash.reference import fa1, fa2
from cuteflash.traits.tables import tables_of
from layouts.lessons import (
    eight_bits,
    gradients,
    lesson_data,
    lesson_scenes,
    loops,
    pipeline,
    seesaw,
    softmax,
    timeline,
    turns,
)
from layouts.lessons.replay import Anything, Replay
from layouts.lessons.sources import source_of
from layouts.rows import OPERATIONS, make_scene, shipped_rows

ROOT = Path(__file__).parents[2]
ROUNDED = 10.0**-softmax.DIGITS


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return lesson_data()


def test_is_json_without_nan(data: dict[str, Any]) -> None:
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_scenes_are_those_of_the_gallery(data: dict[str, Any]) -> None:
    every_row = [row for operation in OPERATIONS for row in shipped_rows(operation)]
    gallery = [(row.problem, row.target, row.choice.row) for row in every_row]
    for name, (problem, target, choice) in lesson_scenes().items():
        assert (problem, target, choice.row) in gallery
        assert make_scene(problem, target, choice).id == data["scenes"][name]


@pytest.mark.parametrize("mask", softmax.MASKS)
def test_softmax_ends_at_the_result_of_flash_attention_2(mask: str) -> None:
    o, lse = softmax.expected(mask)
    traced = softmax.trace(mask)
    torch.testing.assert_close(torch.tensor(traced["o"], dtype=o.dtype), o, atol=ROUNDED, rtol=0)
    torch.testing.assert_close(torch.tensor(traced["lse"], dtype=lse.dtype), lse, atol=ROUNDED, rtol=0)


@pytest.mark.parametrize("mask", softmax.MASKS)
def test_softmax_of_every_block_is_that_of_the_keys_so_far(mask: str) -> None:
    """After each block exp(maximum) * sum is the sum over all visible keys up to it, however the maximum moved."""
    total = torch.zeros(softmax.S_Q, dtype=torch.float64)
    for block in softmax.trace(mask)["blocks"]:
        scores = torch.tensor([[_number(s) for s in row] for row in block["scores"]], dtype=torch.float64)
        total += scores.exp().sum(dim=1)
        shift = torch.tensor(block["shift"], dtype=torch.float64)
        found = shift.exp() * torch.tensor(block["sum"], dtype=torch.float64)
        torch.testing.assert_close(found, total, atol=1e-4, rtol=1e-4)


def test_softmax_shows_a_row_without_a_key() -> None:
    first = softmax.trace("window")["blocks"][0]
    row = first["scores"].index([None] * softmax.TILE_N)
    assert (first["maximum"][row], first["shift"][row], first["sum"][row]) == (None, 0.0, 0.0)
    assert [None] * softmax.TILE_N in softmax.trace("causal")["blocks"][-1]["scores"]


@pytest.mark.parametrize("mask", loops.MASKS)
@pytest.mark.parametrize("sizes", [(8, 8), (7, 9), (5, 12), (12, 5)])
def test_visits_are_those_of_the_reference(mask: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    s_q, s_k = sizes
    left, right = loops.MASKS[mask]
    for module, attend, visits in (
        (fa1, fa1.flash_attention_1, loops.fa1_visits),
        (fa2, fa2.flash_attention_2, loops.fa2_visits),
    ):
        seen: list[tuple[int, int]] = []

        def watch(
            i0: int, i1: int, j0: int, *rest: Any, seen: Any = seen, real: Any = module.visible, **more: Any
        ) -> Any:
            seen.append((i0, j0))
            return real(i0, i1, j0, *rest, **more)

        monkeypatch.setattr(module, "TILE_M", 3)
        monkeypatch.setattr(module, "TILE_N", 2)
        monkeypatch.setattr(module, "visible", watch)
        q, k = torch.zeros(1, s_q, 1, 2), torch.zeros(1, s_k, 1, 2)
        attend(q, k, k, 1.0, left, right)
        assert visits(s_q, s_k, 3, 2, left, right) == seen


@pytest.mark.parametrize("mask", loops.MASKS)
@pytest.mark.parametrize("sizes", [(8, 8), (7, 9), (12, 6)])
def test_traffic_is_what_a_walk_through_the_loops_moves(mask: str, sizes: tuple[int, int]) -> None:
    (s_q, s_k), d, tile, sides = sizes, 5, 3, loops.MASKS[mask]
    reads = writes = 0
    for j0 in range(0, s_k, tile):
        reads += 2 * d * min(tile, s_k - j0)  # K_j, V_j
        for i0 in range(0, s_q, tile):
            rows = min(tile, s_q - i0)
            reads += rows * (d + d + 1 + 1)  # Q_i, O_i, m_i, l_i
            writes += rows * (d + 1 + 1)
    visits = loops.fa1_visits(s_q, s_k, tile, tile, *sides)
    assert loops.fa1_traffic(visits, s_q, s_k, d, tile) == {"reads": reads, "writes": writes}

    visits = loops.fa2_visits(s_q, s_k, tile, tile, *sides)
    reads = writes = 0
    for i0 in range(0, s_q, tile):
        rows = min(tile, s_q - i0)
        reads += rows * d
        writes += rows * (d + 1)
        reads += sum(2 * d * min(tile, s_k - j0) for i, j0 in visits if i == i0)
    assert loops.fa2_traffic(visits, s_q, s_k, d, tile) == {"reads": reads, "writes": writes}


def test_causal_halves_the_tiles_of_flash_attention_2_only() -> None:
    n = loops.SHOWN
    assert len(loops.fa2_visits(n, n, 1, 1, -1, 0)) == n * (n + 1) // 2
    assert len(loops.fa1_visits(n, n, 1, 1, -1, 0)) == n * n


PROBLEM, _, CHOICE = lesson_scenes()["sm80"]
ORDERS = [(off, stages) for off in pipeline.ORDERS.values() for stages in pipeline.SHOWN if off is None or stages == 1]
EVERY_ORDER = pytest.mark.parametrize(("off", "stages"), ORDERS)


def actions_of(off: str | None, stages: int, blocks: int = pipeline.BLOCKS, **fields: Any) -> list[pipeline.Action]:
    traits = dataclasses.replace(pipeline.traits_of(CHOICE.traits, stages, off), **fields)
    return pipeline.run(traits, PROBLEM, blocks)


@EVERY_ORDER
@pytest.mark.parametrize("q_in_regs", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_pipeline_reads_only_what_has_arrived(off: str | None, stages: int, blocks: int, q_in_regs: bool) -> None:
    before = None
    read = []
    for action in actions_of(off, stages, blocks, q_in_regs=q_in_regs):
        for name, (block, status) in action["buffers"].items():
            was = before["buffers"][name] if before else [None, "free"]
            if status == "reading" and was[1] != "reading":
                assert was == [block, "ready"]
                read.append((block, name[1]))
            if status in ("loading", "stored"):
                assert was[1] == "free" or was == [block, status]
        before = action
    assert read == [(block, tensor) for block in range(blocks - 1, -1, -1) for tensor in "KV"]


@EVERY_ORDER
def test_pipeline_overwrites_only_behind_a_barrier(off: str | None, stages: int) -> None:
    """Between the product that reads a buffer and the load that overwrites it stands a wait with its barrier."""
    unsafe: set[str] = set()
    for action in actions_of(off, stages):
        if action["kind"] == "wait":
            unsafe.clear()
        if action["kind"] == "load":
            assert not unsafe.intersection(
                name for name, (_, status) in action["buffers"].items() if status in ("loading", "stored")
            )
        unsafe |= {name for name, (_, status) in action["buffers"].items() if status == "reading"}


@EVERY_ORDER
def test_copies_are_in_flight_during_products_only_as_shipped(off: str | None, stages: int) -> None:
    tally = pipeline.tally(actions_of(off, stages))
    assert tally["work"] == 3 * pipeline.BLOCKS
    if off is None:
        assert tally["covered"] >= tally["work"] - 3  # of the last block, nothing is left to load
        assert tally["waits"] == (2 * pipeline.BLOCKS if stages == 1 else pipeline.BLOCKS + 1)
    else:
        assert (tally["covered"], tally["waits"]) == (0, 2 * pipeline.BLOCKS)


def test_a_waited_step_loads_its_own_key_and_value_block() -> None:
    loads = [(action["text"], action["block"]) for action in actions_of("eager_loads", 1) if action["kind"] == "load"]
    assert [block for _, block in loads] == [block for block in range(pipeline.BLOCKS - 1, -1, -1) for _ in "KV"]
    assert all("issue the copies" in text for text, _ in loads)


def test_without_cp_async_the_calls_keep_their_order_and_no_group_holds_a_copy() -> None:
    shipped, plain = actions_of(None, 1), actions_of("async_copy", 1)
    for one, other in zip(shipped, plain, strict=True):
        assert [one[name] for name in ("function", "line", "kind", "block")] == [
            other[name] for name in ("function", "line", "kind", "block")
        ]
        assert not other["open"] and not any(other["groups"])
    assert shipped[0]["open"] == ["sQ", "sK[0]"]


def test_an_order_says_why_it_refuses_a_depth(data: dict[str, Any]) -> None:
    for order in data["pipeline"]["orders"]:
        refused = {} if order["off"] is None else dict.fromkeys(["2", "3"], order["off"])
        assert order["refused"].keys() == refused.keys()
        assert all(reason in order["refused"][stages] for stages, reason in refused.items())
        assert order["stages"].keys() | refused.keys() == {str(stages) for stages in pipeline.SHOWN}


@EVERY_ORDER
def test_every_action_stands_at_its_call(off: str | None, stages: int, data: dict[str, Any]) -> None:
    calls = {
        "load": "load_kv(",
        "commit": "commit_group()",
        "wait": "wait_loads(",
        "ldmatrix": "cute.copy(",
        "product": "product_",
        "softmax": "softmax_block(",
    }
    (order,) = (order for order in data["pipeline"]["orders"] if order["off"] == off)
    for action in order["stages"][str(stages)]["actions"]:
        line = data["pipeline"]["sources"][action["function"]]["lines"][action["line"]]
        assert calls[action["kind"]] in line


def test_every_shipped_sm80_row_has_a_pipeline(data: dict[str, Any]) -> None:
    table = sum(len(rows) for (_, _, family), rows in tables_of("fwd").items() if family == "sm80")
    shown = [len(depth["rows"]) for order in data["pipeline"]["orders"] for depth in order["stages"].values()]
    assert sum(shown) == table


def test_a_call_that_has_no_stand_in_is_an_error() -> None:
    with pytest.raises(NameError, match="load_kv"):
        Replay((fwd_mma.load_block,), {}).functions["load_block"](Anything(), 1, 0, 0)


def test_a_stand_in_knows_its_line() -> None:
    replay = Replay((_number,), {"float": lambda text: replay.place()})
    assert replay.functions["_number"](None) == ("_number", 1)
    with pytest.raises(RuntimeError, match="no replayed function"):
        replay.place()


@pytest.mark.parametrize("head_dim", turns.HEAD_DIMS)
def test_turns_keep_units_and_order(head_dim: int) -> None:
    traits = turns.row_traits(head_dim)
    product, softmax_clocks = turns.clocks(head_dim, traits.tile_n)
    for overlap in (False, True):
        work = turns.tasks(traits.mma_warpgroups, overlap, True, product, softmax_clocks)
        spans = {span.task.key: span for span in timeline.simulate(work)}
        assert len(spans) == len(work)
        for task in work:
            assert all(spans[key].end <= spans[task.key].start for key in task.after)
        for unit in (timeline.TENSOR, timeline.EXPONENTIAL):
            clocks = sum(task.clocks for task in work if task.unit == unit)
            assert clocks <= max(span.end for span in spans.values())


def test_floor_is_that_of_the_performance_notes() -> None:
    assert turns.clocks(128, 128) == (512, 512)
    assert turns.clocks(64, 128) == (256, 512)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("head_dim", gradients.HEAD_DIMS)
def test_the_backwards_timeline_keeps_the_kernels_order(head_dim: int, apart: bool) -> None:
    traits = gradients.row_traits(head_dim)
    work = gradients.tasks(traits, apart, not apart)
    spans = {span.task.key: span for span in timeline.simulate(work)}
    assert len(spans) == (6 * traits.mma_warpgroups + (1 if apart else traits.mma_warpgroups)) * gradients.STEPS
    for (wg, what, step), span in spans.items():
        assert span.end - span.start >= span.task.clocks - 1e-6
        if what == "dQ":  # sums over the keys of all warpgroups
            assert span.start >= max(spans[other, "dS", step].end for other in range(traits.mma_warpgroups)) - 1e-6
        if what == "dK":
            assert span.start >= spans[wg, "dS", step].end - 1e-6
    busy = [span.task.clocks for span in spans.values() if span.task.unit == timeline.TENSOR]
    assert sum(busy) == 10 * traits.tile_m * traits.tile_n * head_dim * gradients.STEPS // timeline.FLOPS_PER_CLOCK


def test_delta_is_the_sum_of_p_dp() -> None:
    shown = gradients.example()
    assert shown["sum"] == shown["delta"]
    for p, dp, delta, ds in zip(shown["p"], shown["dp"], shown["delta"], shown["ds"], strict=True):
        assert sum(ds) == pytest.approx(0, abs=0.005)
        assert ds == pytest.approx([x * (y - delta[0]) for x, y in zip(p, dp, strict=True)], abs=0.005)


def test_keys_of_8_bits_are_in_the_order_of_a_threads_pairs(data: dict[str, Any]) -> None:
    order = [8 * j + 2 * t + b for t in range(4) for j in range(2) for b in range(2)]
    assert data["fp8"]["keys"] == order


def test_one_level_loses_ever_more_and_two_do_not(data: dict[str, Any]) -> None:
    """Of V with a mean: docs/fp8.md tells of 18 % at 16k keys, which numbers of another spread come near."""
    losses = data["fp8"]["losses"]
    assert [row["keys"] for row in losses] == list(eight_bits.LENGTHS)
    assert losses[0]["one"] == losses[0]["two"]  # one block
    assert all(after["one"] > 2 * before["one"] for before, after in itertools.pairwise(losses[:-1]))
    assert 0.1 < losses[-1]["one"] < 0.3
    assert all(row["two"] < 1e-3 for row in losses)


def test_the_seesaw_waits_for_what_the_kernel_waits_for(data: dict[str, Any]) -> None:
    """P is read after it is written, O's halves see the pages in order, and both see every page."""
    _, _, choice = seesaw.latent_lesson_row()
    spans = {span.task.key: span for span in timeline.simulate(seesaw.tasks(choice.traits))}  # type: ignore[arg-type]
    assert len(spans) == len(seesaw.EVENTS) * seesaw.PAGES // 2
    for page in range(seesaw.PAGES):
        owner = page % 2
        written = spans[owner, "exp", page].end
        assert spans[owner, "exp", page].start >= spans[owner, "S", page].end
        assert spans[owner, "own", page].start >= written and spans[1 - owner, "other", page].start >= written
    for who in (0, 1):
        added = [spans[who, "own" if page % 2 == who else "other", page] for page in range(seesaw.PAGES)]
        assert all(before.end <= after.start for before, after in itertools.pairwise(added))
    flops = sum(span.task.clocks for span in spans.values() if span.task.unit == timeline.TENSOR)
    assert flops * timeline.FLOPS_PER_CLOCK == 2 * 64 * 64 * (576 + 512) * seesaw.PAGES
    for event in data["seesaw"]["events"]:
        assert event["call"] in data["seesaw"]["sources"][event["function"]]["lines"][event["line"]]


def test_shares_are_every_key_block_once_in_equal_parts(data: dict[str, Any]) -> None:
    for example in data["shares"]["examples"]:
        visited = [
            (part["tile"], unit)
            for parts in example["shares"]
            for part in parts
            for unit in range(part["first"], part["last"])
        ]
        tiles = example["tiles"]
        assert visited == [(tile, unit) for tile, one in enumerate(tiles) for unit in range(one["width"])]
        sizes = [sum(part["last"] - part["first"] for part in parts) for parts in example["shares"] if parts]
        assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
        for number, parts in enumerate(example["shares"]):
            assert all(part["owner"] <= number <= part["last_owner"] for part in parts)
            assert sum(part["owner"] != part["last_owner"] for part in parts) <= 2
        assert example["blocks"] == example["lanes"] * len(example["shares"]) <= data["shares"]["multiprocessors"]


def test_turns_that_wait_for_each_other_are_refused() -> None:
    a, b = (0, "QK", 0), (1, "QK", 0)
    with pytest.raises(ValueError, match="wait for each other"):
        timeline.simulate([timeline.Task(a, timeline.TENSOR, 1, (b,)), timeline.Task(b, timeline.TENSOR, 1, (a,))])


def test_a_line_that_is_not_there_once_is_refused() -> None:
    prologue = source_of(fwd_mma.prologue)
    assert prologue.line("load_kv(loads.k, n_last, 0, rows)") > 0
    for text in ("no such line", "load_kv("):
        with pytest.raises(ValueError, match="expected one"):
            prologue.line(text)


def test_sources_are_where_they_say(data: dict[str, Any]) -> None:
    for source in _sources(data):
        text = (ROOT / source["file"]).read_text().splitlines()
        found = text[source["first"] - 1 : source["first"] - 1 + len(source["lines"])]
        assert [line.strip() for line in found] == [line.strip() for line in source["lines"]]


def _sources(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        own = [value] if {"file", "first", "lines"} <= value.keys() else []
        return own + [found for item in value.values() for found in _sources(item)]
    return []


def _number(value: float | None) -> float:
    return float("-inf") if value is None else value
