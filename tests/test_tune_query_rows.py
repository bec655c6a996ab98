"""Sweeps of kernels for some numbers of query rows: what takes part where, what a winner serves, who is refused.

These are the kernel for few rows of e4m3 caches, and those of latent attention.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch

from cuteflash import dispatch, mla_planning, usertable
from cuteflash.cli import sweep as command
from cuteflash.dispatch import choose, choose_mla, choose_shipped, kernel_class
from cuteflash.mla_problem import MlaProblem
from cuteflash.problem import UNBOUNDED, FwdProblem
from cuteflash.reference.mla import latent_decode
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import ANY_ROWS, Row, TableKey, holds
from cuteflash.tune import cuda_backend, tables
from cuteflash.tune.cells import Cell
from cuteflash.tune.cuda_backend import TorchBench, WrongResult, gate_cells
from cuteflash.tune.explain import explain
from cuteflash.tune.operations import SPECS, enumerate_traits
from cuteflash.tune.report.collect import Scope, collect
from cuteflash.tune.results import Run, Slot
from cuteflash.tune.select import boxes, proposed, select
from cuteflash.tune.store import Store, Timing, candidate_id
from cuteflash.tune.timing import Runner
from cuteflash.tune.trials import MlaTrial
from cuteflash.usertable import TableError
from tests.sweep_fakes import World, make_plan, sweep
from tests.user_tables import MEASURED, SM90, OwnTables

CPU = torch.device("cpu")
LATENT = MlaProblem("bf16")
CACHED = FwdProblem.dense("bf16", 128, 128).packed(4).asking(("split", "e4m3_cache"))
FEW, MORE = (FwdTraitsFewSm90(rows, 256, 128, 128, kv_stage=2) for rows in (8, 16))
WIDE = FwdTraitsCacheSm90(64, 64, 128, 128, pingpong=False, splits=True, stored_stage=5)
OTHER = MlaTraitsSm90(groups=(1, 8))
SM80 = MlaTraitsSm80(16, 32, num_warps=4, q_kept=14)
MLA90, MLA80 = TableKey("mla", "sm_90a", "sm90"), TableKey("mla", "sm_80", "sm80")
CLASSES = ((1, 8), (9, 16), (17, 32), (33, UNBOUNDED))
FROM_17 = (17, UNBOUNDED)
LATENT_CLASSES = ((1, 16), (17, 32), (33, 64), (65, UNBOUNDED))


def cached(queries: int = 1, group: int = 4, **changes: Any) -> Cell:
    size: dict[str, Any] = {"tokens": 4096, "hidden": 8 * 128, "group": group, "seqlen_q": queries}
    return Cell(128, "full", 4096, form="cache", **size | changes)


def latents(heads: int = 16, keys: int = 4096, queries: int = 1, **changes: Any) -> Cell:
    size: dict[str, Any] = {"tokens": 2 * keys, "hidden": heads * 576, "seqlen_q": queries}
    return Cell(576, "full", keys, head_dim_v=512, operation="mla", form="mla", **size | changes)


# Cells.


def test_a_cell_of_latents_has_one_kv_head_whose_keys_are_its_values() -> None:
    cell = latents(64, queries=2)
    assert (cell.task, cell.batch, cell.heads, cell.kv_heads, cell.query_rows) == ("mla", 2, 64, 1, 128)
    assert cell.label == "mla D576x512 full 2x4096 batch 2 heads 64/1"
    assert cell.problem == LATENT and dataclasses.replace(cell, dtype="fp16").problem == MlaProblem("fp16")
    assert cell.flops == 2 * 2 * 64 * 2 * 4096 * (576 + 512)
    assert cell.nbytes == 2 * 2 * (2 * 64 * (576 + 512) + 4096 * 576)  # of 2 bytes, of 2 sequences
    assert latents(queries=17).lengths == "decode"  # which is how dispatch asks for them


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mask": "causal", "seqlen_q": 2}, "mask is 'causal'; allowed for mla: full"),
        ({"head_dim_v": 576}, "head_dim is 576x576; allowed for mla: 576x512"),
        ({"dtype": "e4m3"}, "dtype is 'e4m3'; allowed for mla: fp16, bf16"),
    ],
)
def test_cells_that_no_kernel_of_latents_computes(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(latents(), **changes)


def test_slots_tell_numbers_of_query_rows_apart_where_dispatch_does() -> None:
    found = [Slot.of(cached(queries)).query_rows for queries in (1, 2, 3, 4, 5, 8, 9, 16)]
    assert found == [CLASSES[place] for place in (0, 0, 1, 1, 2, 2, 3, 3)]
    found = [Slot.of(latents(heads)).query_rows for heads in (1, 16, 17, 32, 33, 64, 65, 128)]
    assert found == [LATENT_CLASSES[place] for place in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert Slot.of(dataclasses.replace(cached(), form="decode")).query_rows == ANY_ROWS
    assert Slot.of(cached()).shape == "decode, up to 8 rows" and Slot.of(latents(17)).shape == "decode, 17 to 32 rows"
    assert Slot.of(latents(128)).shape == "decode, from 65 rows" and Slot.of(Cell(64, "full", 4096)).shape == "long"


def test_commands_ask_for_heads_of_latents() -> None:
    common: dict[str, Any] = {"operation": "mla", "transposed_v": False, "form": "mla"}
    pairs, masks = command._pairs(None, None, None, SPECS["mla"]), command._masks(None, None, SPECS["mla"])
    sizes = command._decode_sizes("4", "16,128", "mla")
    cells = command._cells(None, pairs, masks, "bf16", "1x8192", None, common, sizes)
    assert [(cell.batch, cell.heads, cell.kv_heads, cell.mask) for cell in cells] == [
        (4, 16, 1, "full"),
        (4, 128, 1, "full"),
    ]
    for mask, causal in (("causal", None), (None, "0,1")):
        with pytest.raises(ValueError, match="mask is 'causal'; allowed: full"):
            command._masks(mask, causal, SPECS["mla"])
    assert command._masks(None, "0,1", None) == command._masks(None, None, SPECS["cache"]) == ["full", "causal"]
    with pytest.raises(ValueError, match=r"heads is .32x8.; allowed: QUERY_HEADS, e\.g\. 16,128"):
        command._decode_sizes(None, "32x8", "mla")


# Who takes part.


def test_only_what_holds_a_cell_races_on_it(tmp_path: pathlib.Path) -> None:
    """Tiles of 64 rows are for more than 32; the others take part everywhere, the shipped ones too."""
    cells, tile = (latents(16), latents(64)), MlaTraitsSm80(64, 32, 33, k_parts=2, q_kept=4)
    world = World(tmp_path)
    funnel, _ = sweep(world, make_plan(cells=cells, traits=(SM80, tile)))
    (group,) = funnel.groups
    assert {SM80, tile} < {one.traits for one in group.candidates}
    with Store(tmp_path / "sweep.sqlite") as store:
        names = {name: {one.candidate for one in store.timings(cell=cell.id)} for name, cell in zip("ab", cells)}
        assert candidate_id(SM80) in names["a"] & names["b"]
        assert candidate_id(tile) in names["b"] - names["a"]
        report = collect(store, Scope("sm_80"))
        told = explain(store, MLA80, (576, 512), {"q_kept": 4, "tile_m": 64})
    (space,) = report["spaces"]
    assert {slot["lengths"] for slot in space["slots"]} == {"decode, up to 16 rows", "decode, 33 to 64 rows"}
    assert [cell["lengths"] for cell in space["cells"]] == [Slot.of(cell).shape for cell in cells]
    assert "64x32 least_rows=33 k_parts=2 q_kept=4" in told and "heads 64/1" in told and "bound  O: " in told


def test_candidates_that_hold_no_cell_are_not_compiled(tmp_path: pathlib.Path) -> None:
    plan = make_plan(cells=(latents(16),), traits=(SM80, MlaTraitsSm80(64, 32, 33, k_parts=2, q_kept=4)))
    funnel, _ = sweep(World(tmp_path), plan, "compile")
    (group,) = funnel.groups
    assert all(one.traits.serves(16) for one in group.candidates) and SM80 in {one.traits for one in group.candidates}


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("traits", [FEW, MORE], ids=["8", "16"])
def test_a_gate_asks_for_no_more_rows_than_there_are(traits: FwdTraitsFewSm90, group: int, mask: Any) -> None:
    problem = FwdProblem.dense("bf16", 128, 128, mask).packed(group).asking(("split", "e4m3_cache"))
    cells, least = gate_cells(problem, traits), 2 if mask == "causal" else 1
    assert all(least * group <= cell.query_rows <= traits.tile_m and cell.problem == problem for cell in cells)
    assert bool(cells) == (least * group <= traits.tile_m)
    if cells:
        assert max(cell.query_rows for cell in cells) > traits.tile_m // 2 or group == 3
        assert {cell.inputs for cell in cells} == {"plain", *cuda_backend.GATE_INPUTS}


@pytest.mark.parametrize("traits", [OTHER, SM80, MlaTraitsSm80(64, 32, 33, k_parts=2)], ids=["sm90", "16", "64"])
def test_a_gate_of_latents_has_tiles_of_all_kinds(traits: Any) -> None:
    cells = gate_cells(LATENT, traits)
    assert all(holds(traits, cell.query_rows) and cell.problem == LATENT and cell.kv_heads == 1 for cell in cells)
    rows = {cell.query_rows % traits.tile_m for cell in cells}
    assert 0 in rows and len(rows) > 1 and {cell.seqlen_q for cell in cells} > {1, 5}
    assert {cell.inputs for cell in cells} == {"plain", *cuda_backend.GATE_INPUTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("traits", "problem", "target"),
    [
        (dataclasses.replace(FEW, kv_stage=3, tile_n=128), CACHED, "sm_90a"),
        (OTHER, LATENT, "sm_90a"),
        (dataclasses.replace(SM80, chains=1), LATENT, "sm_80"),
    ],
    ids=["few", "mla sm90", "mla sm80"],
)
def test_candidates_compile_without_a_complaint(
    traits: Any, problem: Any, target: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("cutlass")
    task: Any = "mla" if traits.operation == "mla" else "cache"
    assert traits in set(enumerate_traits(task, traits.family, traits.head_dim, traits.head_dim_v))
    request.getfixturevalue("kernels")(kernel_class(traits), traits, problem, target).assert_no_complaint()


# Trials.


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> TorchBench:
    monkeypatch.setattr(cuda_backend, "lookup", lambda *_: "a report")
    monkeypatch.setattr(cuda_backend, "gate_cells", lambda *_: (latents(8, 100, 2), latents(3, 200, 1)))
    return TorchBench("sm_90a", CPU)


def decoding(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Lets the definition read a trial's pages in place of a kernel, and `spoil` its output."""

    def kernel(trial: MlaTrial, traits: Any, target: str) -> Runner:
        def run(calls: int) -> torch.Tensor:
            q, (pages, table, lengths) = trial.inputs.q, trial.cache
            options: dict[str, Any] = {"head_dim_v": 512, "softmax_scale": 576**-0.5, "causal": False}
            trial.out.copy_(latent_decode(q, pages, table, lengths, **options)[0])
            spoil(trial.out)
            return trial.out

        return run

    monkeypatch.setattr(MlaTrial, "kernel", kernel)


def test_pages_of_latents_hold_what_is_judged(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding(monkeypatch, lambda out: None)
    errors = bench.check(OTHER, LATENT)["errors"]
    assert len(errors) == 2 and all(worst <= most and rms <= least for worst, most, rms, least in errors.values())
    trial = MlaTrial(latents(8, 100), CPU, heads=1)
    pages, table, _ = trial.cache
    assert pages.shape == (4, 64, 1, 576) and sorted(table.flatten().tolist()) == list(range(4))
    assert table.flatten().tolist() != list(range(4)) and pages[table[:, 1].long(), 36:].isnan().all()


def test_a_wrong_head_of_latents_is_caught(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding(monkeypatch, lambda out: out[-1, -1, 1].add_(0.5))
    with pytest.raises(WrongResult, match="error"):
        bench.check(OTHER, LATENT)


def test_a_trial_runs_the_kernel_of_its_traits_into_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def compiled(*asked: Any) -> Any:
        return lambda *arguments: given.append((asked, arguments))

    monkeypatch.setattr(mla_planning, "compiled", compiled)
    monkeypatch.setattr(mla_planning, "current_target", lambda _: "sm_90a")
    monkeypatch.setattr(mla_planning, "_multiprocessors", lambda _: 132)
    monkeypatch.setattr(mla_planning.arrivals, "of", lambda device, blocks: torch.zeros(blocks, dtype=torch.int32))
    trial = MlaTrial(latents(128), CPU, heads=1)
    assert trial.kernel(OTHER, "sm_90a")(2) is trial.out and len(given) == 2
    (kernel_cls, *asked), arguments = given[0]
    assert (kernel_cls, asked) == (kernel_class(OTHER), [OTHER, LATENT, "sm_90a"])
    q, cache, table, lengths, out, *_ = arguments
    assert q.shape == (2, 128, 576) and cache.shape == (128, 64, 576) and lengths.tolist() == [4096, 4096]
    assert out.data_ptr() == trial.out.data_ptr() and table is trial.cache.table
    with pytest.raises(ValueError, match="sm_80 does not run the sm90 family"):
        trial.kernel(OTHER, "sm_80")
    with pytest.raises(NotImplementedError, match="fa2 is not timed on mla"):
        trial.peer("fa2")


# Winners.


def run(candidate: str, rows: tuple[int, int], ms: float) -> Run:
    slot = Slot("full", "bf16", "decode", rows)
    return Run(candidate, f"cell of {rows}", slot, ms, ms * 0.999, ms * 1.001, 1 / ms)


def test_a_row_serves_the_numbers_of_query_rows_that_it_won() -> None:
    times = {"few": (1.0, 2.0, 9.0, 9.0), "more": (1.5, 1.0, 9.0, 9.0), "wide": (2.0, 2.0, 1.0, 1.0)}
    runs = [run(name, rows, ms) for name, own in times.items() for rows, ms in zip(CLASSES, own, strict=True)]
    picks = select(runs, {}, {"few": FEW, "more": MORE, "wide": WIDE})
    assert {(pick.row.traits, pick.row.query_rows) for pick in picks} == set(
        zip((FEW, MORE, WIDE), (*CLASSES[:2], FROM_17), strict=True)
    )
    assert {pick.row.lengths for pick in picks} == {("decode",)}


def test_numbers_of_query_rows_that_follow_each_other_are_one_row() -> None:
    slots = {Slot("full", "bf16", "decode", rows) for rows in CLASSES}
    ((_, _, _, rows), held), *others = boxes(slots, ())
    assert rows == CLASSES and held == slots and not others
    apart = boxes({slot for slot in slots if slot.query_rows != (9, 16)}, ())
    assert [rows for (*_, rows), _ in apart] == [CLASSES[:1], CLASSES[2:]]


def test_timings_become_a_row_of_the_users_table(own_tables: OwnTables, tmp_path: pathlib.Path) -> None:
    cell, shipped = latents(16), choose_shipped(LATENT, "sm_90a", "sm90", "decode", 16).traits
    with Store(tmp_path / "sweep.sqlite") as store:
        names = store.add_candidates([OTHER, shipped])
        store.add_cell(cell.id, dataclasses.asdict(cell))
        for name, ms in zip(names, (1.0, 1.2), strict=True):
            samples = tuple(ms * (1 + i / 1000) for i in range(9))
            numbers = {"samples": samples, "ms": ms, "low": ms * 0.99, "high": ms * 1.01, "tflops": 1 / ms}
            store.record(Timing(name, cell.id, "sm_90a", "Card", "1", "k", "sm90 1", **numbers))
        (pick,) = proposed(store, MLA90, (576, 512), "Card", "mla")
    assert (pick.row.traits, pick.row.query_rows, pick.kept) == (OTHER, (1, 16), False)
    assert pick.gain == pytest.approx(0.2) and pick.row.title == "576x512 (full; bf16; decode; up to 16 rows)"
    tables.write_user(MLA90, [MEASURED(pick.row)])
    taken = [choose_mla(LATENT, rows, "sm_90a", "sm90") == OTHER for rows in (1, 16, 17, 64)]
    assert taken == [True, True, False, False]


# The user's table, and who is served by it.


def choice(rows: int | None) -> Any:
    return choose(CACHED, "sm_90a", "sm90", "decode", rows)


def test_a_users_few_row_serves_no_call_with_more_rows_than_it_holds(own_tables: OwnTables) -> None:
    shipped = {rows: choice(rows).traits for rows in (1, 8, 9, 16, 17, 64, None)}
    for query_rows in ((1, 8), ANY_ROWS):  # also if a table claims more than a tile holds
        own_tables.write("sm_90a", "sm90", [MEASURED(Row(FEW, lengths=("decode",), query_rows=query_rows))])
        assert usertable.load(SM90)[0].row.query_rows == query_rows
        for rows in (1, 8):
            assert choice(rows).traits == FEW and "user's table" in choice(rows).source
        assert {rows: choice(rows).traits for rows in (9, 16, 17, 64, None)} == {
            rows: shipped[rows] for rows in (9, 16, 17, 64, None)
        }


def test_a_users_row_comes_before_the_shipped_ones_where_it_was_measured_alone(own_tables: OwnTables) -> None:
    """A tile of 64 rows that won with few rows is taken for these; one that was timed with many is not."""
    few = choice(4).traits
    assert isinstance(few, FwdTraitsFewSm90)
    own_tables.write("sm_90a", "sm90", [MEASURED(Row(WIDE, lengths=("decode",), query_rows=FROM_17))])
    assert choice(4).traits == few and choice(17).traits == choice(None).traits == WIDE
    own_tables.write("sm_90a", "sm90", [MEASURED(Row(WIDE, lengths=("decode",), query_rows=CLASSES[0]))])
    assert choice(4).traits == WIDE and choice(17).traits != WIDE


def test_few_rows_stay_in_a_users_table_beside_others(own_tables: OwnTables) -> None:
    rows = [MEASURED(Row(FEW, ("full",), lengths=("decode",), query_rows=CLASSES[0]))]
    rows.append(MEASURED(Row(MORE, ("full",), lengths=("decode",), query_rows=CLASSES[1])))
    tables.write_user(SM90, rows)
    tables.write_user(SM90, [MEASURED(Row(WIDE, ("full",), lengths=("decode",), query_rows=FROM_17))])
    assert {own.row.traits for own in usertable.load(SM90)} == {FEW, MORE, WIDE}
    better = dataclasses.replace(FEW, tile_n=128)
    tables.write_user(SM90, [MEASURED(Row(better, ("full",), lengths=("decode",), query_rows=CLASSES[0]))])
    assert {own.row.traits for own in usertable.load(SM90)} == {better, MORE, WIDE}  # the other is not reached


def test_rows_of_latents_come_back_from_the_users_table(own_tables: OwnTables) -> None:
    measured = (MEASURED(Row(OTHER, ("full",), lengths=("decode",), query_rows=(33, 64))),)
    path = usertable.write(MLA90, measured)
    assert path.name == "mla-sm_90a-sm90.json" and usertable.load(MLA90) == measured
    assert choose_mla(LATENT, 64, "sm_90a") == choose(LATENT, "sm_90a", None, "decode", 64).traits == OTHER
    without_pages = MlaProblem("bf16", is_paged=False, is_split=False)
    assert choose_mla(without_pages, 64, "sm_90a") == OTHER
    assert choose_mla(LATENT, 65, "sm_90a") == choose_shipped(LATENT, "sm_90a", None, "decode", 65).traits != OTHER
    for rows in (16, 32, 64):
        shipped = choose_shipped(LATENT, "sm_90a", "sm80", "decode", rows).traits
        assert choose_mla(LATENT, rows, "sm_90a", "sm80") == shipped
    assert choose_mla(MlaProblem("bf16", is_e4m3=True), 64, "sm_90a").family == "sm80"
    assert usertable.remove() == [path] and choose_mla(LATENT, 64, "sm_90a") != OTHER


def test_up_to_16_rows_of_latents_are_the_sm80_familys_on_hopper(own_tables: OwnTables) -> None:
    """Its table of the user's is the one that counts for them, too."""
    usertable.write(MLA90, [MEASURED(Row(OTHER, ("full",), lengths=("decode",)))])
    found = [choose_mla(LATENT, rows, "sm_90a") for rows in (1, 16, 17)]
    assert [traits.family for traits in found] == ["sm80", "sm80", "sm90"] and found[2] == OTHER
    own = MlaTraitsSm80(16, 32, num_warps=4, q_kept=14, chains=2, early_launch=True)
    usertable.write(TableKey("mla", "sm_90a", "sm80"), [MEASURED(Row(own, ("full",), lengths=("decode",)))])
    assert [choose_mla(LATENT, rows, "sm_90a") for rows in (1, 16, 17)] == [own, own, OTHER]


def test_a_users_row_of_latents_takes_the_sequences_that_it_holds(own_tables: OwnTables) -> None:
    tile = MlaTraitsSm80(64, 32, least_rows=33, k_parts=2, q_kept=4)
    usertable.write(MLA80, [MEASURED(Row(tile, ("full",), lengths=("decode",)))])
    assert [choose_mla(LATENT, rows, "sm_80") == tile for rows in (1, 32, 33, 500)] == [False, False, True, True]
    assert not holds(tile, 32) and holds(SM80, 1) and holds(WIDE, UNBOUNDED) and not holds(MORE, UNBOUNDED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query_rows": [16, 1]}, r"query_rows is \(16, 1\); allowed: the fewest and the most, from 1 on"),
        ({"query_rows": [1]}, r"query_rows is \(1,\); allowed"),
        ({"query_rows": [True, 8]}, r"query_rows is \(True, 8\); allowed"),
        ({"query_rows": None}, "its query_rows is None; allowed: list"),
        ({"kind": "fwd_few_sm90"}, "its kind is 'fwd_few_sm90'; allowed in mla/sm_90a/sm90: mla_sm90"),
        ({"traits": {"groups": [4, 4]}}, r"sm_90a does not run it: groups \(4, 4\) are not 9 slabs"),
    ],
    ids=str,
)
def test_tables_of_latents_that_cannot_be_believed(own_tables: OwnTables, changes: dict[str, Any], reason: str) -> None:
    path = usertable.write(MLA90, [MEASURED(Row(OTHER, ("full",), lengths=("decode",)))])
    table = json.loads(path.read_text())
    table["rows"][0] |= changes
    path.write_text(json.dumps(table))
    with pytest.raises(TableError, match=reason):
        usertable.read(MLA90)


def test_every_shipped_row_of_latents_is_a_row_of_its_table() -> None:
    for family, shipped in dispatch.MLA_ROWS.items():
        rows = dispatch.shipped_rows(LATENT, TableKey("mla", "sm_90a", family))
        assert tuple(row.traits for row in rows) == shipped
        assert all(row.serves(LATENT, "decode", 128) == holds(row.traits, 128) for row in rows)
