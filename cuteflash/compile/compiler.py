"""From a kernel class to a callable: memory cache, disk cache, compiler; and the report of what a kernel costs.

Kernels are compiled for fake arguments, so no GPU is needed and any target can be built anywhere. Whatever runs has
been loaded from an exported object, whether that was compiled a moment ago or found on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from cuteflash.compile.cache import CacheWarning, Entry, cache_dir, warn_unwritable
from cuteflash.compile.key import cache_key
from cuteflash.compile.options import compiler_options
from cuteflash.compile.resources import Resources, parse_ptxas_log


class KernelWarning(UserWarning):
    """A kernel compiled, but ptxas says that it will be slow: spills, serialised WGMMA, ignored setmaxnreg."""


@dataclasses.dataclass(frozen=True, slots=True)
class BuildReport:
    """One built kernel.

    Attributes:
        kernel: qualified name of the kernel class.
        target: what it was compiled for.
        traits, problem: the frozen dataclasses it was generated from.
        seconds: how long it took to compile, also if it now came from the cache.
        resources: registers, stack, spills and warnings as ptxas reported them.
        smem_bytes: shared memory that the traits ask for.
        cached: nothing was compiled now.
    """

    kernel: str
    target: str
    traits: Any
    problem: Any
    seconds: float
    resources: Resources
    smem_bytes: int
    cached: bool

    @property
    def complaints(self) -> tuple[str, ...]:
        """Compiler complaints that disqualify a shipped row; empty is good."""
        spilled = self.resources.spill_store_bytes + self.resources.spill_load_bytes
        spills = (f"spills {spilled} bytes a thread",) if spilled else ()
        return spills + self.resources.warnings

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, flat but for traits and problem."""
        flat = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        flat |= {"traits": dataclasses.asdict(self.traits), "problem": dataclasses.asdict(self.problem)}
        return flat | dataclasses.asdict(flat.pop("resources"))


_loaded: dict[tuple[type, Any, Any, str], Callable[..., Any]] = {}
_compiling = threading.Lock()  # cute.compile is not thread-safe


def compiled(kernel_cls: type, traits: Any, problem: Any, target: str) -> Callable[..., Any]:
    """The callable of `kernel_cls(traits, problem)` for `target`; it takes tensors and scalars in `fake_args` order.

    Compiles only what neither this process nor the disk cache has. Warns with KernelWarning if ptxas found a newly
    compiled kernel slow, and with CacheWarning if a cache entry failed verification.
    """
    request = (kernel_cls, traits, problem, target)
    found = _loaded.get(request)
    if found is None:
        with _compiling:
            found = _loaded.get(request)
            if found is None:
                found = _loaded[request] = _obtain_and_load(*request)
    return found


def build(kernel_cls: type, traits: Any, problem: Any, target: str) -> BuildReport:
    """Compiles the kernel into the disk cache unless it is there, and says what it costs.

    Loads nothing and needs no GPU. Unlike `compiled` it leaves the judgement to the caller: `BuildReport.complaints`.
    """
    with _compiling:
        artifact = _obtain(kernel_cls, traits, problem, target)
    return _report(artifact, traits, problem)


def lookup(kernel_cls: type, traits: Any, problem: Any, target: str) -> BuildReport | None:
    """The report of a kernel that the disk cache holds, None if it does not. Compiles and loads nothing."""
    root = cache_dir()
    entry = Entry(root or pathlib.Path(), cache_key(kernel_cls, traits, problem, target))
    stored, _ = entry.read() if root is not None else (None, None)
    return _report(_Artifact(entry, stored, None, cached=True), traits, problem) if stored is not None else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Artifact:
    """An exported object: in the cache (`blob` is None) or, if that cannot hold it, in memory."""

    entry: Entry
    stored: dict[str, Any]
    blob: bytes | None
    cached: bool


def _obtain(kernel_cls: type, traits: Any, problem: Any, target: str) -> _Artifact:
    """The kernel's object, from the disk cache or compiled into it."""
    root = cache_dir()
    entry = Entry(root or pathlib.Path(), cache_key(kernel_cls, traits, problem, target))
    if root is None:
        return _Artifact(entry, *_compile(kernel_cls(traits, problem), entry), cached=False)
    stored, _ = entry.read()
    if stored is not None:
        return _Artifact(entry, stored, None, cached=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a lock two processes may compile the same; writing says the rest
            stack.enter_context(entry.locked())
        stored, complaint = entry.read()  # another process may have built it while this one waited
        if stored is not None:
            return _Artifact(entry, stored, None, cached=True)
        if complaint:
            warnings.warn(f"cache entry {entry.object_path} is rebuilt: {complaint}", CacheWarning, stacklevel=4)
        stored, blob = _compile(kernel_cls(traits, problem), entry)
        try:
            entry.write(blob, stored)
        except OSError as error:
            warn_unwritable(root, error)
            return _Artifact(entry, stored, blob, cached=False)
    return _Artifact(entry, stored, None, cached=False)


def _compile(kernel: Any, entry: Entry) -> tuple[dict[str, Any], bytes]:
    """(report, object) of a kernel; the only place that invokes the compiler."""
    from cutlass import cute

    target = entry.key["target"]
    with _scratch() as scratch:
        remarks, exported = os.path.join(scratch, "remarks.yaml"), os.path.join(scratch, "kernel.o")
        start = time.perf_counter()
        function = cute.compile[compiler_options(target, remarks)](kernel, *kernel.fake_args())
        function.export_to_c(object_file_path=exported, function_name=_symbol(entry))
        seconds = time.perf_counter() - start
        log = pathlib.Path(remarks).read_text()
        blob = pathlib.Path(exported).read_bytes()
    return {"seconds": round(seconds, 3), "resources": dataclasses.asdict(parse_ptxas_log(log))}, blob


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A directory for temporary files. OSError says where they are: a full /tmp is seldom what the user thinks of."""
    try:
        with tempfile.TemporaryDirectory(prefix="cuteflash-") as scratch:
            yield scratch
    except OSError as error:
        place = f"temporary files lie in {tempfile.tempdir}, " if tempfile.tempdir else ""
        raise OSError(error.errno, f"the kernel is not built: {error}; {place}TMPDIR moves them") from error


def _symbol(entry: Entry) -> str:
    # Objects live in one process together, so each has its own name.
    return f"cuteflash_{entry.digest}"


def _report(artifact: _Artifact, traits: Any, problem: Any) -> BuildReport:
    resources = artifact.stored["resources"]
    return BuildReport(
        kernel=artifact.entry.key["kernel"],
        target=artifact.entry.key["target"],
        traits=traits,
        problem=problem,
        seconds=artifact.stored["seconds"],
        resources=Resources(**resources | {"warnings": tuple(resources["warnings"])}),
        smem_bytes=traits.smem_bytes,
        cached=artifact.cached,
    )


def _obtain_and_load(kernel_cls: type, traits: Any, problem: Any, target: str) -> Callable[..., Any]:
    artifact = _obtain(kernel_cls, traits, problem, target)
    report = _report(artifact, traits, problem)
    if report.complaints and not report.cached:
        warnings.warn(
            f"{report.kernel} for {target}, {traits}: {'; '.join(report.complaints)}", KernelWarning, stacklevel=3
        )
    if artifact.blob is not None:
        with _scratch() as scratch:
            path = pathlib.Path(scratch, "kernel.o")
            path.write_bytes(artifact.blob)
            return _load(path, _symbol(artifact.entry))
    try:
        return _load(artifact.entry.object_path, _symbol(artifact.entry))
    except Exception as error:
        if not artifact.cached:
            raise
        path = artifact.entry.object_path
        warnings.warn(f"cache entry {path} is rebuilt: it does not load ({error})", CacheWarning, stacklevel=3)
        artifact.entry.discard()
    return _obtain_and_load(kernel_cls, traits, problem, target)


def _load(path: pathlib.Path, symbol: str) -> Callable[..., Any]:
    """The function `symbol` of an exported object. Works without a GPU; the call then rejects CPU tensors."""
    from cutlass.cute import runtime

    _load_runtime_libraries()
    function: Callable[..., Any] = runtime.load_module(str(path), enable_tvm_ffi=True)[symbol]
    return function


@functools.cache
def _load_runtime_libraries() -> tuple[ctypes.CDLL, ...]:
    """The DSL's runtime, whose symbols the objects expect to find globally."""
    from cutlass.cute import runtime

    paths = runtime.find_runtime_libraries(enable_tvm_ffi=False)
    return tuple(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in paths)
