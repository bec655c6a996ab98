"""Which GPU this is, under which driver and versions, and how fast it is right now."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import re

import torch

from cuteflash.dispatch import current_target
from cuteflash.tune.backend import Machine
from cuteflash.tune.timing import Runner, Sampler, clock_for, median

MATMUL_SIZE = 8192
VERSIONED = ("cuteflash", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4")
DRIVER_FILE = pathlib.Path("/proc/driver/nvidia/version")


def this_machine(device: torch.device) -> Machine:
    """The GPU `device`. NotImplementedError if no kernel runs on it."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return Machine(torch.cuda.get_device_name(index), driver_version(), current_target(index), versions())


def versions() -> dict[str, str]:
    """Distribution → version of what is installed, and cuDNN's."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return found | ({"cudnn": str(cudnn)} if cudnn else {})


def driver_version() -> str:
    """The driver's version as it names itself, or else the newest CUDA that it supports."""
    try:
        found = re.search(r"\d+\.\d+(?:\.\d+)?", DRIVER_FILE.read_text())
    except OSError:
        found = None
    if found:
        return found.group()
    return f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """A bf16 matrix product of random square matrices: what the tensor cores reach without a softmax."""

    run: Runner  # repeats the product
    flops: int  # of one product

    def tflops(self, device: torch.device, rounds: int = 5) -> float:
        """Its rate alone on `device`, TFLOP/s."""
        sampler = Sampler(clock_for(device))
        sampler(self.run)
        return self.flops / (median([sampler(self.run) for _ in range(rounds)]) * 1e9)


def make_matmul(device: torch.device, size: int = MATMUL_SIZE) -> Matmul:
    """The product of two (size, size) matrices on `device`."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            torch.mm(a, b, out=out)
        return out

    return Matmul(run, 2 * size**3)
