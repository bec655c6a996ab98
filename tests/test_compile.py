"""Kernels compile anywhere, load without a GPU, and nothing that ptxas says about them is lost."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import warnings
from typing import Any

import pytest
import torch
from cutlass import cute

from cuteflash.arguments import FwdArguments
from cuteflash.compile import BuildReport, KernelWarning, Resources, build, cache_dir, compiled
from cuteflash.compile.resources import parse_ptxas_log
from cuteflash.core.signature import fwd_fake_args
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm80 import FwdTraitsSm80
from tests.cubins import machine_code
from tests.slow_kernels import IgnoredSetmaxnreg, SerialisedWgmma, WgmmaKernel
from tests.toy_kernel import ToyKernel

TRAITS = FwdTraitsSm80(64, 64, 64, 64)
PROBLEM = FwdProblem.dense("bf16", 64, 64)

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_a' for 'sm_90a'
ptxas info    : Function properties for kernel_a
ptxas         .     256 bytes stack frame, 640 bytes spill stores, 512 bytes spill loads
ptxas info    : Used 128 registers, used 9 barriers
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in function 'kernel_a'\n"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("cuteflash.compile.compiler._loaded", {})


def test_ptxas_log_is_read() -> None:
    assert parse_ptxas_log(LOG) == Resources(128, 256, 640, 512)


def test_the_largest_of_several_kernels_counts() -> None:
    other = LOG.replace("128 registers", "90 registers").replace("512 bytes spill loads", "900 bytes spill loads")
    assert parse_ptxas_log(LOG + other) == Resources(128, 256, 640, 900)


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        (SERIALISED, "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"),
        ("ptxas warning : Local memory used in 'kernel_a'\n", "Local memory used"),
        ("ptxas /tmp/x.ptx, line 8; warning : (C7508) 'setmaxnreg' ignored\n", "(C7508) 'setmaxnreg' ignored"),
    ],
)
def test_every_ptxas_diagnostic_is_kept_once(line: str, warning: str) -> None:
    (found,) = parse_ptxas_log(line + line + LOG).warnings
    assert warning in found


def test_a_diagnostic_on_the_first_line_of_a_remark_is_kept() -> None:
    remark = f"Remark: 'ptxas output: {SERIALISED}{LOG}'".replace("'kernel_a'", "''kernel_a''")
    (found,) = parse_ptxas_log(remark).warnings
    assert found.startswith("(C7510)")
    assert "kernel_a" not in found


def test_a_log_without_resources_is_an_error() -> None:
    with pytest.raises(ValueError, match="no resource usage in the ptxas log"):
        parse_ptxas_log("ptxas info : 0 bytes gmem")


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_build_cross_compiles(target: str) -> None:
    report = build(ToyKernel, TRAITS, PROBLEM, target)
    assert (report.kernel, report.target) == ("tests.toy_kernel.ToyKernel", target)
    assert (report.traits, report.problem, report.smem_bytes) == (TRAITS, PROBLEM, TRAITS.smem_bytes)
    assert 0 < report.resources.registers <= 255
    assert report.complaints == ()
    assert not report.cached
    again = build(ToyKernel, TRAITS, PROBLEM, target)
    assert again == dataclasses.replace(report, cached=True)


def test_the_report_is_json() -> None:
    report = json.loads(json.dumps(build(ToyKernel, TRAITS, PROBLEM, "sm_80").as_dict()))
    assert report["traits"]["tile_m"] == 64
    assert report["problem"]["operands"]["qk_dtype"] == "bf16"
    assert {"seconds", "registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes", "warnings"} <= set(report)
    assert {"smem_bytes", "cached", "kernel", "target"} <= set(report)


@pytest.mark.parametrize(
    ("kernel_cls", "diagnostic"),
    [(SerialisedWgmma, r"\(C7517\).*\(C7514\).*instructions are serialized"), (IgnoredSetmaxnreg, "C7508")],
)
def test_what_makes_a_kernel_slow_is_reported(kernel_cls: type, diagnostic: str) -> None:
    assert build(WgmmaKernel, TRAITS, PROBLEM, "sm_90a").complaints == ()
    with pytest.warns(KernelWarning, match=diagnostic):
        compiled(kernel_cls, TRAITS, PROBLEM, "sm_90a")
    from_cache = build(kernel_cls, TRAITS, PROBLEM, "sm_90a")
    assert from_cache.cached
    assert from_cache.complaints
    assert not any("function" in complaint and "kernel_" in complaint for complaint in from_cache.complaints)


def test_spills_are_complaints() -> None:
    report = BuildReport("k", "sm_80", TRAITS, PROBLEM, 1.0, parse_ptxas_log(SERIALISED + LOG), 0, cached=False)
    spills, serialised = report.complaints
    assert spills == "spills 1152 bytes a thread"
    assert "C7510" in serialised


def test_a_compiler_error_reaches_the_caller(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(ToyKernel):
        def fake_args(self) -> tuple[Any, ...]:
            return ()

    with pytest.raises(Exception, match=r"(?i)argument"):
        build(Broken, TRAITS, PROBLEM, "sm_80")
    assert not list(pathlib.Path(cache_dir() or "").glob("*.o"))


def test_the_object_carries_the_machine_code_that_the_plain_compiler_makes(tmp_path: pathlib.Path) -> None:
    build(ToyKernel, TRAITS, PROBLEM, "sm_80")
    (ours,) = pathlib.Path(cache_dir() or "").glob("*.o")
    kernel = ToyKernel(TRAITS, PROBLEM)
    options = f"--enable-tvm-ffi --gpu-arch=sm_80 --keep-cubin --dump-dir {tmp_path}"
    cute.compile(kernel, *kernel.fake_args(), options=options)
    (plain,) = tmp_path.glob("*.cubin")
    code = machine_code(plain.read_bytes())
    assert code and code in ours.read_bytes()  # asking for ptxas' log changes nothing


def test_compiled_loads_without_a_gpu_and_checks_its_arguments() -> None:
    function = compiled(ToyKernel, TRAITS, PROBLEM, "sm_90a")
    with pytest.raises(ValueError, match="device_type=cuda"):
        function(torch.zeros(4), torch.zeros(4))


def test_compiled_is_one_lookup_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    function = compiled(ToyKernel, TRAITS, PROBLEM, "sm_80")
    monkeypatch.setattr("cuteflash.compile.compiler.cache_key", None)
    assert compiled(ToyKernel, TRAITS, PROBLEM, "sm_80") is function


def test_threads_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compiler = type(cute.compile)
    real = compiler.__call__
    monkeypatch.setattr(compiler, "__call__", lambda *args: calls.append(1) or real(*args))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        functions = list(pool.map(lambda _: compiled(ToyKernel, TRAITS, PROBLEM, "sm_80"), range(4)))
    assert len(calls) == 1
    assert len({id(function) for function in functions}) == 1


def test_a_good_kernel_draws_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        compiled(ToyKernel, TRAITS, PROBLEM, "sm_80")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("has_lse", [False, True])
def test_forward_arguments(dtype: str, has_lse: bool) -> None:
    (q, k, v, o, lse), _, _, scalars, *_ = FwdArguments.of(fwd_fake_args(FwdProblem.dense(dtype, 96, 64, lse=has_lse)))
    assert [tensor.shape[3] for tensor in (q, k, v, o)] == [96, 96, 64, 64]
    assert all(tensor.stride[3] == 1 for tensor in (q, k, v, o))
    assert all(stride.divisibility == 8 and stride.width == 64 for stride in q.stride[:3])
    assert q.shape[0] is k.shape[0] is v.shape[0] is o.shape[0]
    assert q.shape[1] is o.shape[1]
    assert k.shape[1] is v.shape[1]
    assert q.shape[2] is o.shape[2]
    assert k.shape[2] is v.shape[2]
    assert (lse is not None) == has_lse
    if has_lse:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert [type(value).__name__ for value in scalars] == ["Float32", "Float32", *["Int32"] * 4]
