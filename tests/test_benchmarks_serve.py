"""benchmarks/serve.py, on a CPU and with ways that do nothing."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from benchmarks import serve, serve_ways
from benchmarks.serve_ways import Load, Measured, Way
from tests.serving_parts import model

SMALL = Load(requests=3, shortest=4, longest=9, answer=5, batch=2)


def test_prompts_repeat_and_differ_by_seed() -> None:
    load = Load(requests=50, shortest=4, longest=9)
    prompts = load.prompts(100, seed=1)
    assert prompts == load.prompts(100, seed=1) != load.prompts(100, seed=2)
    assert {len(prompt) for prompt in prompts} == set(range(4, 10))


def test_a_summary_counts_from_the_beginning_and_between_tokens() -> None:
    found = Measured(2.0, [[1] * 4] * 2, [[0.1, 0.2, 0.4], [0.3, 0.5, 0.7]]).summary()
    assert found["tokens_per_second"] == 4
    assert found["first_token_ms"] == pytest.approx(200) and found["between_tokens_ms"] == pytest.approx(200)
    assert found["first_token_ms_p95"] == pytest.approx(100)
    assert set(Measured(2.0, [[1]]).summary()) == {"seconds", "tokens_per_second"}


@pytest.mark.slow
def test_all_ways_give_the_same_answers() -> None:
    """In fp32, greedily; also of transformers' continuous batching, which takes what prompts come first."""
    device = model("tiny").device
    found = {}
    for name, make in serve_ways.makers().items():
        way = make("tiny", device, SMALL)
        measured = way.run(SMALL.prompts(way.vocabulary, seed=0))
        way.close()
        assert measured.tokens == 15 and measured.seconds > 0
        assert [len(times) for times in measured.times] == (
            [] if name in (serve_ways.STATIC, serve_ways.COMPILED) else [5] * 3
        )
        found[name] = measured.answers
    assert list(found) == list(serve_ways.WAYS)
    assert all(list(answers) == list(found["engine"]) for answers in found.values())
    assert serve.equal_first_tokens([[1, 2], [3]], [[1, 3], [4]]) == 0.5


def test_options_that_a_version_does_not_have_are_left_out() -> None:
    assert serve_ways.accepted(Load, requests=3, unheard_of=1) == Load(requests=3)


def started_in_a_thread(way: str, options: argparse.Namespace, load: Load) -> Connection:
    ours, its = multiprocessing.Pipe()
    arguments = way, options.preset, options.device, load, its
    threading.Thread(target=serve_ways.work, args=arguments, daemon=True).start()
    return ours


def test_a_run_writes_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[Sequence[Sequence[int]]] = []

    def make(*about: Any) -> Way:
        def run(prompts: Sequence[Sequence[int]]) -> Measured:
            seeds.append(prompts)
            return Measured(0.5, [[1] * 32] * 64, [[0.1, 0.2]])

        return Way(7, run)

    def stall(*about: Any) -> Way:
        threading.Event().wait(60)
        raise AssertionError("waited for")

    def fail(*about: Any) -> Way:
        raise RuntimeError("no such thing")

    def cut(*about: Any) -> Way:
        return Way(7, lambda prompts: Measured(0.5, [[1] * 31] * 64))

    made = dict(zip(serve_ways.WAYS, (make, fail, stall, cut, make), strict=True))
    monkeypatch.setattr(serve_ways, "makers", lambda: made)
    monkeypatch.setattr(serve, "start", started_in_a_thread)
    path = tmp_path / "serve.json"
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--prepare", "2", "--json", str(path)]
    assert serve.main([*options, "--ways", "engine"]) == 0
    assert seeds == [serve.QUICK.prompts(7, seed) for seed in range(3)]
    assert "4096 tokens/s" in capsys.readouterr().out
    assert serve.main(options) == 1
    ways = json.loads(path.read_text())["ways"]
    assert ways["engine"]["first_token_ms"] == 100
    assert ways["generate"] == {"failed": "RuntimeError: no such thing"}
    assert ways["generate_compiled"] == {"failed": "not ready after 2 s; --prepare allows for more"}
    assert ways["generate_batch"] == {"failed": "an answer has another length than asked for"}


@pytest.mark.slow
def test_ways_run_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "QUICK", SMALL)
    options = ["--device", "cpu", "--quick", "--preset", "tiny", "--prepare", "120", "--ways"]
    assert serve.main([*options, "engine,generate"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in out] == ["engine", "generate"]
    assert all(line.endswith("first tokens as the first way's 100%") for line in out)


def test_what_fails_in_a_way_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "start", started_in_a_thread)
    assert serve.main(["--device", "cpu", "--quick", "--preset", "guess", "--ways", "engine"]) == 1
    assert "ValueError: preset is 'guess'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--ways", "engine,guess"], "ways is engine,guess"),
        (["--rounds", "0"], "rounds is 0"),
        (["--prepare", "0"], "prepare is 0"),
    ],
)
def test_wrong_options_are_named(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--device", "cpu", *options])
    assert complaint in capsys.readouterr().err
