"""`cuteflash info` explains the dispatcher's choice; `cuteflash compile` builds in parallel and judges."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import runpy
import signal
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import cuteflash
from cuteflash.cli import build as building
from cuteflash.cli.app import app
from cuteflash.cli.build import Outcome, Selection, Task, build_task, grid_tasks, table_tasks
from cuteflash.compile import BuildReport, Resources
from cuteflash.dispatch import choose
from cuteflash.install import how_to_install
from cuteflash.problem import DTYPES, MASK_KINDS, BwdProblem, FwdProblem
from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import Row
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.tables import tables_of
from cuteflash.usertable import TableWarning
from tests.user_tables import MEASURED, OwnTables

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROBLEM = FwdProblem.dense("bf16", 128, 128)
TASK = Task("sm_80", "sm80", PROBLEM, choose(PROBLEM, "sm_80").traits)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path / "cache"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def report(**resources: Any) -> BuildReport:
    used = {"registers": 168, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0} | resources
    traits = choose(PROBLEM, "sm_80").traits
    return BuildReport("k.K", "sm_80", traits, PROBLEM, 1.25, Resources(**used), traits.smem_bytes, cached=False)


GOOD = Outcome(TASK, report())
SPILLED = Outcome(TASK, report(spill_store_bytes=8))
WARNED = Outcome(TASK, report(warnings=("(C7510) wgmma serialized",)))
FAILED = Outcome(TASK, error="ValueError: no such instruction")


def test_info_json_is_the_choice_and_what_follows() -> None:
    result = json.loads(call("info", "--head-dim", "128", "--arch", "sm_90a", "--lengths", "long", "--json").stdout)
    (choice,) = result["choices"]
    expected = choose(PROBLEM, "sm_90a")
    assert choice["arch"] == "sm_90a"
    assert choice["source"] == expected.source
    assert choice["kernel"] == "cuteflash.kernels.sm90.fwd.FlashFwdSm90"
    assert choice["traits"] == {name: getattr(expected.traits, name) for name in choice["traits"]}
    assert choice["threads"] == expected.traits.num_threads
    assert choice["smem_bytes"] == expected.traits.smem_bytes <= choice["smem_limit"]
    assert set(choice["registers_per_thread"]) == {"producer", "mma"}
    assert result["environment"]["versions"]["torch"]
    assert result["environment"]["cache"]["kernels"] == 0
    assert result["environment"]["tables"]["user"] == []


def test_info_text_names_every_trait() -> None:
    output = call("info", "--head-dim", "64,96", "--arch", "sm_80", "--mask", "causal", "--dtype", "fp16").stdout
    assert "sm_80: fp16, head_dim 64, head_dim_v 64, causal" in output
    assert "head_dim 96, head_dim_v 96" in output
    for text in (
        "tile_m=",
        "num_warps=",
        "shipped table fwd/sm_80/sm80",
        "threads",
        "registers",
        "smem",
        "nvidia-cutlass-dsl",
    ):
        assert text in output


def test_info_of_a_problem_with_everything() -> None:
    arguments = ("info", "--arch", "sm_90a", "--causal", "--lse", "--softcap", "--lengths", "long")
    (choice,) = json.loads(call(*arguments, "--json").stdout)["choices"]
    problem = FwdProblem.dense("bf16", 128, 128, mask="causal", lse=True, softcap=True)
    assert choice["problem"] == dataclasses.asdict(problem)
    assert choice["source"] == choose(problem, "sm_90a", None, "long").source
    assert "causal, softcap, lse, long" in call(*arguments).stdout


def test_info_of_a_backward() -> None:
    arguments = ("info", "--kernel", "fwd,bwd", "--arch", "sm_90a", "--head-dim", "64", "--lse", "--lengths", "long")
    forward, backward = json.loads(call(*arguments, "--json").stdout)["choices"]
    problem = BwdProblem.dense("bf16", 64, 64, dlse=True)
    assert (forward["operation"], backward["operation"]) == ("fwd", "bwd")
    assert backward["problem"] == dataclasses.asdict(problem)
    assert backward["source"] == choose(problem, "sm_90a").source
    text = call("info", "--kernel", "bwd", "--arch", "sm_90a", "--deterministic", "--lse").stdout
    assert "bwd, sm_90a: bf16, head_dim 128, head_dim_v 128, full, deterministic, dlse" in text


def test_the_command_says_its_version() -> None:
    assert call("--version").stdout == f"cuteflash {cuteflash.__version__}\n"


def test_info_of_another_family_and_value_head_dim() -> None:
    problem = ("--arch", "sm_90a", "--family", "sm80", "--head-dim", "192", "--head-dim-v", "128", "--lengths", "long")
    (choice,) = json.loads(call("info", *problem, "--json").stdout)["choices"]
    assert choice["family"] == "sm80"
    assert tuple(choice["problem"]["operands"][name] for name in ("head_dim", "head_dim_v")) == (192, 128)
    assert choice["registers_per_thread"] == {"limit": 255}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("info", "--arch", "sm_75"), "arch is 'sm_75'; allowed: sm_80, sm_86, sm_89, sm_90a, sm_120"),
        (("info", "--dtype", "fp32"), "dtype is 'fp32'; allowed: fp16, bf16"),
        (("info", "--mask", "alibi"), "mask is 'alibi'; allowed: full, causal, window"),
        (
            ("info", "--lengths", "middling"),
            "lengths is 'middling'; allowed: decode, tiny, small, brief, short, moderate, medium, long",
        ),
        (
            ("compile", "--head-dim", "64", "--arch", "sm_80", "--lengths", "1"),
            "lengths is '1'; allowed: decode, tiny, small, brief, short",
        ),
        (("info", "--family", "sm100"), "family is 'sm100'; allowed: sm80, sm90"),
        (("info", "--causal", "--mask", "full"), "mask and causal are both given"),
        (("info", "--head-dim", "264"), "head_dim is 264; allowed: multiples of 8 up to 256"),
        (("info", "--head-dim", "x"), "head_dim is 'x'; allowed: comma-separated integers"),
        (("info", "--head-dim", "64,96", "--head-dim-v", "64,96,128"), "head_dim_v has 3 values; allowed: one, or 2"),
        (("info", "--arch", "sm_80", "--family", "sm90"), "family is 'sm90', which sm_80 does not run; it runs: sm80"),
        (("info", "--kernel", "decode"), "kernel is 'decode'; allowed: fwd, bwd"),
        (("info", "--deterministic"), "deterministic is given for kernel fwd; allowed: with kernel bwd"),
        (
            ("compile", "--kernel", "fwd,bwd", "--arch", "sm_90a", "--head-dim", "64", "--deterministic", "0,1"),
            "deterministic is given for kernel fwd; allowed: with kernel bwd",
        ),
        (("compile",), "compile needs --head-dim"),
        (("compile", "--head-dim", "64", "--arch", "sm_90"), "arch is 'sm_90'; allowed:"),
        (("compile", "--head-dim", "64", "--arch", "sm_80", "--causal", "2"), "causal is '2'; allowed: 0, 1"),
        (("compile", "--head-dim", "64", "--causal", "0", "--mask", "full"), "mask and causal are both given"),
        (("compile", "--all", "--head-dim", "72"), "no row of the tables is left"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_values_name_what_is_allowed_and_exit_2(arguments: tuple[str, ...], complaint: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stdout == ""


def test_compile_needs_an_arch_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("compile", "--head-dim", "64")
    assert result.exit_code == 2
    assert "arch is not given and torch finds no GPU; allowed: sm_80" in result.stderr


def selected(**changes: Any) -> Selection:
    everything = {
        "targets": [key.target for key in tables_of("fwd")],
        "families": ["sm80", "sm90"],
        "head_dims": None,
        "masks": list(MASK_KINDS),
        "dtypes": list(DTYPES),
        "lse": [False],
        "softcap": [False],
    }
    return Selection(**everything | changes)


def test_all_is_every_row_of_every_table_once() -> None:
    tasks = table_tasks(selected())
    assert len(tasks) == len(set(tasks))
    built = {
        (task.target, task.family, task.problem.operands.head_dim, task.problem.operands.head_dim_v) for task in tasks
    }
    rows = {
        (*table[1:], row.traits.head_dim, row.traits.head_dim_v)
        for table, rows in tables_of("fwd").items()
        for row in rows
    }
    assert built == rows
    for table in tables_of("fwd"):
        for pair in {(row.traits.head_dim, row.traits.head_dim_v) for row in tables_of("fwd")[table]}:
            problems = [FwdProblem.dense(dtype, *pair, mask) for dtype in DTYPES for mask in MASK_KINDS]
            asked = itertools.product(problems, LENGTH_CLASSES)
            kernels = {(problem, choose(problem, *table[1:], lengths).traits) for problem, lengths in asked}
            mine = [task for task in tasks if (task.target, task.family) == table[1:] and head_dims_of(task) == pair]
            assert {(task.problem, task.traits) for task in mine} == kernels
            assert sum(len(task.lengths) for task in mine) == len(problems) * len(LENGTH_CLASSES)


def head_dims_of(task: Task) -> tuple[int, int]:
    return task.problem.operands.head_dim, task.problem.operands.head_dim_v


def test_a_row_of_its_own_for_some_lengths_is_a_kernel_of_its_own(own_tables: OwnTables) -> None:
    traits = FwdTraitsSm80(64, 48, 128, 128)
    own_tables.write("sm_80", "sm80", [MEASURED(Row(traits, ("causal",), lengths=("short", "decode")))])
    tasks = table_tasks(selected(targets=["sm_80"], head_dims=[(128, 128)], masks=["causal"], dtypes=["bf16"]))
    assert [(task.traits == traits, task.lengths) for task in tasks] == [
        (True, ("decode", "short", "moderate")),
        (False, ("tiny", "small", "brief", "medium", "long")),
    ]
    assert [task.cells()[-1] for task in tasks] == ["decode, short, moderate", "tiny, small, brief, medium, long"]
    assert Task("sm_80", "sm80", PROBLEM, traits).cells()[-1] == "all"
    selection = selected(targets=["sm_80"], head_dims=[(128, 128)], families=[None], masks=["causal"], lengths=["long"])
    assert {task.lengths for task in grid_tasks(selection)} == {("long",)}


def test_info_says_which_table_and_row_each_length_class_comes_from(own_tables: OwnTables) -> None:
    row = Row(FwdTraitsSm80(64, 48, 128, 128), ("causal",), lengths=("decode",))
    path = own_tables.write("sm_80", "sm80", [MEASURED(row)])
    arguments = ("info", "--arch", "sm_80", "--head-dim", "128", "--mask", "causal")
    result = json.loads(call(*arguments, "--json").stdout)
    own, shipped = result["choices"]
    assert own["lengths"] == ["decode"] and shipped["lengths"] == [name for name in LENGTH_CLASSES if name != "decode"]
    assert own["source"] == (
        f"user's table {path}, row of head dims 128x128 (causal; decode), measured on Card, 2026-01-31, 123 TFLOP/s"
    )
    assert own["traits"]["tile_n"] == 48
    assert shipped["source"].startswith("shipped table fwd/sm_80/sm80, row of head dims 128x128")
    assert result["environment"]["tables"] == {
        "dir": str(path.parent),
        "user": [{"table": "fwd/sm_80/sm80", "path": str(path), "rows": 1, "unusable": None}],
    }
    text = call(*arguments, "--lengths", "long").stdout
    assert "causal, long" in text and "user's table" not in text
    assert f"sm_80/sm80: {path} (1 rows)" in text


def test_info_says_why_a_users_table_is_not_used(own_tables: OwnTables) -> None:
    path = own_tables.write("sm_80", "sm80", [])
    path.write_text("{")
    own_tables.forget()
    with pytest.warns(TableWarning, match="it is not JSON"):
        result = call("info", "--arch", "sm_80")
    assert "sm_80/sm80: the user's table" in result.stdout and "it is not JSON" in result.stdout
    assert "shipped table fwd/sm_80/sm80" in result.stdout


def test_options_narrow_the_table() -> None:
    tasks = table_tasks(selected(targets=["sm_80"], families=["sm80"], head_dims=[(64, 64)], masks=["causal"]))
    assert [(task.target, task.problem.operands.qk_dtype) for task in tasks] == [("sm_80", dtype) for dtype in DTYPES]


def test_a_grid_is_the_product_of_its_options() -> None:
    tasks = grid_tasks(
        selected(
            targets=["sm_80", "sm_90a"],
            families=[None],
            head_dims=[(64, 64), (72, 40)],
            masks=["full", "causal"],
            dtypes=["bf16"],
            lse=[False, True],
            lengths=["long"],
        )
    )
    assert len(tasks) == len(set(tasks)) == 16
    assert {(task.target, task.family) for task in tasks} == {("sm_80", "sm80"), ("sm_90a", "sm90")}


def test_backwards_are_built_ahead_too() -> None:
    selection = selected(
        operations=["fwd", "bwd"], targets=["sm_90a"], families=["sm90"], head_dims=[(64, 64)], lengths=["long"]
    )
    forwards, backwards = (
        [task for task in table_tasks(selection) if task.problem.operation == operation] for operation in ("fwd", "bwd")
    )
    assert len(forwards) == len(backwards) == len(MASK_KINDS) * len(DTYPES)
    assert {task.problem for task in backwards} == {
        BwdProblem.dense(dtype, 64, 64, mask) for dtype in DTYPES for mask in MASK_KINDS
    }
    assert all(task.traits == choose(task.problem, "sm_90a").traits for task in backwards)
    assert set(forwards + backwards) == set(grid_tasks(selection))
    assert backwards[0].cells()[:2] == ["bwd", "sm_90a"]
    assert Outcome(backwards[0], error="no").as_dict()["operation"] == "bwd"


def test_repeatable_backwards_are_kernels_of_their_own() -> None:
    given = {"targets": ["sm_90a"], "families": [None], "head_dims": [(64, 64)], "masks": ["full"], "dtypes": ["bf16"]}
    tasks = grid_tasks(selected(**given, operations=["bwd"], deterministic=[False, True], lengths=["long"]))
    assert [task.problem.is_deterministic for task in tasks] == [False, True]
    assert "full deterministic" in tasks[1].cells()


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [([GOOD], 0), ([GOOD, SPILLED], 1), ([WARNED], 1), ([FAILED, GOOD], 1)],
    ids=["good", "spills", "ptxas warning", "failed"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_compile_exits_by_the_worst_kernel(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], status: int, as_json: bool
) -> None:
    monkeypatch.setattr(building, "run", lambda tasks, jobs: outcomes)
    result = call("compile", "--arch", "sm_80", "--head-dim", "128", *(["--json"] if as_json else []))
    assert result.exit_code == status
    for outcome in outcomes:
        for complaint in [outcome.error] if outcome.report is None else outcome.report.complaints:
            assert complaint in result.stdout
    if as_json:
        assert [item["error"] for item in json.loads(result.stdout)] == [outcome.error for outcome in outcomes]
    else:
        assert "128x128" in result.stdout


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_is_whole_at_every_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    problem = FwdProblem.dense("bf16", 256, 256, mask="window", lse=True, softcap=True)
    task = Task("sm_90a", "sm90", problem, choose(problem, "sm_90a").traits, ("decode", "short"))
    console = functools.partial(Console, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(building, "Console", console)
    building.print_table([GOOD, Outcome(task, report(stack_bytes=1024, spill_store_bytes=1288, spill_load_bytes=1000))])
    table = capsys.readouterr().out.splitlines()[:-2]
    assert max(map(len, table)) <= width
    shown = " ".join(table).split()
    tile = f"{TASK.traits.tile_m}x{TASK.traits.tile_n}"
    details = "window softcap lse decode, short 1.25 168 1024 1288+1000 compiler"
    assert {*TASK.cells(), *details.split(), tile} <= set(shown)


def test_a_failing_kernel_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, traits: object, problem: object) -> None:
            raise RuntimeError("nothing works")

    monkeypatch.setattr(building, "kernel_class", lambda family: Broken)
    assert build_task(TASK) == Outcome(TASK, error="RuntimeError: nothing works")


@pytest.mark.slow
def test_a_dead_compiler_process_is_a_failed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "build_task", die)
    (outcome,) = building.run([TASK], jobs=1)
    assert outcome.error is not None
    assert "a compiler process died" in outcome.error


def die(task: Task) -> None:
    import os

    os._exit(1)


@pytest.mark.slow
def test_compile_builds_in_parallel_and_the_second_run_compiles_nothing() -> None:
    problems = ("--arch", "sm_80", "--head-dim", "32", "--causal", "0,1", "--lengths", "long")
    first, second = (call("compile", *problems, "--jobs", jobs, "--json") for jobs in ("2", "1"))
    reports = json.loads(first.stdout)
    assert [item["problem"]["scores"]["mask"] for item in reports] == ["full", "causal"]
    for item in reports:
        assert item["error"] is None
        assert item["seconds"] > 0
        assert item["registers"] > 0
        assert item["smem_bytes"] > 0
        assert {"stack_bytes", "spill_store_bytes", "spill_load_bytes", "warnings"} <= set(item)
    assert first.exit_code == second.exit_code == any(item["complaints"] for item in reports)
    assert not any(item["cached"] for item in reports)
    assert json.loads(second.stdout) == [item | {"cached": True} for item in reports]


@pytest.mark.parametrize(("command", "module"), [("demo", "cuteflash.cli.demo")])
def test_demo_gets_its_own_options(monkeypatch: pytest.MonkeyPatch, command: str, module: str) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(f"{module}.main", lambda argv: given.append(argv) or 3)
    assert call(command, "--quick", "x").exit_code == 3
    assert given == [["--quick", "x"]]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_command_without_its_packages_says_how_to_get_them() -> None:
    done = run_python("import sys; sys.modules['typer'] = None; import cuteflash_command; cuteflash_command.main()")
    assert done.returncode == 1
    assert done.stderr == f"cuteflash: the command needs typer; {how_to_install('cli')}\n"


@pytest.mark.parametrize("module", ["cuteflash", "cuteflash.cli"])
def test_the_package_runs_as_a_module(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cuteflash.cli.main", lambda: print("the command"))
    runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out == "the command\n"


AS_COMMAND = "import cuteflash_command; cuteflash_command.main()"
AS_MODULE = "import runpy; sys.argv = ['-m']; runpy._run_module_as_main('cuteflash')"  # as python -m cuteflash does it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "module"),
    [(AS_COMMAND, "torch"), (AS_MODULE, "torch"), (AS_MODULE, "typer")],
    ids=["command, torch", "module, torch", "module, typer"],
)
def test_ctrl_c_during_imports_is_quiet(start: str, module: str) -> None:
    code = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
{start}
"""
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
