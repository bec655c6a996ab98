"""What the GPU tests ask for: it is found and compiled without a GPU."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("tvm_ffi")

from cuteflash.kernels.common.quantize import Quantize
from cuteflash.quantize_problem import QuantizeProblem
from cuteflash.traits.quantize import TARGET, QuantizeTraits
from tests import asked, spills


@pytest.mark.slow
def test_kernels_of_both_families_and_directions_are_found() -> None:
    found = asked.find(["tests/gpu/test_mla_prefill.py", "tests/gpu/test_smoke.py"], 1)
    names = {kernel_cls.__name__ for kernel_cls, *_ in found}
    assert {"FlashFwdSm90", "FlashFwdSm80", "FlashBwdTwoPassSm90"} <= names
    assert {target for *_, target in found} == {"sm_90a"}
    assert len({repr(kernel) for kernel in found}) == len(found) > 10


def test_a_run_that_cannot_begin_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        asked.find(["tests/gpu/test_of_nothing.py"], 1)


def test_what_is_found_is_compiled_into_the_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails does not keep the others from it."""
    problem = QuantizeProblem("bf16", 16, 16, has_scales=True)
    right = Quantize, QuantizeTraits(16), problem, TARGET
    wide = QuantizeProblem("bf16", 256, 256, has_scales=True)
    squeezed = Quantize, QuantizeTraits(256, resident=4), wide, TARGET  # 32 registers a thread
    monkeypatch.setattr(asked, "find", lambda files, jobs: [right, (*right[:3], "sm_1"), squeezed])
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", "")  # what `main` sets is taken back
    assert asked.main([str(tmp_path / "cache"), "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("3 kernels\n") and said.endswith("2 compiled, of 1 ptxas complains, 1 not known, 1 failed\n")
    assert "failed: " in said and "sm_1" in said and "not in tests/spills.py: Quantize for sm_90a: spills" in said
    assert len(list((tmp_path / "cache").glob("*.o"))) == 2


def test_a_known_spill_is_no_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = QuantizeProblem("bf16", 256, 256, has_scales=True)
    squeezed = Quantize, QuantizeTraits(256, resident=4), problem, TARGET
    monkeypatch.setattr(asked, "find", lambda files, jobs: [squeezed])
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", "")
    monkeypatch.setitem(spills.SPILLS, "Quantize sm_90a dtype=bf16 head_dim=256 head_dim_v=256 has_scales=True", 4096)
    assert asked.main([str(tmp_path / "cache"), "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "known: Quantize" in said and said.endswith("1 compiled, of 1 ptxas complains, 0 not known, 0 failed\n")


def test_what_was_found_once_is_not_looked_for_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has a GPU for minutes, and compiles faster."""
    kernel = Quantize, QuantizeTraits(16), QuantizeProblem("bf16", 16, 16, has_scales=True), TARGET
    looked: list[int] = []
    monkeypatch.setattr(asked, "find", lambda files, jobs: looked.append(jobs) or [kernel])
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", "")
    for cache in ("first", "second"):
        assert asked.main([str(tmp_path / cache), "--jobs", "1", "--found", str(tmp_path / "found")]) == 0
        assert len(list((tmp_path / cache).glob("*.o"))) == 1
    assert looked == [1]
