"""What a wheel installs, and what a source distribution holds."""

from __future__ import annotations

import pathlib
import subprocess
import tomllib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_wheel_installs_names_of_ours_alone(setup_arguments: dict[str, Any]) -> None:
    names = [name.split(".") for name in setup_arguments["packages"]]
    assert {top for top, *_ in names} == {"cuteflash", "cuteflash_layouts", "cuteflash_benchmarks"}
    assert setup_arguments["py_modules"] == ["cuteflash_command"]
    found = {ROOT.joinpath(setup_arguments["package_dir"].get(top, top), *rest) for top, *rest in names}
    tops = ("cuteflash", "layouts", "benchmarks")
    assert found == {path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")}


def test_a_wheel_has_the_files_beside_the_modules(setup_arguments: dict[str, Any]) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {name: setup_arguments["package_dir"].get(name, name.replace(".", "/")) for name in settings}
    found = {path for name, globs in settings.items() for glob in globs for path in (ROOT / folders[name]).glob(glob)}
    tops = (ROOT / top for top in ("cuteflash", "layouts"))
    assert found == {
        path for top in tops for path in top.rglob("*") if path.suffix in (".js", ".css", ".html", ".typed")
    }


def test_a_source_distribution_holds_what_the_repository_holds() -> None:
    filelist = pytest.importorskip("setuptools._distutils.filelist")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no repository")
    files = filelist.FileList()
    files.allfiles = listed.stdout.splitlines()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            files.process_template_line(line)
    by_themselves = {"LICENSE", "MANIFEST.in", "README.md", "cuteflash_command.py", "pyproject.toml", "setup.py"}
    missing = set(files.allfiles) - set(files.files) - by_themselves
    assert [path for path in missing if not path.startswith("cuteflash/")] == []  # packages are held, with their data
