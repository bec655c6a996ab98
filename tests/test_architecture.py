"""Imports go downward, siblings never meet, files and functions stay small, and importing costs no compiler."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests.architecture import (
    FILE_LINES,
    FUNCTION_LINES,
    PARAMETERS,
    RANKS,
    ROLE_LINES,
    import_violations,
    layer_of,
    load,
    size_violations,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent

# "path[:function]" → why it may be larger than the soft sizes.
SIZE_EXCEPTIONS: dict[str, str] = {
    f"cuteflash/compat/{module}.py:{function}": "its signature is that of another library"
    for module, functions in {
        "flash_attn": (
            "flash_attn_func",
            "flash_attn_kvpacked_func",
            "flash_attn_qkvpacked_func",
            "flash_attn_varlen_func",
            "flash_attn_varlen_kvpacked_func",
            "flash_attn_varlen_qkvpacked_func",
            "flash_attn_with_kvcache",
        ),
        "flash_attn_interface": (
            "flash_attn_func",
            "flash_attn_qkvpacked_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
        ),
        "metadata": ("get_scheduler_metadata",),
        "flash_mla": ("flash_mla_with_kvcache",),
    }.items()
    for function in functions
}


def plant(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """A synthetic package: the empty layers, then `files` (path below cuteflash/ → source)."""
    layers = [name.replace(".", "/") for name in RANKS if name]
    for path, source in ({f"{layer}/__init__.py": "" for layer in layers} | {"__init__.py": ""} | files).items():
        target = root / "cuteflash" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source)
    return root


def test_cuteflash_imports_only_downward() -> None:
    assert import_violations(ROOT) == []


@pytest.mark.parametrize("package", ["cuteflash", "benchmarks", "examples", "layouts"])
def test_files_and_functions_are_small(package: str) -> None:
    exceptions = {key: why for key, why in SIZE_EXCEPTIONS.items() if key.startswith(f"{package}/")}
    assert size_violations(ROOT, package, exceptions) == []


def test_the_walk_sees_the_package() -> None:
    names = {module.name for module in load(ROOT / "cuteflash")}
    assert {"", "problem", "traits.sm80", "traits.sm90"} <= names


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("traits/sm80.py", "from cuteflash.ops import fwd", "upward"),
        ("traits/sm80.py", "from cuteflash.core import mask", "upward"),
        ("traits/sm80.py", "import torch", "standard library"),
        ("problem/extra.py", "def f():\n    import cutlass.cute as cute", "standard library"),
        ("kernels/sm90/fwd.py", "from cuteflash.kernels.sm80 import fwd", "sideways"),
        ("kernels/sm90/fwd.py", "from cuteflash.kernels import sm80", "sideways"),
        ("kernels/sm80/fwd.py", "from ..sm90 import load", "sideways"),
        ("kernels/sm80/fwd.py", "from ...compile import compiled", "upward"),
        ("kernels/common/combine.py", "import cuteflash.kernels.sm80.fwd", "upward"),
        ("core/mask.py", "from cuteflash import api", "upward"),
        ("core/mask.py", "from cuteflash import flash_attn_func", "upward"),
        ("core/mask.py", "import importlib\nm = importlib.import_module('cuteflash.dispatch')", "upward"),
        ("core/mask.py", "from cuteflash.atoms import sm90", "sideways"),
        ("dispatch/rows.py", "import benchmarks.forward", "may not import benchmarks"),
        ("cli/bench.py", "def bench():\n    from benchmarks import forward", "may not import benchmarks"),
        ("tune/plan.py", "from cuteflash.companions import companion", "sideways"),
        ("core/mask.py", "from tests.architecture import load", "may not import tests"),
        ("novelty.py", "", "no layer"),
    ],
)
def test_a_planted_import_is_found(tmp_path: pathlib.Path, path: str, source: str, complaint: str) -> None:
    assert import_violations(plant(tmp_path, {})) == []
    found = import_violations(plant(tmp_path, {path: source + "\n"}))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/fwd.py", "from cuteflash import dispatch\nfrom cuteflash.reference import naive"),
        ("kernels/sm90/fwd.py", "from cuteflash.kernels.sm90 import load\nfrom . import fwd_mma\nimport cutlass"),
        ("kernels/sm80/fwd.py", "from cuteflash.kernels.common.combine import combine"),
        ("cli/bench.py", "from cuteflash.companions import companion"),
        ("__init__.py", "from cuteflash.api import flash_attn_func"),
    ],
)
def test_a_downward_import_is_allowed(tmp_path: pathlib.Path, path: str, source: str) -> None:
    assert import_violations(plant(tmp_path, {path: source + "\n"})) == []


def test_layers_match_by_longest_prefix() -> None:
    assert layer_of("kernels.sm80.fwd") == "kernels.sm80"
    assert layer_of("kernels") == "kernels"
    assert layer_of("") == ""
    assert layer_of("elsewhere.x") is None


def function(lines: int, head: str = "def f(x):") -> str:
    return "\n".join([head, '    """Docstrings are not counted."""', *["    x += 1"] * (lines - 1)]) + "\n"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * (FILE_LINES + 1), "401 lines"),
        (function(FUNCTION_LINES + 1), "f: 61 lines"),
        ("@cute.jit\n" + function(ROLE_LINES + 1), "f: 121 lines"),
        (f"def f({', '.join('abcdefghi')}): ...\n", "f: 9 parameters"),
    ],
)
def test_a_planted_size_is_found_unless_excepted(tmp_path: pathlib.Path, source: str, complaint: str) -> None:
    root = plant(tmp_path, {"core/mask.py": source})
    (found,) = size_violations(root, "cuteflash", {})
    assert complaint in found
    key = found.split(": ")[0]
    assert size_violations(root, "cuteflash", {key: "reason"}) == []
    (stale,) = size_violations(plant(tmp_path, {"core/mask.py": ""}), "cuteflash", {key: "reason"})
    assert "no reason any more" in stale


@pytest.mark.parametrize(
    "source",
    [
        function(FUNCTION_LINES),
        "@cute.kernel\n" + function(ROLE_LINES),
        f"class C:\n    def f(self, {', '.join('abcdefgh')}, *, more, keywords): ...\n",
    ],
)
def test_sizes_at_the_limit_pass(tmp_path: pathlib.Path, source: str) -> None:
    assert PARAMETERS == 8
    assert size_violations(plant(tmp_path, {"core/mask.py": source}), "cuteflash", {}) == []


def test_no_test_asserts_a_time() -> None:
    clock = re.compile(r"\b(time\.(time|monotonic|perf_counter|process_time)|performance\.now|getEntriesByType)\b")
    tests = (ROOT / "tests").rglob("test_*.py")
    found = [f"{path.name}: {match[0]}" for path in tests for match in clock.finditer(path.read_text())]
    assert [entry for entry in found if not entry.startswith("test_architecture.py")] == []


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, cuteflash, cuteflash.dispatch; print({'cutlass', 'tvm_ffi'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
