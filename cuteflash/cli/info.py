"""`cuteflash info`: the environment, and how the dispatcher would run a problem."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from typing import Any

from cuteflash.compile import cache_dir
from cuteflash.compile.cache import cache_size
from cuteflash.dispatch import FWD_KERNELS, choose_fwd, current_target
from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import ARCHS, Family, get_arch
from cuteflash.traits.sm90 import FwdTraitsSm90

DISTRIBUTIONS = ("cuteflash", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")


def local_target() -> list[str]:
    """The compile target of the current GPU; ValueError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"arch is not given and torch finds no GPU; allowed: {', '.join(ARCHS)}")
    return [current_target(torch.cuda.current_device())]


def default_targets() -> list[str]:
    """The current GPU's target, or every target where there is no GPU."""
    import torch

    return local_target() if torch.cuda.is_available() else list(ARCHS)


def environment() -> dict[str, Any]:
    """Versions, GPUs and the disk cache, as JSON values."""
    import torch

    root = cache_dir()
    entries, size = cache_size(root) if root else (0, 0)
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "gpus": [_gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())],
        "cache": {"dir": str(root) if root else None, "kernels": entries, "bytes": size},
    }


def describe(problem: FwdProblem, target: str, family: Family | None) -> dict[str, Any]:
    """The dispatcher's choice with everything that follows from it, as JSON values."""
    choice = choose_fwd(problem, target, family)
    traits = choice.traits
    arch = get_arch(target)
    registers: dict[str, int]
    if isinstance(traits, FwdTraitsSm90):
        registers = {"producer": traits.producer_regs, "mma": traits.mma_regs}
    else:
        registers = {"limit": min(arch.max_regs_per_thread, arch.regs_per_sm // traits.num_threads)}
    return {
        "arch": target,
        "problem": dataclasses.asdict(problem),
        "family": choice.family,
        "kernel": ".".join(FWD_KERNELS[choice.family]),
        "source": choice.source,
        "traits": dataclasses.asdict(traits),
        "threads": traits.num_threads,
        "registers_per_thread": registers,
        "smem_bytes": traits.smem_bytes,
        "smem_limit": arch.smem_per_block,
    }


def text(result: dict[str, Any]) -> str:
    """`environment()` and `describe()`s, for reading."""
    env = result["environment"]
    cache = env["cache"]
    held = f"{cache['dir']} ({cache['kernels']} kernels, {cache['bytes'] / 1e6:.1f} MB)" if cache["dir"] else "off"
    lines = [
        f"python    {env['python']}",
        *(f"{name:<20}{version or 'not installed'}" for name, version in env["versions"].items()),
        *(f"gpu       {gpu['name']}, {gpu['capability']}, {gpu['sms']} SMs" for gpu in env["gpus"] or []),
        *([] if env["gpus"] else ["gpu       none"]),
        f"cache     {held}",
    ]
    for choice in result["choices"]:
        lines += ["", *_choice_lines(choice)]
    return "\n".join(lines) + "\n"


def _choice_lines(choice: dict[str, Any]) -> list[str]:
    problem = choice["problem"]
    registers = ", ".join(f"{role} {count}" for role, count in choice["registers_per_thread"].items())
    return [
        f"{choice['arch']}: {problem['dtype']}, head_dim {problem['head_dim']}, head_dim_v {problem['head_dim_v']}, "
        f"{problem['mask']}",
        f"  kernel     {choice['kernel']}",
        f"  source     {choice['source']}",
        f"  traits     {', '.join(f'{name}={value}' for name, value in choice['traits'].items())}",
        f"  threads    {choice['threads']}",
        f"  registers  {registers}",
        f"  smem       {choice['smem_bytes']} of {choice['smem_limit']} bytes",
    ]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
    }
