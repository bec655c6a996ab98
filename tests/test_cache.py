"""The disk cache: compiled once for all processes, never trusted blindly, never in the way."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import pytest

from cuteflash.compile import CacheWarning, build, cache, cache_dir, compiled
from cuteflash.compile import key as key_module
from cuteflash.compile.cache import Entry, cache_size, key_digest
from cuteflash.compile.key import cache_key
from cuteflash.compile.trust import doubt_directory, read_trusted
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80
from tests.patience import PATIENCE
from tests.slow_kernels import WgmmaKernel
from tests.toy_kernel import ToyKernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAITS = FwdTraitsSm80(64, 64, 64, 64)
PROBLEM = FwdProblem.dense("bf16", 64, 64)
REQUEST = (ToyKernel, TRAITS, PROBLEM, "sm_80")

# One process that wants the toy kernel; it notes every call of the compiler in COMPILE_LOG, or dies of it.
WORKER = """
import os, sys
from cutlass import cute
from cuteflash.compile import compiled
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80
from tests.toy_kernel import ToyKernel

compile = type(cute.compile).__call__
def watched(*args, **kwargs):
    if "FORBID_COMPILER" in os.environ:
        raise AssertionError("the compiler was called")
    with open(os.environ["COMPILE_LOG"], "a") as log:
        log.write("compiled\\n")
    return compile(*args, **kwargs)
type(cute.compile).__call__ = watched
print("ready", flush=True)
sys.stdin.readline()
compiled(ToyKernel, FwdTraitsSm80(64, 64, 64, 64), FwdProblem.dense("bf16", 64, 64), "sm_80")
"""


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache directory, and a process that remembers nothing."""
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTEFLASH_CACHE", raising=False)
    monkeypatch.setattr("cuteflash.compile.compiler._loaded", {})
    monkeypatch.setattr("cuteflash.compile.cache._told", set())
    return tmp_path / "cache"


def start_worker(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


def release(*workers: subprocess.Popen[str]) -> None:
    """Lets workers that have imported everything go on at the same moment, and expects them to succeed."""
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n", worker.communicate()[1]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        _, errors = worker.communicate(timeout=PATIENCE)
        assert worker.returncode == 0, errors


@pytest.mark.slow
def test_concurrent_processes_compile_an_entry_once_and_later_ones_not_at_all(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    release(*(start_worker(COMPILE_LOG=str(log)) for _ in range(2)))
    assert log.read_text() == "compiled\n"
    release(start_worker(FORBID_COMPILER="1"))


def test_an_entry_is_an_object_and_a_manifest(root: pathlib.Path) -> None:
    build(*REQUEST)
    digest = key_digest(cache_key(*REQUEST))
    assert {path.name for path in root.iterdir()} == {f"{digest}.o", f"{digest}.json", f"{digest}.lock"}
    assert json.loads((root / f"{digest}.json").read_text())["key"] == cache_key(*REQUEST)
    assert cache_size(root) == (1, (root / f"{digest}.o").stat().st_size)


def entry_of(root: pathlib.Path) -> Entry:
    return Entry(root, cache_key(*REQUEST))


def truncate(entry: Entry) -> None:
    blob = entry.object_path.read_bytes()
    entry.object_path.write_bytes(blob[: len(blob) // 2])


def flip_a_bit(entry: Entry) -> None:
    blob = bytearray(entry.object_path.read_bytes())
    blob[len(blob) // 2] ^= 1
    entry.object_path.write_bytes(blob)


def garble_manifest(entry: Entry) -> None:
    entry.manifest_path.write_bytes(b"\xff{ not JSON")


def empty_manifest(entry: Entry) -> None:
    entry.manifest_path.write_text("[]")


def nest_manifest(entry: Entry) -> None:
    entry.manifest_path.write_text("[" * 100_000)


def nest_report(entry: Entry) -> None:
    manifest = json.loads(entry.manifest_path.read_text())
    deep = "[" * 700 + "]" * 700  # parsed within the interpreter's limit
    manifest["report"] = {"seconds": json.loads(deep)}
    entry.manifest_path.write_text(json.dumps(manifest))


def open_to_others(entry: Entry) -> None:
    entry.object_path.chmod(0o666)


def change_report(entry: Entry) -> None:
    manifest = json.loads(entry.manifest_path.read_text())
    manifest["report"]["resources"]["registers"] = 1
    entry.manifest_path.write_text(json.dumps(manifest))


def take_anothers(entry: Entry) -> None:
    build(WgmmaKernel, TRAITS, PROBLEM, "sm_90a")
    other = Entry(entry.root, cache_key(WgmmaKernel, TRAITS, PROBLEM, "sm_90a"))
    shutil.copy(other.object_path, entry.object_path)
    shutil.copy(other.manifest_path, entry.manifest_path)


def believably_unloadable(entry: Entry) -> None:
    report, _ = entry.read()
    assert report is not None
    entry.write(b"not an object", report)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (truncate, "does not match its manifest"),
        (flip_a_bit, "does not match its manifest"),
        (garble_manifest, "manifest is not readable"),
        (empty_manifest, "manifest is not readable"),
        (nest_manifest, "manifest is not readable"),
        (nest_report, "does not match its manifest"),
        (open_to_others, "others can write it: its mode is 0666"),
        (change_report, "does not match its manifest"),
        (take_anothers, "made for another key"),
        (believably_unloadable, "does not load"),
    ],
)
def test_a_damaged_or_foreign_entry_is_rebuilt_with_a_warning(
    root: pathlib.Path, damage: object, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(*REQUEST)
    damage(entry_of(root))
    with pytest.warns(CacheWarning, match=f"is rebuilt: .*{complaint}"):
        compiled(*REQUEST)
    again = build(*REQUEST)
    assert again.cached
    assert again.resources == first.resources


@pytest.mark.parametrize("suffix", [".o", ".json"])
def test_a_half_deleted_entry_is_a_plain_miss(root: pathlib.Path, suffix: str) -> None:
    build(*REQUEST)
    (root / f"{entry_of(root).digest}{suffix}").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert not build(*REQUEST).cached
        assert build(*REQUEST).cached


def test_a_writer_that_dies_leaves_the_entry_as_it_was(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(*REQUEST)
    entry = entry_of(root)
    before = entry.read()

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        entry.write(b"half", {})
    assert entry.read() == before
    assert len(list(root.iterdir())) == 3


def test_another_version_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build(*REQUEST).cached
    assert build(*REQUEST).cached
    for versions in (("nvidia-cutlass-dsl", "4.8.2"),), (("apache-tvm-ffi", "9"),):
        monkeypatch.setattr(key_module, "versions", lambda versions=versions: versions)
        assert not build(*REQUEST).cached


def test_switched_off_nothing_is_kept(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE", "0")
    assert cache_dir() is None
    assert not build(*REQUEST).cached
    assert not build(*REQUEST).cached
    assert callable(compiled(*REQUEST))
    assert not root.exists()


def test_a_directory_that_cannot_be_made_is_reported_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(CacheWarning, match="compiled kernels are not kept: .*CUTEFLASH_CACHE_DIR moves") as caught:
        assert callable(compiled(*REQUEST))
        assert not build(*REQUEST).cached
    assert len([item for item in caught if item.category is CacheWarning]) == 1


def test_a_full_disk_is_reported_and_done_without(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning, match="No space left"):
        assert callable(compiled(*REQUEST))
    assert [path.suffix for path in root.iterdir()] == [".lock"]


def test_a_read_only_cache_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    build(*REQUEST)

    def refuse(self: Entry) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Entry, "locked", refuse)
    monkeypatch.setattr(Entry, "write", refuse)
    assert build(*REQUEST).cached


class Holder:
    """Another process that holds an entry's lock, and never lets it go."""

    def __init__(self, entry: Entry) -> None:
        entry.root.mkdir(mode=0o700)
        self.handle = open(entry.root / f"{entry.digest}.lock", "w")  # noqa: SIM115
        self.handle.write("process 4711 on elsewhere")
        self.handle.flush()
        fcntl.flock(self.handle, fcntl.LOCK_EX)


def test_a_lock_that_is_never_let_go_is_named_and_done_without(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder(entry_of(root))
    monkeypatch.setattr(cache, "LOCK_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    with pytest.warns(CacheWarning) as caught:
        assert not build(*REQUEST).cached
    waiting, alone = (str(item.message) for item in caught)
    kernel = "tests.toy_kernel.ToyKernel for sm_80"
    assert waiting.startswith("waiting up to 0 s for process 4711 on elsewhere to compile " + kernel)
    assert waiting.endswith(f"it holds {holder.handle.name}")
    assert alone.startswith(f"process 4711 on elsewhere has held {holder.handle.name} for 0 s: {kernel} is compiled")
    assert build(*REQUEST).cached
    holder.handle.close()


def test_a_short_wait_for_a_lock_is_not_told(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(entry_of(root))
    monkeypatch.setattr(time, "sleep", lambda seconds: holder.handle.close())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not build(*REQUEST).cached
    assert (root / f"{entry_of(root).digest}.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


@pytest.mark.parametrize("kept", ["1", "0"])
def test_no_room_for_temporary_files_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE", kept)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    with pytest.raises(FileNotFoundError, match=f"the kernel is not built: .*lie in {tmp_path}/full, TMPDIR moves"):
        compiled(*REQUEST)


@pytest.mark.parametrize(
    ("damage", "doubt"),
    [
        (
            lambda root: root.chmod(0o777),
            r"others can write it: its mode is 0777; allowed: writable by its owner alone",
        ),
        (lambda root: root.chmod(0o770), r"others can write it: its mode is 0770"),
        (lambda root: root.parent.chmod(0o777), r"everybody can replace it: the mode of .* is 0777; allowed: .*sticky"),
    ],
    ids=["everybody", "group", "parent"],
)
def test_a_directory_that_others_can_write_is_not_used(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pathlib.Path], None], doubt: str
) -> None:
    root.mkdir(mode=0o700)
    damage(root)
    with pytest.warns(CacheWarning, match=f"{root} is not used: {doubt}.*CUTEFLASH_CACHE_DIR moves") as caught:
        assert cache_dir() is None and cache_dir() is None
    assert len(caught) == 1
    root.chmod(0o755)
    root.parent.chmod(0o1777)  # as /tmp
    assert cache_dir() == root


def test_nothing_is_taken_from_such_a_directory_nor_kept_there(root: pathlib.Path) -> None:
    build(*REQUEST)
    entry_of(root).object_path.unlink()
    root.chmod(0o777)
    with pytest.warns(CacheWarning, match="is not used"):
        assert callable(compiled(*REQUEST))
    assert not entry_of(root).object_path.exists()


def test_nothing_is_kept_in_a_directory_that_somebody_else_made_meanwhile(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = pathlib.Path.mkdir

    def made(path: pathlib.Path, **options: object) -> None:
        mkdir(path, **options)
        path.chmod(0o777)

    monkeypatch.setattr(pathlib.Path, "mkdir", made)
    with pytest.warns(CacheWarning, match=f"are not kept: {root}: others can write it"):
        assert callable(compiled(*REQUEST))
    assert not entry_of(root).object_path.exists()


def test_a_link_is_followed_to_who_can_write_there(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "shared").mkdir()
    root.symlink_to(tmp_path / "shared")
    assert cache_dir() == root
    (tmp_path / "shared").chmod(0o777)
    with pytest.warns(CacheWarning, match="others can write it"):
        assert cache_dir() is None


def test_others_are_not_trusted_and_root_is(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(*REQUEST)
    user = os.geteuid()
    entry = entry_of(root)
    owned_by = {user: None, 0: None, user + 1: f"it belongs to user {user + 1}; allowed: this user, {user}, or root"}
    stat = os.stat_result
    for owner, doubt in owned_by.items():
        status = stat([0o40700, 0, 0, 1, owner, owner, 0, 0, 0, 0])
        monkeypatch.setattr(pathlib.Path, "stat", lambda path, status=status: status)
        monkeypatch.setattr(os, "fstat", lambda descriptor, status=status: status)
        assert doubt_directory(root) == doubt
        if doubt is None:
            assert read_trusted(entry.object_path)
        else:
            with pytest.raises(PermissionError, match=doubt):
                read_trusted(entry.object_path)


def test_without_a_home_kernels_are_kept_beside_temporary_files(
    homeless: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = tmp_path / f"cuteflash-{os.geteuid()}"
    reason = rf"kept in {expected}, because user \d+ has no home directory; CUTEFLASH_CACHE_DIR moves the cache"
    with pytest.warns(CacheWarning, match=reason) as caught:
        assert cache_dir() == cache_dir() == expected
        assert not build(*REQUEST).cached
    assert len(caught) == 1 and expected.stat().st_mode & 0o777 == 0o700
    assert build(*REQUEST).cached
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", "~no-such-user/cache")
    monkeypatch.setattr(cache, "_told", set())
    with pytest.warns(CacheWarning, match=r"CUTEFLASH_CACHE_DIR is '~no-such-user/cache', and that has no home"):
        assert cache_dir() == expected


def test_with_no_place_at_all_nothing_is_kept(homeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.warns(CacheWarning, match="are not kept: user .* has no home directory; No usable temporary directory"):
        assert cache_dir() is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "home/.cache/cuteflash"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/cuteflash"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/cuteflash"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg", "CUTEFLASH_CACHE_DIR": "{tmp}/moved"}, "moved"),
        ({"CUTEFLASH_CACHE_DIR": "~/mine"}, "home/mine"),
        ({"CUTEFLASH_CACHE": "1"}, "home/.cache/cuteflash"),
        ({"CUTEFLASH_CACHE": "off"}, None),
    ],
)
def test_where_the_cache_lies(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    for name in ("XDG_CACHE_HOME", "CUTEFLASH_CACHE_DIR", "CUTEFLASH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert cache_dir() == (None if expected is None else tmp_path / expected)


def test_the_cache_is_private(root: pathlib.Path) -> None:
    build(*REQUEST)
    assert root.stat().st_mode & 0o777 == 0o700
