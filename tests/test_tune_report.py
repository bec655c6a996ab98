"""The report says what the database holds: who won, why others left, how fast all were; in one small file."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import pathlib
import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from cuteflash.page import data_of
from cuteflash.traits.arch import get_arch
from cuteflash.traits.docs import attribute_docs
from cuteflash.traits.row import KINDS
from cuteflash.traits.tables import TABLES
from cuteflash.traits.values import values_of
from cuteflash.tune import report
from cuteflash.tune.cells import Cell
from cuteflash.tune.explain import newest_verdicts, title, where_lost
from cuteflash.tune.operations import made_for
from cuteflash.tune.rank import estimate
from cuteflash.tune.report import Scope, make_report
from cuteflash.tune.report.collect import collect
from cuteflash.tune.report.columns import FINE, Reasons, short
from cuteflash.tune.report.slots import (
    CLOSE,
    DEFAULT_WINS,
    FIRST,
    INCOMPLETE,
    REPLACED,
    STAYS,
    UNCOMPARED,
    gain,
    slot_facts,
)
from cuteflash.tune.report.verdict import headline, measured
from cuteflash.tune.results import Run, Slot, all_candidates, candidates_of, load_runs
from cuteflash.tune.select import cover, decide, proposed, shipped_defaults
from cuteflash.tune.store import Store, Timing, Verdict
from layouts.page import PAGE, page_data
from tests.html_parts import Parts
from tests.layouts.web import BASE_JS, run_js
from tests.sweep_fakes import World, sweep
from tests.sweep_synthetic import GPU, MATMUL, Filler, Sweep
from tests.user_tables import SM90

WEB = pathlib.Path(report.__file__).parent / "web"
LIMIT = 3_000_000  # bytes of a page
SWEEP = Sweep(head_dims=(64, 128), limit=40)
JS = [BASE_JS, *(str(WEB / name) for name in ("core.js", "model.js", "state.js"))]


def filled(path: pathlib.Path, what: Sweep) -> Store:
    store = Store(path)
    Filler(store, what).fill()
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with filled(tmp_path_factory.mktemp("report") / "sweep.sqlite", SWEEP) as opened:
        yield opened


@pytest.fixture(scope="module")
def data(store: Store) -> dict[str, Any]:
    return collect(store, Scope())


def space_of(data: dict[str, Any], text: str) -> dict[str, Any]:
    return next(space for space in data["spaces"] if space["title"] == text)


def script(expression: str, data: dict[str, Any]) -> Any:
    """A JavaScript expression in which `d` is the page's data and `s` its last space."""
    load = "const d = R.model.decode(data); const s = d.spaces.at(-1);"
    return run_js(JS, f"(() => {{ {load} return {expression}; }})()", data=data, prelude="")


# What was swept, and on what.


def test_the_head_names_machine_versions_sources_and_times(store: Store, data: dict[str, Any]) -> None:
    newest = store.timings()[-1]
    assert (data["target"], data["gpu"], data["driver"]) == ("sm_90a", GPU, newest.driver)
    assert data["versions"] == newest.versions and data["source"] == newest.source
    moments = [one.at for one in (*store.timings(), *store.verdicts())]
    assert (data["first"], data["last"]) == (min(moments), max(moments))
    assert data["runs"] == [{"at": store.runs()[0]["at"], "tflops": MATMUL}]


def test_every_candidate_is_there_with_its_traits(store: Store, data: dict[str, Any]) -> None:
    for pair in ((64, 64), (128, 128)):
        space = space_of(data, f"sm90 {pair[0]}x{pair[1]}")
        expected = candidates_of(store, "fwd", "sm90", pair)
        assert space["ids"] == sorted(expected)
        for trait in space["traits"]:
            column = [ord(letter) - ord("0") for letter in trait["column"]] or [0] * len(space["ids"])
            values = [trait["values"][index] for index in column]
            assert values == [values_of(expected[name])[trait["name"]] for name in space["ids"]]


def test_the_states_are_those_of_the_verdicts(store: Store, data: dict[str, Any]) -> None:
    space = space_of(data, "sm90 128x128")
    verdicts = newest_verdicts(store, "sm_90a", space["ids"])
    timed = {(one.candidate, one.cell.split()[1]) for one in store.timings()}
    for problem in space["problems"]:
        for name, state in zip(space["ids"], problem["states"], strict=True):
            lost = {
                where_lost(one)[0]
                for one in verdicts[name]
                if not one.ok and one.problem.split()[2:] in ([], [problem["mask"]])
            }
            assert state == ("T" if (name, problem["mask"]) in timed else min(lost, key="plcgt".index, default="w"))


def test_a_reason_comes_back_word_for_word(store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][-1]
    verdicts = newest_verdicts(store, "sm_90a", space["ids"])
    told = script("s.ids.map((_, who) => R.model.reasonOf(d, s, s.problems[0], who))", data)
    mask = space["problems"][0]["mask"]
    for name, text in zip(space["ids"], told, strict=True):
        rejections = [one for one in verdicts[name] if not one.ok and one.problem.split()[2:] in ([], [mask])]
        assert text == (rejections[0].reason if rejections else "")
    assert any("spills" in text for text in told) and any("beyond the limit" in text for text in told)


@pytest.mark.parametrize(
    "text", ["", "no numbers", "1 2.50 007 sm_90a 3x4", "1.5.2 and 10 %", "a # and a #3", "-5, 1e9", "two\nlines  here"]
)
def test_any_reason_survives_its_template(text: str) -> None:
    reasons = Reasons()
    code = reasons.encode(text)
    back = run_js(
        JS, "R.model.reasonOf(data.d, data.s, null, 0)", prelude="",
        data={"d": {"templates": reasons.templates}, "s": {"reasons": {"0": code}, "problems": []}},
    )  # fmt: skip
    assert back == " ".join(text.split()).replace("#", "no. ")


def test_reasons_that_differ_in_numbers_share_a_template() -> None:
    reasons = Reasons()
    for size in range(100):
        reasons.encode(f"needs {size} bytes of shared memory, sm_90a has 232448")
    assert reasons.templates == ["needs # bytes of shared memory, sm_90a has #"]


def test_a_compilers_colours_are_no_part_of_a_reason() -> None:
    reasons = Reasons()
    reasons.encode("\x1b[91merror:\x1b[0m insufficient registers (128)")
    assert reasons.templates == ["error: insufficient registers (#)"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_trait_is_explained_by_its_class(kind: str) -> None:
    docs = attribute_docs(KINDS[kind])
    assert docs.keys() == {field.name for field in dataclasses.fields(KINDS[kind])}
    assert docs.get("tile_n", "keys of one").startswith(("key rows of one step", "keys of one", "keys of a block"))
    assert all(text.endswith((".", ")")) and "\n" not in text for text in docs.values())


# Times, winners and margins.


def test_the_times_are_those_of_the_races(store: Store, data: dict[str, Any]) -> None:
    space = space_of(data, "sm90 64x64")
    runs = {(run.candidate, run.cell): run for run in load_runs(store, "sm_90a", GPU, space["ids"])}
    seen = 0
    for cell in space["cells"]:
        times = cell["times"]
        assert times["ms"] == sorted(times["ms"])
        for who, ms, below, above in zip(cell["who"], *times.values(), strict=True):
            run = runs[space["ids"][who], cell["id"]]
            assert ms == short(run.ms)
            assert run.low == pytest.approx(run.ms * (1 - below / FINE), rel=1e-4)
            assert run.high == pytest.approx(run.ms * (1 + above / FINE), rel=1e-4)
            assert cell["work"] / ms == pytest.approx(run.tflops, rel=1e-4)
            seen += 1
    assert seen == len(runs)


def test_the_winners_are_those_of_the_choice_of_rows(store: Store, data: dict[str, Any]) -> None:
    space = space_of(data, "sm90 128x128")
    runs = load_runs(store, "sm_90a", GPU, space["ids"])
    defaults = shipped_defaults(store, SM90, (128, 128))
    decisions = {decision.slot: decision for decision in decide(runs, defaults)}
    rows = cover(list(decisions.values()))
    slots = {Slot(one["mask"], one["dtype"], one["lengths"]): one for one in space["slots"]}
    assert slots.keys() == decisions.keys()
    for slot, told in slots.items():
        decision = decisions[slot]
        best = decision.standings[0]
        assert space["ids"][told["winner"]] == best.candidate
        assert space["ids"][told["row"]] == rows[slot]
        assert told["default"] == space["ids"].index(defaults[slot])
        if best.candidate != decision.default:
            middle, least, most = told["margin"]
            assert (middle, least) == pytest.approx((best.gain, best.surely), rel=1e-3)
            assert least <= middle <= most
        else:
            assert told["outcome"] == DEFAULT_WINS
        row = decision.standing(rows[slot])
        assert (told["outcome"] == REPLACED) == (rows[slot] not in (decision.default, None))
        assert told["row_gain"] == pytest.approx(row.gain, rel=1e-3)
    assert len({told["outcome"] for told in slots.values()}) > 1


def test_the_table_rows_are_those_that_apply_would_write(store: Store, data: dict[str, Any]) -> None:
    for pair in ((64, 64), (128, 128)):
        space = space_of(data, f"sm90 {pair[0]}x{pair[1]}")
        picks = proposed(store, SM90, pair, GPU)
        assert {space["ids"][slot["row"]] for slot in space["slots"]} == {pick.candidate for pick in picks}


def test_who_failed_while_it_was_timed_has_no_speed(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(lengths=((4096, 4096),), masks=("full",), limit=4)) as store:
        (space,) = collect(store, Scope())["spaces"]
        winner = space["ids"][space["slots"][0]["winner"]]
        store.record(Verdict(winner, "sm_90a", "bf16 128x128 full", "time", "k", False, "D128 full 4096: crashed"))
        (after,) = collect(store, Scope())["spaces"]
    place = space["ids"].index(winner)
    assert [problem["states"][place] for problem in after["problems"]] == ["t"]
    assert after["slots"][0]["winner"] != place and place not in after["cells"][0]["who"]


def run(candidate: str, cell: str, ms: float, low: float, high: float) -> Run:
    return Run(candidate, cell, Slot("full", "bf16", "long"), ms, low, high, 1 / ms)


def test_a_margins_ends_have_the_errors_of_both_and_of_all_cells_in_squares() -> None:
    fast = {"a": run("x", "a", 1.0, 0.9, 1.1), "b": run("x", "b", 2.0, 1.9, 2.1)}
    slow = {"a": run("y", "a", 1.2, 1.1, 1.3), "b": run("y", "b", 2.4, 2.2, 2.6)}
    down = math.hypot(math.log(1.2 / 1.1), math.log(1.1), math.log(2.4 / 2.2), math.log(2.1 / 2.0)) / 2
    up = math.hypot(math.log(1.3 / 1.2), math.log(1 / 0.9), math.log(2.6 / 2.4), math.log(2.0 / 1.9)) / 2
    expected = [0.2, 1.2 * math.exp(-down) - 1, 1.2 * math.exp(up) - 1]
    assert gain(fast, slow) == pytest.approx(expected, rel=1e-4)


def test_a_single_sample_leaves_the_margins_ends_unknown() -> None:
    one = {"a": run("x", "a", 1.0, 0.0, math.inf)}
    other = {"a": run("y", "a", 1.5, 1.4, 1.6)}
    assert gain(one, other) == [0.5, None, None]


def test_peers_are_compared_within_the_familys_own_races(tmp_path: pathlib.Path) -> None:
    both = Sweep(families=("sm90", "sm80"), lengths=((4096, 4096),), masks=("full",), limit=8)
    with filled(tmp_path / "db", both) as store:
        names = {one.candidate for one in store.timings()}
        for timing in store.timings(race="sm80 1"):  # the clock was half as fast in the later races
            numbers = {name: 2 * getattr(timing, name) for name in ("ms", "low", "high")}
            samples = tuple(2 * sample for sample in timing.samples)
            store.record(dataclasses.replace(timing, **numbers, samples=samples))
        data = collect(store, Scope())
    assert "peer:fa4" in names
    for space in data["spaces"]:
        (slot,), (cell,) = space["slots"], space["cells"]
        ratio = cell["peers"]["fa4"] / cell["times"]["ms"][0]
        fa4 = slot["peers"]["fa4"]
        assert [fa4["mean"], fa4["worst"]] == pytest.approx([ratio, ratio], rel=1e-3)
        assert (0.9 < ratio < 1.1) == (space["family"] == "sm90") == (not fa4["behind"])


def test_peers_are_read_by_the_same_clock_as_the_candidates(store: Store, data: dict[str, Any]) -> None:
    peers = load_runs(store, "sm_90a", GPU, [f"peer:{name}" for name in data["peers"]])
    for space in data["spaces"]:
        for cell in space["cells"]:
            times = {run.candidate.removeprefix("peer:"): short(run.ms) for run in peers if run.cell == cell["id"]}
            assert cell["peers"] == times != {}


def test_a_peer_is_ahead_only_beyond_noise() -> None:
    def behind(*ends: float) -> bool:
        best, peer = run("x", "a", 1.0, 0.99, 1.01), run("peer:fa4", "a", 0.95, *ends)
        (slot,) = slot_facts([best], {"a": {"fa4": peer}}, {}, {"x": 0})
        assert slot["peers"]["fa4"]["mean"] == 0.95
        return slot["peers"]["fa4"]["behind"]

    assert [behind(0.94, 0.96), behind(0.8, 1.1), behind(0.0, math.inf)] == [True, False, False]


def test_the_roof_is_the_matrix_product_of_the_same_run(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(lengths=((4096, 4096),), masks=("full",), limit=4)) as store:
        machine = store.runs()[0]
        for at, rate in (("2020-01-01T00:00:00.000+00:00", 1.0), ("2030-01-01T00:00:00.000+00:00", 2.0)):
            store.add_run(at, {**machine, "matmul_tflops": rate})
        store.add_run(f"{machine['at']}1", {**machine, "gpu": "another", "matmul_tflops": 3.0})
        (space,) = collect(store, Scope())["spaces"]
    assert [cell["matmul"] for cell in space["cells"]] == [MATMUL]


# The verdict.


def slot(lengths: str, outcome: str, row_gain: float | None = None, **behind: bool) -> dict[str, Any]:
    """A slot's facts: outcome, and of each peer whether the winner is behind it."""
    peers = {name: {"behind": is_behind} for name, is_behind in behind.items()}
    facts = {"lengths": lengths, "outcome": outcome, "row_gain": row_gain}
    return facts | ({"winner": None} if outcome == INCOMPLETE else {"winner": 0, "peers": peers})


@pytest.mark.parametrize(
    ("slots", "sentence"),
    [
        (
            [slot("short", REPLACED, 0.061, fa4=False, cudnn=True)] * 4 + [slot("long", STAYS, 0.0)] * 6,
            "4 of 10 problems get a faster row, by up to 6.1 %; behind cuDNN in 4 short ones",
        ),
        (
            [slot("decode", REPLACED, 0.02, fa4=True, cudnn=True), slot("long", CLOSE, 0.0, fa4=False, cudnn=False)],
            "1 of 2 problems gets a faster row, by up to 2.0 %; behind FA4 and cuDNN in 1 decoding one",
        ),
        (
            [slot("short", STAYS, fa2=True, fa4=True), slot("long", STAYS, fa2=False, fa4=True)],
            "none of 2 problems gets a faster row; behind FA4 in 1 short and 1 long ones, behind FA2 in 1 short one",
        ),
        (
            [slot("long", DEFAULT_WINS, 0.0, fa4=False, cudnn=False, fa2=False)],
            "none of 1 problem gets a faster row; nowhere behind FA4, cuDNN or FA2",
        ),
        (
            [slot("long", FIRST), slot("short", UNCOMPARED), slot("short", UNCOMPARED), slot("long", INCOMPLETE)],
            "none of 4 problems gets a faster row; 1 has no shipped row; 2 have a default that was not timed; "
            "1 has no candidate that was timed on all lengths",
        ),
    ],
)
def test_the_verdict_is_one_sentence(slots: list[dict[str, Any]], sentence: str) -> None:
    assert measured(slots) == sentence


def test_the_headline_is_the_verdict_on_all_spaces_of_a_family(data: dict[str, Any]) -> None:
    slots = [slot for space in data["spaces"] for slot in space["slots"]]
    (sentence,) = data["verdict"]
    assert sentence.lower() == f"{measured(slots)}.".lower() and len(slots) == 10
    assert f"{sum(slot['outcome'] == REPLACED for slot in slots)} of 10 problems" in sentence
    assert [space["verdict"] for space in data["spaces"]] == [measured(space["slots"]) for space in data["spaces"]]
    spaces = ("sm90", "bwd sm90")
    two = [space | {"title": f"{name} 64x64"} for space, name in zip(data["spaces"], spaces, strict=True)]
    assert headline(two) == [f"{name}: {space['verdict']}." for space, name in zip(two, spaces, strict=True)]


# What the page computes.


def test_titles_are_those_of_the_explanations(store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][-1]
    traits = candidates_of(store, "fwd", space["family"], (space["head_dim"], space["head_dim_v"]))
    assert script("s.ids.map((_, who) => R.model.title(s, who))", data) == [
        title(traits[name]) for name in space["ids"]
    ]


def test_candidates_of_two_kinds_share_a_space(tmp_path: pathlib.Path) -> None:
    with Store(tmp_path / "sweep.db") as store:
        Filler(store, Sweep(operation="bwd", masks=("causal",), lengths=((512, 512), (4096, 4096)), limit=140)).fill()
        data = collect(store, Scope())
        traits = candidates_of(store, "bwd", "sm90", (128, 128))
    (space,) = data["spaces"]
    assert space["title"] == "bwd sm90 128x128" and data["verdict"] == [f"{upper_first(space['verdict'])}."]
    every = {trait["name"]: trait for trait in space["traits"]}
    assert every["kind"]["values"] == ["bwd_sm90", "bwd_two_pass_sm90"] and every["dq"]["values"][-1] is None
    assert every["q_stage"]["defaults"] == {"bwd_sm90": 2, "bwd_two_pass_sm90": 3} and not every["tile_m"]["defaults"]
    titles, own = script(
        "[s.ids.map((_, who) => R.model.title(s, who)),"
        " s.ids.map((_, who) => R.model.traitsOf(s, who).map((trait) => trait.name))]",
        data,
    )
    # In the order of the page's columns, which both kinds share.
    assert [sorted(one.split()) for one in titles] == [sorted(title(traits[name]).split()) for name in space["ids"]]
    assert [set(one) for one in own] == [values_of(traits[name]).keys() for name in space["ids"]]


def upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


def test_shares_are_geometric_means_over_the_lengths(store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][-1]
    where = {"mask": "causal", "dtype": "bf16", "lengths": "long", "cell": ""}
    told = script(f"[...R.model.shares(s, R.model.cellsOf(s, {json.dumps(where)})).share]", data)
    runs = [one for one in load_runs(store, "sm_90a", GPU, space["ids"]) if one.slot == Slot("causal", "bf16", "long")]
    best = {cell: min(one.ms for one in runs if one.cell == cell) for cell in {one.cell for one in runs}}
    ratios = collections.defaultdict(list)
    for one in runs:
        ratios[one.candidate].append(best[one.cell] / one.ms)
    for name, share in zip(space["ids"], told, strict=True):
        assert (share is None) == (name not in ratios)
        if share is not None:
            assert share == pytest.approx(statistics.geometric_mean(ratios[name]), rel=1e-4)


def test_a_trait_is_worth_what_pairs_that_differ_in_it_alone_say(store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][-1]
    where = Slot("full", "bf16", "long")
    cells = "R.model.cellsOf(s, { mask: 'full', dtype: 'bf16', lengths: 'long' })"
    reference = next(one["winner"] for one in space["slots"] if (one["mask"], one["lengths"]) == ("full", "long"))
    found = script(f"R.model.effects(s, R.model.shares(s, {cells}), {reference})", data)
    fields = {name: dataclasses.asdict(one) for name, one in candidates_of(store, "fwd", "sm90", (128, 128)).items()}
    times: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for one in load_runs(store, "sm_90a", GPU, space["ids"]):
        if one.slot == where:
            times[one.candidate][one.cell] = one.ms
    kept = fields[space["ids"][reference]]
    changes: dict[str, dict[Any, list[float]]] = {name: collections.defaultdict(list) for name in kept}
    for twin, other in itertools.permutations(times, 2):
        apart = [name for name in kept if fields[twin][name] != fields[other][name]]
        if len(apart) == 1 and fields[twin][apart[0]] == kept[apart[0]]:
            ratios = [times[twin][cell] / ms for cell, ms in times[other].items() if cell in times[twin]]
            changes[apart[0]][fields[other][apart[0]]].append(statistics.geometric_mean(ratios) - 1)
    several = {name for name in kept if len({fields[one][name] for one in times}) > 1}
    assert {one["trait"]["name"] for one in found} == several
    worths = [abs(one["worth"] or 0) for one in found]
    assert worths == sorted(worths, reverse=True) and sum(worth > 0 for worth in worths) > 2
    for one in found:
        name = one["trait"]["name"]
        own = changes[name]
        pairs = [change for some in own.values() for change in some]
        assert one["pairs"] == len(pairs)
        assert one["worth"] == (pytest.approx(-statistics.median(pairs), abs=1e-4) if pairs else None)
        for entry in one["values"]:
            told = own[entry["value"]]
            assert entry["count"] == sum(fields[who][name] == entry["value"] for who in times)
            assert entry["pairs"] == len(told)
            if len(told) > 1:
                expected = [min(told), *statistics.quantiles(told, n=4, method="inclusive"), max(told)]
                parts = ("low", "q1", "median", "q3", "high")
                assert [entry[part] for part in parts] == pytest.approx(expected, abs=1e-4)


def test_what_changes_between_two_candidates_are_the_traits_that_differ(store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][-1]
    fields = {name: dataclasses.asdict(one) for name, one in candidates_of(store, "fwd", "sm90", (128, 128)).items()}
    for before, after in itertools.pairwise(random.Random(1).sample(space["ids"], 4)):
        places = [space["ids"].index(before), space["ids"].index(after)]
        assert script(f"R.model.differences(s, {places[0]}, {places[1]})", data) == [
            {"name": name, "from": value, "to": fields[after][name]}
            for name, value in fields[before].items()
            if value != fields[after][name]
        ]


def test_lengths_stand_beside_their_best_peer_and_decoding_by_its_bytes(store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][-1]
    told = script("s.cells.map((cell) => R.model.series(s, cell))", data)
    rates = script("s.slots.map((slot) => R.model.rates(R.model.cellsOf(s, slot), slot.winner))", data)
    fields = store.cells()
    for cell, series in zip(space["cells"], told, strict=True):
        slot = next(one for one in space["slots"] if all(one[key] == cell[key] for key in ("mask", "dtype", "lengths")))
        time = dict(zip(cell["who"], cell["times"]["ms"], strict=True))
        default = {} if slot["default"] == slot["winner"] else {"default": time[slot["default"]]}
        times = {"winner": time[slot["winner"]], **default, **cell["peers"]}
        assert [one["name"] for one in series] == list(times)
        made = Cell(**fields[cell["id"]])
        for one in series:
            ms = times[one["name"]]
            assert one["ratio"] == pytest.approx(min(cell["peers"].values()) / ms)
            assert one["terabytes"] == pytest.approx(made.nbytes / ms / 1e9, rel=1e-4)
            assert one["tflops"] == pytest.approx(made.flops / ms / 1e9, rel=1e-4)
        if slot["lengths"] == "decode":
            of_slot = rates[space["slots"].index(slot)]
            assert {name: series[0][name] for name in ("terabytes", "tflops")} == {
                name: pytest.approx(of_slot[name]) for name in ("terabytes", "tflops")
            }
            assert of_slot["share"] == pytest.approx(of_slot["tflops"] / MATMUL)


@pytest.mark.parametrize(("key", "peers"), [("ratio", {"fa4": 1.0}), ("tflops", {})])
def test_a_chart_shows_ratios_where_there_are_peers_and_decoding_apart(key: str, peers: dict[str, float]) -> None:
    space = {
        "cells": [
            {"label": label, "mask": "full", "dtype": "bf16", "lengths": lengths, "peers": peers}
            for label, lengths in (("1x512", "decode"), ("512", "short"), ("4096", "long"), ("4096 sink:12", "long"))
        ]
    }
    files = [*JS, str(WEB / "peers.js")]
    charts = "R.peersParts.charts(data).map((one) => [one.title, one.cells.length, one.what.key])"
    assert run_js(files, charts, data=space, prelude="") == [
        ["full · bf16 · decoding", 1, "terabytes"],
        ["full · bf16", 2, key],
        ["full · bf16 · sink:12", 1, key],
    ]
    axes = run_js(files, "R.peersParts.charts(data).map((one) => R.peersParts.axisOf([1], one.what))", space, "")
    assert [axis[0] for axis in axes[:2]] == [0, pytest.approx(0.94 if peers else 0)]
    assert axes[1][-1] > 1 if peers else axes[1][-1] == 1  # a peer alone, beside nobody, has an axis too


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (0, 1, 4, [0, 0.5, 1]),
        (0.63, 1.04, 7, [0.6, 0.7, 0.8, 0.9, 1, 1.1]),
        (-0.02, 0.02, 4, [-0.02, -0.01, 0, 0.01, 0.02]),
    ],
)
def test_ticks_are_round_and_cover_what_is_shown(low: float, high: float, most: int, ticks: list[float]) -> None:
    assert run_js(JS, "R.ticks(...data)", data=[low, high, most], prelude="") == pytest.approx(ticks)


def test_who_was_rejected_for_one_problem_and_never_built_for_another_is_rejected(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(masks=("full",), limit=4, until="prune")) as store:
        names = [one.candidate for one in store.verdicts(stage="prune", ok=1)]
        for name, mask, ok in ((names[0], "full", False), (names[1], "full", True), (names[1], "causal", False)):
            reason = None if ok else "spills 8 bytes a thread"
            store.record(Verdict(name, "sm_90a", f"bf16 128x128 {mask}", "compile", "k", ok, reason))
        data = collect(store, Scope())
    counts = script("R.model.funnel(s, null)", data)
    assert (counts["c"], counts["w"], counts["u"]) == (1, 1, len(names) - 2)
    states = {problem["mask"]: problem["states"] for problem in data["spaces"][0]["problems"]}
    first, second = (data["spaces"][0]["ids"].index(name) for name in names[:2])
    assert [states[mask][place] for mask in ("full", "causal") for place in (first, second)] == ["c", "w", "u", "c"]


def test_the_funnel_counts_every_candidate_where_it_came_furthest(data: dict[str, Any]) -> None:
    for place, space in enumerate(data["spaces"]):
        counts = script(f"R.model.funnel(d.spaces[{place}], null)", data)
        assert sum(counts.values()) == len(space["ids"])
        assert [counts[state] for state in "pl"] == [space["base"].count(state) for state in "pl"]
        assert min(counts["p"], counts["l"]) > 0
        assert counts["T"] == len({who for cell in space["cells"] for who in cell["who"]})
        assert counts["w"] == 0  # a candidate that no problem compiles is the compiler's


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("tile_m=128", lambda one: one.tile_m == 128),
        ("pingpong=off", lambda one: not one.pingpong),
        ("", lambda one: True),
    ],
)
def test_the_table_is_searched_by_traits(store: Store, data: dict[str, Any], words: str, passes: Any) -> None:
    space = data["spaces"][-1]
    traits = candidates_of(store, "fwd", "sm90", (128, 128))
    found = script(f"s.ids.map((_, who) => R.model.matches(s, who, '', {json.dumps(words.split())}))", data)
    assert found == [passes(traits[name]) for name in space["ids"]]


def test_a_filter_survives_the_address() -> None:
    chosen = {"tile_m": ["128", "192"], "pingpong": ["false"]}
    assert run_js(JS, "R.state.parseFilter(R.state.printFilter(data))", data=chosen, prelude="") == chosen
    assert run_js(JS, "R.state.parseFilter('a;b:;:c;;')", prelude="") == {}


def test_the_curve_between_two_axes_rises_from_one_to_the_other() -> None:
    files = [*JS, str(WEB / "parallel.js")]
    heights = run_js(files, "[0, 0.25, 0.5, 0.75, 1].map(R.parallelParts.curve)", prelude="")
    assert heights == sorted(heights)
    assert heights[::2] == pytest.approx([0, 0.5, 1], abs=1e-3)


# What is not there, and what cannot be.


def test_what_was_only_compiled_has_a_report_too(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(until="compile", limit=5)) as store:
        data = data_of(make_report(store))
    assert (data["gpu"], data["driver"], data["source"]) == (None, None, None)
    (space,) = data["spaces"]
    assert (space["slots"], space["cells"], len(space["problems"])) == ([], [], 2)
    left = sum(clocks is not None for clocks in space["costs"]["clocks"])
    assert data["verdict"] == [f"Nothing has been timed yet: {left} of {len(space['ids'])} candidates are left."]


def test_who_cannot_run_or_was_rejected_everywhere_has_no_analytic_score(data: dict[str, Any]) -> None:
    states = script("s.ids.map((_, who) => R.model.stateOf(s, null, who))", data)
    clocks = data["spaces"][-1]["costs"]["clocks"]
    assert {state for state, one in zip(states, clocks, strict=True) if one is None} == {"p", "c"}
    assert {state for state, one in zip(states, clocks, strict=True) if one is not None} == {"l", "T"}


def test_a_dry_run_is_told_by_the_analytic_score(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(until="prune", limit=5)) as store:
        data = data_of(make_report(store))
        traits = candidates_of(store, "fwd", "sm90", (128, 128))
    space, arch = data["spaces"][0], get_arch("sm_90a")
    assert (data["gpu"], space["slots"], space["cells"], space["problems"]) == (None, [], [], [])
    clocks = {name: estimate(one, arch) for name, one in traits.items() if one.check(arch) is None}
    first = min(clocks, key=lambda name: clocks[name])
    told = script("[R.model.estimates(s), R.model.fastest(R.model.estimates(s))]", data)
    assert space["ids"][told[1]] == first
    expected = [clocks[first] / clocks[name] if name in clocks else None for name in space["ids"]]
    assert told[0]["share"] == [None if one is None else pytest.approx(one, rel=1e-4) for one in expected]
    shipped = [space["ids"][place] for place in space["shipped"]]
    assert {traits[name] for name in shipped} == {
        row.traits for row in TABLES["fwd", "sm_90a", "sm90"] if made_for(row.traits) == ("fwd", "sm90", (128, 128))
    }
    best = min(shipped, key=lambda name: clocks[name])
    assert f"by the analytic score {title(traits[first])} comes first" in space["verdict"]
    more = f"; the best shipped row takes {100 * (clocks[best] / clocks[first] - 1):.1f} % more clocks"
    assert space["verdict"].endswith(", a shipped row" if best == first else more)


def test_what_a_sweep_leaves_is_reported(tmp_path: pathlib.Path) -> None:
    sweep(World(tmp_path, wrong=(16,), crashing_in_race=(32,), spilling=(48,)))
    with Store(tmp_path / "sweep.sqlite") as store:
        (space,) = data_of(make_report(store))["spaces"]
    assert sorted(space["problems"][0]["states"]) == sorted("gtc" + "T" * (len(space["ids"]) - 3))
    assert [cell["matmul"] for cell in space["cells"]] == [700.0, 700.0]


def test_the_scope_limits_the_spaces(store: Store) -> None:
    spaces = collect(store, Scope(families=["sm90"], head_dims=[(64, 64)]))["spaces"]
    assert [space["title"] for space in spaces] == ["sm90 64x64"]


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ({"target": "sm_80"}, "arch is 'sm_80'; .* has candidates for: sm_90a"),
        ({"target": "sm_1"}, "arch is 'sm_1'; allowed: sm_80"),
        ({"families": ["sm70"]}, "family is 'sm70'; allowed: sm80, sm90"),
        ({"families": ["sm80"]}, "family is sm80; .* has candidates of: sm90 64x64; sm90 128x128"),
        ({"head_dims": [(96, 96)]}, "head_dim is 96x96, padded; .* has candidates of: sm90 64x64"),
        ({"gpu": "abacus"}, "gpu is 'abacus'; .* has timings of: NVIDIA H200"),
    ],
)
def test_a_scope_that_was_not_swept_is_named(store: Store, scope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect(store, Scope(**scope))


def test_an_empty_database_has_no_report(tmp_path: pathlib.Path) -> None:
    with Store(tmp_path / "db") as store, pytest.raises(ValueError, match="holds no candidates yet"):
        make_report(store)


def test_of_several_targets_one_must_be_named(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(until="prune")) as store:
        Filler(store, Sweep(target="sm_80", families=("sm80",), until="prune")).fill()
        with pytest.raises(ValueError, match=r"arch is not given .* allowed: sm_80, sm_90a"):
            make_report(store)
        assert data_of(make_report(store, Scope("sm_80")))["target"] == "sm_80"


def test_a_failed_timing_and_one_of_an_infinite_interval_are_no_obstacle(tmp_path: pathlib.Path) -> None:
    with filled(tmp_path / "db", Sweep(lengths=((4096, 4096),), masks=("full",), limit=3)) as store:
        names = {"candidate": "0" * 16, "cell": store.timings()[0].cell, "target": "sm_90a", "gpu": GPU, "driver": "d"}
        store.record(Timing(**names, key="k", race="sm90 2", error="no answer within 90 s"))
        one = store.timings()[0]
        store.record(dataclasses.replace(one, samples=(1.0,), low=0.0, high=math.inf))
        store.record(Verdict(one.candidate, "sm_90a", "bf16 128x128 full softcap", "gate", "k", False, "wrong"))
        (space,) = data_of(make_report(store))["spaces"]
    assert None in space["cells"][0]["times"]["above"]


# The page.


@pytest.fixture(scope="module")
def page(store: Store) -> str:
    return make_report(store)


def test_the_page_holds_the_data_and_refers_to_nothing(page: str, data: dict[str, Any]) -> None:
    assert data_of(page) == json.loads(json.dumps(data))
    for tag, attributes, _ in Parts(page).elements:
        assert tag not in ("base", "iframe", "img", "object", "embed")
        assert not {"src", "srcset", "action"} & attributes.keys()
        assert attributes.get("href", "data:,") == "data:,"
    code = page.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in code and "https:" not in code and "@import" not in code and "url(" not in code


@pytest.mark.slow
def test_a_page_of_thousands_of_candidates_is_small(tmp_path: pathlib.Path) -> None:
    wide = Sweep(families=("sm90", "sm80"), head_dims=(64, 96, 128), masks=("full",), limit=60)
    with filled(tmp_path / "db", wide) as store:
        text = make_report(store)
        assert store.counts()["candidates"] > 7000
    assert len(text.encode()) < LIMIT / 3


# Links to layout pages.


def gallery(folder: pathlib.Path, store: Store, names: list[str], mask: str = "full") -> pathlib.Path:
    """A folder with an index and a page for each of these candidates, as `cuteflash layouts --all` writes them."""
    folder.mkdir()
    (folder / "index.html").write_text(PAGE.render("index", page_data("index", ["index"], gallery=[])))
    candidates = all_candidates(store)
    for name in names:
        traits = dataclasses.asdict(candidates[name])
        kernel = {"arch": "sm_90a", "family": candidates[name].family, "traits": traits, "mask": mask, "dtype": "bf16"}
        scene = {"title": f"row {name}", "kernel": kernel}
        text = PAGE.render("row", page_data("kernel", ["kernel"], "row", {"row": scene}))
        (folder / f"a row {name}.html").write_text(text)
    return folder


def test_rows_are_linked_to_their_layout_pages(tmp_path: pathlib.Path, store: Store, data: dict[str, Any]) -> None:
    space = data["spaces"][0]
    names = random.Random(0).sample(space["ids"], 3)
    site = gallery(tmp_path / "site", store, names)
    told = data_of(make_report(store, layouts_dir=site, lies_in=tmp_path / "out"))
    pages = told["spaces"][0]["pages"]
    assert {space["ids"][one["who"]]: one["href"] for one in pages} == {
        name: f"../site/a%20row%20{name}.html" for name in names
    }
    assert told["spaces"][1]["pages"] == []


def test_the_page_of_the_selected_mask_is_preferred() -> None:
    pages = [{"who": 1, "mask": mask, "dtype": dtype} for mask in ("full", "causal") for dtype in ("bf16", "fp16")]
    for page in pages:
        found = run_js(JS, "R.model.pageOf({ pages: data[0] }, 1, data[1])", data=[pages, page], prelude="")
        assert found == page
    assert run_js(JS, "R.model.pageOf({ pages: data }, 2, {})", data=pages, prelude="") is None


def test_a_folder_that_is_no_gallery_is_refused(tmp_path: pathlib.Path, store: Store) -> None:
    with pytest.raises(ValueError, match=r"layouts is '.*', which has no index\.html"):
        make_report(store, layouts_dir=tmp_path)


def test_a_broken_layout_page_is_named(tmp_path: pathlib.Path, store: Store) -> None:
    site = gallery(tmp_path / "site", store, [])
    (site / "broken.html").write_text('<script type="application/json" id="data">{"scene": "x", "scenes": {}}</script>')
    with pytest.raises(ValueError, match=r"layouts has .*broken\.html, which cannot be read: KeyError"):
        make_report(store, layouts_dir=site)
