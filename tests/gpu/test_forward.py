"""The forward kernels compute attention: head dims, masks, heads, lengths, softcap, LSE.

Tests are grouped so that many share a compiled kernel: lengths, windows and scales are no part of one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cuteflash.arguments import FwdOptions
from tests.gpu.checks import Case, assert_right, call, check, poisoned
from tests.gpu.gradients import small

pytestmark = pytest.mark.gpu

HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 120, 128, 136, 160, 192, 224, 248, 256)
HEAD_DIM_PAIRS = ((64, 128), (128, 64), (192, 128), (40, 72), (96, 32), (256, 64), (64, 256), (8, 256))
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193)
LENGTHS = (
    *((n, n) for n in EDGES),
    *((1, n) for n in (2, 63, 129, 1024)),
    (2, 1),
    (64, 1),
    (129, 64),
    (113, 203),
    (203, 113),
    (1023, 1024),
    (1024, 1023),
    (1025, 1025),
    (108, 1100),
    (1100, 108),
)
WINDOWS = ((0, 0), (10, 0), (64, 0), (127, 128), (0, -1), (-1, 10), (200, -1), (3, 5), (1000, 1000), (-1, 0))
MASKS = {
    "full": Case(),
    "causal": Case(causal=True),
    "window": Case(window=(70, 30)),
}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", [(113, 203), (300, 300)], ids=str)
def test_every_kind_of_head_dim(head_dim: int, lengths: tuple[int, int], family: str, device: torch.device) -> None:
    check(Case(*lengths, head_dim=head_dim, causal=True), family, device)


@pytest.mark.parametrize("head_dim", [24, 64, 96, 128, 192, 256])
def test_half_precision(head_dim: int, family: str, device: torch.device) -> None:
    check(Case(177, 263, head_dim=head_dim, dtype="fp16"), family, device)


@pytest.mark.parametrize("pair", HEAD_DIM_PAIRS, ids=str)
def test_value_head_dim_may_differ(pair: tuple[int, int], family: str, device: torch.device) -> None:
    check(Case(150, 260, head_dim=pair[0], head_dim_v=pair[1], causal=True), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths: tuple[int, int], head_dim: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim)
    check(small(device, case), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("rows", ["tiny", "brief", "short", "long"])
def test_rows_of_every_class_compute_all_lengths(
    rows: str, head_dim: int, mask: str, family: str, device: torch.device
) -> None:
    for lengths in (*((n, n) for n in EDGES), (203, 113), (1, 1024), (517, 517)):
        case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim)
        inputs = case.inputs(device)
        with poisoned():
            out = torch.ops.cuteflash.fwd(*inputs, *FwdOptions(None, *case.bounds, family=family, lengths=rows))
        assert_right(inputs, case, out)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(113, 203), (203, 113), (517, 517)], ids=str)
def test_windows(window: tuple[int, int], lengths: tuple[int, int], family: str, device: torch.device) -> None:
    check(Case(*lengths, window=window, lse=True), family, device)


def test_causal_bounds_a_window_on_the_right(family: str, device: torch.device) -> None:
    case = Case(150, 190, window=(40, 25))
    inputs = case.inputs(device)
    out, _ = call(*inputs, dataclasses.replace(case, causal=True), family)
    assert_right(inputs, dataclasses.replace(case, window=(40, 0)), out)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 300), (70, 200), (333, 333)], ids=str)
def test_grouped_heads(
    heads: tuple[int, int], lengths: tuple[int, int], mask: str, family: str, device: torch.device
) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], pack_gqa=False)
    check(dataclasses.replace(case, heads=heads[0], kv_heads=heads[1]), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 300), (5, 64), (70, 200), (333, 333), (200, 70)], ids=str)
def test_packed_heads(
    heads: tuple[int, int], lengths: tuple[int, int], mask: str, family: str, device: torch.device
) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], pack_gqa=True)
    check(dataclasses.replace(case, heads=heads[0], kv_heads=heads[1], lse=True), family, device)


@pytest.mark.parametrize(("heads", "head_dim"), [((16, 1), 128), ((64, 1), 64), ((12, 4), 256)], ids=str)
def test_packed_heads_of_other_shapes(heads: tuple[int, int], head_dim: int, family: str, device: torch.device) -> None:
    case = Case(9, 250, head_dim=head_dim, heads=heads[0], kv_heads=heads[1], causal=True, pack_gqa=True)
    check(case, family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [5.0, 30.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_softcap(head_dim: int, softcap: float, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=140, seqlen_k=270, head_dim=head_dim)
    check(dataclasses.replace(case, softcap=softcap, logits=4.0, lse=True), family, device)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 77), (113, 203), (203, 113), (512, 512)], ids=str)
def test_log_sum_exp(lengths: tuple[int, int], head_dim: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, lse=True)
    check(case, family, device)


def test_rows_that_see_nothing_are_zero(family: str, device: torch.device) -> None:
    case = Case(200, 70, causal=True, lse=True)
    out, lse = call(*case.inputs(device), case, family)
    assert (out[:, :130] == 0).all()
    assert lse is not None
    assert (lse[:, :, :130] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, 130:]).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_logits(head_dim: int, mask: str, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS[mask], seqlen_q=333, head_dim=head_dim, logits=30.0)
    check(case, family, device)


def test_one_kernel_serves_other_scales_and_windows(family: str, device: torch.device) -> None:
    for scale in (None, 1.0, 0.03, 2.5):
        check(Case(90, 130, scale=scale, causal=True), family, device)
    for window in ((4, 4), (50, 0), (0, 50)):
        check(Case(90, 130, window=window), family, device)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0}], ids=str)
def test_empty_dimensions(shape: dict[str, int], family: str, device: torch.device) -> None:
    case = dataclasses.replace(Case(16, 16, lse=True), **shape)
    q, k, v = case.inputs(device)
    out, lse = call(q, k, v, case, family)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse is not None
    assert (lse == float("-inf")).all()
