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
from tests.patience import PATIENCE, wait_until

pytestmark = pytest.mark.slow  # work in processes of their own

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
    time.sleep(2 * PATIENCE)
    return Jack()


@pytest.fixture
def worker() -> object:
    with Worker(Jack) as found:
        yield found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_child_stays_warm_between_requests_and_failures(worker: Worker) -> None:
    pid = worker.call("pid", seconds=PATIENCE)
    assert pid != os.getpid()
    with pytest.raises(RequestFailed, match="ValueError: no such thing") as failed:
        worker.call("fail", False, seconds=PATIENCE)
    assert not isinstance(failed.value, WorkerLost)
    assert worker.call("pid", seconds=PATIENCE) == pid
    assert worker.call("count", seconds=PATIENCE) == 2


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
    pid = worker.call("pid", seconds=PATIENCE)
    with pytest.raises(WorkerLost, match=words):
        worker.call(*request_, seconds=PATIENCE)
    assert worker.call("pid", seconds=PATIENCE) != pid
    assert not is_alive(pid)


def test_a_request_that_hangs_is_ended_with_its_child(worker: Worker) -> None:
    pid = worker.call("pid", seconds=PATIENCE)
    with pytest.raises(WorkerLost, match=r"no answer within 0\.3 s"):
        worker.call("sleep", 2 * PATIENCE, seconds=0.3)
    assert not is_alive(pid)


def test_a_full_disk_is_not_the_candidates_fault(worker: Worker) -> None:
    with pytest.raises(OSError, match="No space left"):
        worker.call("fill_disk", seconds=PATIENCE)
    assert worker.call("count", seconds=PATIENCE) == 0


@pytest.mark.parametrize(
    ("make", "seconds", "words"),
    [(no_tool, PATIENCE, "RuntimeError: there is no GPU"), (late_tool, 0.5, "not ready within")],
)
def test_a_tool_that_cannot_be_made_is_nobodys_fault(make: object, seconds: float, words: str) -> None:
    with Worker(make, start_seconds=seconds) as worker, pytest.raises(StartFailed, match=words):  # type: ignore[arg-type]
        worker.call("pid", seconds=PATIENCE)


def test_an_error_is_one_line_without_colours() -> None:
    words = one_line(RuntimeError("\x1b[91merror:\x1b[0m PTX assembly\n  failed"))
    assert words == "RuntimeError: error: PTX assembly failed"


def test_ctrl_c_is_the_parents(worker: Worker) -> None:
    pid = worker.call("pid", seconds=PATIENCE)
    os.kill(pid, signal.SIGINT)
    assert worker.call("pid", seconds=PATIENCE) == pid


def test_stopping_wakes_a_thread_that_waits_for_an_answer(tmp_path: pathlib.Path) -> None:
    worker = Worker(functools.partial(Jack))
    pid = worker.call("pid", seconds=PATIENCE)
    caught: list[Exception] = []

    def ask() -> None:
        try:
            worker.call("sleep", 2 * PATIENCE, tmp_path / "began", seconds=2 * PATIENCE)
        except RequestFailed as failure:
            caught.append(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until((tmp_path / "began").exists, "the request's begin")
    worker.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive() and caught
    assert not is_alive(pid)
    with pytest.raises(StartFailed, match="was stopped"):
        worker.call("pid", seconds=PATIENCE)


ORPHAN = """
import pathlib
from cuteflash.tune.worker import Worker
from tests.patience import PATIENCE
from tests.test_tune_worker import Jack
if __name__ == "__main__":
    worker = Worker(Jack)
    print(worker.call("pid", seconds=PATIENCE), flush=True)
    worker.call("sleep", 2 * PATIENCE, pathlib.Path("began"), seconds=2 * PATIENCE)
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
    wait_until((tmp_path / "began").exists, "the request's begin")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(pid), "the child's end")
