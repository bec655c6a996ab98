"""The real bench on the CPU, where torch stands in for a kernel: what it lets through and what it blames."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuteflash.problem import MASK_KINDS, FwdProblem, MaskKind
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.tune import cuda_backend
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.cuda_backend import TorchBench, WrongResult, gate_cells
from cuteflash.tune.timing import HangError, Runner

CPU = torch.device("cpu")
CELL = Cell(32, "causal", 64, tokens=256, hidden=64)
RIGHT, OTHER = FwdTraitsSm80(64, 64, 32, 32), FwdTraitsSm80(128, 64, 32, 32)
Spoil = Callable[[torch.Tensor], Any]


def attention(spoil: Spoil, traits: object, inputs: Inputs, target: str, out: torch.Tensor) -> Runner:
    """A kernel that is right but for what `spoil` does to its output."""

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            left, right = (-1 if side >= 1 << 30 else side for side in inputs.cell.window)
            scale = inputs.cell.head_dim**-0.5
            out.copy_(flash_attention_2(inputs.q, inputs.k, inputs.v, scale, left, right, 0.0)[0])
            spoil(out)
        return out

    return run


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> TorchBench:
    monkeypatch.setattr(cuda_backend, "lookup", lambda *_: "a report")
    use(monkeypatch, lambda out: None)
    return TorchBench("sm_80", CPU)


def use(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    replace(monkeypatch, runner=functools.partial(attention, spoil))


def replace(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Puts other functions in the place of the forward's."""
    monkeypatch.setitem(cuda_backend.TRIALS, "fwd", dataclasses.replace(cuda_backend.TRIALS["fwd"], **functions))


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_a_right_kernel_passes_the_gate_with_its_errors(bench: TorchBench, mask: MaskKind) -> None:
    found = bench.check(RIGHT, FwdProblem.dense("bf16", 32, 32, mask))["errors"]
    assert list(found) == [cell.label for cell in gate_cells(FwdProblem.dense("bf16", 32, 32, mask))]
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
    replace(monkeypatch, runner=lambda traits, inputs, target, out: lambda calls: out)
    with pytest.raises(WrongResult, match="NaN"):
        bench.sample(OTHER, CELL)


def test_a_head_without_a_reference_is_compared_with_the_first_right_output(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sample(RIGHT, CELL)
    use(monkeypatch, lambda out: out[1, :, 1].add_(0.5))
    with pytest.raises(WrongResult, match="differs from another implementation"):
        bench.sample(OTHER, CELL)


def weights_beyond_one(traits: object, inputs: Inputs, target: str, out: torch.Tensor) -> Runner:
    """A kernel that subtracts a number from the scores in place of their maximum: weights are rounded that torch's
    are not."""

    def run(calls: int) -> torch.Tensor:
        q, k, v = (tensor.float().transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
        weights = torch.exp(q @ k.transpose(2, 3) * inputs.cell.head_dim**-0.5 - 3)
        rounded = weights.to(inputs.q.dtype).float()
        return out.copy_((rounded @ v / weights.sum(-1, keepdim=True)).transpose(1, 2))

    return run


def test_a_kernel_that_is_imprecise_with_sinks_alone_is_caught(
    bench: TorchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, runner=weights_beyond_one)
    with pytest.raises(WrongResult, match=r"sink:30: rms error .* times torch's own"):
        bench.check(RIGHT, FwdProblem.dense("bf16", 32, 32))
    plain = Cell(32, "full", 64, tokens=256, hidden=64)
    assert bench.sample(RIGHT, plain) > 0
    with pytest.raises(WrongResult, match="sink:30: rms error"):
        bench.sample(RIGHT, Cell(32, "full", 64, tokens=256, hidden=64, inputs="sink:30"))


def test_samples_share_a_cells_inputs_and_judge_once(bench: TorchBench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, judged = [], []
    replace(monkeypatch, inputs=lambda *a: made.append(a) or make_inputs(*a))
    complaint = cuda_backend.accuracy.complaint
    monkeypatch.setattr(cuda_backend.accuracy, "complaint", lambda *a: judged.append(a) or complaint(*a))
    assert all(bench.sample(traits, CELL) > 0 for traits in (RIGHT, OTHER, RIGHT, OTHER))
    assert (len(made), len(judged)) == (1, 2)


def test_peers_are_timed_on_the_same_inputs(bench: TorchBench) -> None:
    bench.sample(RIGHT, CELL)
    assert bench.sample("fa2", CELL) > 0
    with pytest.raises(NotImplementedError, match="no windows"):
        bench.sample("fa2", Cell(32, "window", 64, tokens=256, hidden=64))


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
