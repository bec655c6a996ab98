"""The record of machine code: it tells other code from other names, and the comparison's exit status says so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib

import pytest

from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.tables import TABLES
from tests import cubins
from tests.kernel_store import KernelStore
from tests.toy_kernel import ToyKernel

TRAITS = FwdTraitsSm80(64, 64, 64, 64)
PROBLEM = FwdProblem.dense("bf16", 64, 64)
CASE = cubins.Case("sm_80", TRAITS, PROBLEM)


class Renamed(ToyKernel):
    """The same code under another name."""


def test_machine_code_is_the_same_under_another_name(kernels: KernelStore) -> None:
    plain, renamed = (kernels(cls, TRAITS, PROBLEM, "sm_80").cubin for cls in (ToyKernel, Renamed))
    assert plain != renamed
    assert b"" != cubins.machine_code(plain) == cubins.machine_code(renamed)


def test_machine_code_differs_with_the_code(kernels: KernelStore) -> None:
    plain = kernels(ToyKernel, TRAITS, PROBLEM, "sm_80")
    wider = kernels(ToyKernel, dataclasses.replace(TRAITS, tile_n=128), PROBLEM, "sm_80")
    assert cubins.machine_code(plain.cubin) != cubins.machine_code(wider.cubin)


def test_a_cases_hash_is_that_of_its_machine_code(kernels: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "kernel_class", lambda traits: ToyKernel)
    code = cubins.machine_code(kernels(ToyKernel, TRAITS, PROBLEM, "sm_80").cubin)
    assert cubins.code_hash(CASE) == (CASE.name, hashlib.sha256(code).hexdigest()[:16])


def test_a_name_has_only_the_traits_that_are_not_at_their_default() -> None:
    assert CASE.name == "sm_80/sm80 bf16 64x64 full | tile_m=64 tile_n=64 head_dim=64 head_dim_v=64"
    assert "q_in_regs=True" in CASE._replace(traits=dataclasses.replace(TRAITS, q_in_regs=True)).name


def test_every_case_has_a_name_of_its_own() -> None:
    cases = cubins.all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert set(cubins.row_kernels()) <= set(cases)


def test_forwards_and_backwards_of_every_family_are_recorded() -> None:
    recorded = {(case.problem.operation, case.traits.family) for case in cubins.all_cases()}
    assert recorded == {(table.operation, table.family) for table in TABLES}
    hardest, lightest = ({(case.target, case.traits) for case in cubins.row_kernels(one)} for one in (True, False))
    assert hardest == lightest


def test_differences_are_those_of_names_in_both_records() -> None:
    before, after = {"a": "1", "b": "2", "gone": "3"}, {"a": "1", "b": "0", "new": "4"}
    assert cubins.differences(before, after) == ["b"]


@pytest.mark.parametrize(
    ("after", "status", "said"),
    [
        ({"a": "1", "b": "2"}, 0, "2 kernels in both records, 0 with other machine code\n"),
        ({"a": "1", "b": "0"}, 1, "b\n2 kernels in both records, 1 with other machine code\n"),
        ({"a": "1", "c": "2"}, 0, "gone: b\nnew: c\n1 kernels in both records, 0 with other machine code\n"),
    ],
)
def test_the_exit_status_of_a_comparison_says_whether_code_differs(
    after: dict[str, str], status: int, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, record in zip(paths, ({"a": "1", "b": "2"}, after)):
        path.write_text(json.dumps(record))
    assert cubins.main(["compare", *map(str, paths)]) == status
    assert capsys.readouterr().out == said


def test_a_record_holds_the_cases_that_were_asked_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "record", lambda cases, jobs: {case.name: str(jobs) for case in cases})
    path = tmp_path / "record.json"
    assert cubins.main(["record", str(path), "--only", r"sm_80/sm80 .* 64x64", "--jobs", "3"]) == 0
    names = json.loads(path.read_text())
    assert names and set(names.values()) == {"3"}
    assert set(names) == {
        case.name for case in cubins.all_cases() if "sm_80/sm80" in case.name and " 64x64" in case.name
    }
