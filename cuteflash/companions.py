"""The folders beside `cuteflash/` that its commands run: `layouts/` and `benchmarks/`.

In a checkout, an unpacked source distribution or an editable installation they are packages of these names. A wheel
installs them as `cuteflash_layouts` and `cuteflash_benchmarks` (see setup.py), since other wheels may bring packages
of the plain names. Either way a command gets those that belong to this `cuteflash`, whatever else is on `sys.path`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType

ROOT = pathlib.Path(__file__).parents[1]


def companion(name: str) -> ModuleType:
    """A module of `layouts` or `benchmarks`, e.g. "layouts.command", by its name in a checkout.

    Raises:
        ImportError: it is not installed, or another package of its name in a checkout is loaded already.
    """
    top = name.partition(".")[0]
    if (ROOT / f"cuteflash_{top}").is_dir():
        return importlib.import_module(f"cuteflash_{name}")
    _load(top)
    return importlib.import_module(name)


def _load(top: str) -> None:
    """The package `top` from its folder, without a search along the path."""
    file = ROOT / top / "__init__.py"
    if not file.is_file():
        raise ImportError(f"neither {top}/ nor cuteflash_{top}/ lies in {ROOT}, beside cuteflash/")
    loaded = sys.modules.get(top)
    if loaded is not None:
        if loaded.__file__ is None or not file.samefile(loaded.__file__):
            raise ImportError(f"a package {top} that is not {file.parent} is loaded already: {loaded}")
        return
    spec = importlib.util.spec_from_file_location(top, file)
    assert spec is not None and spec.loader is not None  # the file ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[top] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[top]
        raise
