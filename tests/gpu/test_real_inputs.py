"""Inputs like those of language models: attention sinks, heads with peaked scores, outlier channels; and worse.

What a kernel assumes about its first scores, they break: one key far above the others, wherever it stands, maxima that
rise all the way through a tile, heads that differ. Errors are judged head by head.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.checks import Case, assert_right, call, check

pytestmark = pytest.mark.gpu

MASKS = {"full": Case(), "causal": Case(causal=True), "window": Case(window=(150, 40))}
SINKS = ("sink:8", "sink:12", "sink:30", "sink:100", "sink:400")
OTHERS = ("ramp:60", "ramp:-60", "ramp:400", "ramp:-400", "peaked", "peaked:half", "outliers")
LENGTHS = {"cuda": 1100, "cpu": 200}  # several blocks of keys in every row of the tables; few where that is slow
PLACES = {"middle": 117, "last": -1}


def case_of(mask: str, device: torch.device, **fields: object) -> Case:
    shape = {"seqlen_q": LENGTHS[device.type], "batch": 1, "heads": 2, "lse": True}
    return dataclasses.replace(MASKS[mask], **shape | fields)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", SINKS + OTHERS)
def test_real_inputs(kind: str, head_dim: int, mask: str, dtype: str, family: str, device: torch.device) -> None:
    check(case_of(mask, device, head_dim=head_dim, dtype=dtype, kind=kind), family, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["sink:8", "sink:30", "sink:400"])
@pytest.mark.parametrize("place", ["middle", "last"])
def test_a_sink_may_be_anywhere(
    place: str, kind: str, mask: str, dtype: str, family: str, device: torch.device
) -> None:
    check(case_of(mask, device, dtype=dtype, kind=kind, place=PLACES[place]), family, device)


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["sink:12", "sink:30", "ramp:60", "peaked", "outliers"])
def test_real_inputs_of_grouped_heads(kind: str, mask: str, pack_gqa: bool, family: str, device: torch.device) -> None:
    check(
        case_of(mask, device, seqlen_q=150, seqlen_k=400, heads=6, kv_heads=2, pack_gqa=pack_gqa, kind=kind),
        family,
        device,
    )


@pytest.mark.parametrize("head_dim", [40, 96, 192, 256])
@pytest.mark.parametrize("kind", ["sink:30", "ramp:60", "outliers"])
def test_real_inputs_of_other_head_dims(kind: str, head_dim: int, family: str, device: torch.device) -> None:
    check(case_of("causal", device, head_dim=head_dim, dtype="fp16", kind=kind), family, device)


@pytest.mark.parametrize("kind", ["sink:8", "sink:30"])
@pytest.mark.parametrize("lengths", [(1, 500), (5, 1500), (400, 130), (64, 65)], ids=str)
def test_sinks_of_other_lengths(lengths: tuple[int, int], kind: str, family: str, device: torch.device) -> None:
    check(case_of("causal", device, seqlen_q=lengths[0], seqlen_k=lengths[1], kind=kind), family, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", MASKS)
def test_heads_that_differ_are_each_right(mask: str, dtype: str, family: str, device: torch.device) -> None:
    case = case_of(mask, device, dtype=dtype, heads=5)
    kinds = ("plain", "sink:12", "sink:30", "ramp:60", "peaked")
    made = [dataclasses.replace(case, heads=1, kind=kind).inputs(device, seed) for seed, kind in enumerate(kinds)]
    q, k, v = (torch.cat(heads, dim=2) for heads in zip(*made, strict=True))
    out, lse = call(q, k, v, case, family)
    assert lse is not None
    for head in range(len(kinds)):
        own = slice(head, head + 1)
        assert_right((q[:, :, own], k[:, :, own], v[:, :, own]), case, out[:, :, own], lse[:, own])
