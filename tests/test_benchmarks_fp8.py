"""The forward benchmark with 8-bit operands, on the CPU: operands, checks, cuDNN's graph, the report."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import contest, cudnn_fp8, forward, fp8, implementations, report, running
from benchmarks.ahead import fp8_kernels
from cuteflash.cli import bench
from cuteflash.reference.fp8 import stored_rows
from cuteflash.tune.cells import Cell
from cuteflash.tune.machine import Matmul

CPU = torch.device("cpu")
SMALL = Cell(32, "causal", 48, tokens=96, hidden=64)
OURS = ["sm90", "sm90-fp8-vt", "sm90-fp8"]


def test_16_bit_implementations_get_exactly_what_8_bit_operands_stand_for() -> None:
    inputs = fp8.make_fp8_inputs(Cell(32, "full", 48, tokens=96, hidden=64, inputs="outliers"), CPU)
    for wide, narrow, scale in zip(
        (inputs.wide.q, inputs.wide.k, inputs.wide.v), (inputs.q, inputs.k, inputs.v), inputs.descales
    ):
        assert torch.equal(wide.double(), narrow.double() * scale[0, 0])
        assert torch.frexp(scale).mantissa.eq(0.5).all() and scale.shape == (2, 2)
        assert 224 <= narrow.float().abs().max() <= 448
    assert torch.equal(stored_rows(inputs.vt.float(), 48), inputs.v.float())


def exact(inputs: fp8.Fp8Inputs) -> Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (inputs.wide.q, inputs.wide.k, inputs.wide.v))
    causal = inputs.cell.mask == "causal"
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).contiguous()


def test_an_8_bit_output_is_judged_by_what_it_stands_for() -> None:
    inputs = fp8.make_fp8_inputs(SMALL, CPU)
    judge = fp8.Fp8Judge(inputs)
    out = (exact(inputs) * cudnn_fp8.out_scale(inputs.descales)).to(torch.float8_e4m3fn)
    assert judge.complaint(out, exact(inputs)) is None
    assert 0.01 < judge.measured(out)["relative"] < 0.035
    assert judge.measured(exact(inputs))["relative"] < 1e-5


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: out[0, 3, 1].fill_(math.nan), "NaN"),
        (lambda out: out[0, 30, 0, 5].add_(0.2), "of what P |V| is"),
        (lambda out: out.mul_(1.15), "rms error"),
        (lambda out: out.add_(0.2 * out.roll(1, dims=3)), "rms error"),
    ],
)
def test_a_wrong_output_is_caught(spoil: Any, words: str) -> None:
    judge = fp8.Fp8Judge(fp8.make_fp8_inputs(SMALL, CPU))
    wrong = exact(judge.inputs)
    assert judge.complaint(wrong, wrong) is None and judge.imprecision(wrong) is None
    spoil(wrong)
    assert words in str(judge.complaint(wrong, None))


def test_an_output_that_is_wrong_on_other_heads_alone_is_caught_by_another_implementation() -> None:
    judge = fp8.Fp8Judge(fp8.make_fp8_inputs(Cell(16, "full", 48, tokens=48, hidden=64), CPU))
    right = exact(judge.inputs)
    wrong = right.clone()
    wrong[:, :, 1] *= 1.5  # the first and the last of four heads are compared with the definition
    assert judge.complaint(wrong, None) is None
    assert "another implementation" in str(judge.complaint(wrong, right))


def test_our_error_is_at_most_that_of_four_bits_of_mantissa() -> None:
    judge = fp8.Fp8Judge(fp8.make_fp8_inputs(SMALL, CPU))
    assert judge.imprecision(exact(judge.inputs) * 1.03) is None
    assert "over 3.50%" in str(judge.imprecision(exact(judge.inputs) * 1.04))


def test_a_run_checks_times_and_reports(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "fp8.json", tmp_path / "fp8.png"
    assert bench.measure(forward.run, running.Plan([SMALL], OURS, rounds=1), CPU, path, plot) == 0
    result = json.loads(path.read_text())
    assert list(result["host_us"]) == ["sm90"]
    entries = result["cells"][0]["results"]
    assert list(entries) == OURS and all(entry["relative"] < 0.01 for entry in entries.values())
    shown = capsys.readouterr().out
    assert "e4m3 beside bf16" in shown and "fp8 Vᵀ/bf16" in shown and "FP8 V: rms error at most" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert report.marker(result) == "fp8 benchmark"
    assert {"fp8 Vᵀ/bf16", "fp8 V/Vᵀ"} == set(result["summary"])


def test_shares_are_of_the_matrix_product_of_the_same_element_type() -> None:
    results = {"sm90": {"tflops": 600.0}, "sm90-fp8-vt": {"tflops": 900.0}, "sm90-fp8": {"tflops": 800.0}}
    cell = {"label": "D64 full 1024", "head_dim": 64, "mask": "full", "seqlen": 1024, "results": results}
    result = {"cells": [cell | {"matmul_tflops": 750.0, "fp8_matmul_tflops": 1500.0}], "device": {}}
    lines = report.summary_lines(result | {"fp8_matmul_tflops": 1500.0})
    assert "of that matrix product, timed beside them: D64 full 1024 0.800" in lines
    assert "of the e4m3 matrix product, timed beside them: D64 full 1024 0.600" in lines


def test_both_matrix_products_are_timed_beside_a_cell() -> None:
    inputs = fp8.make_fp8_inputs(SMALL, CPU)
    product = Matmul(lambda calls: torch.zeros(()), flops=10**9)
    measured = contest.measure(
        fp8.Fp8Judge(inputs), {"sm90": lambda given: lambda n: exact(given)}, CPU, 1, product, product
    )
    assert measured["matmul_tflops"] > 0 and measured["fp8_matmul_tflops"] > 0


def test_the_set_has_the_promised_cells() -> None:
    chosen = forward.SETS["fp8"]
    assert len(chosen.cells) == 3 * 2 * 5 and {cell.dtype for cell in chosen.cells} == {"bf16"}
    assert chosen.names == ("sm90", "sm90-fp8-vt", "sm90-fp8", "cudnn-fp8")


def test_kernels_are_known_ahead() -> None:
    kernels = list(fp8_kernels([Cell(128, "causal", 4096)], [*OURS, "cudnn-fp8"], "sm_90a"))
    assert [(p.operands.qk_dtype, p.operands.transposed_v, t.two_level) for t, p in kernels] == [
        ("bf16", False, False),
        ("e4m3", True, True),
        ("e4m3", False, True),
    ]


def test_cudnn_is_left_out_if_its_interface_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(cudnn_fp8.importlib.util, "find_spec", lambda name: None)
    assert implementations.unavailable("cudnn-fp8", CPU) == "nvidia-cudnn-frontend is not installed"
    assert implementations.unavailable("sm90-fp8", CPU) == "needs a CUDA device"


class Described:
    """A tensor of `FakeGraph`."""

    def __init__(self, **what: Any) -> None:
        self.what = what

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("set_")
        if key == name:
            raise AttributeError(name)
        return lambda value: self.what.update({key: value}) or self


class FakeGraph:
    """What a graph of cuDNN's frontend does, in torch: P is rounded, O is rounded with its scale."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def tensor(self, **what: Any) -> Described:
        return Described(**what)

    def sdpa_fp8(self, **given: Any) -> list[Described]:
        self.given = given
        self.outputs = [Described() for _ in range(4)]
        return self.outputs

    def execute(self, pack: dict[Any, Tensor], workspace: Tensor, handle: Any) -> None:
        given = {name: pack[x] for name, x in self.given.items() if isinstance(x, Described)}
        for name, x in given.items():
            described = self.given[name].what
            assert (tuple(x.shape), tuple(x.stride())) == (described["dim"], described["stride"]), name
        q, k, v = (given[n].float() * given[f"descale_{n}"] for n in "qkv")
        scores = q @ k.transpose(-1, -2) * self.given["attn_scale"]
        if self.given["use_causal_mask"]:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        rounded = (p * given["scale_s"]).to(torch.float8_e4m3fn).float() * given["descale_s"]
        out = pack[self.outputs[0]]
        assert tuple(out.stride()) == self.outputs[0].what["stride"] and self.outputs[0].what["data_type"] == "e4m3"
        out.copy_((rounded @ v / p.sum(-1, keepdim=True) * given["scale_o"]).to(torch.float8_e4m3fn))

    def get_workspace_size(self) -> int:
        return 16

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None  # the steps from a graph to a plan


class Unsupported(Exception):
    """What the frontend raises if cuDNN has no plan."""


class FakeGraphOfOutputs(FakeGraph):
    """One that cuDNN has a plan for only if the largest magnitudes are outputs, which it then writes."""

    def check_support(self) -> None:
        if not all(x.what["output"] for x in self.outputs[2:]):
            raise Unsupported("no plan of that kind")

    def execute(self, pack: dict[Any, Tensor], workspace: Tensor, handle: Any) -> None:
        super().execute(pack, workspace, handle)
        for x in self.outputs[2:]:
            pack[x].fill_(1.0)


class FakeGraphWithoutPlan(FakeGraph):
    """One that cuDNN has no plan for."""

    def check_support(self) -> None:
        raise Unsupported("head dim is too large")


@pytest.fixture
def fake_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The package, as far as it is used, with a graph that computes in torch."""
    fake = types.SimpleNamespace(
        data_type=types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32"),
        heur_mode=types.SimpleNamespace(A="a", FALLBACK="fallback"),
        pygraph=FakeGraph,
        cudnnGraphNotSupportedError=Unsupported,
        backend_version=lambda: 92000,
        create_handle=object,
        set_stream=lambda handle, stream: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    cudnn_fp8._handle.cache_clear()
    yield fake
    cudnn_fp8._handle.cache_clear()


@pytest.mark.parametrize("graph", [FakeGraph, FakeGraphOfOutputs])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_cudnns_graph_gets_the_operands_and_scales_that_it_describes(
    mask: Any, graph: type, fake_cudnn: types.SimpleNamespace
) -> None:
    fake_cudnn.pygraph = graph
    cell = Cell(32, mask, 48, tokens=96, hidden=64)
    judge = fp8.Fp8Judge(fp8.make_fp8_inputs(cell, CPU))
    out = fp8.runner("cudnn-fp8", judge.inputs)(1)
    assert out.shape == judge.inputs.q.shape
    assert judge.complaint(out, exact(judge.inputs)) is None
    assert judge.measured(out)["relative"] < 0.05


def test_what_cudnn_has_no_plan_for_is_left_out(fake_cudnn: types.SimpleNamespace) -> None:
    fake_cudnn.pygraph = FakeGraphWithoutPlan
    judge = fp8.Fp8Judge(fp8.make_fp8_inputs(Cell(32, "full", 48, tokens=96, hidden=64), CPU))
    found = contest.measure(judge, {"cudnn-fp8": functools.partial(fp8.runner, "cudnn-fp8")}, CPU, rounds=1)
    reason = "cuDNN 92000 has no plan: head dim is too large"
    assert found["results"]["cudnn-fp8"] == {"left out": f"NotImplementedError: {reason}"}


def test_cudnn_has_no_window() -> None:
    with pytest.raises(NotImplementedError, match="no windows"):
        cudnn_fp8.build_graph(None, Cell(32, "window", 48, tokens=96, hidden=64))
