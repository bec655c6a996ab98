"""Traits say what fits an architecture, and why something does not."""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest

from cuteflash.problem import BwdProblem, FwdProblem
from cuteflash.traits.arch import KIB, arch_of_capability, get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.docs import attribute_docs
from cuteflash.traits.length_class import length_class_of, length_class_of_packed
from cuteflash.traits.row import Row
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

GOOD80 = FwdTraitsSm80(128, 64, 128, 128, num_warps=8)
GOOD90 = FwdTraitsSm90(128, 128, 128, 128)


def test_good_traits_pass() -> None:
    assert GOOD80.check(get_arch("sm_80")) is None
    assert GOOD80.check(get_arch("sm_90a")) is None
    assert GOOD90.check(get_arch("sm_90a")) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim_v": 272}, "head_dim_v 272"),
        ({"tile_m": 64}, "tile_m 64"),
        ({"tile_n": 24}, "tile_n 24"),
        ({"kv_stage": 0}, "kv_stage 0"),
        ({"kv_stage": 9}, "shared memory"),
    ],
)
def test_sm80_says_why_not(change: dict[str, object], reason: str) -> None:
    assert reason in (dataclasses.replace(GOOD80, **change).check(get_arch("sm_80")) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim_v": 272}, "head_dim_v 272"),
        ({"tile_m": 256}, "tile_m 256"),
        ({"tile_n": 24}, "tile_n 24"),
        ({"tile_m": 64}, "pingpong"),
        ({"fixed_max": True, "rescale_in_product": True}, "nothing to rescale"),
        ({"fixed_max": True, "overlap": False}, "fixed_max needs overlap"),
        ({"fixed_max": True, "p_in_regs": False}, "fixed_max needs p_in_regs"),
        ({"repair_apart": True}, "repair_apart needs fixed_max"),
        ({"q_stage": 3}, "q_stage 3"),
        ({"q_stage": 2, "q_in_regs": True}, "q_stage 2 needs"),
        ({"q_stage": 2, "share_q_o": True}, "q_stage 2 needs"),
        ({"tile_n": 256}, "registers"),
        ({"kv_stage": 3}, "shared memory"),
    ],
)
def test_sm90_says_why_not(change: dict[str, object], reason: str) -> None:
    assert reason in (dataclasses.replace(GOOD90, **change).check(get_arch("sm_90a")) or "")


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_only_hopper_runs_sm90(name: str) -> None:
    assert "sm90" in (GOOD90.check(get_arch(name)) or "")


def test_smem_is_what_the_tiles_add_up_to() -> None:
    assert GOOD80.smem_bytes == (128 * 128 + 2 * 64 * 128) * 2
    tiles = (2 * 128 * 128 + 2 * 128 * 256) * 2  # Q and O, then two stages of K and V
    assert tiles <= GOOD90.smem_bytes <= tiles + 2 * KIB
    two = dataclasses.replace(GOOD90, q_stage=2, kv_stage=1)  # not a row: only one stage of K and V
    assert two.smem_bytes - GOOD90.smem_bytes == (128 * 128 - 128 * 256) * 2
    shared = dataclasses.replace(GOOD90, share_q_o=True)
    assert GOOD90.smem_bytes - shared.smem_bytes == 128 * 128 * 2


def test_arch_names_and_capabilities() -> None:
    assert arch_of_capability(9, 0).name == "sm_90a"
    with pytest.raises(ValueError, match=r"arch is 'sm_75'; allowed: sm_80"):
        get_arch("sm_75")
    with pytest.raises(NotImplementedError, match=r"is 7\.5; supported: 8\.0"):
        arch_of_capability(7, 5)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "shape"),
    [
        (1, 1, "decode"),
        (1, 1 << 20, "decode"),
        (16, 4096, "decode"),
        (17, 17, "tiny"),
        (64, 64, "tiny"),
        (64, 65, "brief"),
        (448, 17, "brief"),
        (449, 449, "short"),
        (17, 1535, "short"),
        (768, 768, "short"),
        (1, 769, "decode"),
        (769, 769, "short"),
        (1535, 1, "short"),
        (17, 1536, "long"),
        (1536, 17, "long"),
        (17, 3071, "long"),
        (3072, 3072, "long"),
        (16384, 16384, "long"),
    ],
)
def test_shape_classes(seqlen_q: int, seqlen_k: int, shape: str) -> None:
    assert length_class_of(seqlen_q, seqlen_k) == shape
    longer = max(seqlen_q, seqlen_k)
    finer = {"tiny": "small", "short": "short" if longer < 769 else "moderate"}
    backward = (finer | {"long": "medium" if longer < 3072 else "long"}).get(shape, shape)
    assert length_class_of(seqlen_q, seqlen_k, "bwd") == ("tiny" if longer <= 32 else backward)


@pytest.mark.parametrize(
    ("total_q", "total_k", "batch", "expected"),
    [
        (65536, 65536, 4096, "brief"),
        (65536, 65536, 128, "short"),
        (65536, 65536, 64, "moderate"),
        (64, 65536, 64, "decode"),
        (16384, 16384, 2, "long"),
        (16384, 16384, 8, "medium"),
        (200, 200, 1, "brief"),
        (16, 200, 16, "brief"),  # a query and a dozen keys
    ],
)
def test_the_class_of_packed_sequences_is_that_of_the_mean(
    total_q: int, total_k: int, batch: int, expected: str
) -> None:
    assert length_class_of_packed(total_q, total_k, batch) == expected


@pytest.mark.parametrize(
    ("total", "batch", "longest", "expected"),
    [
        (65536, 128, (512, 512), "short"),  # equal lengths
        (65536, 64, (1024, 1024), "moderate"),
        (65536, 64, (2048, 2048), "moderate"),  # uniform ones
        (65536, 64, (13800, 13800), "long"),  # in inverse proportion to their ranks
        (65536, 64, (4096, 16), "medium"),
        (65536, 4096, (16, 16), "tiny"),
        (65536, 4096, (32, 32), "tiny"),
        (65536, 4096, (33, 32), "small"),
        (65536, 4096, (32, 64), "small"),
        (65536, 4096, (65, 32), "brief"),
        (0, 1, (0, 0), "tiny"),
        (65536, 64, (1, 1), "tiny"),  # wrong, which changes nothing but the speed
    ],
)
def test_the_longest_sequences_count_with_the_mean(
    total: int, batch: int, longest: tuple[int, int], expected: str
) -> None:
    assert length_class_of_packed(total, total, batch, *longest) == expected
    half_known = length_class_of_packed(total, total, batch, longest[0], None)
    assert half_known == length_class_of_packed(total, total, batch)


def test_a_few_queries_against_a_long_cache_are_decoding_whatever_the_longest() -> None:
    assert length_class_of_packed(64, 65536, 64, 1, 8192) == "decode"
    assert length_class_of_packed(64, 65536, 64, 1, 40) == "decode"
    assert length_class_of_packed(64, 640, 64, 4, 40) == "small"
    assert length_class_of_packed(64, 640, 64, 4, 80) == "brief"


@pytest.mark.parametrize(("traits", "is_forward"), [("fwd", True), ("bwd", False)])
def test_to_a_forward_small_sequences_are_tiny_moderate_ones_short_and_medium_ones_long(
    traits: str, is_forward: bool
) -> None:
    tile = GOOD80 if is_forward else BwdTraitsSm80(64, 64, 128, 128)
    problem = (FwdProblem if is_forward else BwdProblem).dense("bf16", 128, 128)
    assert Row(tile, lengths=("long",)).serves(problem, "medium") == is_forward
    assert Row(tile, lengths=("medium",)).serves(problem, "medium") != is_forward
    assert Row(tile, lengths=("short",)).serves(problem, "moderate") == is_forward
    assert Row(tile, lengths=("moderate",)).serves(problem, "moderate") != is_forward
    assert Row(tile, lengths=("tiny",)).serves(problem, "small") == is_forward
    assert Row(tile, lengths=("small",)).serves(problem, "small") != is_forward
    assert Row(tile, lengths=("brief",)).serves(problem, "brief")
    assert Row(tile, lengths=("tiny",)).serves(problem, "tiny")
    assert not Row(tile, lengths=("short", "long")).serves(problem, "tiny")


def test_a_row_keeps_what_it_serves_in_order_and_says_what_is_left_out() -> None:
    row = Row(GOOD80, masks=("window", "full"), lengths=("long", "decode"))
    assert row == Row(GOOD80, masks=("full", "window"), lengths=("decode", "long"))
    assert row.title == "128x128 (full, window; decode, long)"
    assert Row(GOOD90).title == "128x128"


@pytest.mark.parametrize(
    ("served", "complaint"),
    [
        ({"masks": ()}, r"masks is \(\); allowed: one or more of full, causal, window"),
        ({"dtypes": ("fp32",)}, r"dtypes is \('fp32',\); allowed: one or more of fp16, bf16"),
        (
            {"lengths": ("short", "middling")},
            "lengths is .*; allowed: one or more of decode, tiny, small, brief, short, moderate, medium, long",
        ),
    ],
)
def test_a_row_names_what_it_cannot_serve(served: dict[str, tuple[str, ...]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Row(GOOD80, **served)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": "fp32"}, "dtype is 'fp32'; allowed: fp16, bf16"),
        ({"mask": "alibi"}, "mask is 'alibi'"),
        ({"head_dim": 4}, "head_dim is 4"),
        ({"head_dim_v": 264}, "head_dim_v is 264"),
        ({"packed_heads": 0}, "packed_heads is 0"),
    ],
)
def test_problem_names_what_is_wrong(change: dict[str, object], complaint: str) -> None:
    fields = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64}
    with pytest.raises(ValueError, match=complaint):
        FwdProblem.dense(**fields | change)


def test_barriers_have_the_memory_they_take_and_tiles_begin_on_a_swizzle_atom() -> None:
    many = FwdTraitsSm90(128, 16, 32, 32, kv_stage=40, q_stage=2, fixed_max=True)
    assert many.check(get_arch("sm_90a")) is None
    plan = many.smem_plan
    assert plan["barriers"].nbytes == 2 * (2 + 40 + 40) * 8 > 1024
    regions = sorted(plan.values(), key=lambda region: region.start)
    assert all(before.end <= after.start for before, after in itertools.pairwise(regions))
    assert all(plan[name].start % 1024 == 0 for name in "qkvo")


def test_a_docstring_says_the_same_with_and_without_its_indentation() -> None:
    """Python 3.13 takes it away."""
    plain = type("Plain", (), {"__doc__": inspect.cleandoc(FwdTraitsSm90.__doc__ or "")})
    indented = type(
        "Indented", (), {"__doc__": "A line.\n\n    Attributes:\n        a, b: first\n            second.\n    "}
    )
    assert attribute_docs(plain) == attribute_docs(FwdTraitsSm90) and "pingpong" in attribute_docs(plain)
    assert attribute_docs(indented) == {"a": "first second.", "b": "first second."}
