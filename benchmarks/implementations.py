"""The implementations that are compared, each as a runner over given inputs; `names` lists them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cuteflash
from cuteflash.traits.arch import arch_of_capability
from cuteflash.tune import peers
from cuteflash.tune.cells import Cell, Inputs
from cuteflash.tune.gradients import BwdInputs, Gradients
from cuteflash.tune.peers import PEERS, Attention, forward_runner, missing_peer, peer_attention
from cuteflash.tune.timing import Runner
from cuteflash.tune.trials import fwd_runner
from cuteflash.tune.variants import Variant

from . import cudnn_fp8
from .contest import Maker
from .names import OURS, UNNAMED, base_of, family_of, is_deterministic, is_fp8, is_ours

NAMES = OURS + PEERS


def unavailable(name: str, device: torch.device) -> str | None:
    """None if the implementation can run on `device`, else the reason in words."""
    base = base_of(name)
    if base not in (UNNAMED, *NAMES):
        return f"implementation is {name!r}; allowed: {', '.join(NAMES)}"
    if base in PEERS and (reason := cudnn_fp8.missing() if is_fp8(name) else missing_peer(base)):
        return reason
    if device.type != "cuda":
        return None if base == "fa2" else "needs a CUDA device"
    if base in OURS:
        arch = arch_of_capability(*torch.cuda.get_device_capability(device))
        if base not in arch.families:
            return f"{arch.name} does not run the {base} family"
    return None


def attention(name: str, cell: Cell) -> Attention:
    """The implementation called `name` through its public interface."""
    base = base_of(name)
    if base == "materialised":
        return Attention(functools.partial(materialised, causal=cell.mask == "causal"), heads_first=True)
    if not is_ours(name):
        return peer_attention(base, cell, is_deterministic(name))
    options: dict[str, Any] = (
        {"window_size": cell.window} if cell.mask == "window" else {"causal": cell.mask == "causal"}
    )
    if is_deterministic(name):
        options["deterministic"] = True
    return Attention(functools.partial(cuteflash.flash_attn_func, family=family_of(name), **options))


def materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of torch's own operators, with the score matrix in memory."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def runner(name: str, inputs: Inputs) -> Runner:
    """The forward of the implementation called `name`."""
    return forward_runner(attention(name, inputs.cell), inputs.q, inputs.k, inputs.v)


def backward_runner(name: str, inputs: BwdInputs[Inputs]) -> Runner:
    """The backward of the implementation called `name`."""
    return peers.backward_runner(attention(name, inputs.forward.cell), inputs)


def training_runner(name: str, inputs: BwdInputs[Inputs]) -> Runner:
    """Forward and backward of the implementation called `name`."""
    chosen = attention(name, inputs.forward.cell)
    leaves, dout = peers.differentiable(chosen, inputs)
    call = chosen.call

    def run(calls: int) -> Gradients:
        with chosen.context():
            for _ in range(calls):
                found = torch.autograd.grad(call(*leaves), leaves, dout)
        return Gradients(*map(chosen.turned, found))

    return run


def variant_runner(variant: Variant, inputs: Inputs) -> Runner:
    """A variant launched directly, without the operator around it."""
    return fwd_runner(variant.traits(inputs.cell), target_of(inputs.q.device), inputs)


def target_of(device: torch.device) -> str:
    """The compile target of a CUDA device."""
    return arch_of_capability(*torch.cuda.get_device_capability(device)).name


def maker(name: str, cell: Cell, overrides: Sequence[Variant] = ()) -> Maker:
    """The function that makes a name's runner; our families run the last override that applies to the cell."""
    override = next((v for v in reversed(overrides) if v.family == name and v.applies(cell)), None)
    return functools.partial(runner, name) if override is None else functools.partial(variant_runner, override)
