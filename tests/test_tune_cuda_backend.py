"""The real bench on the CPU, where torch stands in for a kernel: what it lets through and what it blames."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuteflash.arguments import BwdTensors
from cuteflash.problem import MASK_KINDS, UNBOUNDED, BwdProblem, FwdProblem, MaskKind
from cuteflash.reference.bwd import flash_attention_2_backward
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.tune import cuda_backend, trials
from cuteflash.tune.cells import Cell, make_inputs
from cuteflash.tune.cuda_backend import TorchBench, WrongResult, gate_cells
from cuteflash.tune.gradients import Gradients, saved_forward
from cuteflash.tune.timing import HangError, Runner
from cuteflash.tune.trials import BwdTrial, FwdTrial

CPU = torch.device("cpu")
CELL = Cell(32, "causal", 64, tokens=256, hidden=64)
RIGHT, OTHER = FwdTraitsSm80(64, 64, 32, 32), FwdTraitsSm80(128, 64, 32, 32)
BACKWARD = dataclasses.replace(CELL, operation="bwd")
IN_MEMORY, IN_REGISTERS = BwdTraitsSm80(64, 64, 32, 32, dq_warps=4), BwdTwoPassTraitsSm90(64, 64, 32, 32)
RUNS = itertools.count()
Spoil = Callable[[torch.Tensor], Any]
SpoilGradients = Callable[[Gradients], Any]


def attention(spoil: Spoil, trial: FwdTrial, traits: object, target: str) -> Runner:
    """A kernel that is right but for what `spoil` does to its output."""
    inputs = trial.inputs

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            scale = inputs.cell.head_dim**-0.5
            trial.out.copy_(flash_attention_2(inputs.q, inputs.k, inputs.v, scale, *sides(inputs.cell), 0.0)[0])
            spoil(trial.out)
        return trial.out

    return run


def backward(spoil: SpoilGradients, trial: BwdTrial, traits: object, target: str) -> Runner:
    """A backward that is right but for what `spoil` does to its gradients."""
    forward = trial.inputs.forward

    def run(calls: int) -> Gradients:
        for _ in range(calls):
            left, right = sides(forward.cell)
            window: dict[str, Any] = {"window_left": left, "window_right": right}
            given = (trial.inputs.dout, forward.q, forward.k, forward.v, *trial.saved, None)
            found = flash_attention_2_backward(*given, softmax_scale=forward.cell.head_dim**-0.5, **window)
            for written, one in zip(trial.gradients, found, strict=True):
                written.copy_(one)
            spoil(trial.gradients)
        return trial.gradients

    return run


def sides(cell: Cell) -> tuple[int, int]:
    """A cell's window as the reference takes it."""
    left, right = (-1 if side >= UNBOUNDED else side for side in cell.window)
    return left, right


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> TorchBench:
    monkeypatch.setattr(cuda_backend, "lookup", lambda *_: "a report")
    use(monkeypatch, lambda out: None)
    use_backward(monkeypatch, lambda gradients: None)
    return TorchBench("sm_80", CPU)


def use(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    kernel = functools.partial(attention, spoil)
    monkeypatch.setattr(FwdTrial, "kernel", lambda trial, *given: kernel(trial, *given))


def use_backward(monkeypatch: pytest.MonkeyPatch, spoil: SpoilGradients) -> None:
    kernel = functools.partial(backward, spoil)
    monkeypatch.setattr(BwdTrial, "kernel", lambda trial, *given: kernel(trial, *given))


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_a_right_kernel_passes_the_gate_with_its_errors(bench: TorchBench, mask: MaskKind) -> None:
    found = bench.check(RIGHT, FwdProblem.dense("bf16", 32, 32, mask))["errors"]
    assert list(found) == [f"{cell.label} o" for cell in gate_cells(FwdProblem.dense("bf16", 32, 32, mask))]
    assert all(0 <= worst <= most and 0 <= rms <= least for worst, most, rms, least in found.values())
    assert all(worst > 0 and rms > 0 for worst, _, rms, _ in list(found.values())[:2])  # of plain inputs


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out[-1, -1].add_(0.5), "error"),
        (lambda out: out[0, 0].fill_(float("nan")), "NaN"),
        (lambda out: out.mul_(1 + 1e-2 * torch.rand(())), "runs of the same inputs differ|error"),
    ],
    ids=["wrong at an edge", "leaves memory as it was", "races"],
)
def test_a_wrong_kernel_is_caught(bench: TorchBench, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, words: str) -> None:
    use(monkeypatch, spoil)
    with pytest.raises(WrongResult, match=words):
        bench.check(RIGHT, FwdProblem.dense("bf16", 32, 32))
    assert bench.usable()


def test_a_kernel_that_writes_nothing_is_caught_although_another_was_right_there(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sample(RIGHT, CELL)
    monkeypatch.setattr(FwdTrial, "kernel", lambda trial, traits, target: lambda calls: trial.out)
    with pytest.raises(WrongResult, match="NaN"):
        bench.sample(OTHER, CELL)


def test_a_head_without_a_reference_is_compared_with_the_first_right_output(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sample(RIGHT, CELL)
    use(monkeypatch, lambda out: out[1, :, 1].add_(0.5))
    with pytest.raises(WrongResult, match="differs from another implementation"):
        bench.sample(OTHER, CELL)


def weights_beyond_one(trial: FwdTrial, traits: object, target: str) -> Runner:
    """A kernel that subtracts a number from the scores in place of their maximum: weights are rounded that torch's
    are not."""

    def run(calls: int) -> torch.Tensor:
        inputs = trial.inputs
        q, k, v = (tensor.float().transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
        weights = torch.exp(q @ k.transpose(2, 3) * inputs.cell.head_dim**-0.5 - 3)
        rounded = weights.to(inputs.q.dtype).float()
        return trial.out.copy_((rounded @ v / weights.sum(-1, keepdim=True)).transpose(1, 2))

    return run


def test_a_kernel_that_is_imprecise_with_sinks_alone_is_caught(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FwdTrial, "kernel", weights_beyond_one)
    with pytest.raises(WrongResult, match=r"sink:30: rms error .* times torch's own"):
        bench.check(RIGHT, FwdProblem.dense("bf16", 32, 32))
    plain = Cell(32, "full", 64, tokens=256, hidden=64)
    assert bench.sample(RIGHT, plain) > 0
    with pytest.raises(WrongResult, match="sink:30: rms error"):
        bench.sample(RIGHT, Cell(32, "full", 64, tokens=256, hidden=64, inputs="sink:30"))


def test_samples_share_a_cells_inputs_and_judge_once(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, judged = [], []
    monkeypatch.setattr(trials, "make_inputs", lambda *a: made.append(a) or make_inputs(*a))
    complaint = trials.accuracy.complaint
    monkeypatch.setattr(trials.accuracy, "complaint", lambda *a: judged.append(a) or complaint(*a))
    assert all(bench.sample(traits, CELL) > 0 for traits in (RIGHT, OTHER, RIGHT, OTHER))
    assert (len(made), len(judged)) == (1, 2)


def test_peers_are_timed_on_the_same_inputs(bench: TorchBench) -> None:
    bench.sample(RIGHT, CELL)
    assert bench.sample("fa2", CELL) > 0
    with pytest.raises(NotImplementedError, match="no windows"):
        bench.sample("fa2", Cell(32, "window", 64, tokens=256, hidden=64))


# The backward.


def test_right_gradients_pass_the_gate_with_their_errors(bench: TorchBench) -> None:
    problem = BwdProblem.dense("bf16", 32, 32, "causal")
    found = bench.check(IN_REGISTERS, problem)["errors"]
    assert list(found) == [f"{cell.label} {name}" for cell in gate_cells(problem) for name in Gradients._fields]
    assert all(0 <= worst <= most and 0 <= rms <= least for worst, most, rms, least in found.values())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda found: found.dk[-1, -1].add_(0.5), "error of dk"),
        (lambda found: found.dq[0, 0].fill_(float("nan")), "dq has NaN"),
        (lambda found: found.dv[0, 40].mul_(1 + 1e-2 * (next(RUNS) % 2)), "runs of the same inputs differ"),
    ],
    ids=["wrong at an edge", "leaves memory as it was", "races"],
)
def test_wrong_gradients_are_caught(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch, spoil: SpoilGradients, words: str
) -> None:
    monkeypatch.setattr(cuda_backend, "gate_cells", lambda problem, traits: [BACKWARD])
    use_backward(monkeypatch, spoil)
    with pytest.raises(WrongResult, match=words):
        bench.check(IN_MEMORY, BACKWARD.problem)
    assert bench.usable()


def test_only_sums_in_memory_may_come_out_differently(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "gate_cells", lambda problem, traits: [BACKWARD])
    use_backward(monkeypatch, lambda found: found.dq[0, 40].mul_(1 + 1e-2 * (next(RUNS) % 2)))
    assert bench.check(IN_MEMORY, BACKWARD.problem)
    with pytest.raises(WrongResult, match="runs of the same inputs differ"):
        bench.check(IN_REGISTERS, BACKWARD.problem)


def test_a_backward_that_writes_nothing_is_caught(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.sample(IN_MEMORY, BACKWARD)
    monkeypatch.setattr(BwdTrial, "kernel", lambda trial, traits, target: lambda calls: trial.gradients)
    with pytest.raises(WrongResult, match="dq has NaN"):
        bench.sample(IN_REGISTERS, BACKWARD)


def test_gradients_of_a_head_without_a_reference_are_compared_with_the_first_right_ones(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sample(IN_MEMORY, BACKWARD)
    use_backward(monkeypatch, lambda found: found.dk[1, :, 1].add_(0.5))
    with pytest.raises(WrongResult, match="dk differs from another implementation"):
        bench.sample(IN_REGISTERS, BACKWARD)


def test_peers_backwards_are_timed_on_the_same_inputs(bench: TorchBench) -> None:
    bench.sample(IN_MEMORY, BACKWARD)
    assert bench.sample("fa2", BACKWARD) > 0
    with pytest.raises(NotImplementedError, match="no windows"):
        bench.sample("fa2", dataclasses.replace(BACKWARD, mask="window"))


@pytest.mark.parametrize("traits", [IN_MEMORY, IN_REGISTERS], ids=["sums in memory", "sums in registers"])
def test_a_backward_gets_its_tensors_in_order_and_a_poisoned_workspace(
    traits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(trials, "compiled", lambda *asked: lambda *arguments: given.append((asked, arguments)))
    monkeypatch.setattr(trials, "bwd_scalars", lambda *_: ("scalars",))
    trial = BwdTrial(BACKWARD, CPU, heads=1)
    target = "sm_90a"
    assert trial.kernel(traits, target)(2) is trial.gradients
    (asked, arguments), _ = given
    assert asked[1:] == (traits, BACKWARD.problem, target)
    tensors = BwdTensors(*arguments[:-1])
    forward = trial.inputs.forward
    read = (forward.q, forward.k, forward.v, *trial.saved, trial.inputs.dout)
    assert all(one is other for one, other in zip(tensors, read, strict=False))
    assert tensors.dlse is None and (tensors.dq, tensors.dk, tensors.dv) == tuple(trial.gradients)
    assert tensors.workspace.shape == (traits.workspace(BACKWARD.batch, BACKWARD.heads, BACKWARD.seqlen_q).size,)
    assert bool(tensors.workspace.isnan().all())
    # Candidates share the workspace: at full size one takes a hundredth of a GPU's memory.
    tensors.workspace.zero_()
    trial.kernel(traits, target)(1)
    (*_, (_, arguments)) = given
    assert arguments[:-1][-1].data_ptr() == tensors.workspace.data_ptr() and bool(tensors.workspace.isnan().all())
    # Without a trial's memory it makes its own.
    trials.bwd_runner(traits, target, trial.inputs)(1)
    (*_, (_, arguments)) = given
    own = BwdTensors(*arguments[:-1])
    assert bool(own.workspace.isnan().all() & own.dq.isnan().all()) and torch.equal(own.o, trial.saved.out)


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_what_a_forward_leaves_is_that_of_the_reference(mask: MaskKind) -> None:
    inputs = make_inputs(Cell(32, mask, 70, "fp16", seqlen_q=50, tokens=140, hidden=64), CPU)
    out, lse = saved_forward(inputs)
    expected = flash_attention_2(inputs.q, inputs.k, inputs.v, 32**-0.5, *sides(inputs.cell), 0.0)
    torch.testing.assert_close(out, expected[0], atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(lse, expected[1], atol=1e-4, rtol=1e-4)


def test_nothing_is_compiled_on_the_gpu_machine(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "lookup", lambda *_: None)
    with pytest.raises(LookupError, match="not in the disk cache"):
        bench.check(RIGHT, FwdProblem.dense("bf16", 32, 32))


def test_a_kernel_that_hangs_leaves_a_bench_nobody_can_use(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> torch.Tensor:
        raise HangError("the kernel did not finish within 20 s")

    monkeypatch.setattr(cuda_backend, "first_call", hang)
    with pytest.raises(HangError):
        bench.sample(RIGHT, CELL)
    assert not bench.usable()


def test_without_a_gpu_there_is_no_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="--dry-run and --compile-only work without one"):
        TorchBench("sm_80")


def test_a_sweep_needs_the_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE", "0")
    with pytest.raises(ValueError, match=r"no disk cache.*: CUTEFLASH_CACHE turns it off"):
        cuda_backend.backend("sm_80")
