"""examples/cascade.py: a shared prefix that is read once, on a CPU."""

from __future__ import annotations

import dataclasses

import cascade as example
import pytest
import torch
from cascade import SMALL, Sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"queries": 5},
        {"requests": 1},
        {"prefix": 16, "own": 70},
        {"page_size": 1, "prefix": 33},
        {"kv_heads": 8, "head_dim": 32},
    ],
)
def test_the_two_ways_are_equal(changed: dict[str, int]) -> None:
    step = example.make_step(dataclasses.replace(SMALL, **changed), torch.float32, CPU)
    right = example.exact(step)
    torch.testing.assert_close(example.one_call(step), right, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(example.cascade(step), right, atol=2e-6, rtol=2e-5)


def test_requests_share_the_pages_of_the_prefix_only() -> None:
    step = example.make_step(SMALL, torch.float32, CPU)
    shared = SMALL.prefix // SMALL.page_size
    assert (step.page_table[:, :shared] == step.page_table[0, :shared]).all()
    assert step.page_table[:, shared:].unique().numel() == step.page_table[:, shared:].numel()
    assert step.page_table.unique().numel() == len(step.k_pages)


def test_bytes_are_those_of_each_token_that_a_call_reads() -> None:
    step = example.make_step(SMALL, torch.float32, CPU)
    token = 2 * 2 * 64 * 4  # keys and values, heads, columns, bytes
    own = int(step.own.sum())
    assert example.bytes_read(step) == ((6 * 96 + own) * token, (96 + own) * token)


def test_a_run_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", "cpu", "--requests", "3"]) == 0
    first, one, both = capsys.readouterr().out.splitlines()
    assert first.startswith("3 requests, 96 shared tokens") and "MB" in one and "MB" in both


def test_another_result_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(example, "cascade", lambda step: example.one_call(step) * 1.01)
    assert example.main(["--device", "cpu"]) == 1
    assert "cascade: its error is above" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prefix", "100"], "prefix is 100; allowed: multiples of the page size, 16"),
        (["--queries", "13"], "queries is 13; allowed: up to 12"),
        (["--heads", "9"], "heads is 9; allowed: multiples of kv_heads, 2"),
        (["--requests", "0"], "requests is 0; allowed: positive numbers"),
        (["--rounds", "0"], "rounds is 0"),
        (["--head-dim", "20"], "head_dim"),
    ],
)
def test_wrong_options_are_named(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--device", "cpu", *options])
    assert complaint in capsys.readouterr().err


def test_the_default_of_a_gpu_is_allowed() -> None:
    Sizes().check()
