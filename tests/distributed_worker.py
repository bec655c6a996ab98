"""What each process of `test_distributed.py` runs: training shared by processes against training in one."""

from __future__ import annotations

import copy
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cuteflash.nn import MHA

WORLD, DIM, STEPS, LR = 2, 32, 3, 0.1


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MHA(DIM, 2, 1, causal=True, rotary_emb_dim=16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


def main(rank: int, folder: pathlib.Path) -> None:
    """Run all checks as one of `WORLD` processes that meet in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)
    try:
        check_ddp(rank)
        check_fsdp(rank)
        check_fsdp_in_bf16(rank)
    finally:
        dist.destroy_process_group()


def check_ddp(rank: int) -> None:
    alone = model()
    shared = DistributedDataParallel(copy.deepcopy(alone))
    train(alone, slice(None))
    train(shared, slice(rank, None, WORLD))
    assert_equal(alone, shared.module)


def check_fsdp(rank: int) -> None:
    alone = model()
    shared = sharded(copy.deepcopy(alone))
    train(alone, slice(None))
    train(shared, slice(rank, None, WORLD))
    assert all(isinstance(parameter, DTensor) for parameter in shared.parameters())
    assert_equal(alone, shared)


def check_fsdp_in_bf16(rank: int) -> None:
    alone = model()
    shared = sharded(copy.deepcopy(alone), MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(alone, slice(None))
    train(shared, slice(rank, None, WORLD))
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(full(other), one, rtol=0, atol=0.01)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def sharded(layers: torch.nn.Sequential, policy: MixedPrecisionPolicy | None = None) -> torch.nn.Sequential:
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (*layers, layers):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return layers


def train(layers: torch.nn.Module, share: slice) -> None:
    """Steps on this process's share of the sequences; the loss is a mean, and so is what processes exchange."""
    optimiser = torch.optim.SGD(layers.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(2, 4, 6, DIM, generator=generator, dtype=torch.float64)
        optimiser.zero_grad()
        F.mse_loss(layers(x[share]).double(), y[share]).backward()
        optimiser.step()


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def assert_equal(alone: torch.nn.Module, shared: torch.nn.Module) -> None:
    start = dict(model().named_parameters())
    for (name, one), other in zip(alone.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(full(other), one, rtol=0, atol=1e-12)
        assert not torch.equal(one, start[name]), name
