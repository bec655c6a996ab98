"""The compile key: all that decides machine code, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import pytest

from cuteflash.compile.cache import key_digest
from cuteflash.compile.imports import files_imported_by
from cuteflash.compile.key import PACKAGE, cache_key, source_fingerprint
from cuteflash.dispatch import KERNELS, kernel_modules
from cuteflash.problem import FwdProblem, Storage
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import KINDS
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from tests.slow_kernels import WgmmaKernel
from tests.toy_kernel import ToyKernel

PROBLEM = FwdProblem.dense("bf16", 64, 64)
TRAITS = FwdTraitsSm80(64, 64, 64, 64)
REQUEST = (ToyKernel, TRAITS, PROBLEM, "sm_80")


def another(value: int | bool) -> int | bool:
    """A different value of the same type, within what the traits allow."""
    return not value if isinstance(value, bool) else value + 8


def digest(traits: object, problem: object) -> str:
    return key_digest(cache_key(ToyKernel, traits, problem, "sm_80"))


@pytest.mark.parametrize("traits", [TRAITS, FwdTraitsSm90(128, 128, 128, 128)], ids=["sm80", "sm90"])
def test_every_field_of_the_traits_is_part_of_the_key(traits: FwdTraitsSm80 | FwdTraitsSm90) -> None:
    fields = {field.name: getattr(traits, field.name) for field in dataclasses.fields(traits)}
    changed = [dataclasses.replace(traits, **{name: another(value)}) for name, value in fields.items()]
    assert len({digest(value, PROBLEM) for value in (traits, *changed)}) == len(fields) + 1


def test_every_part_of_a_problem_is_part_of_the_key() -> None:
    problems = [
        PROBLEM,
        FwdProblem.dense("fp16", 64, 64),
        FwdProblem.dense("bf16", 72, 64),
        FwdProblem.dense("bf16", 64, 72),
        FwdProblem.dense("bf16", 64, 64, "causal"),
        FwdProblem.dense("bf16", 64, 64, softcap=True),
        FwdProblem.dense("bf16", 64, 64, lse=True),
        PROBLEM.packed(4),
        dataclasses.replace(PROBLEM, storage=Storage("varlen", "dense")),
        dataclasses.replace(PROBLEM, storage=Storage("dense", "varlen")),
        dataclasses.replace(PROBLEM, storage=Storage(used_q=True)),
        dataclasses.replace(PROBLEM, storage=Storage(used_k=True)),
    ]
    assert len({digest(TRAITS, problem) for problem in problems}) == len(problems)


@pytest.mark.parametrize("traits", [TRAITS, FwdTraitsSm90(128, 128, 128, 128), MlaTraitsSm90()])
def test_a_key_comes_out_of_a_file_as_it_went_in(traits: object) -> None:
    key = cache_key(ToyKernel, traits, PROBLEM, "sm_80")
    assert json.loads(json.dumps(key)) == key


def test_kernel_and_target_are_part_of_the_key() -> None:
    requests = [(ToyKernel, "sm_80"), (ToyKernel, "sm_86"), (WgmmaKernel, "sm_80")]
    digests = {key_digest(cache_key(kernel, TRAITS, PROBLEM, target)) for kernel, target in requests}
    assert len(digests) == len(requests)


def test_a_setting_that_changes_code_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key(*REQUEST)
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "1")
    assert cache_key(*REQUEST) == before
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert cache_key(*REQUEST) != before


# A package as ours is: a kernel that imports in every way there is, and what it has nothing to do with.
SYNTHETIC = {
    "__init__.py": "from made_up.api import call",
    "api.py": "",
    "problem.py": "",
    "rows.py": "from made_up.kernels.fwd import Kernel",
    "core/__init__.py": "",
    "core/mask.py": "from made_up.core.convert import rounded",
    "core/convert.py": "import made_up.core.softmax",
    "core/softmax.py": "",
    "core/late.py": "",
    "core/named.py": "",
    "core/dropout.py": "",
    "kernels/__init__.py": "",
    "kernels/fwd.py": """
import numpy
from made_up import problem
from made_up.core import mask
from .roles import load as load_tile
def kernel():
    from made_up.core.late import something
    importlib.import_module("made_up.core.named")
""",
    "kernels/roles.py": "from ..core.mask import Mask",
    "kernels/bwd.py": "from made_up.core import mask, dropout",
}
IMPORTED = [
    "core/__init__.py", "core/convert.py", "core/late.py", "core/mask.py", "core/named.py", "core/softmax.py",
    "kernels/__init__.py", "kernels/fwd.py", "kernels/roles.py", "problem.py",
]  # fmt: skip
FORWARD = ("made_up.kernels.fwd",)


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, source in SYNTHETIC.items():
        path = tmp_path / "made_up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "made_up"


def fingerprint(package: pathlib.Path, modules: tuple[str, ...] = FORWARD) -> str:
    return source_fingerprint.__wrapped__(modules, package)


def test_what_a_kernel_imports_is_found_however_it_does(package: pathlib.Path) -> None:
    assert [path.relative_to(package).as_posix() for path in files_imported_by(FORWARD, package)] == IMPORTED


@pytest.mark.parametrize("path", SYNTHETIC)
def test_an_edit_changes_the_key_of_the_kernels_that_import_it(package: pathlib.Path, path: str) -> None:
    before = fingerprint(package)
    (package / path).write_text(SYNTHETIC[path] + "\n# changed\n")
    assert (fingerprint(package) != before) == (path in IMPORTED)


def test_a_renamed_or_new_import_changes_the_key(package: pathlib.Path) -> None:
    prints = [fingerprint(package)]
    (package / "core" / "softmax.py").rename(package / "core" / "softmax2.py")
    (package / "core" / "convert.py").write_text("import made_up.core.softmax2")
    prints.append(fingerprint(package))
    (package / "core" / "softmax2.py").write_text("from made_up.core import dropout")
    prints.append(fingerprint(package))
    assert len(set(prints)) == 3


def test_a_package_that_is_imported_by_name_counts_with_its_own_file(package: pathlib.Path) -> None:
    (package / "problem.py").write_text("from made_up import call")
    assert {package / "__init__.py", package / "api.py"} <= set(files_imported_by(FORWARD, package))


def test_modules_of_which_the_kernel_imports_none_count_if_they_are_named(package: pathlib.Path) -> None:
    assert fingerprint(package, (*FORWARD, "made_up.rows")) != fingerprint(package)


def test_a_kernel_outside_the_package_counts_with_its_own_file_and_what_that_imports(
    package: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outside.py"
    module = type(sys)("outside")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "outside", module)
    prints = []
    for source, imported in (
        ("", ""),
        ("x = 1", ""),
        ("import made_up.core.late", ""),
        ("import made_up.core.late", "#"),
    ):
        path.write_text(source)
        (package / "core" / "late.py").write_text(imported)
        prints.append(fingerprint(package, ("outside",)))
    assert len(set(prints)) == 4


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_kernels_sources(family: str) -> None:
    module, _ = KERNELS[KINDS[f"fwd_{family}"]]
    names = {path.relative_to(PACKAGE).as_posix() for path in files_imported_by([module], PACKAGE)}
    other = {"sm80": "sm90", "sm90": "sm80"}[family]
    assert {"problem.py", "arguments.py", "core/mask.py", "core/signature.py", "core/softmax.py"} <= names
    assert {f"{folder}/{family}.py" for folder in ("traits", "atoms")} <= names
    assert {f"kernels/{family}/{name}.py" for name in ("__init__", "fwd", "fwd_mma", "load", "epilogue")} <= names
    assert not [name for name in names if other in name]
    assert not names & {"__init__.py", "dispatch.py", "planning.py", "validate.py", "traits/row.py", "traits/tables.py"}
    assert not [name for name in names if name.startswith(("traits/rows_", "compile/", "tune/"))]


def test_traits_and_problem_count_with_their_own_files() -> None:
    toy = cache_key(*REQUEST)["source"]  # whose file imports neither
    assert toy != source_fingerprint((ToyKernel.__module__,))
    assert toy != cache_key(ToyKernel, FwdTraitsSm90(64, 64, 64, 64), PROBLEM, "sm_80")["source"]


def test_a_kernel_that_no_file_defines_has_a_key() -> None:
    assert cache_key(type("Typed", (), {"__module__": "no_file"}), TRAITS, PROBLEM, "sm_80")["source"]


def test_the_kernels_of_an_operation() -> None:
    modules = (f"cuteflash.kernels.{name}" for name in ("sm80.fwd", "sm90.fwd", "sm90.few"))
    assert kernel_modules("fwd") == tuple(modules)
