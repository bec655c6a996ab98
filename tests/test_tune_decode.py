"""Sweeps of rows that split keys: candidates, ranking, cells by batch and heads, what judges them, where winners go."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import pytest
import torch

from cuteflash import usertable
from cuteflash.cli import sweep as command
from cuteflash.dispatch import choose, choose_shipped
from cuteflash.problem import UNBOUNDED, FwdProblem
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.traits.arch import get_arch
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.row import Row, TableKey
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune import cuda_backend, tables
from cuteflash.tune.cells import Cell, make_inputs
from cuteflash.tune.cuda_backend import TorchBench, WrongResult, gate_cells
from cuteflash.tune.explain import explain
from cuteflash.tune.funnel import make_space
from cuteflash.tune.operations import SPECS, Form, enumerate_traits, shipped_rows
from cuteflash.tune.plan import Plan
from cuteflash.tune.rank import estimate
from cuteflash.tune.store import Store
from cuteflash.tune.timing import Runner
from cuteflash.tune.trials import FwdTrial
from cuteflash.tune.units import BUSY_BYTES, MEMORY, bytes_in_flight, loops
from cuteflash.usertable import MeasuredRow
from tests.user_tables import MEASURED, SM90, OwnTables

CPU = torch.device("cpu")
HOPPER = get_arch("sm_90a")
SPLIT = FwdTraitsSm90(64, 64, 128, 128, kv_stage=3, pingpong=False, q_in_regs=True, splits=True)
every_form = pytest.mark.parametrize("form", ["decode", "cache"])


def cell_of(form: Form, **changes: Any) -> Cell:
    """Two sequences of eight query heads, two of K and V."""
    size: dict[str, Any] = {"tokens": 2 * 96, "hidden": 8 * 32, "group": 4, "seqlen_q": 3} | changes
    return Cell(32, "full", 96, form=form, **size)


@every_form
def test_the_inputs_have_the_kv_heads_of_their_groups(form: Form) -> None:
    inputs = make_inputs(cell_of(form), CPU)
    assert inputs.q.shape == (2, 3, 8, 32) and inputs.k.shape == inputs.v.shape == (2, 96, 2, 32)
    assert inputs.out_dtype == torch.bfloat16 and inputs.empty_out().shape == inputs.q.shape
    if form == "cache":
        assert inputs.k.dtype == inputs.v.dtype == torch.float8_e4m3fn
        assert inputs.scales is not None and inputs.scales.q_descale is None
        _, k, v = inputs.values()
        plain = make_inputs(cell_of("decode"), CPU)
        for stored, exact in ((k, plain.k), (v, plain.v)):
            torch.testing.assert_close(stored, exact.float(), atol=0.01, rtol=2**-4)
        assert inputs.k.float().abs().amax() == 448  # the whole range of e4m3 is used


def attention(spoil: Any, trial: FwdTrial, traits: object, target: str) -> Runner:
    """A kernel that is right but for what `spoil` does to its output."""
    inputs = trial.inputs
    q, k, v = (inputs.q, inputs.k, inputs.v) if inputs.scales is None else inputs.values()
    sides = [-1 if side >= UNBOUNDED else side for side in inputs.cell.window]

    def run(calls: int) -> torch.Tensor:
        out = flash_attention_2(q, k.to(q.dtype), v.to(q.dtype), inputs.cell.head_dim**-0.5, *sides, 0.0)[0]
        trial.out.copy_(out)
        spoil(trial.out)
        return trial.out

    return run


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> TorchBench:
    monkeypatch.setattr(cuda_backend, "lookup", lambda *_: "a report")
    return TorchBench("sm_90a", CPU)


def use(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    kernel = functools.partial(attention, spoil)
    monkeypatch.setattr(FwdTrial, "kernel", lambda trial, *given: kernel(trial, *given))


def problem_of(form: Form, mask: Any = "full", group: int = 4) -> FwdProblem:
    problem = SPECS[form].problem("bf16", 32, 32, mask)
    assert isinstance(problem, FwdProblem)
    return problem.packed(group)


@every_form
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_a_right_kernel_passes_the_gate(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch, form: Form, mask: Any
) -> None:
    use(monkeypatch, lambda out: None)
    problem = problem_of(form, mask)
    found = bench.check(SPLIT, problem)["errors"]
    assert len(found) == len(gate_cells(problem))
    assert all(worst <= most and rms <= least for worst, most, rms, least in found.values())


@every_form
@pytest.mark.parametrize("head", [0, 5])
def test_a_head_of_a_group_that_is_wrong_is_caught(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch, form: Form, head: int
) -> None:
    use(monkeypatch, lambda out: out[-1, -1, head].add_(0.5))
    with pytest.raises(WrongResult, match="error"):
        bench.check(SPLIT, problem_of(form))


@every_form
def test_gate_cells_are_of_the_problem_with_keys_to_split(form: Form) -> None:
    for mask in ("full", "causal"):
        problem = problem_of(form, mask)
        cells = gate_cells(problem)
        assert {cell.problem for cell in cells} == {problem} and {cell.lengths for cell in cells} == {"decode"}
        rows = {cell.seqlen_q * cell.group for cell in cells}
        assert min(rows) <= 8 and max(rows) == 64  # the last to come merges, and blocks meet
        assert max(cell.seqlen for cell in cells) > 10 * 128  # a share has 128 keys at least


@every_form
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_estimate_asks_for_enough_in_flight(form: Form, head_dim: int) -> None:
    """Of two candidates that differ in stages alone, the one that keeps memory busy with less is better."""
    every = [one for one in enumerate_traits(form, "sm90", head_dim, head_dim) if one.check(HOPPER) is None]
    runnable = [one for one in every if isinstance(one, FwdTraitsSm90)]
    least = min(runnable, key=lambda one: estimate(one, HOPPER))
    assert BUSY_BYTES * 0.7 <= bytes_in_flight(least) <= 2 * BUSY_BYTES
    name = "stored_stage" if form == "cache" else "kv_stage"
    starved = dataclasses.replace(runnable[0], **{name: 2})
    assert estimate(starved, HOPPER) > estimate(least, HOPPER)
    (loop,) = loops(runnable[0])
    assert MEMORY in loop.clocks


@every_form
def test_shipped_rows_always_take_part(form: Form) -> None:
    cell = Cell(128, "full", 8192, seqlen_q=1, form=form, tokens=8192, hidden=32 * 128, group=4)
    plan = Plan("sm_90a", ("sm90",), (cell,), limit=3)
    space = make_space(plan, "sm90", form, (128, 128))
    shipped = {row.traits for row in shipped_rows(form, SM90) if row.traits.head_dim == 128}
    assert choose_shipped(cell.problem, "sm_90a", "sm90", "decode", cell.query_rows).traits in shipped
    assert sorted(traits.tile_m for traits in shipped) == ([8, 16, 64] if form == "cache" else [64])
    assert space.always == shipped and len(space.chosen) == len(shipped) + 3
    assert space.title == f"{form} sm90 128x128"
    assert all("split" in traits.features for traits in space.chosen)


@pytest.mark.parametrize(
    ("features", "traits"),
    [
        (("split",), dataclasses.replace(SPLIT, kv_stage=2)),
        (
            ("split", "e4m3_cache"),
            FwdTraitsCacheSm90(64, 64, 128, 128, pingpong=False, splits=True, stored_stage=5),
        ),
    ],
    ids=["decode", "cache"],
)
def test_a_users_row_that_splits_keys_takes_what_it_serves(
    own_tables: OwnTables, features: Any, traits: FwdTraitsSm90
) -> None:
    plain = FwdProblem.dense("bf16", 128, 128)
    before = choose(plain, "sm_90a", "sm90", "decode").traits
    measured = MEASURED(Row(traits, masks=("full",), lengths=("decode",)))
    tables.write_user(SM90, [measured])
    own_tables.forget()
    found = choose(plain.asking(features), "sm_90a", "sm90", "decode")
    assert found.traits == traits and "user's table" in found.source
    assert choose(plain, "sm_90a", "sm90", "decode").traits == before
    causal = FwdProblem.dense("bf16", 128, 128, "causal").asking(features)
    assert choose(causal, "sm_90a", "sm90", "decode").traits != traits
    others = {("split",), ("split", "e4m3_cache")} - {features}
    assert all(choose(plain.asking(other), "sm_90a", "sm90", "decode").traits != traits for other in others)


def test_options_become_cells_by_batch_length_and_heads() -> None:
    common: dict[str, Any] = {"operation": "fwd", "transposed_v": False, "form": "decode"}
    sizes = command._decode_sizes("1,32", "32x8,16x1", "decode")
    cells = command._cells(None, [(128, 128)], ["full", "causal"], "bf16", "1x8192,4x1024", None, common, sizes)
    assert len(cells) == 3 * 4  # a single query has no causal mask
    assert {(cell.batch, cell.heads, cell.kv_heads) for cell in cells} == {
        (batch, *heads) for batch in (1, 32) for heads in ((32, 8), (16, 1))
    }
    assert {(cell.seqlen_q, cell.seqlen, cell.mask) for cell in cells} == {
        (1, 8192, "full"), (4, 1024, "full"), (4, 1024, "causal"),
    }  # fmt: skip
    (plain,) = command._decode_sizes(None, None, "decode")
    assert plain == command.Size(None, (32, 8))


@pytest.mark.parametrize(
    ("batch", "heads", "form", "complaint"),
    [
        ("1", None, "", "batch is '1'; allowed with --kernel decode, cache, mla"),
        (None, "32x8", "", "heads is '32x8'; allowed with --kernel decode, cache, mla"),
        ("0", None, "decode", "batch is '0'; allowed: comma-separated positive integers"),
        (None, "32", "decode", "heads is '32'; allowed: QUERY_HEADSxKV_HEADS, whole groups, e.g. 32x8"),
        (None, "32x5", "cache", "heads is '32x5'; allowed: QUERY_HEADSxKV_HEADS"),
    ],
)
def test_sizes_that_do_not_fit_are_named(batch: str | None, heads: str | None, form: Form, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        command._decode_sizes(batch, heads, form)


def test_an_explanation_says_what_is_in_flight_and_what_bounds(tmp_path: pathlib.Path) -> None:
    with Store(tmp_path / "sweep.sqlite") as store:
        store.add_candidates([SPLIT, dataclasses.replace(SPLIT, splits=False)])
        told = explain(store, TableKey("fwd", "sm_90a", "sm90"), (128, 128), {"tile_n": 64}, task="decode")
    assert "sm_90a, decode, family sm90, head dims 128x128: 1 candidates considered" in told
    assert "in 3 stages" in told and f"bound  O: {MEMORY}" in told


def test_measured_rows_of_a_kind_come_back_from_the_users_table(own_tables: OwnTables) -> None:
    traits = FwdTraitsCacheSm90(64, 96, 128, 128, pingpong=False, splits=True, stored_stage=4)
    row = MeasuredRow(Row(traits, lengths=("decode",)), "Card", "2026-01-31", 12.5)
    own_tables.write("sm_90a", "sm90", [row])
    assert usertable.load(SM90) == (row,)
