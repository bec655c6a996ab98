"""Data-parallel training with gloo on the CPU: the gradients of two processes are those of one with both batches."""

from __future__ import annotations

import pathlib

import pytest
import torch

from tests.distributed import Wrap, alone, ddp, fsdp, together


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_two_processes_have_the_gradients_of_one(wrap: Wrap, tmp_path: pathlib.Path) -> None:
    torch.testing.assert_close(together("cpu", wrap, tmp_path), alone(torch.device("cpu")), atol=1e-6, rtol=1e-4)
