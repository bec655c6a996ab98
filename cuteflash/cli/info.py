"""`cuteflash info`: the environment, and how the dispatcher would run a problem."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from cuteflash import usertable
from cuteflash.compile import cache_dir
from cuteflash.compile.cache import cache_size
from cuteflash.dispatch import KERNELS, Choice, choose, current_target
from cuteflash.problem import Problem
from cuteflash.problem_names import extras_of
from cuteflash.traits.arch import ARCHS, Family, get_arch
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.length_class import LENGTH_CLASSES, LengthClass
from cuteflash.traits.row import TableKey
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import TABLES

DISTRIBUTIONS = ("cuteflash", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")


def local_target() -> list[str]:
    """The compile target of the current GPU; ValueError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"arch is not given and torch finds no GPU; allowed: {', '.join(ARCHS)}")
    return [current_target(torch.cuda.current_device())]


def default_targets() -> list[str]:
    """The current GPU's target, or every target if there is no GPU."""
    import torch

    return local_target() if torch.cuda.is_available() else list(ARCHS)


def environment() -> dict[str, Any]:
    """Versions, GPUs, the disk cache and the user's tables, as JSON values."""
    import torch

    root = cache_dir()
    entries, size = cache_size(root) if root else (0, 0)
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "gpus": [_gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())],
        "cache": {"dir": str(root) if root else None, "kernels": entries, "bytes": size},
        "tables": {
            "dir": str(usertable.config_dir() or "") or None,
            "user": [table for key in TABLES for table in _user_tables(key)],
        },
    }


def _user_tables(key: TableKey) -> Iterator[dict[str, Any]]:
    """The user's table, if there is one: how many rows, or why it is not used."""
    path = usertable.table_path(key)
    if path is not None and path.exists():
        try:
            rows, reason = len(usertable.read(key)), None
        except usertable.TableError as error:
            rows, reason = 0, str(error)
        yield {"table": str(key), "path": str(path), "rows": rows, "unusable": reason}


def describe(
    problem: Problem, target: str, family: Family | None, lengths: Sequence[LengthClass] = LENGTH_CLASSES
) -> list[dict[str, Any]]:
    """The dispatcher's choices with everything that follows from them, as JSON values.

    One entry for each kernel and row, with the length classes that it serves.
    """
    choices: dict[Choice, list[LengthClass]] = {}
    for one in sorted(lengths, key=LENGTH_CLASSES.index):
        choices.setdefault(choose(problem, target, family, one), []).append(one)
    return [_describe(problem, target, choice, served) for choice, served in choices.items()]


def _describe(problem: Problem, target: str, choice: Choice, lengths: Sequence[LengthClass]) -> dict[str, Any]:
    traits = choice.traits
    arch = get_arch(target)
    registers: dict[str, int]
    if isinstance(traits, (FwdTraitsSm90, BwdTraitsSm90, BwdTwoPassTraitsSm90)):
        registers = {"producer": traits.producer_regs, "mma": traits.mma_regs}
    else:
        registers = {"limit": min(arch.max_regs_per_thread, arch.regs_per_sm // traits.num_threads)}
    return {
        "operation": problem.operation,
        "arch": target,
        "problem": dataclasses.asdict(problem),
        "features": extras_of(problem),
        "lengths": list(lengths),
        "family": choice.family,
        "kernel": ".".join(KERNELS[type(traits)]),
        "source": choice.source,
        "traits": dataclasses.asdict(traits),
        "threads": traits.num_threads,
        "registers_per_thread": registers,
        "smem_bytes": traits.smem_bytes,
        "smem_limit": arch.smem_per_block,
    }


def text(result: dict[str, Any]) -> str:
    """`environment()` and the results of `describe()` as text."""
    env = result["environment"]
    cache = env["cache"]
    held = f"{cache['dir']} ({cache['kernels']} kernels, {cache['bytes'] / 1e6:.1f} MB)" if cache["dir"] else "off"
    lines = [
        f"python    {env['python']}",
        *(f"{name:<20}{version or 'not installed'}" for name, version in env["versions"].items()),
        *(f"gpu       {gpu['name']}, {gpu['capability']}, {gpu['sms']} SMs" for gpu in env["gpus"] or []),
        *([] if env["gpus"] else ["gpu       none"]),
        f"cache     {held}",
        *_table_lines(env["tables"]),
    ]
    for choice in result["choices"]:
        lines += ["", *_choice_lines(choice)]
    return "\n".join(lines) + "\n"


def _table_lines(tables: dict[str, Any]) -> list[str]:
    own = [
        f"tables    {table['table']}: " + (table["unusable"] or f"{table['path']} ({table['rows']} rows)")
        for table in tables["user"]
    ]
    return own or [f"tables    the shipped ones; none of the user's in {tables['dir'] or 'a home directory'}"]


def _choice_lines(choice: dict[str, Any]) -> list[str]:
    problem, lengths = choice["problem"], choice["lengths"]
    operands = problem["operands"]
    registers = ", ".join(f"{role} {count}" for role, count in choice["registers_per_thread"].items())
    return [
        f"{choice['operation']}, {choice['arch']}: {operands['qk_dtype']}, head_dim {operands['head_dim']}, "
        f"head_dim_v {operands['head_dim_v']}, "
        f"{', '.join([problem['scores']['mask'], *choice['features']])}, "
        f"{'all lengths' if len(lengths) == len(LENGTH_CLASSES) else ' and '.join(lengths)}",
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
