"""Schedules of split keys: what is asked of a launch, what the kernel compiles to, and errors; on a CPU."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import cuteflash
from cuteflash import kvcache_ops, kvcache_planning, schedule_ops, schedule_planning, split_planning
from cuteflash.arguments import FwdArguments, FwdOptions
from cuteflash.compat import flash_attn_interface
from cuteflash.core.split_slots import START_WORDS, metadata_blocks, metadata_size
from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.kvcache_planning import CacheSizes
from cuteflash.problem import FwdProblem, Operands, Scores, Storage
from cuteflash.schedule_problem import ScheduleOptions, ScheduleProblem, ScheduleScalars
from cuteflash.traits.row import ROW_HEAD_DIMS
from cuteflash.traits.schedule import ScheduleTraits
from tests.gpu.checks import Case
from tests.gpu.paged import Paged
from tests.kernel_store import KernelStore
from tests.slow import slow_but

CPU, NUM_SMS = torch.device("cpu"), 132
SIZES = (2, 1, 4096, 8, 2, 64)  # of `get_scheduler_metadata`, in its order
PAGED = Storage("dense", "paged", used_k=True, page_rows=16, has_page_table=True)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_metadata_have_a_start_and_a_counter_for_each_block() -> None:
    assert metadata_size(132) == 132 * (START_WORDS + 1)
    assert metadata_blocks(metadata_size(132)) == 132


def test_on_a_cpu_nothing_is_scheduled() -> None:
    metadata = cuteflash.get_scheduler_metadata(*SIZES, int32(5, 100))
    assert metadata.shape == (0,) and metadata.dtype == torch.int32
    q, cache = torch.randn(2, 1, 8, 64), torch.randn(2, 128, 2, 64)
    options: dict[str, Any] = {"cache_seqlens": int32(5, 100)}
    found = cuteflash.flash_attn_with_kvcache(q, cache, cache, scheduler_metadata=metadata, **options)
    assert torch.equal(found, cuteflash.flash_attn_with_kvcache(q, cache, cache, **options))
    theirs = flash_attn_interface.get_scheduler_metadata(*SIZES, int32(5, 100), page_size=16, has_softcap=True)
    assert theirs.shape == (0,)
    mapped = torch.vmap(lambda lengths: cuteflash.get_scheduler_metadata(*SIZES, lengths))(int32(5, 6, 7, 8).view(2, 2))
    assert mapped.shape == (2, 0)
    flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, scheduler_metadata=theirs, **options)


def call(**changed: Any) -> dict[str, Any]:
    """A call of `get_scheduler_metadata`."""
    names = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim")
    return dict(zip(names, SIZES, strict=True)) | {"cache_seqlens": int32(5, 100)} | changed


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch of floats": (call(batch_size=2.0), TypeError, "batch_size is 2.0"),
    "negative length": (call(max_seqlen_k=-1), ValueError, "max_seqlen_k is -1"),
    "heads": (call(num_heads_q=7), ValueError, "num_heads_q is 7"),
    "heads of none": (call(num_heads_kv=0), ValueError, "num_heads_q is 8"),
    "head dim": (call(headdim=60), ValueError, "headdim is 60"),
    "head dim of v": (call(headdim_v=512), ValueError, "headdim_v is 512"),
    "lengths of int64": (call(cache_seqlens=torch.tensor([5, 9])), TypeError, "cache_seqlens.dtype"),
    "lengths of another batch": (call(cache_seqlens=int32(5)), ValueError, "cache_seqlens.shape"),
    "lengths as an int": (call(cache_seqlens=5), TypeError, "cache_seqlens is a int"),
    "lengths beyond": (call(max_seqlen_k=99), ValueError, r"cache_seqlens\[1\] is 100"),
    "new tokens beyond": (call(max_seqlen_k=104, max_seqlen_k_new=5), ValueError, r"cache_seqlens\[1\] is 105"),
    "packed new tokens beyond": (
        call(max_seqlen_k=101, cu_seqlens_k_new=int32(0, 1, 3)),
        ValueError,
        r"cache_seqlens\[1\] is 102",
    ),
    "ends": (call(cu_seqlens_q=int32(0, 1)), ValueError, "cu_seqlens_q.shape"),
    "ends past the rows": (call(cu_seqlens_q=int32(0, 1, 3)), ValueError, "cu_seqlens_q"),
    "rows without ends": (call(total_q=3), ValueError, "total_q is 3"),
    "padding": (call(cache_leftpad=int32(0)), ValueError, "cache_leftpad.shape"),
    "padding elsewhere": (call(cache_leftpad=int32(0, 0).to("meta")), (ValueError, NotImplementedError), "cache_leftp"),
    "dtype": (call(qkv_dtype=torch.int8), TypeError, "qkv_dtype is torch.int8"),
    "splits": (call(num_splits=-1), ValueError, "num_splits is -1"),
    "chunk": (call(attention_chunk=-1), ValueError, "attention_chunk is -1"),
    "family": (call(family="sm70"), ValueError, "family is 'sm70'"),
}  # type: ignore[assignment]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    given, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        cuteflash.get_scheduler_metadata(**given)


def test_margins_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="sm_margin"):
        flash_attn_interface.get_scheduler_metadata(*SIZES, int32(5, 100), sm_margin=2)


@pytest.mark.parametrize(
    ("metadata", "kind", "words"),
    [
        (torch.zeros(660, dtype=torch.int32), ValueError, r"scheduler_metadata.shape is \(660,\); allowed: \(0,\)"),
        (torch.zeros(0), TypeError, "scheduler_metadata.dtype is torch.float32"),
        (torch.zeros(0, 4, dtype=torch.int32), ValueError, "scheduler_metadata has 2 dimensions"),
        (3, TypeError, "scheduler_metadata is a int"),
    ],
    ids=["size", "dtype", "dimensions", "no tensor"],
)
def test_wrong_metadata_are_refused_and_nothing_is_appended(metadata: Any, kind: Any, words: str) -> None:
    cache, new = torch.zeros(2, 128, 2, 64), torch.randn(2, 1, 2, 64)
    with pytest.raises(kind, match=words):
        cuteflash.flash_attn_with_kvcache(
            torch.randn(2, 1, 8, 64), cache, cache.clone(), new, new, cache_seqlens=int32(5, 100),
            scheduler_metadata=metadata,
        )  # fmt: skip
    assert not cache.any()


def test_metadata_belong_to_lengths() -> None:
    cache, metadata = torch.zeros(2, 128, 2, 64), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="scheduler_metadata is given without cache_seqlens"):
        cuteflash.flash_attn_with_kvcache(torch.randn(2, 1, 8, 64), cache, cache, scheduler_metadata=metadata)


def test_the_schema() -> None:
    assert str(torch.ops.cuteflash.split_schedule.default._schema) == (
        "cuteflash::split_schedule(Tensor seqused_k, Tensor? cu_seqlens_q=None, Tensor? cache_leftpad=None, "
        "int rows=1, int capacity=0, int heads=1, int kv_heads=1, int head_dim=128, int head_dim_v=128, "
        'str dtype="bf16", '
        "int window_left=-1, int window_right=-1, int attention_chunk=0, int num_splits=0, bool? pack_gqa=None, "
        "str? family=None, str? lengths=None) -> Tensor"
    )


def test_rows_that_split_caches_depend_on_head_dims_alone() -> None:
    """The schedule does not know of log-sum-exps, soft caps and sinks."""
    for family in ("sm80", "sm90"):
        for head_dim in ROW_HEAD_DIMS:
            operands = Operands.of("bf16", head_dim, head_dim)
            few = FwdProblem(operands, Scores(), PAGED, is_split=True)
            many = FwdProblem(operands, Scores("full", softcap=True, sink="fp32"), PAGED, has_lse=True, is_split=True)
            assert choose_shipped(few, "sm_90a", family).row is choose_shipped(many, "sm_90a", family).row


class Gpu:
    """An sm_90a on which kernels only record: (problem, arguments) of every launch in `launches`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        properties = types.SimpleNamespace(multi_processor_count=NUM_SMS)
        monkeypatch.setattr(kvcache_planning, "current_target", lambda index: "sm_90a")
        monkeypatch.setattr(Choice, "kernel_cls", property(lambda choice: choice.family))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        for module in (kvcache_planning, split_planning):
            monkeypatch.setattr(module, "compiled", lambda cls, traits, problem, target: self.kernel(problem))
        monkeypatch.setattr(schedule_planning, "kernel_of", lambda problem, target: self.kernel(problem))

    def kernel(self, problem: Any) -> Any:
        return lambda *arguments: self.launches.append((problem, arguments))


@pytest.mark.parametrize("queries", [None, (1, 3, 0, 2)])
def test_a_call_gets_the_metadata_of_its_sizes(queries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    case = Case(seqlen_q=3, head_dim=128, heads=8, kv_heads=2, window=(700, 3))
    tensors = Paged((300, 0, 1700, 9), 16, case, queries, leftpad=(0, 0, 5, 2)).build(CPU)[0]
    q, table = tensors["q"], tensors["page_table"]
    options = ScheduleOptions(
        q.shape[-3], table.shape[1] * 16, 8, 2, 128, 128, "bf16", 700, 3, num_splits=4, lengths=None
    )
    vectors = tensors["seqused_k"], tensors["cu_seqlens_q"], tensors["cache_leftpad"]
    metadata = schedule_ops._cuda(*vectors, *options)
    problem, arguments = gpu.launches.pop()
    assert problem == ScheduleProblem("window", queries is not None, has_leftpad=True)
    blocks = NUM_SMS // 8 * 8  # a multiple of the tiles: four sequences of two heads
    assert arguments[0] is metadata and metadata.shape == (metadata_size(blocks),)
    assert all(got is x for got, x in zip(arguments[1:4], vectors, strict=True))
    rows, tokens = 3 if queries is None else 6, 64 // 4  # heads are packed
    assert ScheduleScalars(*arguments[4:]) == ScheduleScalars(rows, options.capacity, 2, 2, tokens, 64, 700, 3, 4)
    fwd = kvcache_ops.CudaForward(has_lse=False)
    call_options = FwdOptions(window_left=700, window_right=3, num_splits=4)
    fwd(*(tensors | {"scheduler_metadata": metadata}).values(), *call_options)
    problem, arguments = gpu.launches.pop()
    assert problem.is_split and problem.is_scheduled and problem.operands.packed_heads == 4
    assert FwdArguments.of((*arguments, None), is_split=True).split.arrivals is metadata
    with pytest.raises(ValueError, match=r"scheduler_metadata.shape is \(639,\); allowed: \(640,\), the size"):
        fwd(*(tensors | {"scheduler_metadata": metadata[1:].clone()}).values(), *call_options)
    with pytest.raises(ValueError, match=r"allowed: \(0,\), none, as the call does not split keys"):
        fwd(*(tensors | {"scheduler_metadata": metadata}).values(), *call_options._replace(num_splits=1))
    with pytest.raises(ValueError, match=r"scheduler_metadata.data_ptr"):
        shifted = torch.zeros(metadata_size(blocks) + 1, dtype=torch.int32)[1:]
        fwd(*(tensors | {"scheduler_metadata": shifted}).values(), *call_options)


def test_metadata_of_other_lengths_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUTEFLASH_CHECK=1 the schedule is computed again."""
    Gpu(monkeypatch)
    monkeypatch.setattr(
        schedule_planning,
        "kernel_of",
        lambda problem, target: lambda *arguments: arguments[0].fill_(int(arguments[1].sum())),
    )
    monkeypatch.setenv("CUTEFLASH_CHECK", "1")
    tensors = Paged((300, 1700), 16, Case(seqlen_q=1, head_dim=128, heads=8, kv_heads=2)).build(CPU)[0]
    options = FwdOptions(num_splits=2)
    sizes = tensors["page_table"].shape[1] * 16, 8, 2
    metadata = schedule_ops._cuda(tensors["seqused_k"], None, None, *ScheduleOptions(1, *sizes, num_splits=2))
    launch = kvcache_planning.Planner(has_lse=False).launch
    inputs = kvcache_ops.KvCacheInputs(**tensors)._replace(scheduler_metadata=metadata)
    monkeypatch.setattr(split_planning.SplitLaunch, "arguments", lambda self, metadata: ())
    launch(inputs, options)(inputs)
    grown = inputs._replace(seqused_k=inputs.seqused_k + 1)
    with pytest.raises(ValueError, match="scheduler_metadata is not what get_scheduler_metadata returns"):
        launch(grown, options)(grown)


def test_calls_that_are_not_split_have_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    for batch, options in ((2, ScheduleOptions(1, 4096, 8, 2, num_splits=1)), (0, ScheduleOptions(1, 4096, 8, 2))):
        lengths = torch.zeros(batch, dtype=torch.int32)
        assert schedule_ops._cuda(lengths, None, None, *options).shape == (0,)
    assert not gpu.launches


def test_sizes_of_packed_queries_are_their_mean() -> None:
    sizes = CacheSizes(batch=4, rows=10, capacity=64, heads=8, kv_heads=2, is_packed=True)
    assert sizes.length == 3 and sizes.heads_per_kv == 4
    assert sizes.mask(FwdOptions(window_right=0))[0] == "causal"
    one = CacheSizes(batch=4, rows=1, capacity=64, heads=8, kv_heads=2, is_packed=False)
    assert one.mask(FwdOptions(window_right=0))[0] == "full"


@pytest.mark.parametrize(
    "problem", [ScheduleProblem(), ScheduleProblem("window", is_packed=True, has_leftpad=True)], ids=str
)
def test_the_kernel_is_clean(kernels: KernelStore, problem: ScheduleProblem) -> None:
    from cuteflash.kernels.common.split_schedule import SplitSchedule

    compiled = kernels(SplitSchedule, ScheduleTraits(), problem, "sm_90a")
    compiled.assert_clean()
    assert compiled.resources.registers <= 64


SCHEDULED = {
    "boxes": FwdProblem(Operands.of("bf16", 128, 128, 4), Scores(), PAGED, is_split=True, is_scheduled=True),
    "rows": FwdProblem(
        Operands.of("bf16", 64, 64), Scores("window", softcap=True),
        Storage("varlen", "paged", used_k=True, has_page_table=True, has_leftpad=True),
        has_lse=True, is_split=True, is_scheduled=True,
    ),
}  # fmt: skip
BUILDS = [f"{name} for {target}" for name in SCHEDULED for target in ("sm_90a", "sm_80")]


@pytest.mark.parametrize("case", slow_but(BUILDS))
def test_scheduled_kernels_are_clean(kernels: KernelStore, case: str) -> None:
    from cuteflash.dispatch import kernel_class

    name, target = case.split(" for ")
    problem = SCHEDULED[name]
    traits = choose_shipped(problem, target).traits
    kernels(kernel_class(traits), traits, problem, target).assert_clean()


def test_only_what_is_split_is_scheduled() -> None:
    with pytest.raises(ValueError, match="is_scheduled is True"):
        FwdProblem(Operands.of("bf16", 64, 64), is_scheduled=True)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    def step(q: Tensor, cache: Tensor, lengths: Tensor) -> Tensor:
        metadata = cuteflash.get_scheduler_metadata(
            q.shape[0], q.shape[1], cache.shape[1], 8, 2, 64, lengths, qkv_dtype=torch.float32, causal=True
        )
        found: Tensor = cuteflash.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, causal=True, scheduler_metadata=metadata
        )
        return found * 2

    q, cache, lengths = torch.randn(2, 3, 8, 64), torch.randn(2, 128, 2, 64), int32(5, 100)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, cache, lengths), step(q, cache, lengths))
    torch.testing.assert_close(compiled(q[:1], cache[:1], lengths[:1]), step(q[:1], cache[:1], lengths[:1]))


@pytest.mark.slow
def test_opcheck() -> None:
    options = ScheduleOptions(rows=3, capacity=64, heads=8, kv_heads=2)
    torch.library.opcheck(torch.ops.cuteflash.split_schedule.default, (int32(5, 9), None, None, *options))
