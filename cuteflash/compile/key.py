"""The identity of a compiled kernel: equal keys, equal machine code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from typing import Any

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# What decides the generated code. The row tables do not: the row they choose is itself part of the key.
FINGERPRINTED = (
    "problem.py",
    "traits/arch.py",
    "traits/base.py",
    "traits/sm80.py",
    "traits/sm90.py",
    "core",
    "atoms",
    "kernels",
)
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
        kernel_cls: the kernel's class; its own file counts too where it is not part of this package.
        traits: frozen dataclass.
        problem: frozen dataclass.
        target: compile target, e.g. "sm_90a".
    """
    return {
        "kernel": f"{kernel_cls.__module__}.{kernel_cls.__qualname__}",
        "traits": _fields(traits),
        "problem": _fields(problem),
        "target": target,
        "source": source_fingerprint(),
        "kernel_source": _outside_source(kernel_cls.__module__),
        "versions": dict(versions()),
        "host": platform.machine(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def _fields(value: Any) -> dict[str, Any]:
    return {"type": type(value).__name__, **dataclasses.asdict(value)}


@functools.cache
def source_fingerprint(package: pathlib.Path = PACKAGE) -> str:
    """SHA-256 over path and content of the Python files that device code is generated from."""
    digest = hashlib.sha256()
    for name in FINGERPRINTED:
        base = package / name
        for path in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def _outside_source(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or pathlib.Path(path).resolve().is_relative_to(PACKAGE):
        return None
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """(distribution, version) of the compiler and of the calling convention."""
    return tuple((name, importlib.metadata.version(name)) for name in VERSIONED)
