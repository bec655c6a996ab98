"""Gradients by blocks that have all keys of a head and hold the sum of dQ, or that are the only ones of a sequence."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from tests.gpu import packed_gradients
from tests.gpu.checks import Case, assert_repeats
from tests.gpu.conftest import OwnRow
from tests.gpu.gradients import check, gradients, small, upstream
from tests.gpu.packed import Packed

pytestmark = pytest.mark.gpu

APART = BwdTraitsSm90(
    64, 128, 64, 64, dq="apart", pingpong=False, persistent=True, kv_stage=2, k_in_regs=True, v_in_regs=True
)
FORMS = {
    "whole tiles": dataclasses.replace(APART, lone_tiles=True, held_dq=4),
    "eight tiles": dataclasses.replace(APART, head_dim=32, head_dim_v=32, lone_tiles=True, held_dq=8),
    "parts, in memory": BwdTraitsSm90(
        64, 128, 128, 128, delta_early=False, persistent=True, lone_tiles=True, held_dq=64
    ),
    "transposed, in memory": BwdTraitsSm90(
        64, 128, 128, 128, dq="transposed", persistent=True, lone_tiles=True, held_dq=64
    ),
    "lone": dataclasses.replace(APART, lone_tiles=True),
}
# One key tile, several, of which the last one is cut; more queries than are held; queries that see no key.
LENGTHS = ((1, 1), (64, 128), (130, 129), (256, 256), (200, 448), (517, 385), (203, 113))
MASKS = {"full": Case(lse=True), "causal": Case(causal=True), "window": Case(window=(70, 30))}
WITH_WINDOW = tuple(form for form, traits in FORMS.items() if traits.head_dim < 128)  # wider ones spill
PAIRS = [(form, mask) for form in FORMS for mask in MASKS if mask != "window" or form in WITH_WINDOW]


def use(own_row: OwnRow, form: str) -> int:
    """Make all backward calls of the form's head dim, which it returns, take it."""
    own_row.use(FORMS[form], FORMS["whole tiles"])
    return FORMS[form].head_dim


@pytest.mark.parametrize(("form", "mask"), PAIRS)
def test_dense_batches(form: str, mask: str, own_row: OwnRow, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], head_dim=use(own_row, form))
    for seqlen_q, seqlen_k in LENGTHS if device.type == "cuda" else LENGTHS[3:4]:
        check(small(device, dataclasses.replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k)), "sm90", device)
    for seqlen_q in (100, 200):  # all heads of a group are held, or are too many
        grouped = dataclasses.replace(case, seqlen_q=seqlen_q, seqlen_k=300, heads=8, kv_heads=2, dtype="fp16")
        check(small(device, grouped), "sm90", device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_that_take_one_head_after_the_other(
    form: str, causal: bool, own_row: OwnRow, device: torch.device
) -> None:
    case = Case(250, 250, head_dim=use(own_row, form), batch=40, heads=12, causal=causal)
    for seed in range(3 if device.type == "cuda" else 1):
        check(small(device, case), "sm90", device, seed)


@pytest.mark.parametrize("form", ["whole tiles", "lone"])
def test_packed_sequences(form: str, own_row: OwnRow, device: torch.device) -> None:
    lengths = (0, 1, 100, 128, 129, 0, 257, 448, 64) if device.type == "cuda" else (0, 1, 100)
    for mask in MASKS.values():
        packed = Packed(lengths, case=dataclasses.replace(mask, head_dim=use(own_row, form)))
        packed_gradients.check(packed, "sm90", device)
        packed_gradients.check(packed, "sm90", device, deterministic=True)


@pytest.mark.parametrize("form", [form for form in FORMS if "in memory" not in form])
def test_deterministic_calls_repeat(form: str, own_row: OwnRow, device: torch.device) -> None:
    case = small(device, Case(250, 250, head_dim=use(own_row, form), heads=6, kv_heads=6, causal=True, lse=True))
    inputs = case.inputs(device)
    given = upstream(inputs, case)
    first = gradients(inputs, given, case, "sm90", deterministic=True)
    assert_repeats(first, lambda: gradients(inputs, given, case, "sm90", deterministic=True))
