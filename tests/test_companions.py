"""The folders beside `cuteflash/`: commands load their own, in a checkout and installed, whatever lies on the path."""

from __future__ import annotations

import pathlib
import sys

import pytest

from cuteflash import companions
from cuteflash.companions import companion

ROOT = pathlib.Path(__file__).resolve().parent.parent


def make_package(package: pathlib.Path, owner: str) -> None:
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text(f"OWNER = {owner!r}\n")


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory that `cuteflash` seems to lie in; a foreign package `toy_folder` comes first on the path."""
    make_package(tmp_path / "foreign" / "toy_folder", "somebody else")
    monkeypatch.setattr(companions, "ROOT", tmp_path / "ours")
    monkeypatch.syspath_prepend(tmp_path / "ours")
    monkeypatch.syspath_prepend(tmp_path / "foreign")
    for name in ("toy_folder", "toy_folder.part", "cuteflash_toy_folder", "cuteflash_toy_folder.part"):
        monkeypatch.setitem(sys.modules, name, None)  # what a test adds under these names is taken out again
        del sys.modules[name]
    return tmp_path / "ours"


def test_a_checkout_loads_its_own_folder(here: pathlib.Path) -> None:
    make_package(here / "toy_folder", "ours")
    module = companion("toy_folder.part")
    assert (module.__name__, module.OWNER) == ("toy_folder.part", "ours")
    assert companion("toy_folder.part") is module


def test_an_installation_loads_the_name_of_the_wheel(here: pathlib.Path) -> None:
    make_package(here / "toy_folder", "somebody else")  # site-packages is anybody's
    make_package(here / "cuteflash_toy_folder", "ours")
    module = companion("toy_folder.part")
    assert (module.__name__, module.OWNER) == ("cuteflash_toy_folder.part", "ours")


def test_a_foreign_package_that_is_loaded_already_is_not_taken_for_ours(here: pathlib.Path) -> None:
    make_package(here / "toy_folder", "ours")
    __import__("toy_folder")
    with pytest.raises(ImportError, match=r"a package toy_folder that is not .*ours/toy_folder is loaded already"):
        companion("toy_folder.part")


def test_a_folder_that_is_missing_is_named(here: pathlib.Path) -> None:
    with pytest.raises(ImportError, match=r"neither toy_folder/ nor cuteflash_toy_folder/ lies in .*ours"):
        companion("toy_folder.part")


def test_tests_and_commands_load_the_folders_under_one_name() -> None:
    import benchmarks
    import layouts

    assert companion("layouts") is layouts
    assert companion("benchmarks") is benchmarks
