"""Shared by all tests: the `gpu` marker's skip, and the option that writes the GPU receipt."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pathlib
import pwd
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.receipt import ReceiptPlugin
from tests.user_tables import OwnTables

if TYPE_CHECKING:
    from tests.kernel_store import KernelStore

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = "kernels"  # the directory of a run's kernels
SLOW, QUICK = 3.0, 0.02  # seconds that a test marked slow takes, and another, on average

# A table of the user's own must not decide what is tested; below a device there is none, and none can be written.
os.environ["CUTEFLASH_CONFIG_DIR"] = os.devnull

with contextlib.suppress(ImportError):  # a GPU's host runs tests/gpu, often without it
    from hypothesis import HealthCheck, settings

    # By default an example may take a fifth of a second, which on a busy machine any does now and then.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--receipt", metavar="PATH", help="write the GPU test receipt (JSON) to PATH when the run ends")
    parser.addoption("--record", action="store_true", help="write tests/kernels.json when the run, of all tests, ends")
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="where the tests marked gpu run")


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives setuptools."""
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    monkeypatch.chdir(ROOT)
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), {})
    return given


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if path := config.getoption("--receipt"):
        config.pluginmanager.register(ReceiptPlugin(pathlib.Path(path)), "gpu-receipt")
    if config.getoption("--record"):
        config.pluginmanager.register(RecordPlugin(), "kernel-record")


class RecordPlugin:
    """Writes the record of kernels when a run ends; in the process that all others report to."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from tests.kernel_record import PATH, write

        write(PATH, session.config._tmp_path_factory.getbasetemp() / KERNELS)  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector leaves alone what is there when tests begin, a million objects that stay.

    It would look at all of them whenever a test has made many, for a tenth of the time of a whole run. It looks at all
    others less often, too: compilations make many that live for seconds, and next to no cycles.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        gc.enable()


def put_longest_files_first(items: list[pytest.Item]) -> None:
    """So that no process is left with a long file when the others have ended; with `--no-loadscope-reorder`."""
    seconds: collections.Counter[pathlib.Path] = collections.Counter()
    for item in items:
        seconds[item.path] += SLOW if item.get_closest_marker("slow") else QUICK
    items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ and config.getoption("--device") == "cpu":
        put_longest_files_first(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or config.getoption("--device") == "cpu":
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in gpu_items:
        item.add_marker(skip)


@pytest.fixture
def own_tables(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnTables]:
    """An empty config directory for tables of the user's own."""
    monkeypatch.setenv("CUTEFLASH_CONFIG_DIR", str(tmp_path / "config"))
    tables = OwnTables(tmp_path / "config")
    yield tables
    tables.forget()


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory that all processes of this run share, empty when it starts."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def kernels(run_directory: pathlib.Path) -> Iterator[KernelStore]:
    """Kernels by class, traits, problem and target, each compiled once in this run, unless the record knows it."""
    from tests.kernel_record import PATH, Record, write_part
    from tests.kernel_store import KernelStore

    store = KernelStore(run_directory / KERNELS, Record(PATH))
    yield store
    write_part(store.root, store.kernels)


@pytest.fixture(scope="module")
def integers_of_python() -> Iterator[None]:
    """`cutlass.min` and `cutlass.max` are Python's, which give the same on host integers in a hundredth of the time.

    For modules that compile nothing.
    """
    cutlass = pytest.importorskip("cutlass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass, "min", min)
        patch.setattr(cutlass, "max", max)
        yield


@pytest.fixture
def selects_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cutlass.select_` takes Python's values, too, which a kernel's source may get."""
    monkeypatch.setattr(pytest.importorskip("cutlass"), "select_", lambda condition, a, b: a if condition else b)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without $HOME and without an entry in the user database, as containers may run with."""

    def unknown(user: object) -> object:
        raise KeyError(user)

    for name in ("HOME", "CUTEFLASH_CACHE_DIR", "XDG_CACHE_HOME", "CUTEFLASH_CONFIG_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, for modules that import `tests.browser`."""
    from tests.browser import launch

    yield from launch()
