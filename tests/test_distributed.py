"""Data-parallel training with gloo on the CPU: the gradients of two processes are those of one with both batches."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cuteflash import flash_attn_func
from tests.patience import PATIENCE

PROCESSES, HEADS, HEAD_DIM = 2, 2, 16


class Block(nn.Module):
    """Self-attention with a residual."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        y: Tensor = x + self.out(flash_attn_func(q, k, v, causal=True).flatten(2))
        return y


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(rank: int) -> Tensor:
    return torch.randn(2, 9, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(rank))


def ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(gradient: Tensor) -> Tensor:
    """A gradient in full, of which FSDP keeps a part in each process."""
    gather = getattr(gradient, "full_tensor", None)
    return gradient if gather is None else gather()


def train(rank: int, wrap: Callable[[nn.Sequential], nn.Module], store: str, results: Any) -> None:
    """A process: two steps, of which the second meets what the first left.

    It ends without destructors. That of DDP's reducer keeps the GIL while it waits for gloo's threads, one of which may
    just then want it to give a tensor back: a deadlock, seen once with torch 2.13.
    """
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, PROCESSES), rank=rank, world_size=PROCESSES)
        model = wrap(build())
        for _ in range(2):
            model.zero_grad()
            model(batch(rank)).square().mean().backward()
        gradients = {name.removeprefix("module."): whole(x.grad) for name, x in model.named_parameters()}
        results.put({name: x.numpy() for name, x in gradients.items()} if rank == 0 else None)
        dist.barrier()  # the other process has what it needs of this one
    except BaseException:
        results.put(traceback.format_exc())
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_two_processes_have_the_gradients_of_one(wrap: Callable[..., nn.Module], tmp_path: pathlib.Path) -> None:
    # Not forks of this process, in which autograd's threads may run, but of one that has only loaded this file.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.Queue()
    run = functools.partial(train, wrap=wrap, store=str(tmp_path / "store"), results=results)
    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    got = next(answer for answer in answers if answer is not None)
    alone = build()
    sum(alone(batch(rank)).square().mean() for rank in range(PROCESSES)).div(PROCESSES).backward()
    expected = {name: x.grad for name, x in alone.named_parameters()}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(torch.from_numpy(gradient), expected[name], atol=1e-6, rtol=1e-4)
