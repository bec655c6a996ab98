"""Tree masks of speculative decoding on a CPU: by brute force, what a launch gets, which kernels serve them, errors."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.core.mask import IntervalMask
from cuteflash.dispatch import choose_shipped
from cuteflash.problem import TREE_TOKENS_MAX, FwdProblem, Operands, Scores, Storage
from cuteflash.traits.row import ROW_HEAD_DIMS
from tests.kernel_store import KernelStore
from tests.slow import slow_but
from tests.trees import branches, by_hand, chain, some_tree

STORAGE = Storage("varlen", "paged", used_k=True, has_page_table=True, has_cache_batch_idx=True, has_leftpad=True)


def hardest(head_dims: tuple[int, int], is_split: bool = False) -> FwdProblem:
    """What asks the most of a row."""
    scores = Scores("window", softcap=True, sink="fp32", tree=True)
    return FwdProblem(Operands.of("bf16", *head_dims, 4), scores, STORAGE, has_lse=True, is_split=is_split)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(40))
def test_by_definition(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, tokens = rng.randint(1, 3), rng.choice((1, 2, 7, 16, 64))
    capacity = tokens + rng.choice((0, 1, 30, 300))
    lengths = [rng.choice((capacity, rng.randint(0, capacity))) for _ in range(batch)]
    q = torch.randn(batch, tokens, 4, 16, generator=generator)
    k, v = (torch.randn(batch, capacity, 2, 16, generator=generator) for _ in range(2))
    trees = torch.stack([some_tree(rng, tokens) for _ in range(batch)])
    window = rng.choice(((-1, -1), (20, 0)))
    given: dict[str, Any] = {"cache_seqlens": int32(*lengths), "causal": True, "window_size": window}
    out, lse = cuteflash.flash_attn_with_kvcache(q, k, v, tree_mask=trees, return_lse=True, **given)
    for b, length in enumerate(lengths):
        expected = by_hand(q[b], k[b, :length], v[b, :length], trees[b], window[0])
        torch.testing.assert_close(out[b], expected[0])
        torch.testing.assert_close(lse[b], expected[1])


def test_a_chain_is_causal() -> None:
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16)
    given: dict[str, Any] = {"cache_seqlens": int32(50, 31), "causal": True}
    expected = cuteflash.flash_attn_with_kvcache(q, k, v, **given)
    for tree in (chain(9), torch.full((9,), -1)):  # bits of later tokens do not count
        found = cuteflash.flash_attn_with_kvcache(q, k, v, tree_mask=tree.expand(2, 9).contiguous(), **given)
        torch.testing.assert_close(found, expected)


def test_each_branch_is_the_sequence_that_it_stands_for() -> None:
    """What a token's query gets is what it gets if its branch is all that was appended."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    tree = some_tree(rng, 12)
    q, k, v = (torch.randn(1, 12, 2, 16, generator=generator) for _ in range(3))
    caches = [torch.randn(1, 40, 2, 16, generator=generator) for _ in range(2)]
    given: dict[str, Any] = {"cache_seqlens": int32(20), "causal": True}
    whole = cuteflash.flash_attn_with_kvcache(q, *(x.clone() for x in caches), k, v, tree_mask=tree[None], **given)
    for token in range(12):
        branch = [j for j in range(12) if tree[token] >> j & 1]
        alone = cuteflash.flash_attn_with_kvcache(
            q[:, branch], *(x.clone() for x in caches), k[:, branch], v[:, branch], **given
        )
        torch.testing.assert_close(whole[:, token], alone[:, -1])


def test_packed_queries() -> None:
    rng = random.Random(1)
    lengths, queries = (30, 5, 64), (5, 0, 16)
    trees = [some_tree(rng, n) for n in queries]
    q, k, v = torch.randn(21, 4, 16), torch.randn(3, 64, 2, 16), torch.randn(3, 64, 2, 16)
    out = cuteflash.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(*lengths), cu_seqlens_q=int32(0, 5, 5, 21), causal=True, tree_mask=torch.cat(trees)
    )
    for b, rows in ((0, slice(0, 5)), (2, slice(5, 21))):
        expected, _ = by_hand(q[rows], k[b, : lengths[b]], v[b, : lengths[b]], trees[b])
        torch.testing.assert_close(out[rows], expected)


def call(**changed: Any) -> dict[str, Any]:
    """A call with a tree."""
    tensors = {
        "q": torch.zeros(2, 4, 4, 16),
        "k_cache": torch.zeros(2, 20, 2, 16),
        "v_cache": torch.zeros(2, 20, 2, 16),
    }
    given: dict[str, Any] = {"cache_seqlens": int32(5, 9), "causal": True, "tree_mask": chain(4).repeat(2, 1)}
    return tensors | given | changed


LONG = {"q": torch.zeros(2, 65, 4, 16), "tree_mask": torch.zeros(2, 65, dtype=torch.int64)}
ENDS = {"q": torch.zeros(66, 4, 16), "cu_seqlens_q": int32(0, 65, 66), "tree_mask": torch.zeros(66, dtype=torch.int64)}
ROTARY = {"k": torch.zeros(2, 4, 2, 16), "v": torch.zeros(2, 4, 2, 16), "rotary_cos": torch.zeros(20, 8)}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": (call(tree_mask=torch.zeros(2, 4, dtype=torch.int32)), TypeError, r"tree_mask\.dtype is torch\.int32"),
    "shape": (call(tree_mask=torch.zeros(2, 3, dtype=torch.int64)), ValueError, r"tree_mask\.shape is \(2, 3\)"),
    "dimensions": (call(tree_mask=torch.zeros(8, dtype=torch.int64)), ValueError, r"tree_mask\.shape is \(8,\)"),
    "strides": (call(tree_mask=chain(4).expand(2, 4)), ValueError, r"tree_mask\.stride\(\)"),
    "no tensor": (call(tree_mask=[[1]]), TypeError, "tree_mask is a list"),
    "not causal": (call(causal=False), ValueError, "causal is False"),
    "too many tokens": (call(**LONG), ValueError, r"q\.shape\[1\] \(seqlen_q\) is 65"),
    "too many packed tokens": (call(**ENDS), ValueError, "a sequence of 65 queries"),
    "rotary": (call(**ROTARY, rotary_sin=torch.zeros(20, 8)), ValueError, "rotary_cos is given with tree_mask"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    given, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        cuteflash.flash_attn_with_kvcache(**given)


def test_what_tiles_see_whole_ends_before_the_new_tokens() -> None:
    """Brute force on host integers: a block that is not masked has only keys that every tree shows."""
    choose = random.Random(0)
    for _ in range(500):
        seqlen_q, seqlen_k = choose.randint(1, 40), choose.randint(0, 90)
        tile_n, kind = choose.choice((1, 4, 16)), choose.choice(("causal", "window"))
        mask = IntervalMask(kind, seqlen_q, seqlen_k, choose.choice((5, 1 << 30)), 0, None, tree=True)
        first = choose.randrange(seqlen_q)
        last = min(first + choose.randint(0, 15), seqlen_q - 1)
        lo, hi = mask.full_n_blocks(first, last, tile_n)
        plain = dataclasses.replace(mask, tree=False)
        assert mask.n_blocks(first, last, tile_n) == plain.n_blocks(first, last, tile_n)
        for key in range(lo * tile_n, hi * tile_n):
            assert key < seqlen_k - seqlen_q
            assert all(plain.kv_bounds(i)[0] <= key < plain.kv_bounds(i)[1] for i in range(first, last + 1))
        assert hi == max(min(plain.full_n_blocks(first, last, tile_n)[1], (seqlen_k - seqlen_q) // tile_n), 0)


def test_a_tree_has_a_right_edge() -> None:
    with pytest.raises(ValueError, match="tree is True; allowed with mask 'full': False"):
        Scores("full", tree=True)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_every_head_dim_has_one_row_for_trees_split_or_not(family: Any) -> None:
    for head_dims in (*((d, d) for d in ROW_HEAD_DIMS), (192, 128)):
        split = hardest(head_dims, is_split=True)
        rows = [choose_shipped(problem, "sm_90a", family).row for problem in (hardest(head_dims), split)]
        without = dataclasses.replace(split, scores=Scores("window"))
        assert rows[0] is rows[1] is choose_shipped(without, "sm_90a", family).row


BUILDS = [  # each pair of two of the three
    "64 split for sm_80",
    "64 whole for sm_90a",
    "128 split for sm_90a",
    "128 whole for sm_80",
    "256 split for sm_90a",
    "256 whole for sm_80",
]


@pytest.mark.parametrize("case", slow_but(BUILDS))
def test_kernels_are_clean(kernels: KernelStore, case: str) -> None:
    from cuteflash.dispatch import kernel_class

    head_dim, kind, _, target = case.split()
    problem = hardest((int(head_dim), int(head_dim)), kind == "split")
    traits = choose_shipped(problem, target).traits
    compiled = kernels(kernel_class(traits), traits, problem, target)
    compiled.assert_clean()


def test_trees_of_this_module() -> None:
    assert chain(3).tolist() == [1, 3, 7]
    assert branches([-1, 0, 0, 2]).tolist() == [1, 3, 5, 13]
    assert branches(list(range(-1, TREE_TOKENS_MAX - 1)))[-1] == -1
