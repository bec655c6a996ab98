"""What kernels the GPU tests ask for, found and compiled on a machine without a GPU.

    python -m tests.asked CACHE                  # all of tests/gpu: compiles them into the cache CACHE, lists spills
    python -m tests.asked CACHE tests/gpu/test_sinks.py --jobs 2
    python -m tests.asked CACHE --found FILE     # keeps in FILE what it finds, or reads it there: that takes minutes

It ends with 1 if a kernel cannot be compiled, or if ptxas complains of one and that spill is not in `tests/spills.py`.

A GPU run with `CUTEFLASH_CACHE_DIR` naming such a cache compiles little, as long as sources and compiler are the same.
To find the kernels, the tests run on CPU tensors that are taken for a Hopper GPU's (`benchmarks.stand_in`), on which
launches do nothing: results hold anything, so that assertions are left out (`PYTHONOPTIMIZE`), and tests may fail later
on. What a test asks for after that, and what tests about CUDA itself ask for, is not found.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.spills import is_allowed, kernel_id

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOUND = "ASKED_KERNELS"  # in the environment: where each process of a run writes what it found
# They need much memory, or a GPU's time, and ask for little that no other file does.
LEFT_OUT = ("test_memory.py", "test_engine.py", "test_generation.py", "test_training.py", "test_sweep_decode.py")

Kernel = tuple[Any, Any, Any, str]  # class, traits, problem, target


class Recorder:
    """A plugin of pytest: nothing is computed while tests run, and kernels that are asked for are written to a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.kernels: dict[str, Kernel] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """Takes CPU tensors for a GPU's while the tests run."""
        from benchmarks.stand_in import no_kernels, no_operation

        nothing = no_operation()

        def compiled(*kernel: Any) -> Callable[..., object]:
            self.kernels.setdefault(repr(kernel), kernel)  # type: ignore[arg-type]
            return nothing

        torch.testing.assert_close = lambda *arguments, **options: None
        with no_kernels(compiled):
            result = yield
        self.path.write_bytes(pickle.dumps(list(self.kernels.values())))
        return result

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> str | None:
        """Each kernel family is one that the device runs."""
        if fixturedef.argname != "family":
            return None
        fixturedef.cached_result = (request.param, fixturedef.cache_key(request), None)
        return str(request.param)


def launch_on_cpu() -> None:
    """Give the operators' implementation for CUDA the CPU's place, too.

    Before tests begin: afterwards the garbage collector does not list what was there.
    """
    from benchmarks.stand_in import modules
    from cuteflash.operators import Operator

    modules()  # imports all that define one
    for operator in [found for found in gc.get_objects() if type(found) is Operator]:

        def cpu(*given: Any, operator: Operator = operator) -> Any:
            *tensors, options = given
            count = len(tensors) - len(operator.trailing)
            return operator.cuda(*tensors[:count], *options, *tensors[count:])

        object.__setattr__(operator, "cpu", cpu)


def pytest_configure(config: pytest.Config) -> None:
    """Of a run with `-p tests.asked`."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None or not config.getoption("numprocesses", None):
        launch_on_cpu()
        config.pluginmanager.register(Recorder(pathlib.Path(os.environ[FOUND], worker or "only")), "asked-kernels")


def find(files: Sequence[str], jobs: int) -> list[Kernel]:
    """The kernels that tests ask for.

    RuntimeError: the tests could not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.asked", "-m", "gpu", "--device", "cpu"]
        command += ["--assert=plain", "-p", "no:cacheprovider", *(["-n", str(jobs)] if jobs > 1 else []), *files]
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}  # if in a test
        environment = outer | {FOUND: folder, "PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if process.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(
                f"pytest ended with {process.returncode}: {process.stdout[-2000:]}{process.stderr[-2000:]}"
            )
        parts = [pickle.loads(path.read_bytes()) for path in sorted(pathlib.Path(folder).iterdir())]
    return list({repr(kernel): kernel for part in parts for kernel in part}.values())


def compile_one(kernel: Kernel) -> tuple[str, bool] | None:
    """Compile a kernel into the cache; in words what ptxas complains of, and whether `SPILLS` has that."""
    from cuteflash.compile import build

    report = build(*kernel)
    if not report.complaints:
        return None
    kernel_cls, traits, problem, target = kernel
    words = f"{kernel_cls.__name__} for {target}: {'; '.join(report.complaints)}: {traits}, {problem}"
    return words, is_allowed(report.resources, kernel_id(kernel_cls, traits, problem, target))


def main(argv: Sequence[str] | None = None) -> int:
    """Find, compile, list complaints; 1 if a kernel could not be compiled or spills without being known to."""
    parser = argparse.ArgumentParser(prog="python -m tests.asked", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cache", type=pathlib.Path, help="folder of the kernel cache")
    parser.add_argument("files", nargs="*", help="test files; by default those of tests/gpu but for some")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--found", type=pathlib.Path, metavar="FILE", help="where what is found is kept, or read if it is"
    )
    options = parser.parse_args(argv)
    every = (path for path in sorted(pathlib.Path(ROOT, "tests", "gpu").glob("test_*.py")) if path.name not in LEFT_OUT)
    if options.found is not None and options.found.exists():
        kernels = pickle.loads(options.found.read_bytes())
    else:
        kernels = find(options.files or [str(path) for path in every], options.jobs)
        if options.found is not None:
            options.found.write_bytes(pickle.dumps(kernels))
    print(f"{len(kernels)} kernels")
    options.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["CUTEFLASH_CACHE_DIR"] = str(options.cache.resolve())
    failed = slow = unknown = 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(compile_one, kernel) for kernel in kernels]:
            try:
                complaint = future.result()
            except Exception as failure:
                failed += 1
                print(f"failed: {failure}")
                continue
            if complaint is not None:
                words, is_known = complaint
                slow += 1
                unknown += not is_known
                print(f"{'known' if is_known else 'not in tests/spills.py'}: {words}")
    print(f"{len(kernels) - failed} compiled, of {slow} ptxas complains, {unknown} not known, {failed} failed")
    return 1 if failed or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
