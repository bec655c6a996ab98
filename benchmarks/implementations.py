"""The implementations that are compared, each as a runner over given inputs.

Names: `sm90` and `sm80` are this project's kernel families, the others the peers of `cuteflash.tune.peers`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

import cuteflash
from cuteflash.traits.arch import arch_of_capability
from cuteflash.tune.cells import Cell, Inputs
from cuteflash.tune.cuda_backend import direct_runner
from cuteflash.tune.peers import PEERS, missing_peer, peer_runner, repeated
from cuteflash.tune.timing import Runner
from cuteflash.tune.variants import Variant

from .contest import Maker
from .report import OURS

NAMES = OURS + PEERS


def unavailable(name: str, device: torch.device) -> str | None:
    """None if the implementation can run on `device`, else the reason in words."""
    if name not in NAMES:
        return f"implementation is {name!r}; allowed: {', '.join(NAMES)}"
    if name in PEERS and (reason := missing_peer(name)):
        return reason
    if device.type != "cuda":
        return None if name == "fa2" else "needs a CUDA device"
    if name in OURS:
        arch = arch_of_capability(*torch.cuda.get_device_capability(device))
        if name not in arch.families:
            return f"{arch.name} does not run the {name} family"
    return None


def runner(name: str, inputs: Inputs) -> Runner:
    """The implementation called `name` through its public interface."""
    if name not in OURS:
        return peer_runner(name, inputs)
    cell = inputs.cell
    options: dict[str, Any] = (
        {"window_size": cell.window} if cell.mask == "window" else {"causal": cell.mask == "causal"}
    )
    call = functools.partial(cuteflash.flash_attn_func, inputs.q, inputs.k, inputs.v, family=name, **options)
    return repeated(call)


def variant_runner(variant: Variant, inputs: Inputs) -> Runner:
    """A variant launched directly, without the operator around it."""
    return direct_runner(variant.traits(inputs.cell), inputs, target_of(inputs.q.device))


def target_of(device: torch.device) -> str:
    """The compile target of a CUDA device."""
    return arch_of_capability(*torch.cuda.get_device_capability(device)).name


def maker(name: str, cell: Cell, overrides: Sequence[Variant] = ()) -> Maker:
    """The function that makes a name's runner; our families run the last override that applies to the cell."""
    override = next((v for v in reversed(overrides) if v.family == name and v.applies(cell)), None)
    return functools.partial(runner, name) if override is None else functools.partial(variant_runner, override)
