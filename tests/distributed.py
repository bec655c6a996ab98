"""Data-parallel training of a small model: what the gradients of several processes are, and those of one."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cuteflash import flash_attn_func
from tests.patience import PATIENCE

PROCESSES, HEADS, HEAD_DIM = 2, 2, 16
WIDTH = HEADS * HEAD_DIM
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of attention

Gradients = dict[str, Tensor]
Wrap = Callable[[nn.Sequential], nn.Module]


class Block(nn.Module):
    """Self-attention with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).to(DTYPES[x.device.type]).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        y: Tensor = x + self.out(flash_attn_func(q, k, v, causal=True).flatten(2).to(x.dtype))
        return y


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device)


def batch(rank: int, device: torch.device) -> Tensor:
    return torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)


def ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (PROCESSES,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(gradient: Tensor) -> Tensor:
    """A gradient in full, of which FSDP keeps a part in each process."""
    gather = getattr(gradient, "full_tensor", None)
    return gradient if gather is None else gather()


def train(rank: int, kind: str, wrap: Wrap, store: str, results: Any) -> None:
    """A process: two steps, of which the second meets what the first left.

    It ends without destructors. That of DDP's reducer keeps the GIL while it waits for gloo's threads, one of which may
    just then want it to give a tensor back: a deadlock, seen once with torch 2.13.
    """
    try:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        if kind == "cuda":
            device = torch.device(kind, rank)
            torch.cuda.set_device(device)
        dist.init_process_group(BACKENDS[kind], store=dist.FileStore(store, PROCESSES), rank=rank, world_size=PROCESSES)
        model = wrap(build(device))
        for _ in range(2):
            model.zero_grad()
            model(batch(rank, device)).square().mean().backward()
        gradients = {name.removeprefix("module."): whole(x.grad) for name, x in model.named_parameters()}
        results.put({name: x.cpu().numpy() for name, x in gradients.items()} if rank == 0 else None)
        dist.barrier()  # the other process has what it needs of this one
    except BaseException:
        results.put(traceback.format_exc())
    results.close()
    results.join_thread()
    os._exit(0)


def together(kind: str, wrap: Wrap, folder: pathlib.Path) -> Gradients:
    """The gradients of two processes with a batch each, on the CPU; `kind` of device: "cpu" or "cuda"."""
    # Not forks of this process, in which autograd's threads may run, but of one that has only loaded this file.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.Queue()
    run = functools.partial(train, kind=kind, wrap=wrap, store=str(folder / "store"), results=results)
    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join()
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    found = next(answer for answer in answers if answer is not None)
    return {name: torch.from_numpy(x) for name, x in found.items()}


def alone(device: torch.device) -> Gradients:
    """The gradients of one process with both batches, on the CPU."""
    model = build(device)
    losses = [model(batch(rank, device)).square().mean() for rank in range(PROCESSES)]
    torch.stack(losses).mean().backward()
    return {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
