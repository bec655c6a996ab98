"""The identity of a compiled kernel: equal keys, equal machine code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Any

from cuteflash.compile.imports import files_imported_by, names_imported_by

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
VERSIONED = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
# The DSL's settings that change what it generates; its other variables only log or dump.
ENVIRONMENT = (
    "CUTE_DSL_AUTO_M2S",
    "CUTE_DSL_COMPILER_BACKEND",
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_DEBUG",
    "CUTE_DSL_ENABLE_ASSERTIONS",
    "CUTE_DSL_ENABLE_PYIR",
    "CUTE_DSL_LINEINFO",
    "CUTE_DSL_TOLERATE_M2M",
)


def cache_key(kernel_cls: type, traits: Any, problem: Any, target: str) -> dict[str, Any]:
    """Everything that decides a kernel's object file, as JSON values.

    Args:
        kernel_cls: the kernel's class.
        traits: frozen dataclass.
        problem: frozen dataclass.
        target: compile target, e.g. "sm_90a".
    """
    return {
        "kernel": f"{kernel_cls.__module__}.{kernel_cls.__qualname__}",
        "traits": _fields(traits),
        "problem": _fields(problem),
        "target": target,
        "source": source_fingerprint((kernel_cls.__module__, type(traits).__module__, type(problem).__module__)),
        "versions": dict(versions()),
        "host": platform.machine(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _fields(value: Any) -> dict[str, Any]:
    """As a file gives them back, in which a tuple is a list: an entry's key is compared with the one asked for."""
    return json.loads(json.dumps({"type": type(value).__name__, **dataclasses.asdict(value)}))  # type: ignore[no-any-return]


@functools.cache
def source_fingerprint(modules: tuple[str, ...], package: pathlib.Path = PACKAGE) -> str:
    """SHA-256 over path and content of the modules' files and of all in this package that they import, directly or not.

    Host code, row tables and the kernels of other operations are not imported: an edit there changes no key.
    """
    outside = [file for module in modules if (file := _file_outside(module, package)) is not None]
    names = [*modules, *(name for file in outside for name in names_imported_by(file, anchor=""))]
    digest = hashlib.sha256()
    for path in [*outside, *files_imported_by(names, package)]:
        name = path.name if path in outside else path.relative_to(package).as_posix()
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _file_outside(module: str, package: pathlib.Path) -> pathlib.Path | None:
    """The file of a loaded module that is not part of the package."""
    if module.split(".")[0] == package.name:
        return None
    path = getattr(sys.modules.get(module), "__file__", None)
    return path and pathlib.Path(path)


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """(distribution, version) of the compiler and of the calling convention."""
    return tuple((name, importlib.metadata.version(name)) for name in VERSIONED)
