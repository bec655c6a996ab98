"""An explanation names numbers: what a configuration takes, who rejected it and why, by how much and where it lost."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from cuteflash.traits.arch import get_arch
from cuteflash.traits.row import TableKey
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.cells import Cell
from cuteflash.tune.explain import SHOWN, explain, footprint, title
from cuteflash.tune.rank import beyond
from cuteflash.tune.store import Store, Timing, Verdict

TARGET, GPU = "sm_90a", "NVIDIA H200"
FAST = FwdTraitsSm90(128, 128, 128, 128, q_in_regs=True, exp_rows_before_wait=1)
SLOW = FwdTraitsSm90(128, 80, 128, 128, kv_stage=3)
CLOSE = FwdTraitsSm90(128, 112, 128, 128, q_in_regs=True)
BIG = FwdTraitsSm90(192, 256, 128, 128)
SPILLS = FwdTraitsSm90(128, 144, 128, 128)
WRONG = FwdTraitsSm90(128, 64, 128, 128)
HANGS = FwdTraitsSm90(128, 48, 128, 128)
WAITING = FwdTraitsSm90(64, 48, 128, 128, pingpong=False)
PROBLEM = "bf16 128x128 full"
ASKED: dict[str, Any] = {"table": TableKey("fwd", TARGET, "sm90"), "head_dims": (128, 128)}


def time(store: Store, traits: FwdTraitsSm90, cell: str, ms: float, noise: float = 0.01, **more: Any) -> None:
    name = store.add_candidates([traits])[0]
    numbers = {"samples": (ms,) * 3, "ms": ms, "low": ms * (1 - noise), "high": ms * (1 + noise), "tflops": 600 / ms}
    store.record(Timing(name, cell, TARGET, GPU, "d", "k", **numbers | more))


def judge(store: Store, traits: FwdTraitsSm90, stage: Any, reason: str | None, **details: Any) -> None:
    problem = "" if stage == "prune" else PROBLEM
    name = store.add_candidates([traits])[0]
    store.record(Verdict(name, TARGET, problem, stage, "k", reason is None, reason, details))


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    """A small sweep with one candidate for each way to end."""
    with Store(tmp_path / "sweep.db") as opened:
        for cell in (Cell(128, "full", 512), Cell(128, "full", 16384)):
            opened.add_cell(cell.label, dataclasses.asdict(cell))
        for traits in (FAST, SLOW, CLOSE, BIG, SPILLS, WRONG, HANGS, WAITING):
            judge(opened, traits, "prune", traits.check(get_arch(TARGET)))
        judge(opened, SPILLS, "compile", "spills 96 bytes a thread", registers=168)
        judge(opened, WRONG, "compile", None, registers=168)
        judge(opened, WRONG, "gate", "error 0.2, allowed 0.01")
        time(opened, FAST, "D128 full 512", 1.0)
        time(opened, FAST, "D128 full 16384", 1.0)
        time(opened, CLOSE, "D128 full 16384", 1.005)
        time(opened, SLOW, "D128 full 512", 1.1)
        time(opened, SLOW, "D128 full 16384", 1.25)
        name = opened.add_candidates([HANGS])[0]
        opened.record(Timing(name, "D128 full 512", TARGET, GPU, "d", "k", error="no answer within 90 s"))
        yield opened


def told(store: Store, **fields: Any) -> str:
    """The explanation of the candidates with these traits, without the heading and the winners."""
    return explain(store, **ASKED, fields=fields).split("\n\n", 2)[2]


def heading(store: Store) -> list[str]:
    return explain(store, **ASKED).split("\n\n")[0].splitlines()


def test_the_heading_counts_how_far_everybody_came(store: Store) -> None:
    assert heading(store) == [
        "sm_90a, family sm90, head dims 128x128: 8 candidates considered",
        "  1 cannot run",
        "  1 rejected by the compiler's report",
        "  1 rejected by the correctness gate",
        "  3 timed",
    ]


def test_winners_have_their_time_rate_interval_and_margin(store: Store) -> None:
    long, short = explain(store, **ASKED).split("\n\n")[1].splitlines()[1:]
    assert long == (
        "  D128 full 16384: 128x128 q_in_regs exp_rows_before_wait=1, 1.0000 ms (0.9900 to 1.0100), 600.0 TFLOP/s; "
        "0.5 % before 128x112 q_in_regs (-0.9 % to 1.9 %, within noise)"
    )
    assert "10.0 % before 128x80 kv_stage=3 (8.5 % to 11.6 %, beyond noise)" in short


def test_a_loser_is_told_by_how_much_and_where(store: Store) -> None:
    text = told(store, tile_n=80)
    assert text.startswith("128x80 kv_stage=3  [")
    assert (
        f"takes  {SLOW.smem_bytes} of {227 * 1024} bytes of shared memory in 3 stages; 240 registers a thread" in text
    )
    assert f"{SLOW.accumulator_regs} of them for fragments; 1 block of 384 threads on an SM" in text
    assert (
        "D128 full 16384: 1.2500 ms (1.2375 to 1.2625), 480.0 TFLOP/s, 3 of 3: 25.0 % slower than "
        "128x128 q_in_regs exp_rows_before_wait=1 at 600.0 TFLOP/s (23.2 % to 26.8 %, beyond noise)"
    ) in text
    assert "D128 full 512: 1.1000 ms" in text and "2 of 2: 10.0 % slower" in text
    differs = text.split("differs from the winner of its worst cell: ")[1]
    for part in (
        "tile_n 80 against 128",
        "kv_stage 3 against 2",
        "q_in_regs False against True",
        f"{SLOW.smem_bytes} bytes of shared memory against {FAST.smem_bytes}",
        f"{SLOW.accumulator_regs} of them for fragments against {FAST.accumulator_regs}",
    ):
        assert part in differs
    assert "registers a thread against" not in differs  # both split them alike


def test_noise_is_called_noise(store: Store) -> None:
    assert "0.5 % slower than" in told(store, tile_n=112) and "within noise" in told(store, tile_n=112)


def test_a_winner_is_told_that_it_won(store: Store) -> None:
    text = told(store, tile_n=128)
    assert text.count("the winner") == 2 and "differs" not in text


@pytest.mark.parametrize(
    ("traits", "words"),
    [
        (BIG, f"cannot run: {BIG.check(get_arch(TARGET))}"),
        (SPILLS, f"rejected by the compiler's report ({PROBLEM}): spills 96 bytes a thread"),
        (WRONG, f"rejected by the correctness gate ({PROBLEM}): error 0.2, allowed 0.01"),
        (HANGS, "failed: D128 full 512: no answer within 90 s"),
        (WAITING, "not rejected and not timed yet"),
    ],
)
def test_a_rejection_says_who_and_why(store: Store, traits: FwdTraitsSm90, words: str) -> None:
    assert words in told(store, tile_m=traits.tile_m, tile_n=traits.tile_n)


def test_who_is_beyond_the_limit_could_run_and_is_counted_apart(store: Store) -> None:
    judge(store, FwdTraitsSm90(64, 16, 128, 128), "prune", beyond(70, 90))
    judge(store, FwdTraitsSm90(64, 32, 128, 128), "prune", beyond(71, 90))
    assert heading(store)[1:4] == [
        "  1 cannot run",
        "  2 left out before compiling",
        "  1 rejected by the compiler's report",
    ]
    words = told(store, tile_n=32)
    assert "left out before compiling: number 71 of 90 by the analytic score, beyond the limit" in words
    assert "cannot run" not in words


def test_only_the_newest_verdict_counts(store: Store) -> None:
    name = store.add_candidates([SPILLS])[0]
    store.record(Verdict(name, TARGET, PROBLEM, "compile", "a newer source", True, at="9999"))
    assert "spills" not in told(store, tile_n=144)


def test_a_sweep_without_timings_is_explained_too(tmp_path: pathlib.Path) -> None:
    with Store(tmp_path / "dry.db") as store:
        judge(store, BIG, "prune", BIG.check(get_arch(TARGET)))
        text = explain(store, **ASKED)
    assert "0 timed" in text and "registers a thread" in text and "winners" not in text


def test_many_matches_are_cut_short_and_counted(store: Store) -> None:
    for tile_n in range(16, 16 * (SHOWN + 2), 16):
        store.add_candidates([FwdTraitsSm90(64, tile_n, 128, 128)])
    text = explain(store, **ASKED, fields={"tile_m": 64})
    assert text.count("  takes  ") == SHOWN
    assert "\n\n2 more candidates match" in text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"fields": {"tile_q": 1}}, "tile_q is not a trait of the sm90 family; allowed: tile_m, tile_n"),
        ({"fields": {"tile_n": 7}}, "no candidate has tile_n=7; considered, .*tile_n: 48, 64, 80"),
        ({"head_dims": (64, 64)}, "no sm90 candidates for head dims 64x64; sweep them first"),
        ({"table": TableKey("fwd", TARGET, "sm70")}, "family is 'sm70'; allowed: sm80, sm90"),
        ({"table": TableKey("fwd", "sm_70", "sm90")}, "arch is 'sm_70'; allowed: sm_80"),
        ({"gpu": "another"}, "gpu is 'another'"),
    ],
)
def test_what_cannot_be_explained_is_named(store: Store, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        explain(store, **ASKED | change)


def test_titles_name_what_is_not_the_default() -> None:
    assert title(FwdTraitsSm80(64, 48, 128, 128)) == "64x48"
    changed = FwdTraitsSm80(64, 48, 128, 128, num_warps=8, q_in_regs=True, double_buffer=False)
    assert title(changed) == "64x48 num_warps=8 q_in_regs double_buffer=False"


def test_occupancy_is_bounded_by_memory_threads_and_registers() -> None:
    a100 = get_arch("sm_80")
    small = FwdTraitsSm80(64, 64, 64, 64, blocks_per_sm=4)  # 24 KiB, and at most 128 registers for 4 x 128 threads
    assert (footprint(small, a100).registers, footprint(small, a100).blocks) == (128, 4)
    assert footprint(small, a100, compiled_regs=96).blocks == 5  # by registers
    assert footprint(small, a100, compiled_regs=32).blocks == 6  # by shared memory, with 1 KiB of each block's own
    wide = FwdTraitsSm80(128, 64, 256, 256, num_warps=8)
    assert (footprint(wide, a100).blocks, footprint(wide, a100).warps) == (1, 8)
    assert footprint(FAST, get_arch(TARGET)).blocks == 1
