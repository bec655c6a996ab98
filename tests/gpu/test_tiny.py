"""Gradients of tiny and small sequences, whose rows take one tile of keys as a whole: others add to a sum of dQ."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from cuteflash.traits.length_class import SMALL_LENGTH, TINY_LENGTH
from tests.gpu import gradients as dense
from tests.gpu.checks import Case, assert_repeats
from tests.gpu.gradients import Tensors, Upstream
from tests.gpu.packed import Lengths, Packed
from tests.gpu.packed_gradients import assert_right, gradients, upstream

pytestmark = pytest.mark.gpu

MASKS = {
    "full": Case(lse=True),
    "causal": Case(lse=True, causal=True),
    "window": Case(lse=True, window=(7, 3)),
}
CAUSAL = MASKS["causal"]
LONGER: Lengths = (16, 33, 0, 200, 32, 1, 64, 9)  # than the limit that is given with them


@pytest.fixture(params=[TINY_LENGTH, SMALL_LENGTH])
def lengths(device: torch.device, request: pytest.FixtureRequest) -> Lengths:
    choose, longest = random.Random(0), request.param
    return (0, 1, longest, *(choose.randint(0, longest) for _ in range(150 if device.type == "cuda" else 9)), 0)


def shuffled(lengths: Lengths) -> Lengths:
    return tuple(random.Random(1).sample(lengths, len(lengths)))


def run(
    packed: Packed, inputs: Tensors, given: Upstream, deterministic: bool = False, longest: int | None = None
) -> tuple[torch.Tensor, ...]:
    """The gradients by the default family for sequences of up to `longest` tokens; None is as long as they are."""
    longest = longest or max(*packed.lengths_q, *packed.keys)
    vectors = packed.vectors(inputs[0].device) | {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return gradients(packed, inputs, given, None, deterministic, vectors)


def check(packed: Packed, device: torch.device, deterministic: bool = False, longest: int | None = None) -> None:
    inputs = packed.inputs(device)
    given = upstream(packed, inputs)
    assert_right(packed, inputs, given, run(packed, inputs, given, deterministic, longest))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim: int, mask: str, lengths: Lengths, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim)
    check(Packed(lengths, case=case), device)
    check(Packed(lengths, shuffled(lengths), case), device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dims", [(32, 32), (96, 96), (160, 160), (192, 128), (224, 224), (256, 256), (40, 72)])
def test_head_dims(head_dims: tuple[int, int], dtype: str, lengths: Lengths, device: torch.device) -> None:
    case = dataclasses.replace(CAUSAL, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype)
    check(Packed(lengths, shuffled(lengths), case), device)


@pytest.mark.parametrize("heads", [(8, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_grouped_heads(mask: str, heads: tuple[int, int], lengths: Lengths, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], heads=heads[0], kv_heads=heads[1])
    check(Packed(lengths, shuffled(lengths), case), device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_softcap_and_scale(deterministic: bool, lengths: Lengths, device: torch.device) -> None:
    case = dataclasses.replace(CAUSAL, softcap=15.0, logits=4.0, scale=0.3)
    check(Packed(lengths, case=case), device, deterministic)


def test_only_rows_in_use_count(lengths: Lengths, device: torch.device) -> None:
    choose = random.Random(4)
    used = tuple(choose.randint(0, n) for n in lengths)
    check(Packed(lengths, lengths, CAUSAL, used, used, rest_q=70, rest_k=9), device)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_not_a_number_stays_in_its_sequence(
    deterministic: bool, value: float, lengths: Lengths, device: torch.device
) -> None:
    case = dataclasses.replace(CAUSAL, heads=4, kv_heads=2)
    packed = Packed(lengths, tuple(reversed(lengths)), case, rest_q=40, rest_k=40)
    inputs = q, k, v = packed.inputs(device)
    given = upstream(packed, inputs)
    assert given.lse is not None
    for of_q, of_k in list(zip(packed.spans("q"), packed.spans("k"), strict=True))[1::2]:
        for x, span in ((q, of_q), (k, of_k), (v, of_k), (given.out, of_q), (given.lse.T, of_q)):
            x[span] = value
    got = run(packed, inputs, given, deterministic)
    assert_right(packed, inputs, given, got, range(0, len(lengths), 2))


@pytest.mark.parametrize("mask", MASKS)
def test_deterministic_gradients_are_right_and_bitwise_equal(mask: str, lengths: Lengths, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], heads=4, kv_heads=2)
    packed = Packed(lengths, shuffled(lengths), case)
    inputs = packed.inputs(device)
    given = upstream(packed, inputs)
    first = run(packed, inputs, given, deterministic=True)
    assert_right(packed, inputs, given, first)
    assert_repeats(first, lambda: run(packed, inputs, given, deterministic=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("longest", [TINY_LENGTH, SMALL_LENGTH])
@pytest.mark.parametrize("mask", MASKS)
def test_a_limit_that_is_too_small_changes_no_result(
    mask: str, longest: int, deterministic: bool, cuda: torch.device
) -> None:
    case = dataclasses.replace(MASKS[mask], heads=4, kv_heads=2)
    check(Packed(LONGER, case=case), cuda, deterministic, longest)
    check(Packed(LONGER, shuffled(LONGER), case), cuda, deterministic, longest)


@pytest.mark.parametrize(
    "case",
    [
        Case(16, head_dim=128, batch=5),
        Case(32, 7, causal=True, lse=True, heads=6, kv_heads=2),
        Case(5, 31, window=(3, 2), softcap=20.0, batch=7),
        Case(1, 1, head_dim=96, dtype="fp16"),
        Case(64, head_dim=128, batch=5, lse=True),
        Case(50, 33, causal=True, heads=6, kv_heads=2),
        Case(33, 64, window=(9, 5), softcap=20.0, batch=7, head_dim=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_dense_batches(case: Case, deterministic: bool, device: torch.device) -> None:
    dense.check(case, None, device, deterministic=deterministic)
