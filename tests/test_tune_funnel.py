"""The sweep with a pretended compiler and GPU: who is let through, who is blamed, what a second run still has to do."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import signal
from typing import Any

import pytest

from cuteflash.cli.sweep import LIMIT
from cuteflash.traits import row
from cuteflash.traits.arch import get_arch
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.tables import TABLES
from cuteflash.tune.backend import PEER
from cuteflash.tune.cells import Cell
from cuteflash.tune.funnel import make_space
from cuteflash.tune.operations import enumerate_traits
from cuteflash.tune.plan import VALUE_DEPENDENT, Limits
from cuteflash.tune.race_plan import Field, arrange, past_of
from cuteflash.tune.rank import shortlist
from cuteflash.tune.results import load_runs
from cuteflash.tune.store import Store, Timing, candidate_id
from cuteflash.tune.timing import Roles, Rules
from cuteflash.tune.worker import StartFailed
from tests import forked
from tests.patience import wait_until
from tests.sweep_fakes import CELLS, TARGET, TRAITS, World, make_plan, sweep

pytestmark = pytest.mark.slow  # work in processes of their own

DEFAULT = next(row.traits for row in TABLES["fwd", TARGET, "sm80"] if row.traits.head_dim == 128)
IDS = {traits.tile_n: candidate_id(traits) for traits in TRAITS}
FINALISTS = (96,)  # of TRAITS, those within the margin of the best


@pytest.fixture
def world(tmp_path: pathlib.Path) -> World:
    return World(tmp_path)


def rejections(world: World) -> dict[tuple[str, str], str]:
    """(stage, candidate) → reason."""
    with Store(world.folder / "sweep.sqlite") as store:
        return {(v.stage, v.candidate): str(v.reason) for v in store.verdicts(ok=0)}


def timed(world: World) -> dict[tuple[str, str], int]:
    """(candidate, cell) → samples in the store."""
    with Store(world.folder / "sweep.sqlite") as store:
        return {(t.candidate, t.cell): len(t.samples) for t in store.timings() if t.error is None}


def work(world: World) -> list[tuple[str, ...]]:
    """Everything that was asked of the fakes."""
    return [(kind, *words) for kind in ("build", "check", "sample") for words in world.journaled(kind)]


def test_everybody_is_built_checked_and_timed_until_clearly_beaten(world: World) -> None:
    _, display = sweep(world)
    assert sorted(world.journaled("build")) == sorted(world.journaled("check"))
    assert len(world.journaled("build")) == len(TRAITS) + 1  # and the shipped row
    samples = timed(world)
    for cell in CELLS:
        assert {n: samples[IDS[n], cell.id] for n in IDS} == {n: 5 if n in FINALISTS else 3 for n in IDS}
        assert samples[candidate_id(DEFAULT), cell.id] == 5  # stays, although beaten
    assert sum(samples.values()) == len(world.journaled("sample"))
    assert display.counts["compile"] == {"kept": 7}
    assert display.counts["gate"] == {"kept": 7}
    assert +display.counts["time"] == {"to the end": 4, "left early": 10}


def test_the_run_is_recorded_with_its_matrix_product(world: World) -> None:
    sweep(world)
    with Store(world.folder / "sweep.sqlite") as store:
        (timing, *_), cells = store.timings(), store.cells()
        (run,) = store.export()["runs"]
    assert (timing.gpu, timing.driver, timing.versions, timing.target) == ("a GPU", "1.0", {"torch": "2"}, TARGET)
    assert {Cell(**fields) for fields in cells.values()} == set(CELLS)
    assert (run["gpu"], run["driver"], run["target"], run["matmul_tflops"]) == ("a GPU", "1.0", TARGET, 700.0)


def test_a_second_run_does_nothing(world: World) -> None:
    sweep(world)
    before = work(world)
    _, display = sweep(world)
    assert work(world) == before
    assert display.counts["gate"] == {"kept": 7}


def test_who_passed_a_gate_that_asked_less_is_checked_again_and_not_timed_again(world: World) -> None:
    sweep(world)
    with Store(world.folder / "sweep.sqlite") as store:
        older = [dataclasses.replace(verdict, details={"errors": {}}) for verdict in store.verdicts(stage="gate")]
        store.record(*older)
    before = collections.Counter(entry[:2] for entry in work(world))
    _, display = sweep(
        dataclasses.replace(world, wrong=(16,))
    )  # which is far from the best: no race goes on without it
    assert collections.Counter(entry[:2] for entry in work(world)) - before == collections.Counter(
        ("check", str(n)) for n in (*IDS, DEFAULT.tile_n)
    )
    assert display.counts["gate"] == {"kept": 6, "rejected": 1}
    with Store(world.folder / "sweep.sqlite") as store:
        sound = {run.candidate for run in load_runs(store, TARGET, "a GPU", IDS.values())}
        assert {candidate for candidate, _ in timed(world)} > sound == set(IDS.values()) - {IDS[16]}


def test_cells_of_other_inputs_are_timed_beside_plain_ones(world: World) -> None:
    cells = (CELLS[0], dataclasses.replace(CELLS[0], inputs="sink:12"))
    sweep(world, make_plan(cells=cells))
    assert {cell for _, cell in timed(world)} == {cell.id for cell in cells}


def test_traits_by_which_speed_depends_on_values_exist() -> None:
    assert all(any(hasattr(traits, name) for traits in row.KINDS.values()) for name in VALUE_DEPENDENT)


def test_a_changed_candidate_runs_again_alone_beside_the_yardsticks(world: World) -> None:
    sweep(world)
    count = len(work(world))
    sweep(dataclasses.replace(world, changed=(48,)))
    kinds = collections.Counter(entry[:2] for entry in work(world)) - collections.Counter()
    assert kinds["build", "48"] == kinds["check", "48"] == 2
    assert all(kinds["build", str(n)] == 1 for n in IDS if n not in (48, DEFAULT.tile_n))
    again = [entry[1] for entry in work(world)[count + 2 :] if entry[0] == "sample"]
    assert set(again) <= {"48", "96", str(DEFAULT.tile_n)}


@pytest.mark.parametrize(
    ("fault", "stage", "words"),
    [
        ("uncompilable", "compile", "no such instruction"),
        ("spilling", "compile", "spills 16 bytes"),
        ("wrong", "gate", "error 1 over 0.1"),
        ("crashing", "gate", "SIGSEGV"),
        ("unusable", "gate", "illegal memory access"),
        ("hanging", "gate", "no answer within 5 s"),
        ("crashing_in_race", "time", "D128 full 512: the worker process ended by signal SIGKILL"),
    ],
)
def test_a_bad_candidate_is_blamed_and_skipped_and_the_others_go_on(
    world: World, fault: str, stage: str, words: str
) -> None:
    bad = dataclasses.replace(world, **{fault: (32,)})
    plan = make_plan()
    if fault == "hanging":
        plan = make_plan(limits=dataclasses.replace(plan.limits, gate=5.0))
    sweep(bad, plan)
    reasons = rejections(world)
    assert set(reasons) == {(stage, IDS[32])}
    assert words in reasons[stage, IDS[32]]
    samples = timed(world)
    assert not any(name == IDS[32] for name, _ in samples)
    assert all(samples[IDS[n], cell.id] >= 3 for n in IDS if n != 32 for cell in CELLS)
    before = work(world)
    sweep(bad, plan)  # known by now, so it is not tried again
    assert work(world) == before


def test_a_row_of_the_table_is_timed_also_where_it_spills(world: World) -> None:
    sweep(dataclasses.replace(world, spilling=(DEFAULT.tile_n,)))
    samples = timed(world)
    assert all((candidate_id(DEFAULT), cell.id) in samples for cell in CELLS)
    assert not any(name == IDS[DEFAULT.tile_n] for name, _ in samples)


@pytest.mark.parametrize("lines", [3, 10, 17, 26, 45, 61], ids=lambda lines: f"at request {lines}")
def test_after_a_kill_nothing_is_done_twice_and_nothing_is_lost(world: World, lines: int) -> None:
    # It may come two requests further, for the signal to find it anywhere between them, and not to its end.
    with forked.started(sweep, dataclasses.replace(world, pause=0.02, hold=lines + 2)) as process:
        wait_until(lambda: world.requests() >= lines, f"request {lines}")
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert lines <= world.requests() <= lines + 2
    sweep(world)
    whole = World(world.folder / "whole")
    whole.folder.mkdir()
    sweep(whole)
    repeated = collections.Counter(work(world))
    repeated.subtract(collections.Counter(work(whole)))
    assert not any(count < 0 for count in repeated.values())
    assert sum(repeated.values()) <= 1  # the request that was in flight, which nobody had an answer to
    assert timed(world) == timed(whole)


def test_what_the_cache_lacks_is_reported_and_not_compiled(world: World) -> None:
    sweep(world, until="compile")
    for path in sorted(world.folder.glob("*.o"))[:2]:
        path.unlink()
    built = len(world.journaled("build"))
    _, display = sweep(world, make_plan(from_cache=True))
    assert len(world.journaled("build")) == built
    assert display.counts["compile"] == {"kept": 5, "missing": 2}
    assert any("2 kernels are not in the cache" in text and "--compile-only" in text for text in display.said)
    assert not rejections(world)


def test_a_carried_cache_is_enough(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    sweep(world, until="compile")
    (world.folder / "sweep.sqlite").unlink()
    _, display = sweep(world, make_plan(from_cache=True))
    assert display.counts["compile"] == {"kept": 7}
    assert len(world.journaled("build")) == 7


def test_the_wrong_gpu_is_refused_before_anything_is_compiled(world: World) -> None:
    with pytest.raises(StartFailed, match="arch is sm_80; the GPU here is a a GPU, which is sm_90a"):
        sweep(dataclasses.replace(world, gpu_target="sm_90a"))
    assert not work(world)


def test_a_full_disk_stops_the_sweep_and_blames_nobody(world: World) -> None:
    with pytest.raises(OSError, match="No space left"):
        sweep(dataclasses.replace(world, full_disk=(48,)))
    assert not rejections(world)
    kept = len(world.journaled("build"))
    sweep(world)
    assert len(world.journaled("build")) == kept + 7 - (kept - 1)


def test_a_limit_keeps_the_promising_ones_and_says_so_of_the_others(world: World) -> None:
    sweep(world, make_plan(limit=2), until="prune")
    reasons = rejections(world)
    assert len(reasons) == len(TRAITS) - 2
    assert all("of 7 by the analytic score, beyond the limit" in reason for reason in reasons.values())
    sweep(world, until="prune")
    assert not rejections(world)
    sweep(world, make_plan(limit=2), until="prune")
    assert not rejections(world)  # they were let through before


def test_a_wider_limit_races_only_the_new_ones_and_the_yardsticks(world: World) -> None:
    sweep(world, make_plan(limit=2))
    first = {name for name, _ in timed(world)}
    sweep(world)
    with Store(world.folder / "sweep.sqlite") as store:
        races = {(t.race, t.candidate) for t in store.timings(cell=CELLS[0].id)}
    second = {name for race, name in races if race == "sm80 2"}
    assert {name for race, name in races if race == "sm80 1"} == first
    assert second >= set(IDS.values()) - first
    assert candidate_id(DEFAULT) in second
    assert len(second & first) <= 2


def test_without_time_only_the_rows_of_the_tables_are_measured_and_more_time_goes_on(world: World) -> None:
    _, display = sweep(world, make_plan(budget=0.0))
    assert display.counts["gate"] == {"kept": 1, "left for later": 6}
    sweep(world)
    assert {name for name, _ in timed(world)} == {*IDS.values(), candidate_id(DEFAULT)}


def test_peers_are_timed_beside_and_judge_nobody(world: World) -> None:
    sweep(world, make_plan(peers=("cudnn",)))
    samples = timed(world)
    for cell in CELLS:
        assert samples[PEER + "cudnn", cell.id] == 5
        assert samples[IDS[96], cell.id] == 5


def test_far_behind_in_one_cell_is_not_timed_in_the_others_of_its_shape_class(world: World) -> None:
    cells = (*CELLS, Cell(128, "full", 2048, tokens=4096))
    _, display = sweep(world, make_plan(cells=cells))
    samples = timed(world)
    assert (IDS[16], CELLS[1].id) in samples
    assert (IDS[16], cells[2].id) not in samples
    assert (candidate_id(DEFAULT), cells[2].id) in samples
    assert display.counts["time"]["far behind elsewhere"] >= 1


def of_16_bits(operation: Any, target: str, family: Any, head_dim: int) -> list[Any]:
    """The traits of a table's rows of as many columns of Q, K and V, which take 16-bit operands."""
    rows = [row.traits for row in TABLES[operation, target, family] if "bf16" in row.traits.dtypes]
    return [traits for traits in rows if traits.head_dim == traits.head_dim_v == head_dim]


@pytest.mark.parametrize(("target", "family"), [("sm_80", "sm80"), ("sm_90a", "sm90"), ("sm_90a", "sm80")])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_candidate_is_kept_or_has_a_reason(target: str, family: Any, head_dim: int) -> None:
    cell = Cell(head_dim, "full", 512)
    plan = make_plan(target=target, families=(family,), cells=(cell,), traits=None, limit=40)
    space = make_space(plan, family, "fwd", (head_dim, head_dim))
    considered = len(space.chosen) + len(space.refused)
    assert considered >= 200
    assert len(space.chosen) <= 40 + len(space.always)
    assert all(reason for _, reason in space.refused)
    every = set(enumerate_traits("fwd", family, head_dim, head_dim))
    assert {*space.chosen, *(traits for traits, _ in space.refused)} >= every
    shipped = set(of_16_bits("fwd", target, family, head_dim))
    assert shipped <= set(space.chosen[: len(space.always)])


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_the_score_finds_the_hopper_rows_that_were_measured(head_dim: int) -> None:
    arch = get_arch("sm_90a")
    fitting = [one for one in enumerate_traits("fwd", "sm90", head_dim, head_dim) if one.check(arch) is None]
    order = shortlist(fitting, arch)
    rows = of_16_bits("fwd", "sm_90a", "sm90", head_dim)
    # Of a thousand. At 128 columns candidates with Q in registers, which nobody has timed, stand before the rows.
    assert min(map(order.index, rows)) < (32 if head_dim == 128 else 10)
    tiles = {(traits.tile_m, traits.tile_n) for traits in order[:40]}
    assert {(traits.tile_m, traits.tile_n) for traits in rows if traits.fixed_max} <= tiles
    most = max(traits.blocks_per_sm for traits in rows)  # others stand in for them, with masks or storages that spill
    assert most == 1 or {traits for traits in rows if traits.blocks_per_sm == most} <= set(order[:LIMIT])


def test_a_limit_leaves_candidates_of_several_resident_blocks() -> None:
    arch = get_arch("sm_90a")
    fitting = [one for one in enumerate_traits("fwd", "sm90", 64, 64) if one.check(arch) is None]
    first = shortlist(fitting, arch)
    assert [one.blocks_per_sm > 1 for one in first[:12]] == [False, False, False, True] * 3
    assert len(first) == len(set(first)) == len(fitting)


def test_a_shortlist_mixes_tiles() -> None:
    arch = get_arch("sm_90a")
    fitting = [one for one in enumerate_traits("fwd", "sm90", 128, 128) if one.check(arch) is None]
    tiles = {(traits.tile_m, traits.tile_n) for traits in shortlist(fitting, arch)[:40]}
    assert len(tiles) >= 8


RULES = Rules(rounds=5)
FIELD = Field("sm80", CELLS[0], {"a": "k", "b": "k", "c": "k"}, Roles(stays=["a"]))


def timing(name: str, race: str, samples: int, key: str = "k", ms: float = 1.0) -> Timing:
    return Timing(name, CELLS[0].id, TARGET, "gpu", "1", key, race, (ms,) * samples, ms, ms, ms, 1.0)


@pytest.mark.parametrize(
    ("timings", "planned"),
    [
        ([], ("sm80 1", {"a": 0, "b": 0, "c": 0})),
        # Interrupted in the first round: everybody else joins.
        ([timing("a", "sm80 1", 1)], ("sm80 1", {"a": 1, "b": 0, "c": 0})),
        # Interrupted later: the same ones go on, the new one waits for its own race.
        ([timing("a", "sm80 1", 2), timing("b", "sm80 1", 1)], ("sm80 1", {"a": 2, "b": 1})),
        ([timing("a", "sm80 1", 5), timing("b", "sm80 1", 5)], ("sm80 2", {"a": 0, "c": 0})),
        # The fastest so far is a yardstick, too.
        ([timing("a", "sm80 1", 5), timing("b", "sm80 1", 5, ms=0.99)], ("sm80 2", {"a": 0, "b": 0, "c": 0})),
        # Other sources and other families count for nothing, but names are not used again.
        ([timing("a", "sm80 3", 5, key="old")], ("sm80 4", {"a": 0, "b": 0, "c": 0})),
        ([timing("a", "sm90 3", 5)], ("sm80 1", {"a": 0, "b": 0, "c": 0})),
        ([timing(name, "sm80 1", 5) for name in "abc"], None),
    ],
)
def test_the_next_race(timings: list[Timing], planned: tuple[str, dict[str, int]] | None) -> None:
    found = arrange(FIELD, "abc", past_of(FIELD, timings), RULES)
    assert (found and (found.name, {name: len(values) for name, values in found.samples.items()})) == planned


def test_limits_are_generous_enough_for_a_first_compilation() -> None:
    assert Limits().compile >= 60 and Limits().gate >= 30
    assert FwdTraitsSm80(64, 64, 128, 128).check(get_arch(TARGET)) is None
