"""The kernels of a run: each compiled once, whichever test or process asks first, or known by the record."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import types
from typing import Any

import pytest

from cuteflash.compile.cache import key_digest
from cuteflash.compile.key import cache_key
from cuteflash.compile.resources import Resources
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80
from tests import cross_compile, kernel_record
from tests.cross_compile import Compiled
from tests.kernel_record import SAMPLE, Kernel, Record, write_part
from tests.kernel_store import KernelStore
from tests.slow import slow_but
from tests.toy_kernel import ToyKernel

TRAITS = FwdTraitsSm80(64, 64, 64, 64)
REQUEST = (ToyKernel, TRAITS, FwdProblem.dense("bf16", 64, 64), "sm_80")


def store(root: pathlib.Path, **facts: Any) -> KernelStore:
    """A store in `root`; its record knows so much of the request."""
    record = Record(root / "no.json")
    if facts:
        record.known[key_digest(cache_key(*REQUEST))] = facts
    return KernelStore(root / "kernels", record)


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
    first, second = store(tmp_path), store(tmp_path)  # what two processes have
    compiled = first(*REQUEST)
    assert first(*REQUEST) is compiled
    assert compiled.folder == second(*REQUEST).folder
    assert compilations == ["sm_80"]
    assert ".target sm_80" in compiled.ptx and compiled.count("STG") and compiled.resources.registers
    compiled.assert_clean()


def test_another_kernel_is_not_taken_for_it(tmp_path: pathlib.Path, compilations: list[str]) -> None:
    kernels = store(tmp_path)
    plain, other = kernels(*REQUEST), kernels(*REQUEST[:-1], "sm_90a")
    wider = kernels(ToyKernel, dataclasses.replace(TRAITS, tile_n=128), *REQUEST[2:])
    assert len({compiled.folder for compiled in (plain, other, wider)}) == 3
    assert compilations == ["sm_80", "sm_90a", "sm_80"]


def test_a_kernel_that_does_not_compile_is_tried_again(
    tmp_path: pathlib.Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = cross_compile.cross_compile

    def broken(kernel: Any, target: str, folder: pathlib.Path) -> Compiled:
        watched(kernel, target, folder)
        raise RuntimeError("no such instruction")

    kernels = store(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(cross_compile, "cross_compile", broken)
        with pytest.raises(RuntimeError, match="no such instruction"):
            _ = kernels(*REQUEST).resources
    assert kernels(*REQUEST).resources.registers
    assert compilations == ["sm_80", "sm_80"]


RESOURCES = [40, 0, 0, 0, ["(C1) slow"]]
KNOWN: dict[str, Any] = {
    "resources": RESOURCES,
    "count LDL": 3,
    "found \\.target (\\w+)": ["sm_10"],
    "times \\.target before .version": 2,
}


def test_what_the_record_knows_is_not_compiled(
    tmp_path: pathlib.Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "is_sample", False)
    kernel = store(tmp_path, **KNOWN)(*REQUEST)
    assert kernel.resources == Resources(40, 0, 0, 0, ("(C1) slow",)) and kernel.count("LDL") == 3
    assert kernel.found(r"\.target (\w+)") == ("sm_10",) and kernel.times(r"\.target", before=".version") == 2
    for check in (kernel.assert_no_complaint, kernel.assert_clean):
        with pytest.raises(AssertionError):
            check()
    assert compilations == [] and kernel.facts == KNOWN
    assert kernel.found(r"\.target sm_\d+") == (".target sm_80",) and ".target sm_80" in kernel.ptx
    assert kernel.count("LDL") == 3 and compilations == ["sm_80"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_kernel_of_the_sample_is_compared(
    tmp_path: pathlib.Path, name: str, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "is_sample", True)
    kernel = store(tmp_path, **{name: KNOWN[name]})(*REQUEST)
    with pytest.raises(AssertionError, match=r"kernels.json says .*, the compiler"):
        kernel.assert_clean()
        kernel.found(r"\.target (\w+)")
        kernel.times(r"\.target", before=".version")
    numbers = [[*kernel_numbers(kernel), []], 0, ["sm_80"], 0]
    truth = dict(zip(KNOWN, numbers, strict=True))
    kernel = store(tmp_path, **{name: truth[name]})(*REQUEST)
    kernel.assert_clean()
    assert kernel.found(r"\.target (\w+)") == ("sm_80",) and kernel.times(r"\.target", before=".version") == 0
    assert kernel.times(r"\.target") == 1 and compilations == ["sm_80"]


def kernel_numbers(kernel: Kernel) -> list[int]:
    """Registers and bytes that the compiler says."""
    return list(dataclasses.astuple(kernel.compiled.resources)[:4])


def test_a_digest_says_whether_a_kernel_is_of_the_sample() -> None:
    digests = [hashlib.sha256(bytes([i, j])).hexdigest() for i in range(40) for j in range(40)]
    chosen = sum(Kernel(digest, {}, nothing).is_sample for digest in digests)
    assert abs(chosen - len(digests) / SAMPLE) < 25


def nothing() -> Any:
    raise AssertionError("compiled")


def test_a_record_is_what_the_processes_of_a_run_know(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {1: {"a": {"count LDL": 0}, "b": {}}, 2: {"a": {"count STL": 1}, "c": {"resources": RESOURCES}}}
    for process, kernels in parts.items():
        monkeypatch.setattr(kernel_record.os, "getpid", lambda process=process: process)
        write_part(tmp_path, {digest: types.SimpleNamespace(facts=facts) for digest, facts in kernels.items()})
    path = tmp_path / "record.json"
    kernel_record.write(path, tmp_path)
    assert Record(path).known == {"a": {"count LDL": 0, "count STL": 1}, "c": {"resources": RESOURCES}}
    assert len(path.read_text().splitlines()) == 2 + 2
    monkeypatch.setattr(kernel_record, "readers", lambda: "others")
    assert Record(path).known == {}


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
