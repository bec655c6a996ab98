"""Sweeps of few queries: the shipped rows pass the gate and are timed, with real split launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuteflash.compile import build
from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.tune.cells import Cell
from cuteflash.tune.cuda_backend import TorchBench
from cuteflash.tune.operations import Form
from cuteflash.tune.trials import FwdTrial, MlaTrial, split_arguments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["decode", "cache"])
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


@pytest.mark.parametrize("queries", [1, 3])
def test_a_row_of_few_query_rows_passes_the_gate_and_is_timed(queries: int, hopper_gpu: torch.device) -> None:
    size: dict[str, Any] = {"tokens": 3 * 4096, "hidden": 8 * 128, "group": 4, "seqlen_q": queries}
    cell = Cell(128, "full", 4096, form="cache", **size)
    traits = choose_shipped(cell.problem, "sm_90a", "sm90", "decode", cell.query_rows).traits
    assert isinstance(traits, FwdTraitsFewSm90) and traits.tile_m == (8 if queries == 1 else 16)
    build(kernel_class(traits), traits, cell.problem, "sm_90a")
    bench = TorchBench("sm_90a", hopper_gpu)
    errors = bench.check(traits, cell.problem)["errors"]
    assert errors and all(worst <= most and rms <= least for worst, most, rms, least in errors.values())
    assert bench.sample(traits, cell) > 0


@pytest.mark.parametrize(("family", "heads"), [("sm90", 16), ("sm90", 128), ("sm80", 16)])
def test_a_row_of_latent_attention_passes_the_gate_and_is_timed(
    family: Any, heads: int, hopper_gpu: torch.device
) -> None:
    size: dict[str, Any] = {"tokens": 3 * 4096, "hidden": heads * 576, "seqlen_q": 1}
    cell = Cell(576, "full", 4096, head_dim_v=512, form="mla", operation="mla", **size)
    traits = choose_shipped(cell.problem, "sm_90a", family, "decode", cell.query_rows).traits
    build(kernel_class(traits), traits, cell.problem, "sm_90a")
    bench = TorchBench("sm_90a", hopper_gpu)
    errors = bench.check(traits, cell.problem)["errors"]
    assert errors and all(worst <= most and rms <= least for worst, most, rms, least in errors.values())
    assert bench.sample(traits, cell) > 0
    trial = MlaTrial(cell, hopper_gpu, heads=2)
    assert trial.complaint(trial.kernel(traits, "sm_90a")(1), None) is None
