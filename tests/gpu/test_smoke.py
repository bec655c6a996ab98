"""First light: the few cases to run on a new kernel or device before anything else."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import gradients
from tests.gpu.checks import Case, check

pytestmark = [pytest.mark.gpu, pytest.mark.smoke]

CASES = [
    Case(128, head_dim=64, batch=1, heads=1),
    Case(128, head_dim=128, batch=1, heads=1),
    Case(113, 203, head_dim=64),
    Case(113, 203, head_dim=64, causal=True),
    Case(640, head_dim=128, causal=True),
    Case(256, 512, head_dim=128, dtype="fp16"),
    Case(300, head_dim=256, causal=True),
    Case(200, 333, head_dim=64, window=(30, 20)),
    Case(160, head_dim=64, heads=8, kv_heads=2, causal=True),
    Case(160, head_dim=64, causal=True, lse=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_light(case: Case, family: str, device: torch.device) -> None:
    check(case, family, device)


BACKWARD_CASES = [
    Case(128, head_dim=64, batch=1, heads=1),
    Case(128, head_dim=128, batch=1, heads=1),
    Case(113, 203, head_dim=64, causal=True),
    Case(640, head_dim=128, causal=True),
    Case(300, head_dim=256, causal=True),
    Case(200, 333, head_dim=64, window=(30, 20)),
    Case(160, head_dim=64, heads=8, kv_heads=2, lse=True),
]


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
def test_first_light_of_the_backward(case: Case, family: str, device: torch.device) -> None:
    gradients.check(case, family, device)
