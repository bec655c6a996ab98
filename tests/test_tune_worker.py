"""Work in a child process: whatever happens there is told apart, blamed rightly, and leaves nothing running."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from cuteflash.tune.worker import RequestFailed, StartFailed, Worker, WorkerLost, one_line

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Jack:
    """A tool of all trades."""

    healthy: bool = True
    calls: int = 0

    def pid(self) -> int:
        self.calls += 1
        return os.getpid()

    def count(self) -> int:
        return self.calls

    def fail(self, lost: bool) -> None:
        self.healthy = not lost
        raise ValueError("no such\nthing")

    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def leave(self) -> None:
        print("what it printed", flush=True)
        os._exit(7)

    def sleep(self, seconds: float, began: pathlib.Path | None = None) -> None:
        if began is not None:
            began.touch()
        time.sleep(seconds)

    def fill_disk(self) -> None:
        raise OSError(28, "No space left on device")

    def usable(self) -> bool:
        return self.healthy


def no_tool() -> Jack:
    raise RuntimeError("there is no GPU")


def late_tool() -> Jack:
    time.sleep(60)
    return Jack()


@pytest.fixture
def worker() -> object:
    with Worker(Jack) as found:
        yield found


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_the_child_stays_warm_between_requests_and_failures(worker: Worker) -> None:
    pid = worker.call("pid", seconds=30)
    assert pid != os.getpid()
    with pytest.raises(RequestFailed, match="ValueError: no such thing") as failed:
        worker.call("fail", False, seconds=30)
    assert not isinstance(failed.value, WorkerLost)
    assert worker.call("pid", seconds=30) == pid
    assert worker.call("count", seconds=30) == 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (("die", signal.SIGSEGV), "SIGSEGV: Fatal Python error: Segmentation fault"),
        (("die", signal.SIGKILL), "SIGKILL"),
        (("leave",), "status 7: what it printed"),
        (("fail", True), "no such thing"),
    ],
    ids=["crashes", "is killed", "exits", "loses its context"],
)
def test_what_ends_the_child_is_blamed_and_the_next_request_has_another(
    worker: Worker, request_: tuple[str, ...], words: str
) -> None:
    pid = worker.call("pid", seconds=30)
    with pytest.raises(WorkerLost, match=words):
        worker.call(*request_, seconds=30)
    assert worker.call("pid", seconds=30) != pid
    assert not is_alive(pid)


def test_a_request_that_hangs_is_ended_with_its_child(worker: Worker) -> None:
    pid = worker.call("pid", seconds=30)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"no answer within 0\.3 s"):
        worker.call("sleep", 60, seconds=0.3)
    assert time.monotonic() - started < 5
    assert not is_alive(pid)


def test_a_full_disk_is_not_the_candidates_fault(worker: Worker) -> None:
    with pytest.raises(OSError, match="No space left"):
        worker.call("fill_disk", seconds=30)
    assert worker.call("count", seconds=30) == 0


@pytest.mark.parametrize(
    ("make", "seconds", "words"),
    [(no_tool, 60.0, "RuntimeError: there is no GPU"), (late_tool, 0.5, "not ready within")],
)
def test_a_tool_that_cannot_be_made_is_nobodys_fault(make: object, seconds: float, words: str) -> None:
    with Worker(make, start_seconds=seconds) as worker, pytest.raises(StartFailed, match=words):  # type: ignore[arg-type]
        worker.call("pid", seconds=30)


def test_an_error_is_one_line_without_colours() -> None:
    words = one_line(RuntimeError("\x1b[91merror:\x1b[0m PTX assembly\n  failed"))
    assert words == "RuntimeError: error: PTX assembly failed"


def test_ctrl_c_is_the_parents(worker: Worker) -> None:
    pid = worker.call("pid", seconds=30)
    os.kill(pid, signal.SIGINT)
    assert worker.call("pid", seconds=30) == pid


def test_stopping_wakes_a_thread_that_waits_for_an_answer(tmp_path: pathlib.Path) -> None:
    worker = Worker(functools.partial(Jack))
    pid = worker.call("pid", seconds=30)
    caught: list[Exception] = []

    def ask() -> None:
        try:
            worker.call("sleep", 60, tmp_path / "began", seconds=60)
        except RequestFailed as failure:
            caught.append(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(tmp_path / "began")
    worker.stop()
    thread.join(30)
    assert not thread.is_alive() and caught
    assert not is_alive(pid)
    with pytest.raises(StartFailed, match="was stopped"):
        worker.call("pid", seconds=30)


ORPHAN = """
import pathlib
from cuteflash.tune.worker import Worker
from tests.test_tune_worker import Jack
if __name__ == "__main__":
    worker = Worker(Jack)
    print(worker.call("pid", seconds=60), flush=True)
    worker.call("sleep", 600, pathlib.Path("began"), seconds=600)
"""


def test_a_killed_parent_takes_its_child_along(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(tmp_path / "began")  # so that it is in the middle of a request
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for_end(pid)
