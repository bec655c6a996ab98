"""Traits that no shipped row, or few of them, switch on compute attention as all others do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cuteflash.traits.sm90 import FwdTraitsSm90
from tests.gpu.checks import Case, assert_right, call, check
from tests.gpu.conftest import OwnRow
from tests.gpu.pairwise import every_pair

pytestmark = pytest.mark.gpu

BASES = {
    64: FwdTraitsSm90(192, 128, 64, 64),
    128: FwdTraitsSm90(128, 128, 128, 128, q_in_regs=True),
}
SWITCHES = {
    "rescaled in the product": {"rescale_in_product": True, "exp_rows_before_wait": 1},
    "fixed": {"fixed_max": True},
    "fixed, repaired apart": {"fixed_max": True, "repair_apart": True, "q_in_regs": False},
    "fixed, one wave": {"fixed_max": True, "persistent": False},
    "two Q tiles": {"fixed_max": True, "repair_apart": True, "q_in_regs": False, "q_stage": 2},
    "two Q tiles, moving": {"q_in_regs": False, "q_stage": 2, "exp_rows_before_wait": 1},
}
# Blocks of 64 keys leave the registers for exponentials that are taken before the wait for P's.
REPAIRED = {
    "in the loop": {"fixed_max": True, "tile_n": 64, "exp_rows_before_wait": 1},
    "apart": {"fixed_max": True, "repair_apart": True, "q_in_regs": False},
}
LENGTHS = ((1, 300), (113, 203), (203, 113), (385, 385), (700, 130), (1030, 1100), (2049, 2049))
MASKS = {"full": Case(), "causal": Case(causal=True), "window": Case(window=(70, 30)), "left": Case(window=(200, -1))}


@every_pair(switch=tuple(SWITCHES), head_dim=tuple(BASES), mask=tuple(MASKS))
def test_a_switch_is_right(switch: str, head_dim: int, mask: str, own_row: OwnRow, cuda: torch.device) -> None:
    traits = dataclasses.replace(BASES[head_dim], **SWITCHES[switch])
    own_row.use(traits)
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim)
    for seqlen_q, seqlen_k in LENGTHS:
        check(dataclasses.replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k), "sm90", cuda)
    lengths = {"seqlen_q": 333, "seqlen_k": 500, "lse": True}
    check(dataclasses.replace(case, heads=6, kv_heads=2, **lengths), "sm90", cuda)
    check(dataclasses.replace(case, heads=6, kv_heads=1, pack_gqa=True, **lengths), "sm90", cuda)
    check(dataclasses.replace(case, logits=30.0, **lengths), "sm90", cuda)
    for logits in (1.0, 0.01):  # small ones overflow nowhere, whatever becomes of the cap
        check(dataclasses.replace(case, softcap=20.0, logits=logits, **lengths), "sm90", cuda)


@every_pair(where=tuple(REPAIRED), head_dim=tuple(BASES), mask=tuple(MASKS), dtype=["bf16", "fp16"])
def test_blocks_that_outgrow_the_first_maxima_are_repaired(
    where: str, head_dim: int, mask: str, dtype: str, own_row: OwnRow, cuda: torch.device
) -> None:
    traits = dataclasses.replace(BASES[head_dim], **REPAIRED[where])
    own_row.use(traits)
    # Neither the first keys nor the last ones. Heads differ in how far these outgrow the others: not, a little, past
    # all numbers; and in the last four they grow from block to block, seen from either end.
    case = dataclasses.replace(MASKS[mask], head_dim=head_dim, dtype=dtype, heads=8, lse=True, seqlen_q=2500)
    q, k, v = case.inputs(cuda)
    for head, growth in enumerate((1.0, 4.0, 10.0, 300.0 if dtype == "bf16" else 60.0)):
        k[:, 1003:1900:7, head] *= growth
        q[:, ::3, head] *= growth
    ramp = torch.linspace(0.5, 8.0, 2500, device=cuda)[None, :, None, None]
    k[:, :, 4:6] = (k[:, :, 4:6] * ramp).to(k.dtype)
    k[:, :, 6:8] = (k[:, :, 6:8] * ramp.flip(1)).to(k.dtype)
    out, lse = call(q, k, v, case, "sm90")
    assert_right((q, k, v), case, out, lse)


def test_what_is_not_a_number_stays_in_its_row(own_row: OwnRow, cuda: torch.device) -> None:
    own_row.use(dataclasses.replace(BASES[64], fixed_max=True))
    case = Case(seqlen_q=1000, head_dim=64)
    q, k, v = case.inputs(cuda)
    q[1, 77, 2, 5] = float("nan")
    out, _ = call(q, k, v, case, "sm90")
    assert out[1, 77, 2].isnan().all()
    q[1, 77, 2, 5] = 0.0
    out[1, 77, 2] = call(q, k, v, case, "sm90")[0][1, 77, 2]
    assert_right((q, k, v), case, out)
