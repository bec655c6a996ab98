"""What a main loop asks of each unit is what docs/backward.md counts, and the estimate puts good rows first."""

from __future__ import annotations

from typing import Any

import pytest

from cuteflash.traits.arch import get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.row import KINDS
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.operations import SPECS, enumerate_traits
from cuteflash.tune.rank import ESTIMATES, shortlist
from cuteflash.tune.units import L2, LOOPS, POINTWISE, SMEM, SUMS, TENSOR, TURNING, loops

DOZENS = 3 * 12


def test_every_kind_has_units_and_an_estimate() -> None:
    assert LOOPS.keys() == ESTIMATES.keys() == set(KINDS.values())


def test_a_step_of_one_pass_is_that_of_the_notes() -> None:
    """docs/backward.md: 64 x 128 at head dim 128 takes 2560 clocks of the tensor cores, 2048 + 384 of the port."""
    (loop,) = loops(BwdTraitsSm90(64, 128, 128, 128))
    assert (loop.clocks[TENSOR], loop.clocks[SMEM], loop.bound) == (2560, 2048 + 384, TENSOR)
    (narrow,) = loops(BwdTraitsSm90(64, 128, 64, 64))
    assert narrow.bound == SMEM  # "with N = 64 the port is busy all the time"
    (held,) = loops(BwdTraitsSm90(64, 128, 64, 64, k_in_regs=True))
    (wide,) = loops(BwdTraitsSm90(80, 128, 128, 128, dq="transposed"))
    assert narrow.clocks[SMEM] - held.clocks[SMEM] == 2 * 4 * 16  # a product's A, by each warpgroup
    assert wide.clocks[SMEM] / wide.scores < loop.clocks[SMEM] / loop.scores


def test_sums_of_dq_bound_what_has_few_keys_in_a_tile() -> None:
    """4 bytes an element and key tile: what a tile of 128 keys adds is below its products, at any head dim."""
    for head_dim in (64, 96, 128):
        (loop,) = loops(BwdTraitsSm90(64, 128, head_dim, head_dim))
        assert 0.6 < loop.clocks[SUMS] / loop.clocks[TENSOR] < 0.8
    (few,) = loops(BwdTraitsSm80(64, 32, 128, 128))
    assert few.clocks[SUMS] / few.clocks[TENSOR] == pytest.approx(1820 / 1280, rel=0.01)


def test_two_passes_compute_seven_products_and_add_nothing_up_in_memory() -> None:
    one, two = BwdTraitsSm90(64, 128, 128, 128), BwdTwoPassTraitsSm90(64, 64, 128, 128)
    (single,) = loops(one)
    assert [loop.title for loop in loops(two)] == ["dK and dV", "dQ"]
    assert all(SUMS not in loop.clocks for loop in loops(two))
    products = sum(loop.clocks[TENSOR] / loop.scores for loop in loops(two))
    assert products / (single.clocks[TENSOR] / single.scores) == pytest.approx(7 / 5)


@pytest.mark.parametrize(("task", "kind"), [("fwd", "fwd_sm90"), ("fwd e4m3", "fwd_fp8_sm90"), ("bwd", "bwd_sm90")])
def test_products_are_the_operations(task: Any, kind: str) -> None:
    traits: Any = KINDS[kind](128, 128, 64, 32)
    (loop,) = loops(traits)
    rate = 8192 if kind == "fwd_fp8_sm90" else 4096
    assert loop.clocks[TENSOR] * rate == SPECS[task].flops(loop.scores, 64, 32)
    assert loop.clocks[POINTWISE] > loop.scores / 16


def test_8_bit_products_leave_the_softmax_as_the_bound() -> None:
    """At head dim 128 the tensor cores wait for the exponentials; at 256 the two are close."""
    (half,) = loops(FwdTraitsSm90(128, 128, 128, 128))
    (one,) = loops(FwdTraitsFp8Sm90(128, 128, 128, 128))
    assert one.clocks[TENSOR] == half.clocks[TENSOR] / 2
    assert one.clocks[L2] == half.clocks[L2] / 2
    assert one.bound == POINTWISE
    (two,) = loops(FwdTraitsFp8Sm90(128, 128, 128, 128, two_level=True))
    assert two.clocks[POINTWISE] - one.clocks[POINTWISE] == 128  # an addition for each element of O, on 128 lanes
    (turning,) = loops(FwdTraitsFp8Sm90(128, 128, 128, 128, turns_v=True))
    assert TURNING not in one.clocks and 0 < turning.clocks[TURNING] < turning.clocks[TENSOR]
    assert turning.clocks[SMEM] - one.clocks[SMEM] == 2 * 128 * 128 / 128  # V is read, and V^T written
    (turning,), (given,) = (loops(FwdTraitsFp8Sm90(128, 96, 128, 128, turns_v=turns)) for turns in (True, False))
    assert turning.clocks[SMEM] - given.clocks[SMEM] == 3 * 96 * 128 / 128  # written in two ways


@pytest.mark.parametrize(
    "traits",
    [
        BwdTraitsSm90(128, 128, 64, 64, dq="rows"),
        BwdTraitsSm90(64, 128, 128, 128),
        BwdTraitsSm90(80, 128, 128, 128, dq="transposed"),
        BwdTwoPassTraitsSm90(64, 64, 192, 192, k_stage=3, v_stage=2),
        BwdTwoPassTraitsSm90(48, 64, 256, 256),
    ],
    ids=lambda traits: f"{traits.head_dim}-{traits.tile_m}",
)
def test_what_won_on_a_gpu_is_among_the_first(traits: BwdTraitsSm90 | BwdTwoPassTraitsSm90) -> None:
    arch = get_arch("sm_90a")
    found = enumerate_traits("bwd", "sm90", traits.head_dim, traits.head_dim_v)
    assert traits in shortlist([one for one in found if one.check(arch) is None], arch)[:DOZENS]
