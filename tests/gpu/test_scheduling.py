"""Metadata of a step: calls that get it compute what they would without it, bit for bit, also in a CUDA graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from tests.gpu.checks import Case
from tests.gpu.paged import Paged

pytestmark = pytest.mark.gpu

KEYS = (1000, 0, 2047, 3, 4096, 1, 64, 128, 129, 700)
MANY = tuple(37 * i % 611 for i in range(100))  # more sequences than a warp looks at at a time
QUERIES = (3, 1, 0, 1, 40, 2, 1, 1, 5, 16)


def metadata_of(tensors: dict[str, Any], paged: Paged, family: str | None) -> Tensor:
    """What `get_scheduler_metadata` returns for a call of the operator."""
    case, cache, table = paged.case, tensors["k_cache"], tensors["page_table"]
    capacity = cache.shape[1] if table is None else table.shape[1] * cache.shape[1]
    more: dict[str, Any] = {}
    if paged.queries is not None:
        more = {"cu_seqlens_q": tensors["cu_seqlens_q"], "total_q": tensors["q"].shape[0]}
    return cuteflash.get_scheduler_metadata(
        len(paged.keys), max(paged.queries or (case.seqlen_q,)), capacity, case.heads, case.kv_heads, case.head_dim,
        tensors["seqused_k"], headdim_v=case.head_dim_v, cache_leftpad=tensors["cache_leftpad"], causal=case.causal,
        window_size=case.window, num_splits=paged.num_splits, pack_gqa=case.pack_gqa, family=family, **more,
    )  # fmt: skip


def check(paged: Paged, family: str, device: torch.device) -> None:
    """The result with metadata is right, and that without them, bit for bit; the counters are 0 again."""
    tensors, alone = paged.build(device)
    expected = paged.call(tensors, family)
    metadata = metadata_of(tensors, paged, family)
    assert metadata.numel() > 0
    before = metadata.clone()
    for _ in range(3):
        found = paged.call(tensors | {"scheduler_metadata": metadata}, family)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(metadata, before)
    paged.assert_right(alone, *found)


@pytest.mark.parametrize("num_splits", [2, 1000])
@pytest.mark.parametrize("page_size", [None, 5, 16])
def test_decode(page_size: int | None, num_splits: int, family: str, cuda: torch.device) -> None:
    case = Case(seqlen_q=1, head_dim=128, heads=8, kv_heads=2, causal=True, lse=True)
    check(Paged(KEYS, page_size, case, num_splits=num_splits), family, cuda)
    check(Paged(MANY, page_size, case, num_splits=num_splits), family, cuda)


@pytest.mark.parametrize("window", [(-1, -1), (900, 0)])
@pytest.mark.parametrize("page_size", [5, 16])
def test_packed_queries_and_padding(page_size: int, window: Any, family: str, cuda: torch.device) -> None:
    case = Case(head_dim=64, heads=8, kv_heads=2, window=window, causal=window[0] < 0, lse=True)
    left = tuple(min(n, 70) for n in KEYS)
    check(Paged(KEYS, page_size, case, QUERIES, left, indexed=True, num_splits=1000), family, cuda)


def test_tiles_of_a_head_each(family: str, cuda: torch.device) -> None:
    case = Case(seqlen_q=100, head_dim=128, heads=4, kv_heads=4, causal=True, lse=True, pack_gqa=False)
    check(Paged((1000, 2047, 300), 16, case, num_splits=8), family, cuda)


def test_a_graph_schedules_its_step(family: str, cuda: torch.device) -> None:
    """Metadata and two layers in one graph, replayed with other lengths."""
    case = Case(seqlen_q=1, head_dim=128, heads=8, kv_heads=2, lse=True)
    paged = Paged((4000,) * 6, 16, case, num_splits=1000)
    tensors, _ = paged.build(cuda)
    lengths = tensors["seqused_k"]

    def step() -> list[Tensor]:
        metadata = metadata_of(tensors, paged, family)
        return [paged.call(tensors | {"scheduler_metadata": metadata}, family)[0] for _ in range(2)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths.copy_(torch.randint(0, 4000, (6,), generator=generator))
        graph.replay()
        expected = paged.call(tensors, family)[0]
        assert all(torch.equal(out, expected) for out in outs)


def test_metadata_of_other_calls_are_refused(family: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seqlen_q=1, head_dim=128, heads=8, kv_heads=2, lse=True)
    paged = Paged((4000, 900), 16, case, num_splits=1000)
    tensors, _ = paged.build(cuda)
    metadata = metadata_of(tensors, paged, family)
    with pytest.raises(ValueError, match=r"scheduler_metadata\.shape"):
        paged.call(tensors | {"scheduler_metadata": metadata[:-5].clone()}, family)
    with pytest.raises(ValueError, match=r"scheduler_metadata\.device"):
        paged.call(tensors | {"scheduler_metadata": metadata.cpu()}, family)
    unsplit = dataclasses.replace(paged, num_splits=1)
    with pytest.raises(ValueError, match="the call does not split keys"):
        unsplit.call(tensors | {"scheduler_metadata": metadata}, family)
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    paged.call(tensors | {"scheduler_metadata": metadata}, family)
    tensors["seqused_k"] -= 200
    with pytest.raises(ValueError, match="scheduler_metadata is not what"):
        paged.call(tensors | {"scheduler_metadata": metadata}, family)


def test_a_whole_step(family: str, cuda: torch.device) -> None:
    """Append and attention of the public function, with metadata for the lengths that follow the append."""
    generator = torch.Generator(cuda).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, 128, generator=generator, device=cuda).bfloat16()

    q, k, v = normal(3, 1, 8), normal(3, 1, 2), normal(3, 1, 2)
    lengths = torch.tensor([2000, 0, 500], dtype=torch.int32, device=cuda)
    caches, copies = ((normal(3, 2048, 2), normal(3, 2048, 2)) for _ in range(2))
    for cache, copy in zip(caches, copies, strict=True):
        copy.copy_(cache)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "num_splits": 64, "family": family}
    metadata = cuteflash.get_scheduler_metadata(
        3, 1, 2048, 8, 2, 128, lengths, max_seqlen_k_new=1, causal=True, num_splits=64, family=family
    )  # fmt: skip
    assert metadata.numel() > 0
    found = cuteflash.flash_attn_with_kvcache(q, *caches, k, v, scheduler_metadata=metadata, **options)
    assert torch.equal(found, cuteflash.flash_attn_with_kvcache(q, *copies, k, v, **options))


@pytest.mark.parametrize("queries", [None, (1, 3, 2)])
def test_metadata_of_other_lengths_harm_no_other_call(queries: Any, family: str, cuda: torch.device) -> None:
    """Their calls end, with wrong results, and leave nothing behind."""
    case = Case(seqlen_q=1, head_dim=128, heads=8, kv_heads=2, lse=True)
    paged = Paged((4000, 900, 2000), 16, case, queries, num_splits=1000)
    tensors, _ = paged.build(cuda)
    lengths = tensors["seqused_k"]
    for before, after in (((4000, 900, 2000), (0, 0, 3)), ((5, 0, 1), (4000, 900, 2000)), ((0, 4000, 0), (2000, 9, 0))):
        lengths.copy_(torch.tensor(before))
        stale = metadata_of(tensors, paged, family)
        lengths.copy_(torch.tensor(after))
        for _ in range(2):
            paged.call(tensors | {"scheduler_metadata": stale}, family)
        expected = paged.call(tensors, family)
        found = paged.call(tensors | {"scheduler_metadata": metadata_of(tensors, paged, family)}, family)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
