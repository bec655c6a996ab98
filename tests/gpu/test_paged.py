"""Keys and values in a cache: whatever the pages hold past the last key, and the table past the last page."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import cuteflash
from cuteflash.compile import compiler
from tests.gpu.checks import Case, poisoned
from tests.gpu.paged import Paged

pytestmark = pytest.mark.gpu

PAGE_SIZES = (1, 5, 16, 24, 64, 128, 256)
KEYS = (0, 1, 5, 16, 17, 100, 128, 129, 300, 511)
QUERIES = (0, 1, 3, 64, 65, 0, 130, 1, 40, 200)
MASKS = {
    "full": Case(lse=True),
    "causal": Case(lse=True, causal=True),
    "window": Case(lse=True, window=(70, 30)),
}
DECODE = Case(seqlen_q=1, heads=8, kv_heads=2, causal=True, lse=True)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes(page_size: int, family: str, device: torch.device) -> None:
    Paged(KEYS, page_size, dataclasses.replace(MASKS["causal"], head_dim=128), QUERIES).check(family, device)
    Paged(KEYS, page_size, dataclasses.replace(MASKS["full"], seqlen_q=70)).check(family, device)


@pytest.mark.parametrize("page_size", [1, 16])
def test_windows(page_size: int, family: str, device: torch.device) -> None:
    Paged(KEYS, page_size, dataclasses.replace(MASKS["window"], head_dim=128), QUERIES).check(family, device)
    Paged(KEYS, page_size, dataclasses.replace(MASKS["window"], seqlen_q=70)).check(family, device)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decode(page_size: int, family: str, device: torch.device) -> None:
    case = dataclasses.replace(DECODE, head_dim=128)
    Paged(KEYS, page_size, case).check(family, device)
    Paged((1000, 2047, 3, 4096), page_size, case, num_splits=1000).check(family, device)


@pytest.mark.parametrize("head_dims", [(96, 96), (160, 160), (192, 128), (224, 224), (256, 256)], ids=str)
def test_decode_from_small_pages(head_dims: tuple[int, int], family: str, device: torch.device) -> None:
    case = dataclasses.replace(DECODE, head_dim=head_dims[0], head_dim_v=head_dims[1])
    for page_size in (16, 32):
        Paged(KEYS, page_size, case).check(family, device)
        Paged((1000, 2047, 3, 4096), page_size, case, num_splits=1000).check(family, device)


@pytest.mark.parametrize("num_splits", [2, 1000])
@pytest.mark.parametrize("page_size", [None, 5, 16])
def test_split_keys(page_size: int | None, num_splits: int, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS["window"], window=(900, 0), head_dim=128, heads=8, kv_heads=2)
    Paged((1000, 0, 2047, 3, 4096), page_size, case, (3, 1, 0, 1, 40), num_splits=num_splits).check(family, device)


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "fp16"), (16, "bf16"), (32, "bf16")])
@pytest.mark.parametrize("head_dims", [(24, 24), (96, 96), (192, 128), (256, 256), (40, 72)], ids=str)
def test_head_dims(head_dims: tuple[int, int], page_size: int, dtype: str, family: str, device: torch.device) -> None:
    case = Case(lse=True, causal=True, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype)
    Paged(KEYS, page_size, case, QUERIES).check(family, device)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "pack_gqa"), [((8, 2), True), ((7, 1), True), ((6, 1), False)], ids=str)
def test_grouped_heads(
    heads: tuple[int, int], pack_gqa: bool, page_size: int, family: str, device: torch.device
) -> None:
    case = Case(seqlen_q=9, lse=True, causal=True, heads=heads[0], kv_heads=heads[1], pack_gqa=pack_gqa)
    Paged(KEYS, page_size, case).check(family, device)
    if pack_gqa:
        Paged(KEYS, page_size, case, QUERIES).check(family, device)


@pytest.mark.parametrize("page_size", [1, 16, None], ids=str)
def test_padding_and_indices(page_size: int | None, family: str, device: torch.device) -> None:
    case = dataclasses.replace(MASKS["causal"], seqlen_q=30)
    leftpad = (0, 1, 5, 0, 16, 3, 17, 128, 64, 200)
    Paged(KEYS, page_size, case, indexed=True).check(family, device)
    Paged(KEYS, page_size, case, QUERIES, leftpad, indexed=True).check(family, device)
    Paged(KEYS, page_size, case, leftpad=leftpad).check(family, device)


@pytest.mark.parametrize("page_size", [None, 1, 16], ids=str)
def test_whole_caches(page_size: int | None, family: str, device: torch.device) -> None:
    case = Case(seqlen_q=5, lse=True, causal=True, softcap=15.0, logits=4.0)
    Paged((144, 144), page_size, case, (7, 200), all_used=True).check(family, device)


@pytest.mark.parametrize("indexed", [False, True], ids=["in_order", "indexed"])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64], ids=str)
def test_split_keys_of_whole_caches(page_size: int | None, indexed: bool, family: str, device: torch.device) -> None:
    """Lengths that the host knows: a block finds its first tile before it waits for the launch ahead."""
    for head_dim in (64, 128):
        case = dataclasses.replace(DECODE, head_dim=head_dim)
        for keys, num_splits in (((1024,) * 5, 0), ((1024,), 1000), ((192,) * 40, 2)):
            paged = Paged(keys, page_size, case, indexed=indexed, all_used=True, num_splits=num_splits)
            paged.check(family, device)


@pytest.mark.parametrize(("page_size", "head_dim"), [(None, 64), (24, 64), (16, 128), (32, 192)], ids=str)
def test_strides(page_size: int | None, head_dim: int, family: str, device: torch.device) -> None:
    paged = Paged(KEYS, page_size, dataclasses.replace(DECODE, head_dim=head_dim, seqlen_q=3))
    tensors, alone = paged.build(device)

    def beside(x: torch.Tensor, dim: int, more: int) -> torch.Tensor:
        """The same in a larger tensor of NaN."""
        shape = list(x.shape)
        shape[dim] += more
        room = torch.full(shape, float("nan"), dtype=x.dtype, device=device)
        return room.narrow(dim, 8 if dim == 3 else 1, x.shape[dim]).copy_(x)

    k, v = tensors["k_cache"], tensors["v_cache"]
    both = torch.stack((k, v), dim=1)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    odd_pages = [torch.cat((x.flatten(1), x.new_full((x.shape[0], 8), float("nan"))), dim=1) for x in (k, v)]
    odd_pages = [y[:, :-8].unflatten(1, x.shape[1:]) for x, y in zip((k, v), odd_pages, strict=True)]
    for caches in (both.unbind(1), heads_first, odd_pages, [beside(x, 2, 3) for x in (k, v)], [k, beside(v, 3, 16)]):
        named = {**tensors, "k_cache": caches[0], "v_cache": caches[1]}
        paged.assert_right(alone, *paged.call(named, family))
    if page_size is not None:
        table = tensors["page_table"]
        wide = torch.cat((table, table), dim=1)[:, : table.shape[1]]
        paged.assert_right(alone, *paged.call({**tensors, "page_table": wide}, family))


@pytest.mark.parametrize("page_size", [1, 16])
def test_public_function(page_size: int, family: str, device: torch.device) -> None:
    paged = Paged(KEYS, page_size, MASKS["causal"], QUERIES)
    tensors, alone = paged.build(device)
    named = {name: tensors[name] for name in ("cu_seqlens_q", "seqused_k", "page_table")}
    limits = {"max_seqlen_q": max(QUERIES), "max_seqlen_k": max(KEYS)}
    caches = tensors["q"], tensors["k_cache"], tensors["v_cache"]
    with poisoned(), torch.no_grad():
        result = cuteflash.flash_attn_varlen_func(
            *caches, **named, **limits, causal=True, return_lse=True, family=family
        )
    paged.assert_right(alone, *result)


@pytest.mark.parametrize("page_size", [1, 16, None], ids=str)
def test_a_graph_replays_with_other_lengths_and_pages(page_size: int | None, family: str, cuda: torch.device) -> None:
    lengths = [KEYS, tuple(reversed(KEYS)), (511, 511, 0, 7, 400, 3, 80, 100, 16, 1)]
    case = dataclasses.replace(DECODE, head_dim=128, seqlen_q=2)
    paged = Paged(lengths[0], page_size, case)
    static, alone = paged.build(cuda)
    rows = 130 if page_size == 16 else 2048
    if page_size is not None:  # room for any of the lengths
        for name in ("k_cache", "v_cache"):
            x = static[name]
            static[name] = torch.full((rows, *x.shape[1:]), float("nan"), dtype=x.dtype, device=cuda)
            static[name][: x.shape[0]] = x
    paged.assert_right(alone, *paged.call(static, family))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out, lse = torch.ops.cuteflash.kvcache_fwd_lse(*static.values(), *paged.options(family))
    for seed, keys in enumerate(lengths):
        paged = Paged(keys, page_size, case)
        fresh, alone = paged.build(cuda, seed + 1)
        for name, source in fresh.items():
            if source is not None:
                static[name][: source.shape[0]].copy_(source)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        paged.assert_right(alone, out, lse)


def test_other_lengths_compile_nothing(family: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(DECODE, head_dim=64)
    Paged((40, 50, 60), 16, case).check(family, cuda)

    def compiles(*arguments: object, **named: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "_obtain_and_load", compiles)
    for keys in ((60, 50, 41), (33, 70), (100, 0, 0, 100, 20)):
        Paged(keys, 16, case).check(family, cuda)


def test_repeated_runs_are_bitwise_equal(family: str, cuda: torch.device) -> None:
    for page_size in (1, 16):
        paged = Paged(KEYS, page_size, dataclasses.replace(DECODE, heads=32, kv_heads=8, head_dim=128))
        tensors, alone = paged.build(cuda)
        first, first_lse = paged.call(tensors, family)
        paged.assert_right(alone, first, first_lse)
        for _ in range(50):
            out, lse = paged.call(tensors, family)
            assert torch.equal(out, first)
            assert torch.equal(lse, first_lse)


def test_caches_beyond_32_bits(family: str, cuda: torch.device) -> None:
    for page_size in (1, 64):
        paged = Paged((100, 300), page_size, dataclasses.replace(DECODE, head_dim=128))
        tensors, alone = paged.build(cuda)
        pages = 2**32 // (page_size * 2 * 128)
        moved = {}
        shift = pages - tensors["k_cache"].shape[0]
        for name in ("k_cache", "v_cache"):
            small = tensors[name]
            moved[name] = torch.empty((pages, *small.shape[1:]), dtype=small.dtype, device=cuda)
            moved[name][shift:] = small
        table = tensors["page_table"]
        table = torch.where((table >= 0) & (table < pages - shift), table + shift, table)
        paged.assert_right(alone, *paged.call({**tensors, **moved, "page_table": table}, family))


def test_no_call_waits_for_the_gpu(family: str, cuda: torch.device) -> None:
    paged = Paged(KEYS, 16, MASKS["causal"], QUERIES)
    tensors, _ = paged.build(cuda)
    paged.call(tensors, family)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged.call({**tensors, "q": tensors["q"][:-1]}, family)
    finally:
        torch.cuda.set_sync_debug_mode(before)
