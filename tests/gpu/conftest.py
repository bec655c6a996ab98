"""Fixtures of the GPU tests: the device, and the kernel families that it runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cuteflash.traits.arch import FAMILIES, arch_of_capability


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """`--device`: cuda, or cpu to run the same specifications on the reference."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, for what only CUDA has."""
    if device.type != "cuda":
        pytest.skip("about CUDA itself")
    return device


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    """The device, if it has 8-bit products or is a CPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("8-bit operands need a Hopper")
    return device


@pytest.fixture
def hopper_gpu(cuda: torch.device, hopper: torch.device) -> torch.device:
    """The device, for what only CUDA has, if it has 8-bit products."""
    return hopper


@pytest.fixture(params=sorted(FAMILIES, reverse=True))
def family(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Each kernel family; those that the device does not run are skipped."""
    if device.type == "cuda":
        arch = arch_of_capability(*torch.cuda.get_device_capability(device))
        if request.param not in arch.families:
            pytest.skip(f"{arch.name} does not run the {request.param} family")
    elif request.param != FAMILIES[0]:
        pytest.skip("one family is enough on the CPU, which has none")
    return str(request.param)


@pytest.fixture(autouse=True)
def exact_matmul() -> Iterator[None]:
    """References in true fp32: no TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
