"""A sweep of 8-bit operands without a GPU: its inputs, what its gate lets through, and the rows that it proposes."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cuteflash.arguments import FwdTensors, ScaleTensors
from cuteflash.problem import FP8_DTYPES, UNBOUNDED, FwdProblem
from cuteflash.reference.fp8 import fp8_attention
from cuteflash.reference.fp8_accumulator import modelled_attention
from cuteflash.traits.arch import get_arch
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90, is_two_level
from cuteflash.traits.row import Row, TableKey
from cuteflash.tune import cuda_backend, trials
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.cuda_backend import TorchBench, WrongResult, gate_cells
from cuteflash.tune.feature_checks import settle
from cuteflash.tune.fp8_accuracy import SAMPLED_ROWS, Fp8Reference, kernel_model, sampled_rows
from cuteflash.tune.operations import enumerate_traits
from cuteflash.tune.plan import SINK, with_sinks
from cuteflash.tune.rank import shortlist
from cuteflash.tune.select import Pick, proposed
from cuteflash.tune.store import Store, Timing, candidate_id
from cuteflash.tune.timing import Runner
from cuteflash.tune.trials import Fp8Trial

CPU = torch.device("cpu")
SM90 = TableKey("fwd", "sm_90a", "sm90")
STORED = Cell(32, "causal", 64, "e4m3", tokens=64, hidden=64)
GIVEN = dataclasses.replace(STORED, transposed_v=True)
ONE = FwdTraitsFp8Sm90(64, 64, 32, 32, pingpong=False, turns_v=True)
TWO = dataclasses.replace(ONE, two_level=True)
FIXED = dataclasses.replace(TWO, fixed_max=True, masked_by_fixed_max=True)
cells = pytest.mark.parametrize("cell", [STORED, GIVEN], ids=["V as stored", "V^T"])
Compute = Callable[[Inputs], Tensor]


def modelled(inputs: Inputs, traits: FwdTraitsFp8Sm90 = TWO) -> Tensor:
    """What the hardware is expected to give, rounded to O's type."""
    assert inputs.scales is not None
    mask = (inputs.cell.head_dim**-0.5, *inputs.cell.window)
    given = inputs.q, inputs.k, inputs.rows_of_v(), inputs.scales[:3], mask
    return modelled_attention(*given, kernel_model(traits)).to(inputs.out_dtype)


def by_definition(inputs: Inputs) -> Tensor:
    assert inputs.scales is not None
    left, right = (-1 if side >= UNBOUNDED else side for side in inputs.cell.window)
    given = inputs.q, inputs.k, inputs.rows_of_v(), inputs.scales[:3], inputs.cell.head_dim**-0.5
    return fp8_attention(*given, left, right)[0]


def use(monkeypatch: pytest.MonkeyPatch, compute: Compute, spoil: Callable[[Tensor], Any] = lambda out: None) -> None:
    """Kernels compute this, but for what `spoil` does to their output."""

    def kernel(trial: Fp8Trial, traits: object, target: str) -> Runner:
        def run(calls: int) -> Tensor:
            trial.out.copy_(compute(trial.inputs))
            spoil(trial.out)
            return trial.out

        return run

    monkeypatch.setattr(Fp8Trial, "kernel", kernel)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> TorchBench:
    monkeypatch.setattr(cuda_backend, "lookup", lambda *_: "a report")
    chosen = {GIVEN.problem: GIVEN}
    monkeypatch.setattr(cuda_backend, "gate_cells", lambda problem, traits: [chosen.get(problem, STORED)])
    return TorchBench("sm_90a", CPU)


@cells
def test_inputs_are_normal_ones_quantised_with_a_scale_a_head(cell: Cell) -> None:
    inputs, half = make_inputs(cell, CPU), make_inputs(dataclasses.replace(cell, dtype="bf16", transposed_v=False), CPU)
    assert inputs.scales is not None
    assert {x.dtype for x in (inputs.q, inputs.k, inputs.v)} == {torch.float8_e4m3fn}
    assert inputs.empty_out().dtype == torch.bfloat16 and bool(inputs.empty_out().isnan().all())
    assert [scale.shape for scale in inputs.scales[:3]] == [(cell.batch, cell.heads)] * 3
    if cell.transposed_v:
        assert inputs.v.shape == (cell.batch, cell.heads, 32, 128)
    for value, exact in zip(inputs.values(), (half.q, half.k, half.v), strict=True):
        torch.testing.assert_close(value, exact.float(), rtol=2**-4, atol=0.01)
    rounded = inputs.in_16_bits()
    assert rounded.cell == half.cell and rounded.q.dtype == torch.bfloat16
    assert all(x.is_contiguous() for x in (rounded.q, rounded.k, rounded.v))  # as kernels load them
    torch.testing.assert_close(rounded.v.float(), inputs.values()[2], rtol=2**-8, atol=0)


@cells
@pytest.mark.parametrize("compute", [modelled, by_definition])
def test_right_kernels_pass_the_gate_with_their_errors(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch, cell: Cell, compute: Compute
) -> None:
    use(monkeypatch, compute)
    ((name, (worst, most, rms, least)),) = bench.check(TWO, cell.problem)["errors"].items()
    assert name == f"{cell.label} o" and 0 < worst <= most and 0 < rms <= least


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out[-1, -1].add_(0.5), "error .* over"),
        (lambda out: out[0, 0].fill_(float("nan")), "NaN"),
        (
            lambda out: out.mul_(1 + 0.05 * torch.where(torch.arange(32) % 2 == 0, 1, -1)),
            "rms error .* modelled hardware",
        ),
        (lambda out: out[0, 50].mul_(1 + 1e-2 * torch.rand(())), "runs of the same inputs differ"),
    ],
    ids=["wrong at an edge", "leaves memory as it was", "coarser than the hardware", "races"],
)
def test_wrong_kernels_are_caught(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Any], words: str
) -> None:
    use(monkeypatch, modelled, spoil)
    with pytest.raises(WrongResult, match=words):
        bench.check(TWO, STORED.problem)


def test_keys_in_another_order_are_caught(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes V^T for one whose keys lie in their natural order."""

    def natural(inputs: Inputs) -> Tensor:
        rows = inputs.v[..., : inputs.cell.seqlen].permute(0, 3, 1, 2)
        stored = dataclasses.replace(inputs.cell, transposed_v=False)
        return by_definition(dataclasses.replace(inputs, cell=stored, v=rows))

    use(monkeypatch, natural)
    with pytest.raises(WrongResult, match="error"):
        bench.check(TWO, GIVEN.problem)


def test_a_kernel_is_judged_by_its_own_way_to_accumulate() -> None:
    """V of mean 1 over many keys: one level loses what two keep."""
    cell = Cell(32, "full", 2048, "e4m3", seqlen_q=4, tokens=2048, hidden=32)
    inputs = make_inputs(cell, CPU)
    inputs = dataclasses.replace(inputs, v=(inputs.v.float() + 100).to(inputs.v.dtype))
    reference = Fp8Reference(inputs, heads=1)
    one, two = (modelled(inputs, traits) for traits in (ONE, TWO))
    assert reference.imprecision(two, kernel_model(TWO)) is None
    assert reference.imprecision(one, kernel_model(ONE)) is None
    assert "modelled hardware" in (reference.imprecision(one, kernel_model(TWO)) or "")


def test_a_kernel_is_judged_by_its_own_maxima() -> None:
    """Peaked scores: the largest weight of a row is exact under maxima that move, and rounded under those of a block
    before.
    """
    inputs = make_inputs(Cell(64, "causal", 700, "e4m3", seqlen_q=100, tokens=700, hidden=64, inputs="peaked"), CPU)
    reference = Fp8Reference(inputs, heads=1)
    out = modelled(inputs, FIXED)
    assert reference.imprecision(out, kernel_model(FIXED)) is None
    assert "modelled hardware" in (reference.imprecision(out, kernel_model(TWO)) or "")
    moves_at_masks = dataclasses.replace(FIXED, masked_by_fixed_max=False)
    assert reference.allowed(kernel_model(moves_at_masks)).rms < reference.allowed(kernel_model(FIXED)).rms


def test_long_cells_are_judged_on_some_rows_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_rows(50) == [slice(0, 50)]
    assert [rows.start for rows in sampled_rows(1000)] == [0, 464, 944]
    cell = dataclasses.replace(STORED, seqlen=200, seqlen_q=200, tokens=600)
    inputs = make_inputs(cell, CPU)
    reference = Fp8Reference(inputs, heads=2)
    assert [(part.batch, part.head) for part in reference.parts[::3]] == [(0, 0), (2, 1)]
    assert {part.rows.stop - part.rows.start for part in reference.parts} == {SAMPLED_ROWS, 200 - 144}
    right = by_definition(inputs)
    assert reference.complaint(right, None) is reference.imprecision(right, kernel_model(TWO)) is None
    wrong = right.clone()
    wrong[1, :, 1].add_(0.5)  # a head that is not compared with fp32
    assert reference.complaint(wrong, None) is None
    assert "differs from another implementation" in (reference.complaint(wrong, right) or "")
    assert reference.complaint(right, right) is None


@cells
def test_a_kernel_gets_its_tensors_and_scales_in_order(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(trials, "compiled", lambda *asked: lambda *arguments: given.append((asked, arguments)))
    monkeypatch.setattr(trials, "fwd_scalars", lambda *_: ("scalars",))
    trial = Fp8Trial(cell, CPU, heads=1)
    traits = dataclasses.replace(TWO, turns_v=not cell.transposed_v)
    assert trial.kernel(traits, "sm_90a")(1) is trial.out
    ((asked, arguments),) = given
    assert asked[1:] == (traits, cell.problem, "sm_90a")
    inputs = trial.inputs
    assert FwdTensors(*arguments[:5]) == (inputs.q, inputs.k, inputs.v, trial.out, None)
    assert ScaleTensors(*arguments[5:-1]) == inputs.scales and arguments[-1] == "scalars"


def test_peers_are_left_out(bench: TorchBench) -> None:
    with pytest.raises(NotImplementedError, match="fa4 takes no 8-bit operands"):
        bench.sample("fa4", STORED)


@cells
def test_the_gate_and_the_sinks_are_of_the_same_form(cell: Cell) -> None:
    assert all(one.problem == cell.problem for one in gate_cells(cell.problem))
    plain, sink = with_sinks([cell], ["sm90"])
    assert (plain, sink) == (cell, dataclasses.replace(cell, inputs=SINK))


@pytest.mark.parametrize("speeds", [(1.0, 0.8), (1.0,)], ids=["both were timed", "two levels alone"])
def test_two_levels_are_proposed_although_one_is_faster(speeds: tuple[float, ...], tmp_path: pathlib.Path) -> None:
    with Store(tmp_path / "sweep.sqlite") as store:
        store.add_cell(STORED.id, dataclasses.asdict(STORED))
        candidates = (TWO, ONE)[: len(speeds)]
        store.add_candidates(candidates)
        for traits, ms in zip(candidates, speeds, strict=True):
            found = {"ms": ms, "low": ms, "high": ms, "tflops": 1 / ms, "samples": (ms,)}
            timing = Timing(candidate_id(traits), STORED.id, "sm_90a", "A", "d", "k", "sm90 1", source="s", **found)
            store.record(timing)
        (pick,) = proposed(store, SM90, (32, 32), "A", "fwd e4m3")
        assert pick.row.traits == TWO and pick.row.dtypes == FP8_DTYPES  # which run alike
        assert proposed(store, SM90, (32, 32), "A") == proposed(store, SM90, (32, 32), "A", "fwd e4m3 vt") == []


def test_a_limit_leaves_candidates_of_one_level_and_of_two() -> None:
    arch = get_arch("sm_90a")
    for task, head_dim in (("fwd e4m3", 64), ("fwd e4m3 vt", 128)):
        fitting = [one for one in enumerate_traits(task, "sm90", head_dim, head_dim) if one.check(arch) is None]  # type: ignore[arg-type]
        first = shortlist(fitting, arch)
        assert [is_two_level(one) for one in first[:8]] == [True, False] * 4
        assert len(first) == len(set(first)) == len(fitting)


def test_features_are_compiled_with_the_form_of_v() -> None:
    """What a row that turns V also serves is asked of kernels that turn V."""
    asked: list[FwdProblem] = []

    def judge(kernels: Any, what: str) -> dict[Any, str | None]:
        asked.extend(problem for _, problem in kernels)
        return dict.fromkeys(kernels)

    for turns_v in (True, False):
        traits = dataclasses.replace(TWO, turns_v=turns_v)
        pick = Pick("id", Row(traits, ("full",), FP8_DTYPES), 1.0, None, False, "")
        (settled,) = settle([pick], judge)
        assert settled.row.without == ()
        assert {problem.operands.qk_dtype for problem in asked} == set(FP8_DTYPES)
        assert all(problem.features == traits.features for problem in asked)
        assert ("turned_v" in traits.features) == turns_v
        asked.clear()
