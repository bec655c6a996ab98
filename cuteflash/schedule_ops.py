"""The operator `torch.ops.cuteflash.split_schedule`: where the blocks of launches that split keys begin."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cuteflash.arguments import FwdOptions
from cuteflash.calls import Known
from cuteflash.kvcache_planning import CachePlan, CacheSizes
from cuteflash.operators import Operator, define
from cuteflash.problem import (
    DTYPES,
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    LENGTH_MAX,
    PACK_GQA_MAX,
    Dtype,
    FwdProblem,
    Operands,
    Scores,
    Storage,
)
from cuteflash.schedule_planning import Schedule
from cuteflash.schedule_problem import ScheduleOptions
from cuteflash.transforms import register_one_by_one
from cuteflash.validate import check_options, holds
from cuteflash.validate_packed import check_vector

COUNTS = ("rows", "capacity", "heads", "kv_heads")


class ScheduleInputs(NamedTuple):
    """The tensors of the operator."""

    seqused_k: Tensor  # (batch,)
    cu_seqlens_q: Tensor | None = None  # (batch + 1,)
    cache_leftpad: Tensor | None = None  # (batch,)


TENSORS = ScheduleInputs._fields


def fwd_options(options: ScheduleOptions) -> FwdOptions:
    """The options of the calls that are scheduled."""
    shared = {name: value for name, value in options._asdict().items() if name in FwdOptions._fields}
    return FwdOptions(**shared)


def check_schedule(inputs: ScheduleInputs, options: ScheduleOptions) -> None:
    """Raise if there are no such calls; reads no element.

    Raises:
        TypeError: a vector that is not int32.
        ValueError: a shape, stride, device mix or option that is not allowed.
        NotImplementedError: a device or memory layout that is not supported.
    """
    check_options(fwd_options(options))
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype is {options.dtype!r}; allowed: {', '.join(DTYPES)}")
    for name in COUNTS:
        value = getattr(options, name)
        if not 0 <= value <= LENGTH_MAX:
            raise ValueError(f"{name} is {value}; allowed: 0 to {LENGTH_MAX}")
    for name in ("head_dim", "head_dim_v"):
        value = getattr(options, name)
        if not HEAD_DIM_STEP <= value <= HEAD_DIM_MAX or value % HEAD_DIM_STEP:
            raise ValueError(f"{name} is {value}; allowed: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}")
    heads, kv_heads = options.heads, options.kv_heads
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"heads is {heads}; allowed: multiples of kv_heads, which is {kv_heads}")
    if options.pack_gqa and kv_heads and heads // kv_heads > PACK_GQA_MAX:
        ratio = heads // kv_heads
        raise ValueError(f"pack_gqa is True with {ratio} query heads for each KV head; allowed: up to {PACK_GQA_MAX}")
    seqused_k = inputs.seqused_k
    check_vector("seqused_k", seqused_k, seqused_k.device)
    for name, vector, more in (("cu_seqlens_q", inputs.cu_seqlens_q, 1), ("cache_leftpad", inputs.cache_leftpad, 0)):
        if vector is not None:
            check_vector(name, vector, seqused_k.device)
            if holds(vector.shape[0] != seqused_k.shape[0] + more):
                size = seqused_k.shape[0] + more
                raise ValueError(f"{name}.shape is {tuple(vector.shape)}; allowed: ({size},), by the batch")


def schedule_of(inputs: ScheduleInputs, options: ScheduleOptions) -> Schedule:
    """The schedule of checked calls on a GPU. NotImplementedError: no kernel runs on it."""
    is_packed = inputs.cu_seqlens_q is not None
    batch, of_calls = inputs.seqused_k.shape[0], fwd_options(options)
    sizes = CacheSizes(batch, options.rows, options.capacity, options.heads, options.kv_heads, is_packed)
    operands = Operands.of(cast(Dtype, options.dtype), options.head_dim, options.head_dim_v)
    storage = Storage(
        "varlen" if is_packed else "dense", "paged", used_k=True, has_leftpad=inputs.cache_leftpad is not None
    )
    scores = Scores(sizes.mask(of_calls)[0], chunked=options.attention_chunk > 0)
    problem = FwdProblem(operands, scores, storage)
    return CachePlan(sizes, problem, of_calls, inputs.seqused_k.device, is_scheduled=True).schedule()


known: Known[Schedule] = Known()


def _planned(inputs: ScheduleInputs, options: ScheduleOptions) -> Schedule:
    check_schedule(inputs, options)
    return schedule_of(inputs, options)


def _cuda(*arguments: Any) -> Tensor:
    inputs, options = ScheduleInputs(*arguments[: len(TENSORS)]), ScheduleOptions(*arguments[len(TENSORS) :])
    looks = tuple(x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs)
    schedule = known.find((looks, options), _planned, inputs, options)
    return schedule.compute(*inputs)


def _cpu(*arguments: Any) -> Tensor:
    _check(*arguments)
    seqused_k: Tensor = arguments[0]
    return torch.empty(0, dtype=torch.int32, device=seqused_k.device)


def _fake(*arguments: Any) -> Tensor:
    *tensors, options = arguments
    inputs = ScheduleInputs(*tensors)
    size = 0
    if inputs.seqused_k.device.type == "cuda":
        if not torch.cuda.is_available():
            raise NotImplementedError("seqused_k is on a GPU that is not there; supported: one of this machine")
        size = _planned(inputs, options).size
    else:
        check_schedule(inputs, options)
    return inputs.seqused_k.new_empty(size)


def _check(*arguments: Any) -> None:
    *tensors, options = arguments
    check_schedule(ScheduleInputs(*tensors), options)


SCHEDULE = Operator(
    name="split_schedule",
    tensors=TENSORS[:1],
    optional=TENSORS[1:],
    options=ScheduleOptions,
    returns=Tensor,
    check=_check,
    cuda=_cuda,
    cpu=_cpu,
    fake=_fake,
    transforms=register_one_by_one,  # autocast has nothing to cast
)
split_schedule = define(SCHEDULE)
