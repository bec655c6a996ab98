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
from cuteflash.problem import DTYPES, MASK_KINDS, FwdProblem
from cuteflash.problem_names import problem_id
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.row import Row
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.building import Kernel, complaints
from cuteflash.tune.cuda_backend import backend
from cuteflash.tune.feature_checks import settle
from cuteflash.tune.progress import Display
from cuteflash.tune.select import Pick
from tests.sweep_fakes import TRAITS, World

NARROW = Row(FwdTraitsSm80(64, 64, 192, 128), ("causal",), ("bf16",), ("long",))
PACKED = "varlen used_q used_k"
LSE, SOFTCAP, VARLEN = (f"bf16 192x128 causal {extras}" for extras in ("lse", "softcap", PACKED))
ALL, BOTH, CAPPED, SAVED = (
    f"bf16 192x128 causal {extras}"
    for extras in (f"softcap lse {PACKED}", "softcap lse", f"softcap {PACKED}", f"lse {PACKED}")
)
PAIRS, SINGLES = [CAPPED, BOTH, SAVED], [SOFTCAP, VARLEN, LSE]  # in the order in which they are asked for


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


def served(one: Pick) -> set[str]:
    return {"softcap", "lse", "varlen"} - set(one.row.without)


@pytest.mark.parametrize(
    ("spilling", "lacking", "asked"),
    [
        ((), {}, [[ALL]]),
        (PAIRS, {}, [[ALL]]),  # what all together leave room for, some of them do
        ((ALL,), {"softcap": ALL}, [[ALL], PAIRS]),  # of what can be spared the first feature is
        ((ALL, SAVED), {"varlen": SAVED}, [[ALL], PAIRS]),
        ((ALL, BOTH, SAVED), {"lse": BOTH}, [[ALL], PAIRS]),
        ((ALL, *PAIRS), {"softcap": BOTH, "varlen": SAVED}, [[ALL], PAIRS, SINGLES]),
        ((ALL, *PAIRS, LSE), {"softcap": CAPPED, "lse": LSE}, [[ALL], PAIRS, SINGLES]),
        ((ALL, *PAIRS, *SINGLES), {"softcap": SOFTCAP, "varlen": VARLEN, "lse": LSE}, [[ALL], PAIRS, SINGLES]),
    ],
)
def test_a_row_serves_what_is_clean_and_says_what_is_not(
    spilling: Sequence[str], lacking: dict[str, str], asked: list[list[str]]
) -> None:
    compiler = Compiler(spilling)
    (found,) = settle([pick(NARROW)], compiler)
    assert served(found) == {"softcap", "lse", "varlen"} - lacking.keys()
    assert found.lacking == {name: f"{problem}: spills 8 bytes" for name, problem in lacking.items()}
    assert dataclasses.replace(found.row, without=()) == NARROW
    assert compiler.asked == asked


def test_of_a_backward_the_features_are_its_own() -> None:
    row = Row(BwdTwoPassTraitsSm90(64, 64, 128, 128), ("causal",), ("bf16",))
    hard = "bf16 128x128 causal softcap varlen deterministic used_q used_k"
    compiler = Compiler((hard, "bf16 128x128 causal softcap deterministic"))
    (found,) = settle([pick(row)], compiler)
    assert compiler.asked[0] == [hard] and len(compiler.asked[1]) == 3
    assert found.row.without == ("softcap",)
    assert "bf16 128x128 causal varlen deterministic used_q used_k" in compiler.asked[1]


def test_what_a_kernel_does_not_implement_is_not_compiled() -> None:
    plain = FwdTraitsSm90(64, 64, 64, 64, warp_specialized=False, pingpong=False, overlap=False)
    compiler = Compiler(())
    (found,) = settle([pick(Row(plain, ("full",), ("bf16",)))], compiler)
    assert compiler.asked == [["bf16 64x64 full softcap lse"]]
    assert found.row.without == () and not found.row.serves(FwdProblem.dense("bf16", 64, 64).asking(["varlen"]), "long")


def test_features_that_a_pick_came_without_count_for_nothing() -> None:
    for without in ((), ("softcap",), ("lse",), ("softcap", "lse", "varlen")):
        (found,) = settle([pick(dataclasses.replace(NARROW, without=without))], Compiler(()))
        assert found.row.without == ()


def test_a_row_is_split_where_its_masks_and_dtypes_differ() -> None:
    row = Row(FwdTraitsSm80(64, 64, 64, 64), ("full", "causal"), lengths=("short", "long"))
    causal = {f"bf16 64x64 causal {extras}" for extras in (f"softcap lse {PACKED}", f"lse {PACKED}", "softcap lse")}
    compiler = Compiler({*causal, "fp16 64x64 full softcap"})
    found = [one.row for one in settle([pick(row), pick(NARROW)], compiler)]
    assert found == [
        dataclasses.replace(row, dtypes=("fp16",)),
        dataclasses.replace(row, masks=("full",), dtypes=("bf16",)),
        dataclasses.replace(row, masks=("causal",), dtypes=("bf16",), without=("lse",)),
        NARROW,
    ]
    # Nobody doubts the others.
    extras = (f"softcap {PACKED}", "softcap lse", f"lse {PACKED}")
    assert compiler.asked[1:] == [[f"bf16 64x64 causal {one}" for one in extras]]


def test_rows_of_the_same_traits_share_their_kernels() -> None:
    compiler = Compiler([ALL, SAVED, BOTH])
    rows = [dataclasses.replace(NARROW, lengths=(lengths,)) for lengths in ("short", "long")]
    assert [one.row.without for one in settle([pick(row) for row in rows], compiler)] == [("lse",)] * 2
    assert compiler.asked == [[ALL], PAIRS]


@pytest.mark.parametrize("seed", range(20))
def test_all_that_a_row_admits_was_compiled_clean_and_no_more_could_be(seed: int) -> None:
    choose = random.Random(seed)
    masks, dtypes = (tuple(choose.sample(names, choose.randint(1, len(names)))) for names in (MASK_KINDS, DTYPES))
    names = ("softcap", "varlen", "lse")
    every = [some for size in (1, 2, 3) for some in itertools.combinations(names, size)]

    def problem(dtype: str, mask: str, some: Collection[str]) -> str:
        words = [word for name, word in (("softcap", "softcap"), ("lse", "lse"), ("varlen", PACKED)) if name in some]
        return " ".join([dtype, "64x64", mask, *words])

    problems = [problem(dtype, mask, some) for mask in MASK_KINDS for dtype in DTYPES for some in every]
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
    for (mask, dtype), admitted in flags.items():
        clean = [some for some in every if problem(dtype, mask, some) not in compiler.spilling]
        assert not admitted or problem(dtype, mask, admitted) in asked
        assert len(admitted) == max(map(len, clean), default=0)
        # Combinations come in order, so that the last one has the last features.
        assert admitted == set(max(clean, key=lambda some: (len(some), every.index(some)), default=()))


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
        assert found.row.without == ()
    (entry,) = tmp_path.rglob("*.o")
    assert entry.stat().st_size
