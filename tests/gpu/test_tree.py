"""Tree masks of speculative decoding, split and not, in every kind of cache; chains are causal, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash.traits.cache_sm80 import CONVERTING_CAPABILITY
from tests.gpu.checks import Case, assert_close_to, assert_lse_close_to
from tests.gpu.paged import Paged
from tests.gpu.pairwise import every_pair
from tests.trees import by_hand, chain, some_tree

pytestmark = pytest.mark.gpu

KEYS = (1000, 7, 2047, 64, 4096, 129, 70)  # some shorter than the new tokens
CASE = Case(seqlen_q=16, head_dim=128, heads=8, kv_heads=2, causal=True, lse=True)


def check(paged: Paged, family: str, device: torch.device, seed: int = 0) -> None:
    """Every element, with random trees."""
    rng, case = random.Random(seed), paged.case
    tensors, alone = paged.build(device, seed)
    lengths = paged.queries or (case.seqlen_q,) * len(paged.keys)
    trees = [some_tree(rng, length).to(device) for length in lengths]
    masks = torch.cat(trees) if paged.queries else torch.stack(trees)
    out, lse = paged.call(tensors | {"tree_mask": masks}, family)
    rows = out if paged.queries else out.flatten(0, 1)
    lse = lse if paged.queries else lse.transpose(0, 1).flatten(1, 2)
    exact, low = (
        [by_hand(*(x[0] for x in parts), tree, case.window[0], dtype) for parts, tree in zip(alone, trees, strict=True)]
        for dtype in (torch.float32, out.dtype)
    )
    assert_close_to(rows, *(torch.cat([o for o, _ in results]) for results in (exact, low)))
    assert_lse_close_to(lse, torch.cat([x for _, x in exact], dim=1), case)


@every_pair(page_size=[None, 5, 16], num_splits=[1, 2])
def test_caches(page_size: int | None, num_splits: int, family: str, device: torch.device) -> None:
    check(Paged(KEYS, page_size, CASE, num_splits=num_splits), family, device)


@pytest.mark.parametrize("num_splits", [1, 2, 1000])
def test_e4m3_caches_of_the_sm80_family(num_splits: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CONVERTING_CAPABILITY:
        pytest.skip("e4m3 caches need sm_89 or later")
    check(Paged(KEYS, 16, CASE, num_splits=num_splits, e4m3=True), "sm80", device)


@pytest.mark.parametrize("num_splits", [1, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_tokens(tokens: int, num_splits: int, family: str, device: torch.device) -> None:
    check(Paged(KEYS, 16, dataclasses.replace(CASE, seqlen_q=tokens), num_splits=num_splits), family, device)


@pytest.mark.parametrize("pack_gqa", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (32, 1)])
def test_heads(heads: int, kv_heads: int, pack_gqa: bool, family: str, device: torch.device) -> None:
    case = dataclasses.replace(CASE, heads=heads, kv_heads=kv_heads, pack_gqa=pack_gqa)
    check(Paged(KEYS, 16, case, num_splits=0), family, device)


@pytest.mark.parametrize(
    ("head_dims", "num_splits"), [((64, 64), 1), ((96, 96), 1000), ((192, 128), 1), ((256, 256), 1000), ((72, 40), 1)]
)
def test_head_dims(head_dims: tuple[int, int], num_splits: int, family: str, device: torch.device) -> None:
    case = dataclasses.replace(CASE, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype="fp16")
    check(Paged(KEYS, 16, case, num_splits=num_splits), family, device)


@pytest.mark.parametrize("num_splits", [1, 1000])
def test_packed_queries_and_windows(num_splits: int, family: str, device: torch.device) -> None:
    queries = (16, 3, 64, 0, 1, 40, 8)
    check(Paged(KEYS, 16, CASE, queries, num_splits=num_splits), family, device)
    case = dataclasses.replace(CASE, causal=False, window=(300, 0))
    check(Paged(KEYS, 16, case, queries, num_splits=num_splits), family, device)


@pytest.mark.parametrize("num_splits", [1, 0])
def test_whole_dense_caches(num_splits: int, family: str, device: torch.device) -> None:
    check(Paged((700,) * 3, None, CASE, all_used=True, num_splits=num_splits), family, device)


def test_a_chain_is_causal(family: str, device: torch.device) -> None:
    paged = Paged((1000, 2000, 500), 16, CASE, num_splits=1000)
    tensors, _ = paged.build(device)
    tree = chain(16).repeat(3, 1).to(device)
    for a, b in zip(paged.call(tensors | {"tree_mask": tree}, family), paged.call(tensors, family), strict=True):
        assert torch.equal(a, b)


def test_a_graph_replays_with_other_trees_and_lengths(family: str, cuda: torch.device) -> None:
    rng, paged = random.Random(0), Paged((2000, 900), 16, CASE, num_splits=0)
    tensors, _ = paged.build(cuda)
    tensors["tree_mask"] = torch.stack([some_tree(rng, 16) for _ in range(2)]).to(cuda)
    given: dict[str, Any] = {"cache_seqlens": tensors["seqused_k"], "page_table": tensors["page_table"]}
    given |= {"tree_mask": tensors["tree_mask"], "causal": True, "family": family}

    def step() -> Tensor:
        found: Tensor = cuteflash.flash_attn_with_kvcache(tensors["q"], tensors["k_cache"], tensors["v_cache"], **given)
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(10):
        tensors["tree_mask"].copy_(torch.stack([some_tree(rng, 16) for _ in range(2)]))
        tensors["seqused_k"].copy_(torch.tensor([rng.randint(0, 2000), rng.randint(0, 900)]))
        graph.replay()
        assert torch.equal(out, step())


def test_with_metadata_of_a_step(family: str, cuda: torch.device) -> None:
    paged = Paged(KEYS, 16, CASE, num_splits=1000)
    tensors, _ = paged.build(cuda)
    rng, capacity = random.Random(1), tensors["page_table"].shape[1] * 16
    tensors["tree_mask"] = torch.stack([some_tree(rng, 16) for _ in KEYS]).to(cuda)
    expected = paged.call(tensors, family)
    metadata = cuteflash.get_scheduler_metadata(
        len(KEYS), 16, capacity, 8, 2, 128, tensors["seqused_k"], causal=True, num_splits=1000, family=family
    )  # fmt: skip
    found = paged.call(tensors | {"scheduler_metadata": metadata}, family)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
