"""Fixtures of the GPU tests: the device, and the kernel families that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cuteflash import bwd_planning, packed_planning, planning
from cuteflash.traits.arch import FAMILIES, arch_of_capability
from cuteflash.traits.row import Row, Traits
from tests.user_tables import MEASURED, OwnTables


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


class OwnRow:
    """A row that all calls of its operation, family and head dims take."""

    def __init__(self, tables: OwnTables, is_cpu: bool) -> None:
        self.tables = tables
        self.is_cpu = is_cpu
        self.used: list[Traits] = []
        self.planned: list[Traits] = []

    def use(self, traits: Traits, first: Traits | None = None) -> None:
        """Calls from now on take these traits; on a CPU, whose reference has none, only a test of `first` goes on."""
        if self.is_cpu and first not in (None, traits):
            pytest.skip("the first traits of a file are enough on the CPU")
        self.tables.write("sm_90a", traits.family, [MEASURED(Row(traits))], traits.operation)
        self.used.append(traits)


@pytest.fixture
def own_row(
    own_tables: OwnTables, hopper: torch.device, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnRow]:
    """Rows for the test; no kernel of their operation may have had others when it is over."""
    own = OwnRow(own_tables, device.type == "cpu")
    for module in (planning, bwd_planning, packed_planning):
        compiled = module.compiled

        def noted(kernel_cls: type, traits: Traits, *rest: Any, compiled: Any = compiled) -> Any:
            own.planned.append(traits)
            return compiled(kernel_cls, traits, *rest)

        monkeypatch.setattr(module, "compiled", noted)
    yield own
    operations = {traits.operation for traits in own.used}
    planned = {traits for traits in own.planned if traits.operation in operations}
    assert own.is_cpu or planned == set(own.used)


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
