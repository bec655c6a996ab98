"""What a picked row serves beside the plain problem is what its kernels were compiled for without a complaint."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from cuteflash.dispatch import choose_shipped
from cuteflash.problem import DTYPES, MASK_KINDS, FwdProblem, problem_id
from cuteflash.traits.row import Row
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.tune.building import Kernel, complaints
from cuteflash.tune.cuda_backend import backend
from cuteflash.tune.feature_checks import settle
from cuteflash.tune.progress import Display
from cuteflash.tune.select import Pick
from tests.sweep_fakes import TRAITS, World

NARROW = Row(FwdTraitsSm80(64, 64, 192, 128), ("causal",), ("bf16",), ("long",))
BOTH, SOFTCAP, LSE = (f"bf16 192x128 causal {extras}" for extras in ("softcap lse", "softcap", "lse"))


class Compiler:
    """Knows which problems spill, and what it was asked."""

    def __init__(self, spilling: Collection[str]):
        self.spilling = spilling
        self.asked: list[list[str]] = []

    def __call__(self, kernels: Sequence[Kernel], what: str) -> dict[Kernel, str | None]:
        self.asked.append([problem_id(problem) for _, problem in kernels])
        return {kernel: "spills 8 bytes" if problem_id(kernel[1]) in self.spilling else None for kernel in kernels}


def pick(row: Row) -> Pick:
    return Pick("id", row, 100.0, 0.1, False, "2026-01-31")


def served(one: Pick) -> tuple[bool, bool]:
    return "softcap" not in one.row.without, "lse" not in one.row.without


@pytest.mark.parametrize(
    ("spilling", "flags", "lacking"),
    [
        ((), (True, True), {}),
        ((SOFTCAP, LSE), (True, True), {}),  # what both together leave room for, one of them does
        ((BOTH,), (False, True), {"softcap": BOTH}),
        ((BOTH, SOFTCAP), (False, True), {"softcap": SOFTCAP}),
        ((BOTH, LSE), (True, False), {"lse": LSE}),
        ((BOTH, SOFTCAP, LSE), (False, False), {"softcap": SOFTCAP, "lse": LSE}),
    ],
)
def test_a_row_serves_what_is_clean_and_says_what_is_not(
    spilling: tuple[str, ...], flags: tuple[bool, bool], lacking: dict[str, str]
) -> None:
    compiler = Compiler(spilling)
    (found,) = settle([pick(NARROW)], compiler)
    assert served(found) == flags
    assert found.lacking == {name: f"{problem}: spills 8 bytes" for name, problem in lacking.items()}
    assert dataclasses.replace(found.row, without=()) == NARROW
    assert compiler.asked == [[BOTH]] + [[SOFTCAP, LSE]] * (BOTH in spilling)


def test_features_that_a_pick_came_without_count_for_nothing() -> None:
    for without in ((), ("softcap",), ("lse",), ("softcap", "lse")):
        (found,) = settle([pick(dataclasses.replace(NARROW, without=without))], Compiler(()))
        assert served(found) == (True, True)


def test_a_row_is_split_where_its_masks_and_dtypes_differ() -> None:
    row = Row(FwdTraitsSm80(64, 64, 64, 64), ("full", "causal"), lengths=("short", "long"))
    causal = {f"bf16 64x64 causal {extras}" for extras in ("softcap lse", "lse")}
    compiler = Compiler({*causal, "fp16 64x64 full softcap"})
    found = [one.row for one in settle([pick(row), pick(NARROW)], compiler)]
    assert found == [
        dataclasses.replace(row, dtypes=("fp16",)),
        dataclasses.replace(row, masks=("full",), dtypes=("bf16",)),
        dataclasses.replace(row, masks=("causal",), dtypes=("bf16",), without=("lse",)),
        NARROW,
    ]
    assert compiler.asked[1] == ["bf16 64x64 causal softcap", "bf16 64x64 causal lse"]  # nobody doubts the others


def test_rows_of_the_same_traits_share_their_kernels() -> None:
    compiler = Compiler([BOTH, LSE])
    rows = [dataclasses.replace(NARROW, lengths=(lengths,)) for lengths in ("short", "long")]
    assert [served(one) for one in settle([pick(row) for row in rows], compiler)] == [(True, False)] * 2
    assert compiler.asked == [[BOTH], [SOFTCAP, LSE]]


@pytest.mark.parametrize("seed", range(20))
def test_all_that_a_row_admits_was_compiled_clean_and_no_more_could_be(seed: int) -> None:
    choose = random.Random(seed)
    masks, dtypes = (tuple(choose.sample(names, choose.randint(1, len(names)))) for names in (MASK_KINDS, DTYPES))
    extras = ("softcap", "lse", "softcap lse")
    problems = [f"{dtype} 64x64 {mask} {extra}" for mask in MASK_KINDS for dtype in DTYPES for extra in extras]
    compiler = Compiler(choose.sample(problems, choose.randint(0, len(problems))))
    row = Row(FwdTraitsSm80(64, 64, 64, 64), masks, dtypes)
    found = settle([pick(row)], compiler)
    flags = {}
    for one in found:
        assert (one.row.traits, one.row.lengths) == (row.traits, row.lengths)
        assert set(one.row.without) == one.lacking.keys()
        for pair in itertools.product(one.row.masks, one.row.dtypes):
            assert pair not in flags
            flags[pair] = served(one)
    assert flags.keys() == set(itertools.product(row.masks, row.dtypes))
    asked = set(itertools.chain(*compiler.asked))
    for (mask, dtype), (softcap, lse) in flags.items():
        clean = {extra for extra in extras if f"{dtype} 64x64 {mask} {extra}" not in compiler.spilling}
        admitted = " ".join(name for name, flag in (("softcap", softcap), ("lse", lse)) if flag)
        assert not admitted or (admitted in clean and f"{dtype} 64x64 {mask} {admitted}" in asked)
        assert admitted == "softcap lse" or "softcap lse" not in clean
        assert admitted or not clean & {"softcap", "lse"}
        assert admitted != "softcap" or "lse" not in clean


# What the compiler says.


def kernel(tile: int, **extras: bool) -> Kernel:
    return TRAITS[tile], FwdProblem.dense("bf16", 128, 128, **extras)


def judge(world: World, wanted: Sequence[Kernel], jobs: int = 2) -> tuple[dict[Kernel, str | None], dict[str, int]]:
    with Display() as display:
        found = complaints(wanted, "stage", jobs, display, world.backend)
    return found, dict(display.counts["stage"])


@pytest.mark.slow
def test_kernels_are_compiled_once_and_what_fails_is_no_better_than_what_spills(tmp_path: pathlib.Path) -> None:
    world = World(
        tmp_path, spilling_on=("bf16 128x128 full softcap",), uncompilable_on=("bf16 128x128 full softcap lse",)
    )
    fine, spills = kernel(1, lse=True), kernel(2, softcap=True)
    fails = kernel(3, softcap=True, lse=True)
    found, counts = judge(world, [fine, spills, fails, fine])
    assert found == {fine: None, spills: "spills 16 bytes a thread", fails: "ValueError: no such instruction"}
    assert counts == {"clean": 1, "with complaints": 2}
    assert sorted(world.journaled("build")) == [("32",), ("48",), ("64",)]
    assert judge(world, [spills, fails, fine]) == (found, counts)
    assert len(world.journaled("build")) == 4  # what does not compile is in no cache


def test_a_kernel_that_takes_its_process_down_is_no_better(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, crashing_in_build=(48,))
    fine, crashes = kernel(1), kernel(2)
    found, _ = judge(world, [crashes, fine], jobs=1)
    assert found[fine] is None
    assert "SIGSEGV" in str(found[crashes])


def test_a_full_disk_blames_no_kernel(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        judge(World(tmp_path, full_disk=(48,)), [kernel(2)])


def test_nothing_to_compile_starts_no_process(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuteflash.tune.building.Worker", None)
    assert judge(World(tmp_path), []) == ({}, {})


@pytest.mark.slow
def test_a_shipped_rows_kernel_is_judged_by_the_real_compiler(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTEFLASH_CACHE_DIR", str(tmp_path))
    shipped = choose_shipped(FwdProblem.dense("fp16", 64, 64), "sm_80").row
    row = dataclasses.replace(shipped, masks=("full",), dtypes=("fp16",), without=("softcap", "lse"))
    real = backend("sm_80")
    without_compiler: Any = dataclasses.replace(real, builder=None)  # the second time the cache has to do
    for compiler in (real, without_compiler):
        with Display() as display:

            def ask(
                kernels: Sequence[Kernel], what: str, watch: Display = display, compiler: Any = compiler
            ) -> dict[Kernel, str | None]:
                return complaints(kernels, what, 1, watch, compiler)

            (found,) = settle([pick(row)], ask)
        assert served(found) == (True, True)
    (entry,) = tmp_path.rglob("*.o")
    assert entry.stat().st_size
