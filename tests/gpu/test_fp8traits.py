"""Rows of 8-bit operands whose masked blocks keep the row maxima: scores that outgrow them, rows without a key."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.checks import Case, rms
from tests.gpu.test_fp8 import Operands8, assert_as_modelled

pytestmark = pytest.mark.gpu

# (queries, keys): of the rows for short and for long sequences.
LENGTHS = {"short": (700, 700), "cut": (300, 900), "long": (333, 3200)}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("logits", [1.0, 16.0])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_scores_of_masked_blocks_may_outgrow_the_maxima(
    lengths: str, logits: float, is_transposed: bool, hopper: torch.device
) -> None:
    seqlen_q, seqlen_k = LENGTHS[lengths]
    case = Case(
        causal=True, head_dim=64, logits=logits, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=4, kv_heads=2
    )  # fmt: skip
    assert_as_modelled(case, hopper, is_transposed=is_transposed)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("from_the_end", [20, 100, 210])
def test_sinks_in_masked_blocks(from_the_end: int, lengths: str, is_transposed: bool, hopper: torch.device) -> None:
    """A key that takes all of the weight of the queries after it lies on the diagonal of a tile."""
    seqlen_q, seqlen_k = LENGTHS[lengths]
    case = Case(
        causal=True, head_dim=64, kind="sink:60", place=seqlen_k - from_the_end,
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, heads=2,
    )  # fmt: skip
    assert_as_modelled(case, hopper, is_transposed=is_transposed)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_queries_before_the_first_key_see_nothing(is_transposed: bool, hopper: torch.device) -> None:
    case = Case(causal=True, head_dim=64, seqlen_q=500, seqlen_k=150, heads=4, kv_heads=2)
    assert_as_modelled(case, hopper, is_transposed=is_transposed)
    out, lse = Operands8.of(case, hopper).attend(case, False)
    assert (out[:, :350] == 0).all() and (lse[:, :, :350] == -torch.inf).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_largest_weight_of_a_row_is_exact(head_dim: int, hopper: torch.device) -> None:
    """P is multiplied with a whole power of 2, so that a key that takes all of the weight gives its V."""
    case = Case(head_dim=head_dim, kind="sink:60", seqlen_q=128, seqlen_k=1500, batch=1, heads=2)
    operands = Operands8.of(case, hopper)
    out, _ = operands.attend(case, True)
    exact, _ = operands.exact(case)
    assert rms(out.double() - exact) <= 4e-3 * rms(exact)
