"""Sweeps of rows that split keys: the shipped rows pass the gate and are timed, with real split launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuteflash.compile import build
from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.tune.cells import Cell
from cuteflash.tune.cuda_backend import TorchBench
from cuteflash.tune.operations import FORMS, Form
from cuteflash.tune.trials import FwdTrial, split_arguments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_shipped_row_passes_the_gate_and_is_timed(form: Form, mask: Any, hopper_gpu: torch.device) -> None:
    size: dict[str, Any] = {"tokens": 3 * 4096, "hidden": 8 * 128, "group": 4, "seqlen_q": 2}
    cell = Cell(128, mask, 4096, form=form, **size)
    traits = choose_shipped(cell.problem, "sm_90a", "sm90", "decode").traits
    build(kernel_class(traits), traits, cell.problem, "sm_90a")
    bench = TorchBench("sm_90a", hopper_gpu)
    errors = bench.check(traits, cell.problem)["errors"]
    assert all(worst <= most and rms <= least for worst, most, rms, least in errors.values())
    assert bench.sample(traits, cell) > 0
    trial = FwdTrial(cell, hopper_gpu, heads=2)
    partials, arrivals, most_parts, lanes = split_arguments(traits, trial.inputs)
    assert partials.isnan().all() and not arrivals.any() and most_parts >= 2 and lanes in (1, 2)
    result = trial.kernel(traits, "sm_90a")(1)
    assert trial.complaint(result, None) is None
