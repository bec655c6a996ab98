"""The forward operators, `torch.ops.cuteflash.fwd` and `fwd_lse`, and what runs behind them on each device.

    CUDA      a launch, looked up by everything that it depends on, or planned (`cuteflash.planning`), which checks the
              arguments and may compile; then the output is allocated and the kernel launched. No host read, no
              synchronisation.
    CPU       the same checks, then the reference (FlashAttention-2 in torch).
    fake      the same checks on possibly symbolic sizes, and empty results with the strides of the real ones.
    autograd  nothing without gradients; with them a node whose backward says that there is none in this release.

What vmap, autocast and other transforms and modes of torch do with them is in `cuteflash.transforms`.
Two operators, so that a call without LSE never allocates one. A CUDA graph can capture a call once an earlier one with
the same problem and length class (`cuteflash.traits.length_class`) has compiled its kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cuteflash.arguments import FwdOptions
from cuteflash.operators import Operator, define
from cuteflash.planning import Launch, Planner, Result, call_of, table_of
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.transforms import register_transforms
from cuteflash.validate import ALIGNMENT, check_alignment, check_fwd

ALIGNMENT_MASK = ALIGNMENT - 1
LAUNCHES_MAX = 4096  # a serving process sees ever new lengths: a launch is about 1 kB, and planned again in 10 us


def cuda_forward(has_lse: bool) -> Callable[..., Result]:
    """The CUDA implementation: look the launch of an equal call up, or plan one."""
    planner = Planner(has_lse)
    launches: dict[Hashable, Launch] = {}

    def cuda(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Result:
        try:
            call = call_of(q, k, v, options)
        except RuntimeError:
            check_fwd(q, k, v, FwdOptions(*options))
            raise
        launch = launches.get(call)
        if launch is None:
            launch = planner.launch(q, k, v, call)
            if len(launches) >= LAUNCHES_MAX:
                launches.clear()
            launches[call] = launch
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNMENT_MASK:
            check_alignment(q, k, v)
        return launch(q, k, v)

    return cuda


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Result:
    check_fwd(q, k, v, options)
    if q.device.type == "cuda" and torch.cuda.is_available():  # else traced for another machine's GPU
        table_of(q.device, options.family)
    b, s_q, h, _ = q.shape
    o = q.new_empty((b, s_q, h, v.shape[3]))
    return (o, q.new_empty((b, h, s_q), dtype=torch.float32)) if has_lse else o


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, options: FwdOptions, has_lse: bool) -> Result:
    check_fwd(q, k, v, options)
    check_alignment(q, k, v)
    result = flash_attention_2(q, k, v, **options.definition(q.shape[3]))
    return result if has_lse else result[0]


def _forward(name: str, returns: Any, cuda: Callable[..., Result], has_lse: bool) -> Operator:
    return Operator(
        name=name,
        tensors=("q", "k", "v"),
        options=FwdOptions,
        returns=returns,
        check=check_fwd,
        cuda=cuda,
        cpu=functools.partial(_fwd_cpu, has_lse=has_lse),
        fake=functools.partial(_fwd_fake, has_lse=has_lse),
        transforms=register_transforms,
    )


fwd_cuda, fwd_lse_cuda = cuda_forward(has_lse=False), cuda_forward(has_lse=True)
FWD = _forward("fwd", Tensor, fwd_cuda, has_lse=False)
FWD_LSE = _forward("fwd_lse", tuple[Tensor, Tensor], fwd_lse_cuda, has_lse=True)
fwd, fwd_lse = define(FWD), define(FWD_LSE)
