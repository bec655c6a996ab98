"""The ladder against a brute force written from the definition, and its interval masks on host integers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from cuteflash.reference import LADDER, flash_attention_2, naive_attention, split_attention
from cuteflash.reference.masks import block_bounds, key_bounds, visible

EVERY = LADDER | {"split keys": split_attention}
STEPS = pytest.mark.parametrize("step", EVERY.values(), ids=[name.replace(" ", "_") for name in EVERY])
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (3, 0), (2, 5), (-1, 4), (4, -1)]


def sees(i: int, j: int, s_q: int, s_k: int, left: int, right: int) -> bool:
    """The definition: keys from `left` before to `right` after the query's own position, counted from the end."""
    distance = (s_k - 1 - j) - (s_q - 1 - i)  # how far the key lies before the query
    return (left < 0 or distance <= left) and (right < 0 or -distance <= right)


def brute_force(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int = -1, right: int = -1, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Row by row in float64, softmax by torch; nothing shared with the code under test."""
    b, s_q, h_q, _ = q.shape
    s_k, h_k, d_v = k.shape[1], k.shape[2], v.shape[3]
    o = torch.zeros(b, s_q, h_q, d_v, dtype=torch.float64)
    lse = torch.full((b, h_q, s_q), -math.inf, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for i in range(s_q):
        keys = [j for j in range(s_k) if sees(i, j, s_q, s_k, left, right)]
        if not keys:
            continue
        for head in range(h_q):
            kv_head = head // (h_q // h_k)
            s = torch.einsum("bd,bjd->bj", q[:, i, head], k[:, keys, kv_head]) * scale
            if softcap:
                s = torch.tanh(s / softcap) * softcap
            lse[:, head, i] = torch.logsumexp(s, dim=-1)
            o[:, i, head] = torch.einsum("bj,bjd->bd", torch.softmax(s, dim=-1), v[:, keys, kv_head])
    return o, lse


def inputs(
    b: int, s_q: int, s_k: int, h_q: int, h_k: int, d: int, d_v: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (b, s_q, h_q, d), (b, s_k, h_k, d), (b, s_k, h_k, d_v)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes)
    return q, k, v


def assert_right(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 2e-5) -> None:
    for actual, wanted in zip(result, expected, strict=True):
        assert actual.shape == wanted.shape
        torch.testing.assert_close(actual.double(), wanted, atol=tolerance, rtol=tolerance)


@STEPS
@pytest.mark.parametrize(("left", "right"), WINDOWS)
@pytest.mark.parametrize(("s_q", "s_k"), [(1, 1), (1, 19), (19, 1), (17, 17), (23, 9), (9, 23)])
def test_every_mask_and_length(step, s_q, s_k, left, right):
    q, k, v = inputs(2, s_q, s_k, 2, 2, 8, 8)
    assert_right(step(q, k, v, 0.3, left, right), brute_force(q, k, v, 0.3, left, right))


@STEPS
@pytest.mark.parametrize(("s_q", "s_k"), [(130, 257), (257, 130), (128, 256)])
@pytest.mark.parametrize(("left", "right"), [(-1, 0), (40, 30), (-1, -1)])
def test_lengths_around_a_tile(step, s_q, s_k, left, right):
    q, k, v = inputs(1, s_q, s_k, 1, 1, 8, 8)
    assert_right(step(q, k, v, 0.3, left, right), brute_force(q, k, v, 0.3, left, right))


@STEPS
@pytest.mark.parametrize(("h_q", "h_k"), [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize(("d", "d_v"), [(16, 8), (8, 24)])
def test_grouped_heads_and_value_dim(step, h_q, h_k, d, d_v):
    q, k, v = inputs(2, 5, 7, h_q, h_k, d, d_v)
    assert_right(step(q, k, v, 0.2, -1, 0), brute_force(q, k, v, 0.2, -1, 0))


@STEPS
@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_softcap(step, softcap):
    q, k, v = inputs(1, 12, 20, 2, 1, 16, 16)
    assert_right(step(q, k, v, 0.8, 6, 2, softcap), brute_force(q, k, v, 0.8, 6, 2, softcap))


@pytest.mark.parametrize("name", [name for name in LADDER if name != "naive"])
def test_large_logits(name):
    q, k, v = inputs(2, 70, 300, 2, 2, 32, 32)
    q = q * 30
    assert_right(LADDER[name](q, k, v, 1.0, -1, 0), brute_force(q, k, v, 1.0, -1, 0), tolerance=3e-4)


def test_naive_overflows_where_safe_softmax_does_not():
    q, k, v = inputs(1, 4, 6, 1, 1, 32, 32)
    o, _ = naive_attention(q * 30, k, v, 1.0)
    assert not torch.isfinite(o).all()


@STEPS
def test_rows_without_a_visible_key(step):
    q, k, v = inputs(2, 9, 4, 4, 2, 8, 8)
    o, lse = step(q, k, v, 0.3, -1, 0)
    blind = 9 - 4  # causal, aligned at the end: the first rows stand before every key
    assert (o[:, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()
    assert torch.isfinite(lse[:, :, blind:]).all()


@STEPS
@pytest.mark.parametrize(
    ("b", "s_q", "s_k", "h"), [(0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 0, 2), (2, 3, 3, 0), (1, 0, 0, 1)]
)
def test_empty(step, b, s_q, s_k, h):
    q, k, v = inputs(b, s_q, s_k, h, h, 8, 16)
    o, lse = step(q, k, v, 0.3, -1, 0)
    assert o.shape == (b, s_q, h, 16) and lse.shape == (b, h, s_q)
    if s_k == 0:
        assert (o == 0).all() and (lse == -math.inf).all()


@STEPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(step, dtype):
    q, k, v = inputs(1, 6, 10, 2, 2, 8, 8, dtype)
    o, lse = step(q, k, v, 0.4)
    assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected_o, expected_lse = brute_force(q, k, v, 0.4)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(o.double(), expected_o, atol=tolerance, rtol=tolerance)
    lse_tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, atol=lse_tolerance, rtol=lse_tolerance)


@STEPS
def test_strides_and_expanded_inputs(step):
    q, k, v = inputs(2, 6, 5, 4, 2, 16, 8)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = k[:1].expand(2, -1, -1, -1)
    assert_right(step(strided, expanded, v, 0.3), brute_force(q, k[[0, 0]], v, 0.3))


def test_flash_attention_2_returns_new_contiguous_tensors():
    q, k, v = inputs(2, 6, 5, 4, 2, 16, 8)
    o, lse = flash_attention_2(q, k, v, 0.3)
    assert o.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize(("s_q", "s_k"), [(1, 1), (5, 5), (3, 9), (9, 3), (4, 0)])
def test_key_bounds_are_the_definition(s_q, s_k):
    sides = [-1, 0, 1, 2, 7, 1 << 30]
    for left, right, i in ((a, b, i) for a in sides for b in sides for i in range(s_q)):
        lo, hi = key_bounds(i, s_q, s_k, left, right)
        assert list(range(lo, hi)) == [j for j in range(s_k) if sees(i, j, s_q, s_k, left, right)]


@pytest.mark.parametrize(("left", "right"), WINDOWS)
@pytest.mark.parametrize(("s_q", "s_k"), [(7, 7), (4, 11), (11, 4)])
def test_blocks_visit_every_visible_key_and_no_other(s_q, s_k, left, right):
    for i0 in range(s_q):
        for i1 in range(i0 + 1, s_q + 1):
            lo, hi = block_bounds(i0, i1, s_q, s_k, left, right)
            wanted = {j for i in range(i0, i1) for j in range(s_k) if sees(i, j, s_q, s_k, left, right)}
            assert set(range(lo, hi)) >= wanted
            if wanted:
                assert lo == min(wanted) and hi == max(wanted) + 1


def test_chunks_are_the_definition():
    for s_q, s_k, left, right, chunk in itertools.product((1, 5), (0, 3, 7), (-1, 0, 2), (-1, 0, 2), (1, 2, 3, 100)):
        seen = [
            [sees(i, j, s_q, s_k, left, right) and j // chunk == (i + s_k - s_q) // chunk for j in range(s_k)]
            for i in range(s_q)
        ]
        for i, row in enumerate(seen):
            lo, hi = key_bounds(i, s_q, s_k, left, right, chunk)
            assert list(range(lo, hi)) == [j for j, there in enumerate(row) if there]
        mask = visible(0, s_q, 0, s_k, s_k - s_q, left, right, torch.device("cpu"), chunk=chunk)
        assert mask is not None and mask.tolist() == seen


@pytest.mark.parametrize(("left", "right"), WINDOWS)
def test_tile_mask_is_the_definition_and_none_only_where_all_is_visible(left, right):
    s_q, s_k, tile = 7, 9, 3
    for i0 in range(0, s_q, tile):
        for j0 in range(0, s_k, tile):
            i1, j1 = min(i0 + tile, s_q), min(j0 + tile, s_k)
            wanted = [[sees(i, j, s_q, s_k, left, right) for j in range(j0, j1)] for i in range(i0, i1)]
            mask = visible(i0, i1, j0, j1, s_k - s_q, left, right, torch.device("cpu"))
            if mask is None:
                assert all(map(all, wanted))
            else:
                assert mask.tolist() == wanted and not all(map(all, wanted))


@pytest.mark.parametrize("parts", [1, 2, 7, 19, 40])
def test_the_number_of_parts_changes_nothing(parts):
    q, k, v = inputs(2, 5, 19, 4, 2, 8, 6)
    assert_right(split_attention(q, k, v, 0.3, 9, 1, parts=parts), brute_force(q, k, v, 0.3, 9, 1))
