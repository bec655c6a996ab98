"""The benchmark of host time, on a CPU that plays a GPU: its rows, the launches that a call makes, its options."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import host, stand_in
from cuteflash import api

CPU = torch.device("cpu")
LAUNCHES = {  # of each call; a backward's kernels are one
    "forward": 1,
    "forward that keeps what its gradient needs": 1,
    "forward + backward": 2,
    "packed forward": 1,
    "packed forward + backward": 2,
    "decode": 1,
    "decode, paged": 1,
    "decode, appends": 2,
    "decode, appends and rotates": 2,
    "decode, paged, appends and rotates": 2,
    "append_kv": 1,
    "quantize_qkv": 1,
    "forward, fp8=True": 2,
}


def test_every_row_is_timed_and_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    assert host.main(["--device", "cpu", "--rounds", "2", "--calls", "1", "--json", str(path)]) == 0
    printed, found = capsys.readouterr().out, json.loads(path.read_text())["host_us"]
    assert LAUNCHES.keys() < found.keys()
    for title, times in found.items():
        assert 0 < times["best"] <= times["median"] and f"| {title} |" in printed
    assert "none (CPU)" in printed


def test_a_call_makes_its_launches_and_no_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def compiled(kernel_cls: type, traits: Any, problem: Any, target: str) -> Callable[..., None]:
        return lambda *arguments: launched.append(problem)

    before = api.is_plain_cuda_call
    monkeypatch.setattr(host, "HEAD_DIM", 80)  # which no other test plans with a kernel of its own
    with stand_in.no_kernels(compiled):
        rows = {title: (group.context, row) for group in host.groups_of([], CPU) for title, row in group.rows.items()}
        for title, count in LAUNCHES.items():
            context, row = rows[title]
            with context():
                for _ in range(2):
                    launched.clear()
                    row()
                    assert len(launched) == count, title
    assert api.is_plain_cuda_call is before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "--rounds and --calls are 1 or more"),
        (["--device", "cuda"], "there is no GPU; allowed: cpu"),
        (["--peers", "fa5"], "invalid choice: 'fa5'"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as stopped:
        host.main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err
