"""`cuteflash sweep`: what it asks for, what it says, and what its findings turn into; the GPU is a pretended one."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cuteflash import usertable
from cuteflash.cli import sweep as command
from cuteflash.cli import sweep_apply
from cuteflash.cli.app import app
from cuteflash.compile import cache_dir
from cuteflash.dispatch import choose
from cuteflash.problem import BwdProblem, FwdProblem
from cuteflash.problem_names import problem_id
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.tune.cells import Cell
from cuteflash.tune.funnel import Funnel
from cuteflash.tune.plan import Plan
from cuteflash.tune.store import Store, StoreError
from cuteflash.tune.worker import StartFailed
from tests.patience import PATIENCE, wait_until
from tests.sweep_fakes import CELLS, TRAITS, World, make_plan
from tests.sweep_fakes import sweep as run_sweep
from tests.user_tables import SM80

pytestmark = pytest.mark.slow  # whole sweeps, with processes of their own

ROOT = pathlib.Path(__file__).resolve().parent.parent
CANDIDATES = json.dumps([{"tile_m": 64, "tile_n": traits.tile_n} for traits in TRAITS])


@pytest.fixture(autouse=True)
def own_folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUTEFLASH_CONFIG_DIR", str(tmp_path / "config"))
    usertable.load.cache_clear()
    choose.cache_clear()


@pytest.fixture
def world(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A machine with an A100, as the command sees it."""
    world = World(tmp_path)
    for module in (command, sweep_apply):
        monkeypatch.setattr(module, "backend", lambda target: world.backend)
    monkeypatch.setattr(command, "_check_gpu", lambda targets: None)
    return world


@pytest.fixture
def swept(world: World, tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the database of a small sweep."""
    run_sweep(world, make_plan(cells=CELLS[:1]))
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


def sweep(*more: str) -> Result:
    chosen = ("--arch", "sm_80", "--head-dim", "128", "--mask", "full", "--seqlen", "512,4096", "--traits", CANDIDATES)
    return call(*chosen, "--jobs", "1", *more)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that a command would have run."""
    found: list[Plan] = []

    def run(self: Funnel, until: Any) -> None:
        found.append(self.plan)

    monkeypatch.setattr(Funnel, "run", run)
    monkeypatch.setattr(command, "_check_gpu", lambda targets: None)
    monkeypatch.setattr(command.results, "show", lambda *_: None)
    return found


def test_options_become_cells(plans: list[Plan]) -> None:
    options = ("--head-dim", "64,192", "--head-dim-v", "64,128", "--causal", "0,1", "--seqlen", "1x8192,512,16384")
    options += ("--dtype", "fp16", "--inputs", "plain", "--budget", "1.5m", "--limit", "0", "--rounds", "5")
    result = call("--arch", "sm_90a", *options)
    assert result.exit_code == 0, result.output
    (plan,) = plans
    assert (plan.target, plan.families, plan.limit, plan.budget, plan.rules.rounds) == (
        "sm_90a",
        ("sm90",),
        None,
        90.0,
        5,
    )
    labels = [cell.label for cell in plan.cells]
    assert labels == [
        "D64 full 1x8192 fp16", "D64 full 512 fp16", "D64 full 16384 fp16", "D64 causal 512 fp16",
        "D64 causal 16384 fp16", "D192x128 full 1x8192 fp16", "D192x128 full 512 fp16", "D192x128 full 16384 fp16",
        "D192x128 causal 512 fp16", "D192x128 causal 16384 fp16",
    ]  # fmt: skip
    assert {cell.batch for cell in plan.cells if cell.seqlen_q == 1} == {16}


def test_rows_whose_speed_depends_on_values_race_with_sinks_too(plans: list[Plan]) -> None:
    options = ("--head-dim", "64", "--causal", "1", "--seqlen", "512,1024,16384")
    for arch in ("sm_90a", "sm_80"):
        assert call("--arch", arch, *options).exit_code == 0
    hopper, ampere = ([(cell.seqlen, cell.inputs) for cell in plan.cells] for plan in plans)
    assert ampere == [(512, "plain"), (1024, "plain"), (16384, "plain")]
    assert hopper == [
        *ampere[:2],
        (1024, "sink:12:middle"),
        *ampere[2:],
        (16384, "sink:12:middle"),
    ]  # of each length class the longest


def test_8_bit_operands_are_swept_by_their_dtype(plans: list[Plan]) -> None:
    options = ("--arch", "sm_90a", "--head-dim", "128", "--mask", "full", "--seqlen", "4096", "--dtype", "e4m3")
    traits = '[{"tile_m": 128, "tile_n": 128, "two_level": true}]'
    for more in ((), ("--transposed-v",), ("--traits", traits, "--transposed-v")):
        result = call(*options, *more)
        assert result.exit_code == 0, result.output
    assert [plan.cells[0].label for plan in plans] == ["D128 full 4096 e4m3", *["D128 full 4096 e4m3 vt"] * 2]
    assert [[cell.inputs for cell in plan.cells] for plan in plans] == [["plain", "sink:12:middle"]] * 3
    assert plans[2].traits == (FwdTraitsFp8Sm90(128, 128, 128, 128, two_level=True),)


def test_inputs_can_be_chosen(plans: list[Plan]) -> None:
    options = ("--head-dim", "64", "--causal", "1", "--seqlen", "512")
    assert call("--arch", "sm_80", *options, "--inputs", "plain,sink:30.0,peaked").exit_code == 0
    assert call("--arch", "sm_90a", "--cells", "64:512:causal:outliers").exit_code == 0
    assert [[cell.inputs for cell in plan.cells] for plan in plans] == [["plain", "sink:30", "peaked"], ["outliers"]]


def test_cells_and_candidates_can_be_given_one_by_one(plans: list[Plan]) -> None:
    cells = "128:16384:causal,96:512:window"
    traits = '[{"tile_m": 64, "tile_n": 80}, {"family": "sm80", "tile_m": 64, "tile_n": 64, "head_dim": 96}]'
    result = call("--arch", "sm_90a", "--cells", cells, "--family", "sm90,sm80", "--traits", traits)
    assert result.exit_code == 0, result.output
    (plan,) = plans
    assert plan.cells == (Cell(128, "causal", 16384), Cell(96, "window", 512))
    assert [(t.family, t.head_dim) for t in plan.traits or ()] == [("sm90", 128), ("sm90", 96), ("sm80", 96)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--arch", "sm_80", "--dry-run"), "sweep needs --head-dim"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--cells", "64:512:full"), "and not both"),
        (("--arch", "sm_80", "--dry-run", "--inputs", "peaked", "--cells", "64:512:full"), "allowed: inputs of a cell"),
        (("--arch", "sm_80", "--dry-run", "--inputs", "sink", "--head-dim", "64"), "inputs is 'sink'; allowed: plain"),
        (("--arch", "sm_75", "--dry-run", "--head-dim", "64"), "arch is 'sm_75'; allowed: sm_80"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "260"), "head_dim is 260; allowed: multiples of 8"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--family", "sm90"), "which sm_80 does not run"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--kernel", "jvp"), "kernel is 'jvp'; allowed: fwd, bwd"),
        (
            ("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--dtype", "e4m3"),
            "which the sm80 family of sm_80 does",
        ),
        (
            ("--arch", "sm_90a", "--dry-run", "--head-dim", "64", "--transposed-v"),
            "transposed_v is True with dtype bf16",
        ),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--seqlen", "4k"), "seqlen is '4k'; allowed: KEYS"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--budget", "soon"), "budget is 'soon'; allowed:"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--peers", "fa9"), "peers is 'fa9'; allowed: fa4"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--traits", "{"), "allowed: a JSON list"),
        (
            ("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--traits", '[{"tile": 1}]'),
            "fields of fwd_sm80: tile_m",
        ),
        (("--arch", "sm_80", "--no-compile", "--head-dim", "64"), "no_compile is given without dry_run"),
        (("--arch", "sm_80", "--dry-run", "--compile-only", "--head-dim", "64"), "both given"),
        (("--arch", "sm_80", "--dry-run", "--head-dim", "64", "--mask", "full", "--causal", "1"), "both given"),
        (("explain", "--head-dim", "64", "--where", "tile_m:64"), "no such sweep database"),
        (("apply",), "no such sweep database"),
        (("report", "-o", "report.html"), "no such sweep database"),
        (("export",), "no such sweep database"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_values_name_what_is_allowed_and_nothing_is_written(
    arguments: tuple[str, ...], complaint: str, tmp_path: pathlib.Path
) -> None:
    result = call(*arguments)
    assert result.exit_code in (1, 2)
    assert complaint in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_command_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("--arch", "sm_90a", "--head-dim", "64")
    assert result.exit_code == 2
    assert "--dry-run and --compile-only work without one" in result.stderr


def test_another_gpu_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(command.information, "local_target", lambda: ["sm_86"])
    for archs in ("sm_90a", "sm_86,sm_90a"):
        result = call("--arch", archs, "--head-dim", "64")
        assert result.exit_code == 2
        assert "the GPU here is sm_86" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arch", "family"), [("sm_80", "sm80"), ("sm_90a", "sm90")])
def test_a_dry_run_gives_every_rejected_candidate_a_reason(arch: str, family: str) -> None:
    result = call("--arch", arch, "--head-dim", "64,128", "--dry-run", "--no-compile", "--limit", "5", "--json")
    (found,) = json.loads(result.stdout)
    for space in found["spaces"]:
        assert (space["family"], space["considered"] >= 200) == (family, True)
        assert space["kept"] >= 5
    rejected = sum(space["considered"] - space["kept"] for space in found["spaces"])
    assert len(found["rejected"]) == rejected == found["stages"]["prune"]["rejected"]
    assert all(entry["reason"] for entry in found["rejected"])
    with Store("sweep.sqlite", create=False) as store:
        assert len(store.verdicts(stage="prune", ok=0)) == rejected


def test_a_dry_run_shows_counts_and_kinds_and_on_demand_everybody() -> None:
    short = call("--arch", "sm_80", "--head-dim", "256", "--dry-run", "--no-compile", "--limit", "5")
    assert "considered" in short.stdout and "bytes of shared memory" in short.stdout
    full = call("--arch", "sm_80", "--head-dim", "256", "--dry-run", "--no-compile", "--limit", "5", "--show-rejected")
    assert len(full.stdout.splitlines()) > 200


def test_kernels_are_compiled_without_a_gpu_and_known_the_next_time() -> None:
    traits = '[{"tile_m": 64, "tile_n": 48}, {"tile_m": 64, "tile_n": 8192}]'
    options = ("--arch", "sm_80", "--head-dim", "64", "--mask", "full", "--seqlen", "512", "--traits", traits)
    first = call(*options, "--compile-only", "--jobs", "2", "--json")
    assert first.exit_code == 0, first.output
    (found,) = json.loads(first.stdout)
    assert found["stages"]["compile"]["kept"] >= 2
    assert any(entry["stage"] == "prune" and "8192" in entry["candidate"] for entry in found["rejected"])
    with Store("sweep.sqlite", create=False) as store:
        verdicts = store.verdicts(stage="compile")
    assert all(verdict.details["registers"] > 0 for verdict in verdicts)
    kernels = {path: path.stat().st_mtime_ns for path in cache_dir().iterdir()}
    assert any(path.suffix == ".o" for path in kernels)
    assert json.loads(call(*options, "--dry-run", "--from-cache", "--json").stdout)[0]["stages"] == found["stages"]
    assert {path: path.stat().st_mtime_ns for path in cache_dir().iterdir()} == kernels


def test_a_sweep_shows_winners_and_is_explained_and_exported(world: World) -> None:
    result = sweep("--peers", "cudnn")
    assert result.exit_code == 0, result.output
    assert "D128 full 4096" in result.stdout and "64x96" in result.stdout and "%" in result.stdout
    assert "700 TFLOP/s" in result.stderr
    words = call("explain", "--head-dim", "128", "--where", "tile_n=16").stdout
    assert "64x16" in words and "slower than 64x96" in words
    exported = json.loads(call("export", "--json").stdout)
    assert {run["matmul_tflops"] for run in exported["runs"]} == {700.0}
    assert len(exported["timings"]) == 16
    call("export", "--json", "-o", "out.json")
    assert json.loads(pathlib.Path("out.json").read_text()) == exported


def test_a_report_is_one_page_about_what_was_asked_for(world: World, tmp_path: pathlib.Path) -> None:
    sweep()
    result = call("report", "-o", "report.html")
    assert result.exit_code == 0, result.output
    text = pathlib.Path("report.html").read_text()
    assert result.stdout == f"report.html: {len(text.encode()) / 1e6:.2f} MB\n"
    assert "cuteflash sweep · sm_80 · a GPU" in text and "sm80 128x128" in text
    options = ("--arch", "sm_80", "--family", "sm80", "--head-dim", "120", "--head-dim-v", "128", "--gpu", "a GPU")
    assert call("report", *options, "-o", "folder.html").exit_code == 0
    assert pathlib.Path("folder.html").read_text() == text


def test_a_report_links_to_a_gallery_from_where_it_lies(world: World, tmp_path: pathlib.Path) -> None:
    sweep()
    site, reports = tmp_path / "site", tmp_path / "reports"
    reports.mkdir()
    assert (
        CliRunner().invoke(app, ["layouts", "--all", "--arch", "sm_80", "--head-dim", "128", "-o", "site"]).exit_code
        == 0
    )
    assert call("report", "--layouts", "site", "-o", "reports/page.html").exit_code == 0
    text = (reports / "page.html").read_text()
    links = re.findall(r'"href":"([^"]+)"', text)
    assert links and all((reports / link).resolve().parent == site for link in links)
    assert all((reports / link).is_file() for link in links)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "sweep report needs -o, e.g. -o report.html"),
        (("-o", "."), "output . is a directory; a file is needed"),
        (("-o", "sweep.sqlite"), "output sweep.sqlite is the database itself"),
        (("-o", "r.html", "--arch", "sm_75"), "arch is 'sm_75'; allowed: sm_80"),
        (("-o", "r.html", "--arch", "sm_80,sm_90a"), "arch is 'sm_80,sm_90a'; allowed: one"),
        (("-o", "r.html", "--arch", "sm_90a"), "has candidates for: sm_80"),
        (("-o", "r.html", "--family", "sm70"), "family is 'sm70'; allowed: sm80, sm90"),
        (("-o", "r.html", "--family", "sm90"), "has candidates of: sm80 128x128"),
        (("-o", "r.html", "--head-dim", "64"), "has candidates of: sm80 128x128"),
        (("-o", "r.html", "--head-dim", "300"), "head_dim is 300; allowed: multiples of 8"),
        (("-o", "r.html", "--head-dim-v", "64"), "head_dim_v is given without head_dim"),
        (("-o", "r.html", "--gpu", "another"), "gpu is 'another'"),
        (("-o", "r.html", "--layouts", "nowhere"), "which has no index.html"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_reported_is_named_and_nothing_is_written(
    arguments: tuple[str, ...], complaint: str, swept: pathlib.Path
) -> None:
    before = sorted(swept.iterdir())
    result = call("report", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in result.stderr
    assert sorted(swept.iterdir()) == before
    assert call("export").exit_code == 0  # the database is still one


@pytest.mark.parametrize("name", ["report", "export"])
def test_a_page_that_cannot_be_written_is_said_before_the_work(
    name: str, swept: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("worked for nothing")

    monkeypatch.setattr(command.results, "make_report", work)
    monkeypatch.setattr(Store, "export", work)
    (swept / "file").write_text("")
    result = call(name, "-o", "file/page")
    assert result.exit_code == 2 and "file is not a directory" in result.stderr


@pytest.mark.parametrize("name", ["report", "export"])
def test_missing_directories_of_an_output_are_made(name: str, swept: pathlib.Path) -> None:
    assert call(name, "-o", "new/folder/file").exit_code == 0
    assert (swept / "new" / "folder" / "file").stat().st_size > 100


@pytest.fixture
def read_only(swept: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[pathlib.Path, str]]:
    """The database of a sweep that was killed, in a directory that takes no files, and its last candidate.

    That record is still in the write-ahead log.
    """
    folder = swept / "elsewhere"
    folder.mkdir()
    with Store("sweep.sqlite") as store:
        last = store.add_candidates([dataclasses.replace(TRAITS[0], tile_n=144)])[0]
        for suffix in ("", "-wal"):
            shutil.copy(f"sweep.sqlite{suffix}", folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
    yield folder / "sweep.sqlite", last
    folder.chmod(0o755)


def test_results_are_read_from_a_directory_that_cannot_be_written(read_only: tuple[pathlib.Path, str]) -> None:
    database, last = read_only
    before = sorted(database.parent.iterdir())
    exported = call("export", "--db", str(database))
    assert exported.exit_code == 0, exported.output
    assert last in [candidate["id"] for candidate in json.loads(exported.stdout)["candidates"]]
    for command_ in (("explain", "--head-dim", "128"), ("report", "-o", "report.html")):
        result = call(*command_, "--db", str(database))
        assert result.exit_code == 0, result.output
    assert sorted(database.parent.iterdir()) == before


def test_a_database_that_is_only_read_takes_no_records(swept: pathlib.Path) -> None:
    with Store("sweep.sqlite", create=False) as store, pytest.raises(StoreError, match="readonly"):
        store.add_cell("cell", {})


def test_what_won_is_applied_dispatched_and_reset(world: World) -> None:
    sweep()
    problem = FwdProblem.dense("bf16", 128, 128)
    assert choose(problem, "sm_80", lengths="long").traits.tile_n != 96
    dry = call("apply", "--dry-run")
    assert "64x96" in dry.stdout and "written" not in dry.stdout
    result = call("apply")
    assert result.exit_code == 0, result.output
    assert "written: " in result.stdout
    choose.cache_clear()
    choice = choose(problem, "sm_80", lengths="long")
    assert choice.traits.tile_n == 96
    assert "user's table" in choice.source and "a GPU" in choice.source
    assert choose(problem, "sm_80", lengths="decode").traits.tile_n != 96  # was not timed
    removed = call("--reset")
    assert removed.exit_code == 0 and "removed" in removed.stdout
    choose.cache_clear()
    assert choose(problem, "sm_80", lengths="long").traits.tile_n != 96
    assert "no tables of your own" in call("--reset").stdout


def test_a_backward_is_swept_explained_reported_applied_and_dispatched(
    world: World, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = BwdProblem.dense("bf16", 128, 128, "causal")
    spilling = (f"{problem_id(problem)} softcap varlen deterministic used_q used_k",)
    hopper = dataclasses.replace(world, target="sm_90a", gpu_target="sm_90a", fast=(48,), spilling_on=spilling)
    for module in (command, sweep_apply):
        monkeypatch.setattr(module, "backend", lambda target: hopper.backend)
    traits = [
        {"kind": "bwd_sm90", "tile_m": 48, "tile_n": 128, "dq": "transposed"},
        {"kind": "bwd_two_pass_sm90", "tile_m": 32, "tile_n": 64},
        {"tile_m": 112, "tile_n": 128, "dq": "rows"},
    ]
    chosen = ("--operation", "bwd", "--arch", "sm_90a", "--head-dim", "128", "--causal", "1", "--seqlen", "512")
    result = call(*chosen, "--traits", json.dumps(traits), "--jobs", "1", "--show-rejected")
    assert result.exit_code == 0, result.output
    assert "prune  bwd sm90 128x128  bwd_sm90 112x128 dq=rows: dq 'rows', tile_m 112: a warpgroup gets" in result.stdout

    told = call("explain", "--kernel", "bwd", "--head-dim", "128", "--where", "dq=transposed")
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("sm_90a, bwd, family sm90, head dims 128x128: ")
    assert "bwd_sm90 48x128 dq=transposed" in told.stdout and ": the winner" in told.stdout
    assert (
        "bound  dQ, dK and dV: shared memory, 2016 clocks a step of 48 x 128 scores; tensor cores 1920" in told.stdout
    )
    told = call("explain", "--kernel", "bwd", "--head-dim", "128", "--where", "kind=bwd_two_pass_sm90,tile_m=32")
    assert "bound  dK and dV: shared memory, 576 clocks a step of 32 x 64 scores" in told.stdout
    assert "bound  dQ: tensor cores" in told.stdout and "kind bwd_two_pass_sm90 against bwd_sm90" in told.stdout
    assert call("report", "-o", "report.html").exit_code == 0

    applied = call("apply")
    assert applied.exit_code == 0, applied.output
    assert "bwd/sm_90a/sm90: 128x128 (causal; bf16; short; no softcap): bwd_sm90 48x128 dq=transposed" in applied.stdout
    choose.cache_clear()
    assert choose(problem, "sm_90a", lengths="short").traits.tile_m == 48
    assert choose(problem.asking(["varlen", "deterministic"]), "sm_90a", lengths="short").traits.tile_m == 48
    assert choose(problem.asking(["softcap"]), "sm_90a", lengths="short").traits.tile_m != 48
    folder = tmp_path / "traits"
    folder.mkdir()
    assert call("apply", "--shipped", str(folder)).exit_code == 0
    row = 'bwd_sm90(128, 48, CAUSAL, dtypes=BF16, lengths=SHORT, without=SOFTCAP, dq="transposed").measured('
    assert row in (folder / "rows_bwd_sm90.py").read_text()


def test_shipped_tables_are_written_where_they_are_wanted(world: World, tmp_path: pathlib.Path) -> None:
    sweep()
    target = tmp_path / "traits"
    target.mkdir()
    result = call("apply", "--shipped", str(target))
    assert result.exit_code == 0, result.output
    (path,) = target.iterdir()
    assert "fwd_sm80(128, 64, 96, 4" in path.read_text()
    assert '.measured("a GPU", ' in path.read_text()


def test_what_is_applied_serves_softcap_and_lse_where_they_compile_clean(
    swept: pathlib.Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = FwdProblem.dense("bf16", 128, 128, softcap=True, lse=True)
    swept_kernels = len(world.journaled("build"))
    result = call("apply")
    assert result.exit_code == 0, result.output
    assert "compile with all features: 1 of 1: 1 clean" in result.stderr
    assert "no softcap" not in result.stdout and "no lse" not in result.stdout
    assert len(world.journaled("build")) == swept_kernels + 1
    assert choose(problem, "sm_80", lengths="short").traits.tile_n == 96
    assert call("apply", "--jobs", "1").exit_code == 0
    assert len(world.journaled("build")) == swept_kernels + 1  # from the cache


def test_what_spills_with_softcap_or_lse_is_said_and_left_to_other_rows(
    swept: pathlib.Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ("softcap lse varlen", "softcap lse", "lse varlen", "lse", "softcap varlen", "softcap")
    problems = [f"bf16 128x128 full {extras}".replace("varlen", "varlen used_q used_k") for extras in every]
    lse, softcap = problems[3], problems[5]
    spilling = dataclasses.replace(world, spilling_on=tuple(problems[:-1]), uncompilable_on=(softcap,))
    monkeypatch.setattr(sweep_apply, "backend", lambda target: spilling.backend)
    result = call("apply", "--jobs", "1")
    assert result.exit_code == 0, result.output
    assert "compile with all features but 2: 3 of 3: 2 with complaints, 1 clean" in result.stderr
    (line, _) = result.stdout.splitlines()
    assert "128x128 (full; bf16; short; no softcap; no lse): 64x96" in line
    assert f"no softcap, because of {softcap}: ValueError: no such instruction" in line
    assert f"no lse, because of {lse}: spills 16 bytes a thread" in line
    (own,) = usertable.load(SM80)
    assert own.row.without == ("softcap", "lse")
    assert choose(FwdProblem.dense("bf16", 128, 128), "sm_80", lengths="short").traits.tile_n == 96
    for extras in ({"softcap": True}, {"lse": True}):
        assert choose(FwdProblem.dense("bf16", 128, 128, **extras), "sm_80", lengths="short").traits.tile_n != 96


def test_a_dry_run_says_the_same_and_writes_nothing(swept: pathlib.Path, world: World) -> None:
    dry, real = call("apply", "--dry-run"), call("apply")
    assert dry.stdout and real.stdout.startswith(dry.stdout)
    assert not dry.stdout.count("written") and real.stdout.count("written") == 1


def test_nothing_is_compiled_for_rows_that_are_not_written(
    swept: pathlib.Path, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    proposed = sweep_apply.proposed

    def as_shipped(*arguments: Any) -> list[Any]:
        return [dataclasses.replace(pick, kept=True) for pick in proposed(*arguments)]

    monkeypatch.setattr(sweep_apply, "proposed", as_shipped)
    before = len(world.journaled("build"))
    result = call("apply")
    assert result.exit_code == 0 and "nothing is written" in result.stdout
    assert len(world.journaled("build")) == before and not usertable.load(SM80)
    assert call("apply", "--shipped", str(tmp_path)).exit_code == 0
    assert len(world.journaled("build")) == before + 1


@pytest.mark.parametrize(
    ("stop", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped; nothing is written; the kernels compiled so far are kept in "),
        (StartFailed("no process"), 1, "no process; nothing is written"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_apply_that_is_stopped_writes_nothing(
    stop: BaseException, status: int, words: str, swept: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiling(*_: Any) -> None:
        raise stop

    monkeypatch.setattr(sweep_apply, "complaints", compiling)
    result = call("apply")
    assert result.exit_code == status
    assert words in result.stderr and "written: " not in result.stdout
    assert not usertable.load(SM80)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--shipped", "missing"), "shipped is missing, which is not a directory"),
        (("--shipped", "sweep.sqlite"), "shipped is sweep.sqlite, which is not a directory"),
        (
            ("--head-dim", "64"),
            "nothing was timed for sm_80, family sm80, head_dim 64; sweep.sqlite has head dims 128x128",
        ),
        (("--family", "sm90"), "nothing was timed for sm_80, family sm90, head_dim 128x128"),
        (("--jobs", "0"), "Invalid value for '--jobs'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_applied_is_said_before_anything_is_compiled(
    arguments: tuple[str, ...], complaint: str, swept: pathlib.Path, world: World
) -> None:
    before = len(world.journaled("build"))
    result = call("apply", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())
    assert len(world.journaled("build")) == before


def test_a_users_table_that_cannot_be_written_is_said_before_anything_is_compiled(
    swept: pathlib.Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTEFLASH_CONFIG_DIR", str(swept / "sweep.sqlite"))
    before = len(world.journaled("build"))
    result = call("apply")
    assert result.exit_code == 2 and "cannot be written" in result.stderr
    assert len(world.journaled("build")) == before


def test_fresh_moves_the_database_aside(world: World, tmp_path: pathlib.Path) -> None:
    sweep()
    before = len(world.journaled("sample"))
    sweep()
    assert len(world.journaled("sample")) == before
    result = sweep("--fresh")
    assert "sweep.sqlite.1" in result.stderr
    assert len(world.journaled("sample")) == 2 * before
    with Store(tmp_path / "sweep.sqlite.1", create=False) as store:
        assert store.counts()["timings"]


def test_another_versions_database_is_refused_and_left_alone(world: World, tmp_path: pathlib.Path) -> None:
    sweep("--dry-run")
    with sqlite3.connect(tmp_path / "sweep.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    result = sweep()
    assert result.exit_code == 1
    assert "schema version 99" in result.stderr


def test_a_full_disk_is_a_message_and_nothing_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    full = dataclasses.replace(world, full_disk=(48,))
    monkeypatch.setattr(command, "backend", lambda target: full.backend)
    result = sweep()
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr and "are kept in sweep.sqlite" in result.stderr


INTERRUPTED = """
import pathlib, sys
from cuteflash.cli import sweep as command
from cuteflash.cli import sweep_apply
from cuteflash.cli.app import app
from tests.sweep_fakes import World

if __name__ == "__main__":
    world = World(pathlib.Path("."), pause=0.05, hold=22)  # the start, seven builds and checks, the first round
    command.backend = lambda target: world.backend
    command._check_gpu = lambda targets: None
    app(["sweep", *sys.argv[1:]])
"""


def test_ctrl_c_keeps_what_was_measured_and_says_so(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    options = ["--arch", "sm_80", "--cells", "128:512:full", "--traits", CANDIDATES, "--jobs", "1"]
    process = subprocess.Popen(
        [sys.executable, script, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell starts in the background ignores the signal, and so does everything below it.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    world = World(tmp_path)
    wait_until(lambda: len(world.journaled("sample")) >= 5 or process.poll() is not None, "the fifth sample")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it as well
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "timings are kept in sweep.sqlite" in said and "goes on from there" in said
    assert "Traceback" not in said
    with Store(tmp_path / "sweep.sqlite", create=False) as store:
        samples = sum(len(timing.samples) for timing in store.timings())
    assert len(world.journaled("sample")) - samples <= 1
    assert functools.reduce(max, (len(timing.samples) for timing in store_timings(tmp_path))) == 1


def store_timings(folder: pathlib.Path) -> list[Any]:
    with Store(folder / "sweep.sqlite", create=False) as store:
        return store.timings()
