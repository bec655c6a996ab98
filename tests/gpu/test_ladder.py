"""Every rung of the ablation ladder computes attention: an optimisation switched off is slower, never wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks import backward_ladder, decode_ladder
from benchmarks.backward_ladder import BackwardLadder
from benchmarks.decode_ladder import DecodeLadder, decode_cell, latent_cell
from benchmarks.judges import GradientJudge
from benchmarks.ladder import LADDERS, Ladder
from cuteflash.problem import MaskKind
from cuteflash.traits.arch import arch_of_capability
from cuteflash.tune import accuracy
from cuteflash.tune.cells import Cell, make_inputs
from cuteflash.tune.timing import first_call
from cuteflash.tune.trials import bwd_runner, fwd_runner

pytestmark = pytest.mark.gpu

RUNGS = [(item, rung.title) for item in LADDERS for rung in item.rungs[:-1]]


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(("steps", "title"), RUNGS, ids=[f"{item.family}-{title}" for item, title in RUNGS])
def test_a_rung_is_right(steps: Ladder, title: str, mask: MaskKind, cuda: torch.device) -> None:
    arch = arch_of_capability(*torch.cuda.get_device_capability(cuda))
    if steps.family not in arch.families:
        pytest.skip(f"{arch.name} does not run the {steps.family} family")
    cell = Cell(128, mask, 1363, seqlen_q=1111, tokens=2 * 1363, hidden=256)
    inputs = make_inputs(cell, cuda)
    traits = steps.variants(cell, arch.name)[title].traits(cell)
    out = first_call(fwd_runner(traits, arch.name, inputs), cuda)
    reference = accuracy.make_reference(inputs, cell.batch * cell.heads)
    assert accuracy.complaint(out, reference, None) is None


BACKWARD_RUNGS = [(item, rung.title) for item in backward_ladder.LADDERS for rung in item.rungs[:-1]]


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize(
    ("steps", "title"), BACKWARD_RUNGS, ids=[f"{item.name}-{title}" for item, title in BACKWARD_RUNGS]
)
def test_a_rung_of_the_backward_is_right(steps: BackwardLadder, title: str, mask: MaskKind, cuda: torch.device) -> None:
    arch = arch_of_capability(*torch.cuda.get_device_capability(cuda))
    if steps.family not in arch.families:
        pytest.skip(f"{arch.name} does not run the {steps.family} family")
    head_dim = 256 if "two passes" in steps.name else 128
    cell = Cell(head_dim, mask, 1363, seqlen_q=1111, tokens=2 * 1363, hidden=256)
    judge = GradientJudge.of(cell, cuda)
    run = bwd_runner(steps.traits(cell, arch.name)[title], arch.name, judge.inputs)
    assert judge.complaint(first_call(run, cuda), None) is None


DECODE_CELLS = {"decoding": (decode_cell(3, 1363),), "latents": (latent_cell(3, 777, 16), latent_cell(3, 777, 128))}
DECODE_RUNGS = [(item, rung["title"]) for item in decode_ladder.LADDERS for rung in item.told()]


@pytest.mark.parametrize(("steps", "title"), DECODE_RUNGS, ids=[f"{item.name}-{title}" for item, title in DECODE_RUNGS])
def test_a_rung_of_decoding_is_right(steps: DecodeLadder, title: str, cuda: torch.device) -> None:
    arch = arch_of_capability(*torch.cuda.get_device_capability(cuda))
    if steps.family not in arch.families:
        pytest.skip(f"{arch.name} does not run the {steps.family} family")
    cells = DECODE_CELLS[steps.name.split()[1]]
    cell = next((one for one in cells if steps.serves(one, arch.name)), None)
    if cell is None:
        pytest.skip(f"{arch.name} runs other kernels")
    judge = steps.judge(cell, cuda)
    out = first_call(steps.makers(cell, arch.name)[title](judge.inputs), cuda)
    assert judge.complaint(out, None) is judge.imprecision(out) is None
