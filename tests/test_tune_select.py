"""Rows are chosen as the module says: defaults stay unless surely beaten, and as few rows as there can be."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DTYPES, MASK_KINDS, FwdProblem
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.tune.cells import Cell
from cuteflash.tune.results import (
    Run,
    Slot,
    candidates_of,
    load_runs,
    measured_gpu,
    race_scales,
)
from cuteflash.tune.select import TOLERANCE, boxes, cover, decide, proposed, select
from cuteflash.tune.store import Store, Timing
from tests.user_tables import SM80

FULL = Slot("full", "bf16", "long")
CAUSAL = Slot("causal", "bf16", "long")
SHORT = Slot("full", "bf16", "short")
SLOTS = [Slot(*names) for names in itertools.product(MASK_KINDS, DTYPES, LENGTH_CLASSES)]
NAMES = ("a", "b", "c", "d", "e")
TRAITS = {name: FwdTraitsSm80(64, 16 * (1 + index), 64, 64) for index, name in enumerate(NAMES)}


def run(candidate: str, slot: Slot, ms: float, noise: float = 0.001, cell: str = "") -> Run:
    """A run whose interval reaches `noise` of its median to both sides."""
    return Run(
        candidate, cell or str(slot), slot, ms, ms * (1 - noise), ms * (1 + noise), 100 / ms, f"day {ord(candidate)}"
    )


def surely_beats(one: Run, default: Run) -> bool:
    """By more than 1 %, and by more than the errors of both, which add in squares."""
    gain, above, below = math.log(default.ms / one.ms), math.log(one.high / one.ms), math.log(default.ms / default.low)
    return default.ms / one.ms > 1.01 and gain > math.hypot(above, below)


def chosen(runs: list[Run], defaults: dict[Slot, str]) -> dict[Slot, str]:
    return cover(decide(runs, defaults))


@pytest.mark.parametrize(
    ("gain", "noise", "winner"),
    [
        (0.05, 0.001, "b"),
        (0.05, 0.03, "b"),  # the intervals overlap; both ends at once are less likely than either
        (0.05, 0.04, "a"),
        (0.008, 0.001, "a"),  # sure, but not worth it
        (0.012, 0.001, "b"),
        (0.012, math.inf, "a"),  # a single sample has no interval
    ],
)
def test_a_default_is_replaced_only_beyond_noise(gain: float, noise: float, winner: str) -> None:
    runs = [run("a", FULL, 1.0, min(noise, 1.0)), run("b", FULL, 1 / (1 + gain), min(noise, 1.0))]
    if math.isinf(noise):
        runs = [dataclasses.replace(one, low=0.0, high=math.inf) for one in runs]
    assert chosen(runs, {FULL: "a"}) == {FULL: winner}


def test_without_a_default_the_fastest_wins() -> None:
    assert chosen([run("a", FULL, 1.0, 0.5), run("b", FULL, 0.999, 0.5)], {}) == {FULL: "b"}


def test_a_default_that_was_not_timed_is_none() -> None:
    (decision,) = decide([run("a", FULL, 1.0)], {FULL: "lost"})
    assert decision.default is None and decision.allowed == ("a",)


def test_one_row_within_the_tolerance_everywhere_is_better_than_two_winners() -> None:
    runs = [run("a", FULL, 1.0), run("b", FULL, 1.5), run("a", CAUSAL, 1.5), run("b", CAUSAL, 1.0)]
    between = [run("c", FULL, 1 + 0.9 * TOLERANCE), run("c", CAUSAL, 1 + 0.9 * TOLERANCE)]
    assert chosen(runs, {}) == {FULL: "a", CAUSAL: "b"}
    assert chosen(runs + between, {}) == {FULL: "c", CAUSAL: "c"}
    outside = [dataclasses.replace(one, ms=1 + 1.1 * TOLERANCE) for one in between]
    assert chosen(runs + outside, {}) == {FULL: "a", CAUSAL: "b"}


def test_as_few_rows_are_broken_as_ties_by_the_geometric_mean() -> None:
    runs = [run("a", FULL, 1.0), run("b", FULL, 1.01), run("a", CAUSAL, 1.015), run("b", CAUSAL, 1.0)]
    assert chosen(runs, {}) == {FULL: "b", CAUSAL: "b"}


def test_a_beaten_default_may_stay_where_that_saves_a_row_and_costs_little() -> None:
    runs = [run("a", FULL, 1.015), run("b", FULL, 1.0), run("a", CAUSAL, 1.0), run("b", CAUSAL, 1.2)]
    assert chosen(runs, {FULL: "a", CAUSAL: "a"}) == {FULL: "a", CAUSAL: "a"}
    assert chosen(runs[:2], {FULL: "a"}) == {FULL: "b"}


def test_where_nobody_is_good_everywhere_the_smallest_largest_distance_counts() -> None:
    runs = [run("a", FULL, 1.0, cell="2k"), run("a", FULL, 1.30, cell="16k")]
    runs += [run("b", FULL, 1.2, cell="2k"), run("b", FULL, 1.0, cell="16k")]
    runs += [run("c", FULL, 1.1, cell="2k"), run("c", FULL, 1.1, cell="16k")]
    (decision,) = decide(runs, {})
    assert decision.allowed == ("c",)
    assert decision.standing("c").worst == pytest.approx(0.1)


def test_who_was_not_timed_on_every_cell_cannot_run_the_slot_but_sets_the_mark() -> None:
    runs = [run("a", FULL, 1.0, cell="2k"), run("a", FULL, 1.0, cell="16k"), run("b", FULL, 0.9, cell="2k")]
    (decision,) = decide(runs, {})
    assert decision.allowed == ("a",)
    assert decision.standing("b") is None
    assert decision.standing("a").worst == pytest.approx(1 / 0.9 - 1)
    assert chosen([run("a", FULL, 1.0, cell="2k"), run("b", FULL, 1.0, cell="16k")], {}) == {}


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Run], dict[Slot, str]]:
    """Up to four slots, every candidate timed on each, defaults for some."""
    slots = draw(st.lists(st.sampled_from(SLOTS), min_size=1, max_size=4, unique=True))
    times = st.sampled_from([1.0, 1.005, 1.015, 1.019, 1.03, 1.2])
    runs = [run(name, slot, draw(times), draw(st.sampled_from([0.0, 0.002, 0.05]))) for slot in slots for name in NAMES]
    defaults = {slot: draw(st.sampled_from(NAMES)) for slot in slots if draw(st.booleans())}
    return runs, defaults


@given(problems())
def test_the_cover_is_allowed_complete_and_smallest(problem: tuple[list[Run], dict[Slot, str]]) -> None:
    decisions = decide(*problem)
    assignment = cover(decisions)
    assert list(assignment) == [decision.slot for decision in decisions]
    for decision in decisions:
        assert assignment[decision.slot] in decision.allowed
    used = len(set(assignment.values()))
    for fewer in itertools.combinations(NAMES, used - 1):  # brute force: no smaller set runs every slot
        assert not all(set(decision.allowed) & set(fewer) for decision in decisions)


@given(problems())
def test_every_choice_is_near_the_best_or_an_unbeaten_default(problem: tuple[list[Run], dict[Slot, str]]) -> None:
    runs, defaults = problem
    decisions = {decision.slot: decision for decision in decide(runs, defaults)}
    for slot, name in cover(list(decisions.values())).items():
        here = {one.candidate: one for one in runs if one.slot == slot}
        best, mine = min(one.ms for one in here.values()), here[name]
        default = here.get(defaults.get(slot, ""))
        if default is not None and not any(surely_beats(one, default) for one in here.values()):
            assert name == default.candidate
        else:
            nobody_within = all(one.worst > TOLERANCE for one in decisions[slot].standings if one.candidate == name)
            assert mine.ms <= best * (1 + TOLERANCE) * (1 + 1e-9) or nobody_within
            if default is not None and mine is not default:
                assert surely_beats(mine, default)


@given(problems())
def test_the_first_row_that_fits_is_the_chosen_one(problem: tuple[list[Run], dict[Slot, str]]) -> None:
    picks = select(*problem, TRAITS)
    for slot, name in chosen(*problem).items():
        first = next(
            pick
            for pick in picks
            if slot.mask in pick.row.masks and slot.dtype in pick.row.dtypes and slot.lengths in pick.row.lengths
        )
        assert (first.candidate, first.row.traits) == (name, TRAITS[name])


@given(st.sets(st.sampled_from(SLOTS), min_size=1), st.sets(st.sampled_from(SLOTS)))
def test_boxes_hold_just_their_slots_and_what_lies_above(slots: set[Slot], above: set[Slot]) -> None:
    assume(not slots & above)
    found = boxes(slots, above)
    held = [{Slot(*names) for names in itertools.product(*box)} for box, _ in found]
    assert set().union(*held) - above == slots
    added = [own for _, own in found]
    assert set().union(*added) == slots and sum(map(len, added)) == len(slots)


def test_a_general_row_is_one_row_below_its_exception() -> None:
    runs = [run("a", slot, 1.2 if slot == CAUSAL else 1.0) for slot in SLOTS] + [run("b", CAUSAL, 1.0)]
    special, general = select(runs, dict.fromkeys(SLOTS, "a"), TRAITS)
    assert (special.candidate, special.row.masks, special.row.lengths) == ("b", ("causal",), ("long",))
    assert (general.row.masks, general.row.dtypes, general.row.lengths) == (MASK_KINDS, DTYPES, LENGTH_CLASSES)
    assert special.gain == pytest.approx(0.2) and not special.kept
    assert general.gain == pytest.approx(0.0) and general.kept
    assert special.tflops == pytest.approx(100) and special.at == "day 98"


# From the store.


def record(store: Store, candidate: str, ms: float, **fields: Any) -> None:
    names = {"candidate": candidate, "cell": "cell", "target": "sm_80", "gpu": "A", "driver": "d", "key": "k"}
    numbers = {"samples": (ms,), "ms": ms, "low": ms, "high": ms, "tflops": 10 / ms, "source": "s"}
    store.record(Timing(**names | numbers | fields))


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Any:
    with Store(tmp_path / "sweep.db") as opened:
        opened.add_cell("cell", dataclasses.asdict(Cell(64, "causal", 512, "fp16")))
        yield opened


def test_slots_follow_from_cells() -> None:
    assert Slot.of(Cell(64, "full", 16384, seqlen_q=1)) == Slot("full", "bf16", "decode")
    assert Slot.of(Cell(64, "full", 16384)) == FULL


def test_races_are_read_by_one_clock(store: Store) -> None:
    for name, race, ms, at in (("a", "1", 1.0, "1"), ("x", "1", 1.2, "1"), ("a", "2", 1.1, "2"), ("y", "2", 1.2, "2")):
        record(store, name, ms, race=race, at=at)
    runs = {one.candidate: one for one in load_runs(store, "sm_80", "A", ["a", "x", "y"])}
    assert runs["a"].ms == pytest.approx(1.1)
    assert runs["x"].ms == pytest.approx(1.32) and runs["x"].tflops == pytest.approx(10 / 1.32)
    assert runs["y"].ms == 1.2
    assert runs["x"].slot == Slot("causal", "fp16", "short")


def test_a_race_without_common_members_is_taken_as_it_is() -> None:
    def of(candidate: str, race: str) -> Timing:
        numbers: dict[str, Any] = {"samples": (2.0,), "ms": 2.0, "low": 2.0, "high": 2.0, "tflops": 1.0}
        return Timing(candidate, "cell", "sm_80", "A", "d", "k", race, **numbers)

    assert race_scales([of("a", "1"), of("b", "2")]) == {"1": 1.0, "2": 1.0}


def test_failures_other_sources_gpus_and_names_do_not_count(store: Store) -> None:
    record(store, "a", 1.0, source="old", at="1")
    record(store, "b", 1.0, at="2")
    record(store, "peer:x", 1.0, at="2")
    record(store, "b", 3.0, gpu="B", at="2")
    store.record(Timing("c", "cell", "sm_80", "A", "d", "k", error="hangs", source="s"))
    (only,) = load_runs(store, "sm_80", "A", ["a", "b", "c"])
    assert (only.candidate, only.ms) == ("b", 1.0)


def test_newer_sources_of_another_operation_change_nothing(store: Store) -> None:
    store.add_cell("other", dataclasses.asdict(Cell(64, "causal", 512, "fp16", operation="bwd")))
    record(store, "a", 1.0, at="1")
    record(store, "b", 1.0, cell="other", source="newer", at="2")
    assert {one.candidate for one in load_runs(store, "sm_80", "A", ["a", "b"])} == {"a", "b"}


def test_the_gpu_must_be_one_that_was_used(store: Store) -> None:
    with pytest.raises(ValueError, match="no timings for sm_80"):
        measured_gpu(store, "sm_80")
    record(store, "a", 1.0)
    assert measured_gpu(store, "sm_80") == "A"
    record(store, "a", 1.0, gpu="B")
    with pytest.raises(ValueError, match="several; allowed: A, B"):
        measured_gpu(store, "sm_80")
    with pytest.raises(ValueError, match="gpu is 'C'"):
        measured_gpu(store, "sm_80", "C")
    assert measured_gpu(store, "sm_80", "B") == "B"


def test_candidates_come_back_as_traits_unless_another_version_made_them(store: Store) -> None:
    name = store.add_candidates([TRAITS["a"]])[0]
    fields = json.dumps({"tile_m": 64, "tile_n": 16, "head_dim": 64, "head_dim_v": 64})
    old = [("field", "fwd_sm80", fields.replace("}", ', "x": 1}')), ("kind", "fwd_sm70", fields)]
    store._write("INSERT INTO candidates VALUES (?, ?, ?)", old)
    assert candidates_of(store, "fwd", "sm80", (64, 64)) == {name: TRAITS["a"]}
    assert candidates_of(store, "fwd", "sm80", (64, 32)) == candidates_of(store, "fwd", "sm90", (64, 64)) == {}


def test_rows_are_chosen_against_the_shipped_ones(store: Store) -> None:
    problem = FwdProblem.dense("fp16", 64, 64, "causal")
    default = choose_shipped(problem, "sm_80", "sm80", "short").traits
    better = dataclasses.replace(default, tile_n=default.tile_n + 16)
    for traits, ms in ((default, 1.0), (better, 0.9)):
        record(store, store.add_candidates([traits])[0], ms, samples=(ms,) * 3)
    (pick,) = proposed(store, SM80, (64, 64), "A")
    assert (pick.row.traits, pick.row.masks, pick.row.dtypes) == (better, ("causal",), ("fp16",))
    assert pick.row.lengths == ("short",)
    assert pick.gain == pytest.approx(1 / 0.9 - 1) and not pick.kept
    assert proposed(store, SM80, (96, 96), "A") == []
