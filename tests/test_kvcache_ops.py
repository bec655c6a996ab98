"""Attention to caches: what the operators compute on a CPU, what a launch gets, and which input is refused.

A GPU's launches are driven here on CPU tensors, with kernels that record their arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cuteflash import (
    flash_attn_func,
    flash_attn_varlen_func,
    kvcache_ops,
    kvcache_planning,
    packed_planning,
    split_planning,
)
from cuteflash.arguments import FwdArguments, FwdOptions, FwdScalars, FwdTensors, PackedTensors
from cuteflash.core.lengths import Lengths
from cuteflash.core.paged import Pages
from cuteflash.dispatch import Choice, padded_head_dim
from cuteflash.kvcache_planning import box_rows, check_reach, takes_wide_boxes
from cuteflash.problem import FwdProblem, Storage
from cuteflash.validate_kvcache import KvCacheInputs
from tests.gpu.checks import Case
from tests.gpu.paged import Paged

KVCACHE, KVCACHE_LSE = torch.ops.cuteflash.kvcache_fwd.default, torch.ops.cuteflash.kvcache_fwd_lse.default
CPU = torch.device("cpu")
NUM_SMS = 132
KEYS, QUERIES = (5, 0, 17, 9), (3, 2, 0, 6)
CASE = Case(seqlen_q=3, head_dim=16, head_dim_v=24, heads=4, kv_heads=2, lse=True, causal=True)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def built(page_size: int | None = 4, **fields: Any) -> dict[str, Any]:
    """The operator's tensors by name."""
    return Paged(KEYS, page_size, **({"case": CASE} | fields)).build(CPU)[0]


@pytest.mark.parametrize("page_size", [None, 1, 4, 7])
@pytest.mark.parametrize("queries", [None, QUERIES])
def test_each_sequence_is_what_it_would_be_alone(page_size: int | None, queries: Any) -> None:
    for leftpad, indexed in ((None, False), ((0, 0, 5, 2), True)):
        paged = Paged(KEYS, page_size, CASE, queries, leftpad, indexed)
        tensors, alone = paged.build(CPU)
        out, lse = KVCACHE_LSE(*tensors.values(), window_right=0)
        assert torch.equal(out, KVCACHE(*tensors.values(), window_right=0))
        parts = [flash_attn_func(*x, causal=True, return_lse=True) for x in alone]
        rows = out.flatten(0, 1) if queries is None else out
        assert torch.equal(rows, torch.cat([o[0] for o, _ in parts]))
        lse = lse.transpose(0, 1).flatten(1) if queries is None else lse
        assert torch.equal(lse, torch.cat([x[0] for _, x in parts], dim=1))


def test_whole_dense_caches_are_as_k_and_v() -> None:
    tensors = Paged((9, 9), None, CASE, all_used=True).build(CPU)[0]
    q, k, v = (tensors[name] for name in ("q", "k_cache", "v_cache"))
    assert torch.equal(KVCACHE(q, k, v), flash_attn_func(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("op", [KVCACHE, KVCACHE_LSE], ids=str)
@pytest.mark.parametrize("page_size", [None, 4])
def test_opcheck(op: Any, page_size: int | None) -> None:
    for queries in (None, QUERIES):
        torch.library.opcheck(op, tuple(built(page_size, queries=queries).values()))


def test_the_schema() -> None:
    assert str(KVCACHE._schema) == (
        "cuteflash::kvcache_fwd(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cu_seqlens_q=None, "
        "Tensor? seqused_k=None, Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, "
        "Tensor? sinks=None, Tensor? k_descale=None, Tensor? v_descale=None, Tensor? scheduler_metadata=None, "
        "Tensor? tree_mask=None, "
        "float? softmax_scale=None, int window_left=-1, int window_right=-1, float softcap=0., bool? pack_gqa=None, "
        "str? family=None, bool deterministic=False, str? lengths=None, int attention_chunk=0, "
        "int num_splits=1) -> Tensor"
    )


@pytest.mark.slow
def test_compiling_makes_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(KVCACHE_LSE, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for keys in ((2, 3, 50, 1, 9), (7,) * 7, (*KEYS, 1, 2)):
            tensors = Paged(keys, 4, CASE).build(CPU)[0]
            for got, expected in zip(compiled(*tensors.values()), KVCACHE_LSE(*tensors.values()), strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("queries", [None, QUERIES])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_results_look_like_real_ones(device: str, queries: Any) -> None:
    tensors = built(queries=queries)
    real = KVCACHE_LSE(*tensors.values())
    with FakeTensorMode() if device != "meta" else contextlib.nullcontext():
        made = [x if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in tensors.values()]
        fake = KVCACHE_LSE(*made)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]
    assert fake[0].device.type == device


def test_gradients_and_tangents_are_refused_by_name() -> None:
    tensors = built()
    leaf = tensors["k_cache"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"k_cache.requires_grad is True; cuteflash has no gradient of"):
        KVCACHE(*(tensors | {"k_cache": leaf}).values())
    with torch.no_grad():
        KVCACHE(*(tensors | {"k_cache": leaf}).values())
    with pytest.raises(NotImplementedError, match="q has a tangent"):
        q = tensors["q"].float()
        others = {name: x.float() if name.endswith("cache") else x for name, x in tensors.items() if name != "q"}
        torch.func.jvp(lambda x: KVCACHE(x, *others.values()), (q,), (q,))


def test_vmap_makes_one_call_after_the_other() -> None:
    tensors = built()
    q = torch.stack([tensors["q"], -tensors["q"]])
    out = torch.vmap(KVCACHE, in_dims=(0, *[None] * (len(tensors) - 1)))(*(tensors | {"q": q}).values())
    for i in range(2):
        assert torch.equal(out[i], KVCACHE(*(tensors | {"q": q[i]}).values()))


def test_autocast_takes_its_dtype() -> None:
    tensors = built()
    with torch.autocast("cpu", torch.bfloat16):
        assert KVCACHE(*(tensors | {"q": tensors["q"].float()}).values()).dtype == torch.bfloat16


def test_flops_are_those_of_whole_entries() -> None:
    tensors = built()
    with FlopCounterMode(display=False) as counter:
        KVCACHE(*tensors.values())
    assert counter.get_total_flops() == 2 * 4 * 3 * 4 * tensors["page_table"].shape[1] * 4 * (16 + 24)


# The function for packed sequences.


def of_function(page_size: int = 4) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    tensors = built(page_size, queries=QUERIES)
    caches = tensors["q"], tensors["k_cache"], tensors["v_cache"]
    return caches, {name: tensors[name] for name in ("cu_seqlens_q", "seqused_k", "page_table")}


def test_the_function_for_packed_sequences_takes_pages() -> None:
    caches, named = of_function()
    expected = KVCACHE_LSE(*caches, named["cu_seqlens_q"], named["seqused_k"], named["page_table"], window_right=0)
    ends = int32(0, *(sum(KEYS[: i + 1]) for i in range(len(KEYS))))
    as_ends = {"cu_seqlens_q": named["cu_seqlens_q"], "cu_seqlens_k": ends, "page_table": named["page_table"]}
    for given in (named, as_ends, named | {"max_seqlen_q": 6, "max_seqlen_k": 17}):
        result = flash_attn_varlen_func(*caches, **given, causal=True, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))
        assert torch.equal(flash_attn_varlen_func(*caches, **given, causal=True), expected[0])


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lengths": ({"seqused_k": None}, ValueError, "seqused_k is None; allowed with page_table: the lengths, as seq"),
    "used": ({"seqused_q": int32(1, 1, 1, 1)}, NotImplementedError, "seqused_q is a tensor of shape .*with page_table"),
    "fp8": ({"q_descale": torch.ones(4, 2)}, NotImplementedError, "q_descale is a tensor of shape .* with page_table"),
    "v": ({"transposed_v": True}, NotImplementedError, "transposed_v is True; supported with page_table: not given"),
    "list": ({"page_table": [[0]]}, TypeError, "page_table is a list; allowed: a torch.Tensor"),
    "longest": ({"max_seqlen_k": 16}, ValueError, "max_seqlen_k is 16; allowed: 17 or more, the length of sequence 2"),
    "table": ({"page_table": torch.zeros(3, 5).int()}, ValueError, r"page_table.shape\[0\] is 3; allowed without cach"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_function_refuses_with_pages(case: str) -> None:
    change, error, message = REFUSED[case]
    caches, named = of_function()
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(*caches, **(named | change))


def test_without_pages_ends_of_keys_are_needed() -> None:
    q, k = torch.empty(3, 2, 16), torch.empty(3, 2, 16)
    with pytest.raises(TypeError, match="cu_seqlens_k is a NoneType"):
        flash_attn_varlen_func(q, k, k, int32(0, 3))


# Launches.


class Gpu:
    """An sm_90a on which kernels only record: (problem, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[FwdProblem, tuple[Any, ...]]] = []
        properties = types.SimpleNamespace(multi_processor_count=NUM_SMS)
        stream = types.SimpleNamespace(device_index=0, cuda_stream=1)
        for module in ("planning", "kvcache_planning"):
            monkeypatch.setattr(f"cuteflash.{module}.current_target", lambda index: "sm_90a")
        monkeypatch.setattr(kvcache_planning, "compiled", self._compiled)
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(kvcache_planning, "counters", packed_planning.TileCounters())
        self.fwd, self.fwd_lse = kvcache_ops.CudaForward(has_lse=False), kvcache_ops.CudaForward(has_lse=True)

    def _compiled(self, kernel_cls: Any, traits: Any, problem: FwdProblem, target: str) -> Any:
        return lambda *arguments: self.launches.append((problem, arguments))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize("queries", [None, QUERIES])
def test_a_launch_gets_tensors_vectors_table_and_scalars(gpu: Gpu, queries: Any) -> None:
    tensors = built(16, queries=queries, indexed=True)
    o, lse = gpu.fwd_lse(*tensors.values(), 0.3, 5, -1)
    problem, arguments = gpu.launches[0]
    kind = "dense" if queries is None else "varlen"
    assert problem.storage == Storage(
        kind, "paged", used_k=True, page_rows=16, has_page_table=True, has_cache_batch_idx=True
    )
    first, rest = arguments[: len(FwdTensors._fields)], arguments[len(FwdTensors._fields) :]
    assert all(got is x for got, x in zip(first, (*list(tensors.values())[:3], o, lse), strict=True))
    packed = PackedTensors(*rest[: len(PackedTensors._fields)])
    for name in ("cu_seqlens_q", "seqused_k", "page_table", "cache_batch_idx", "cache_leftpad"):
        assert getattr(packed, name) is tensors[name]
    assert (packed.tile_counter is None) == (queries is None)
    assert FwdScalars(*rest[len(PackedTensors._fields) :]) == FwdScalars(0.3, 0.0, 5, 1 << 30, 0, NUM_SMS)


@pytest.mark.parametrize("page_size", [None, 5, 16])
@pytest.mark.parametrize("queries", [None, QUERIES])
def test_a_launch_that_splits_keys(gpu: Gpu, queries: Any, page_size: int | None, monkeypatch: Any) -> None:
    counters = torch.zeros(NUM_SMS, dtype=torch.int32)
    monkeypatch.setattr(split_planning, "compiled", gpu._compiled)
    monkeypatch.setattr(split_planning.arrivals, "of", lambda device, blocks: counters)
    tensors = Paged((300, 0, 17, 9), page_size, CASE, queries).build(CPU)[0] | {"sinks": torch.zeros(4)}
    gpu.fwd_lse(*tensors.values(), *FwdOptions(num_splits=3))
    problem, arguments = gpu.launches[0]
    assert problem.is_split and problem.storage.page_rows == {None: 128, 5: 0, 16: 16}[page_size]
    found = FwdArguments.of((*arguments, None), is_split=True, has_sinks=True)
    assert found.split.arrivals is counters and found.split.most_parts == 3 and found.split.partials.dim() == 1
    assert found.packed.tile_counter is None and found.packed.page_table is tensors["page_table"]
    assert found.scalars.num_sms == NUM_SMS and found.sinks is tensors["sinks"]
    assert len(arguments) + 1 == len(found.flat())


def test_whole_dense_caches_take_the_kernel_of_dense_batches(gpu: Gpu) -> None:
    gpu.fwd(*Paged((9, 9), None, CASE, all_used=True).build(CPU)[0].values())
    problem, arguments = gpu.launches[0]
    assert problem.storage == Storage() and len(arguments) == len(FwdTensors._fields) + len(FwdScalars._fields)


def test_nothing_is_launched_if_there_is_nothing_to_see(gpu: Gpu) -> None:
    tensors = built()
    empty = {"k_cache": tensors["k_cache"][:0], "v_cache": tensors["v_cache"][:0]}
    for change in (empty, {"q": tensors["q"][:, :0]}, {"page_table": tensors["page_table"][:, :0]}):
        o, lse = gpu.fwd_lse(*(tensors | change).values())
        assert (o == 0).all() and (lse == -math.inf).all()
    assert not gpu.launches


@pytest.mark.parametrize(
    ("page_size", "tile_n", "rows"),
    [(1, 128, 0), (5, 128, 0), (8, 176, 8), (16, 112, 16), (24, 128, 8), (64, 96, 32), (256, 128, 128), (12, 64, 0)],
)
def test_rows_of_a_box(page_size: int, tile_n: int, rows: int) -> None:
    def found(inputs: KvCacheInputs) -> int:
        return box_rows(inputs, [x.stride() for x in inputs[1:3]], tile_n)

    inputs = KvCacheInputs(**built(page_size))
    k, v = inputs[1:3]
    assert found(inputs) == rows
    assert found(inputs._replace(page_table=None)) == tile_n
    assert found(inputs._replace(cache_leftpad=inputs.seqused_k)) == 0
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert found(inputs._replace(k_cache=heads_first, v_cache=torch.stack((v, v), 1)[:, 0])) == rows
    between_rows = torch.cat((k.flatten(1), k.new_zeros(len(k), 8)), 1)[:, :-8].unflatten(1, k.shape[1:])
    assert found(inputs._replace(k_cache=between_rows)) == 0
    assert found(inputs._replace(v_cache=v[:, :1].expand_as(v))) == (rows if page_size == 1 else 0)


@pytest.mark.parametrize(
    ("head_dim", "rows", "is_wide"),
    [(128, 16, True), (128, 32, False), (128, 24, False), (128, 64, False), (128, 0, False), (96, 16, True),
     (96, 32, False), (160, 16, True), (160, 32, False), (224, 16, True), (64, 16, False), (256, 16, False),
     (88, 16, False)],
)  # fmt: skip
def test_boxes_of_all_columns(head_dim: int, rows: int, is_wide: bool) -> None:
    def found(k: Tensor, v: Tensor) -> bool:
        inputs = KvCacheInputs(k.new_empty(1, 1, 4, head_dim), k, v)
        return takes_wide_boxes(inputs, [x.stride() for x in (k, v)], traits, rows)

    padded = padded_head_dim(head_dim)
    traits = types.SimpleNamespace(tile_n=64, head_dim=padded, head_dim_v=padded, q_in_regs=head_dim == 128)
    k = torch.empty(3, 32, 2, head_dim, dtype=torch.bfloat16, device="meta")
    assert found(k, k) == is_wide
    assert found(k.transpose(1, 2).contiguous().transpose(1, 2), k) == is_wide
    apart = torch.empty(3, 32, 2, head_dim + 8, dtype=k.dtype, device="meta")[..., :head_dim]
    assert not found(apart, k) and not found(k, apart)  # heads are not whole slabs apart
    assert found(apart[:, :, :1], k[:, :, :1]) == is_wide
    assert not found(k.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn))


def test_caches_that_cannot_be_addressed_are_refused() -> None:
    k = torch.empty(2**27 + 1, 1, 2, 128, dtype=torch.bfloat16, device="meta")
    inputs = KvCacheInputs(torch.empty(1, 1, 2, 128), k, k, page_table=int32(0)[None])
    with pytest.raises(ValueError, match=r"k_cache reaches over 68719477246 bytes; allowed for pages of 1 rows: few"):
        check_reach(inputs, [k.stride()] * 2)


def change_of(tensors: dict[str, Any], **change: Any) -> dict[str, Any]:
    return tensors | {name: make(tensors) if callable(make) else make for name, make in change.items()}


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q rank": ({"q": lambda t: t["q"][0]}, ValueError, r"q has 3 dimensions.*allowed: 4, \(batch, seqlen, heads, head"),
    "k rank": ({"k_cache": lambda t: t["k_cache"][0]}, ValueError, r"k_cache has 3 dimensions.*\(num_pages, page_size"),
    "k head_dim": (
        {"k_cache": lambda t: t["k_cache"][..., :8]},
        ValueError,
        r"k_cache.shape\[3\] \(head_dim\) is 8; allowed: 16, the head_dim of q",
    ),
    "v pages": (
        {"v_cache": lambda t: t["v_cache"][1:]},
        ValueError,
        r"v_cache.shape\[0\] \(num_pages\) is \d+; allowed: \d+, that of k_cache",
    ),
    "heads": ({"q": lambda t: t["q"][:, :, :3]}, ValueError, r"q.shape\[2\] \(heads\) is 3; .* k_cache.shape\[2\], wh"),
    "dtype": ({"v_cache": lambda t: t["v_cache"].half()}, TypeError, "v_cache.dtype is torch.float16; allowed: torch."),
    "table dtype": ({"page_table": lambda t: t["page_table"].long()}, TypeError, "page_table.dtype is torch.int64; a"),
    "table rank": ({"page_table": int32(1)}, ValueError, "page_table has 1 dimensions, .* allowed: 2, .batch, pages"),
    "table batch": (
        {"page_table": lambda t: t["page_table"][1:]},
        ValueError,
        r"page_table.shape\[0\] is 3; allowed without cache_batch_idx: 4, the batch",
    ),
    "table stride": (
        {"page_table": lambda t: t["page_table"].T.contiguous().T},
        ValueError,
        r"page_table.stride\(1\) is 4; allowed: 1",
    ),
    "table device": ({"page_table": lambda t: t["page_table"].to("meta")}, ValueError, "page_table.device is meta; al"),
    "page size": (
        {"k_cache": lambda t: t["k_cache"][:, :0], "v_cache": lambda t: t["v_cache"][:, :0]},
        ValueError,
        r"k_cache.shape\[1\] \(page_size\) is 0; allowed: 1 or more",
    ),
    "table size": (
        {name: lambda t, name=name: t[name][:, :1].expand(-1, 2**28, -1, -1) for name in ("k_cache", "v_cache")},
        ValueError,
        r"page_table.shape\[1\] times page_size is 1342177280; allowed: up to",
    ),
    "used": ({"seqused_k": int32(1)}, ValueError, r"seqused_k.shape is \(1,\); allowed: \(4,\), the batch"),
    "used dtype": ({"seqused_k": torch.ones(4)}, TypeError, "seqused_k.dtype is torch.float32; allowed: torch.int32"),
    "index": ({"cache_batch_idx": int32(1, 2)}, ValueError, r"cache_batch_idx.shape is \(2,\); allowed: \(4,\)"),
    "leftpad": ({"cache_leftpad": int32(1, 2)}, ValueError, r"cache_leftpad.shape is \(2,\); allowed: \(4,\)"),
    "no end": ({"cu_seqlens_q": int32(), "q": lambda t: t["q"][0]}, ValueError, r"cu_seqlens_q.shape is \(0,\); allo"),
    "packing": ({"pack_gqa": True, "q": lambda t: t["q"][:, :, :1].expand(-1, -1, 130, -1)}, ValueError, "pack_gqa is"),
    "scale": ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0; allowed: None or a positive"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(gpu: Gpu, case: str) -> None:
    change, error, message = BAD[case]
    arguments = change_of(built(), **change)
    with pytest.raises(error, match=message):
        KVCACHE(**arguments)
    options = {name: arguments.pop(name, None) for name in ("softmax_scale", "pack_gqa")}
    with pytest.raises(error, match=message):
        gpu.fwd(*arguments.values(), options["softmax_scale"], -1, -1, 0.0, options["pack_gqa"])
    assert not gpu.launches


def with_page(t: dict[str, Any], number: int) -> Tensor:
    table = t["page_table"].clone()
    table[2, 3] = number
    return table


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "page": ({"page_table": lambda t: with_page(t, 99)}, r"page_table\[2, 3\] is 99, a page of sequence 2; allowed: "),
    "negative page": ({"page_table": lambda t: with_page(t, -1)}, r"page_table\[2, 3\] is -1, a page of sequence 2"),
    "too long": ({"seqused_k": int32(5, 0, 21, 9)}, r"seqused_k\[2\] is 21; allowed: 0 to 20, the rows of a cache ent"),
    "negative": ({"seqused_k": int32(5, -1, 17, 9)}, r"seqused_k\[1\] is -1; allowed: 0 to 20"),
    "index": ({"cache_batch_idx": int32(0, 1, 2, 4)}, r"cache_batch_idx\[3\] is 4; allowed: 0 to 3"),
    "leftpad": ({"cache_leftpad": int32(6, 0, 0, 0)}, r"cache_leftpad\[0\] is 6; allowed: 0 to 5, the end of sequence"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_found_on_a_cpu_and_on_request(gpu: Gpu, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = WRONG[case]
    arguments = change_of(built(), **change)
    with pytest.raises(ValueError, match=message):
        KVCACHE(**arguments)
    gpu.fwd(*arguments.values())
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        gpu.fwd(*arguments.values())
    assert len(gpu.launches) == 1


def test_storage_of_caches() -> None:
    with pytest.raises(ValueError, match="page_rows is 12; allowed: multiples of 8"):
        Storage("dense", "paged", page_rows=12)
    with pytest.raises(ValueError, match="storage of k is 'dense'; allowed with what only a cache has: 'paged'"):
        Storage(has_page_table=True)
    with pytest.raises(ValueError, match="page_rows is 8; allowed with has_leftpad: 0"):
        Storage("dense", "paged", page_rows=8, has_page_table=True, has_leftpad=True)
    with pytest.raises(ValueError, match="wide_boxes is True; allowed with page_rows 0: False"):
        Storage("dense", "paged", wide_boxes=True)
    with pytest.raises(ValueError, match="storage of q is 'paged'; allowed: dense, varlen"):
        Storage("paged")
    assert dataclasses.replace(Storage("dense", "paged"), page_rows=8).gathers is False


def test_where_rows_lie() -> None:
    table = torch.tensor([[7, 3], [2, 5]])
    pages = Pages(table, [1, 0], 4, None)
    assert pages.entry(0) == 1
    assert [pages.place(1, row) for row in (0, 3, 4, 6)] == [(2, 0), (2, 3), (5, 0), (5, 2)]
    dense = Pages(None, None, None, (9, 9))
    assert (dense.entry(3), dense.place(3, 17)) == (3, (3, 17))


def test_rows_before_the_first_key_do_not_count() -> None:
    lengths = Lengths(3, 20, used_k=[5, 9, 4], left_k=[0, 2, 6])
    spans = [lengths.sequence(i)[2:] for i in range(3)]
    assert spans == [(0, 5), (2, 7), (6, 0)]
