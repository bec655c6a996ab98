"""Gradients by blocks that round dQ once all others have added to it, whether by chance or in turn."""

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

FORMS = {
    "columns": BwdTraitsSm90(64, 128, 128, 128),
    "rows": BwdTraitsSm90(128, 128, 64, 64, dq="rows", pingpong=False, q_stage=1, do_stage=1),
    "transposed": BwdTraitsSm90(64, 128, 128, 128, dq="transposed"),
    "apart": BwdTraitsSm90(64, 128, 96, 96, dq="apart", pingpong=False, delta_early=False, keep_thread=True),
    "apart, transposed": BwdTraitsSm90(96, 128, 64, 64, dq="apart", pingpong=False, keep_thread=True),
    "apart, persistent": BwdTraitsSm90(
        64, 128, 64, 64, dq="apart", pingpong=False, persistent=True, kv_stage=2, k_in_regs=True, v_in_regs=True
    ),
}
# One key tile, several, of which some see no query, a last one that is cut; queries that see no key.
LENGTHS = ((1, 300), (113, 203), (203, 113), (385, 385), (517, 20), (700, 1030), (1100, 1100))
MASKS = {"full": Case(lse=True), "causal": Case(causal=True), "window": Case(window=(70, 30))}
WITH_WINDOW = tuple(form for form, traits in FORMS.items() if traits.head_dim < 128)  # wider ones spill
PAIRS = [(form, mask) for form in FORMS for mask in MASKS if mask != "window" or form in WITH_WINDOW]
PACKED = (0, 1, 600, 128, 129, 0, 257, 1030, 64)


def use(own_row: OwnRow, form: str, in_turn: bool) -> int:
    """Make all backward calls of the form's head dim, which it returns, take it."""
    traits = dataclasses.replace(FORMS[form], last_rounds=True, in_turn=in_turn)
    own_row.use(traits, dataclasses.replace(FORMS["columns"], last_rounds=True))
    return traits.head_dim


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("form", "mask"), PAIRS)
def test_dense_batches(form: str, mask: str, in_turn: bool, own_row: OwnRow, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], head_dim=use(own_row, form, in_turn))
    for seqlen_q, seqlen_k in LENGTHS if device.type == "cuda" else LENGTHS[:2]:
        check(small(device, dataclasses.replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k)), "sm90", device)
    grouped = dataclasses.replace(case, seqlen_q=513, seqlen_k=641, heads=8, kv_heads=2, dtype="fp16")
    check(small(device, grouped), "sm90", device)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_many_heads_that_meet_at_tiles(
    form: str, causal: bool, in_turn: bool, own_row: OwnRow, device: torch.device
) -> None:
    case = Case(1024, 1024, head_dim=use(own_row, form, in_turn), batch=8, heads=24, kv_heads=24, causal=causal)
    for seed in range(3 if device.type == "cuda" else 1):
        check(small(device, case), "sm90", device, seed)


@pytest.mark.parametrize(("form", "mask"), PAIRS)
def test_packed_sequences(form: str, mask: str, own_row: OwnRow, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], head_dim=use(own_row, form, in_turn=False))
    lengths = PACKED if device.type == "cuda" else PACKED[:4]
    packed_gradients.check(Packed(lengths, case=case), "sm90", device)
    packed_gradients.check(Packed(lengths, lengths[::-1], case=case, rest_q=70, rest_k=70), "sm90", device)
    packed_gradients.check(Packed(lengths, case=case), "sm90", device, deterministic=True)


@pytest.mark.parametrize("form", FORMS)
def test_deterministic_calls_repeat(form: str, own_row: OwnRow, device: torch.device) -> None:
    head_dim = use(own_row, form, in_turn=False)
    case = small(device, Case(600, 600, head_dim=head_dim, heads=6, kv_heads=3, causal=True, lse=True))
    check(case, "sm90", device, deterministic=True)
    inputs = case.inputs(device)
    given = upstream(inputs, case)
    first = gradients(inputs, given, case, "sm90", deterministic=True)
    assert_repeats(first, lambda: gradients(inputs, given, case, "sm90", deterministic=True))
