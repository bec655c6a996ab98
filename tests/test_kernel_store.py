"""The kernels of a run: each compiled once, whichever test or process asks first, and never taken from elsewhere."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80
from tests import cross_compile
from tests.cross_compile import Compiled, KernelStore
from tests.slow import slow_but
from tests.toy_kernel import ToyKernel

TRAITS = FwdTraitsSm80(64, 64, 64, 64)
REQUEST = (ToyKernel, TRAITS, FwdProblem.dense("bf16", 64, 64), "sm_80")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of what is compiled."""
    real, targets = cross_compile.cross_compile, []

    def watched(kernel: Any, target: str, folder: pathlib.Path) -> Compiled:
        targets.append(target)
        return real(kernel, target, folder)

    monkeypatch.setattr(cross_compile, "cross_compile", watched)
    return targets


def test_a_kernel_is_compiled_once_for_all_processes_of_a_run(tmp_path: pathlib.Path, compilations: list[str]) -> None:
    first, second = KernelStore(tmp_path), KernelStore(tmp_path)  # what two processes have
    compiled = first(*REQUEST)
    assert first(*REQUEST) is compiled
    assert second(*REQUEST) == compiled
    assert compilations == ["sm_80"]
    assert ".target sm_80" in compiled.ptx and compiled.count("STG") and compiled.resources.registers
    compiled.assert_clean()


def test_another_kernel_is_not_taken_for_it(tmp_path: pathlib.Path, compilations: list[str]) -> None:
    store = KernelStore(tmp_path)
    plain, other = store(*REQUEST), store(*REQUEST[:-1], "sm_90a")
    wider = store(ToyKernel, dataclasses.replace(TRAITS, tile_n=128), *REQUEST[2:])
    assert compilations == ["sm_80", "sm_90a", "sm_80"]
    assert len({compiled.folder for compiled in (plain, other, wider)}) == 3


def test_a_kernel_that_does_not_compile_is_tried_again(
    tmp_path: pathlib.Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = cross_compile.cross_compile

    def broken(kernel: Any, target: str, folder: pathlib.Path) -> Compiled:
        watched(kernel, target, folder)
        raise RuntimeError("no such instruction")

    store = KernelStore(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(cross_compile, "cross_compile", broken)
        with pytest.raises(RuntimeError, match="no such instruction"):
            store(*REQUEST)
    assert store(*REQUEST).resources.registers
    assert compilations == ["sm_80", "sm_80"]


def test_every_process_of_a_run_has_the_same_store(
    kernels: KernelStore, run_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert kernels.root.parent == run_directory
    assert run_directory in tmp_path.parents and not run_directory.name.startswith("popen-")


def test_all_parameters_but_some_are_slow() -> None:
    slow, quick = slow_but(["a", "b"], "b")
    assert quick == "b"
    assert slow.values == ("a",) and [mark.name for mark in slow.marks] == ["slow"]
    with pytest.raises(ValueError, match=r"quick is \('c',\); allowed: a, b"):
        slow_but(["a", "b"], "c")
