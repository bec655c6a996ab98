"""Hints name a command that works from where this cuteflash came from."""

from __future__ import annotations

import importlib.metadata
import pathlib
import shlex
import tomllib

import pytest

from cuteflash import install

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_checkout_is_installed_with_the_extra() -> None:
    command = install.how_to_install("demo").removeprefix("install it with: ")
    assert shlex.split(command) == ["pip", "install", "-e", f"{ROOT}[demo]"]


def test_a_wheel_needs_the_packages_of_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = [f"{one}; extra == '{extra}'" for extra, packages in extras.items() for one in packages]
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.11", *known])
    command = install.how_to_install("layouts").removeprefix("install it with: ")
    assert set(shlex.split(command)) == {"pip", "install", "numpy>=2", "pillow>=11", *extras["cli"]}
