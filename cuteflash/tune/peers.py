"""Other implementations of the forward, as runners over given inputs: what ours are measured beside.

`fa2` and `cudnn` are torch's SDPA backends, `fa4` the flash-attn-4 package. They see the same memory in the layout they
want.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuteflash.tune.cells import Inputs
from cuteflash.tune.timing import Runner

PEERS = ("fa4", "cudnn", "fa2")
BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def missing_peer(name: str) -> str | None:
    """None if the package of a peer is installed, else the reason in words. ValueError: no such peer."""
    if name not in PEERS:
        raise ValueError(f"peers is {name!r}; allowed: {', '.join(PEERS)}")
    return "flash-attn-4 is not installed" if name == "fa4" and importlib.util.find_spec("flash_attn") is None else None


def peer_runner(name: str, inputs: Inputs) -> Runner:
    """The peer called `name`. NotImplementedError if its interface has no such mask."""
    return _fa4(inputs) if name == "fa4" else _sdpa(inputs, BACKENDS[name])


def repeated(call: Callable[[], Any], output: Callable[[Any], torch.Tensor] = lambda result: result) -> Runner:
    """A runner that repeats `call` without gradients; `output` finds the tensor in what it returns."""

    def run(calls: int) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(calls):
                result = call()
        return output(result)

    return run


def _fa4(inputs: Inputs) -> Runner:
    from flash_attn.cute import flash_attn_func

    cell = inputs.cell
    mask: dict[str, Any] = {"window_size": cell.window} if cell.mask == "window" else {"causal": cell.mask == "causal"}
    return repeated(functools.partial(flash_attn_func, inputs.q, inputs.k, inputs.v, **mask), lambda result: result[0])


def _sdpa(inputs: Inputs, backend: SDPBackend) -> Runner:
    cell = inputs.cell
    if cell.mask == "window" or (cell.mask == "causal" and cell.seqlen_q != cell.seqlen):
        raise NotImplementedError("torch's SDPA has no windows, and aligns a causal mask to the first key")
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))  # (b, h, s, d) views
    causal = cell.mask == "causal"

    def run(calls: int) -> torch.Tensor:
        with torch.no_grad(), sdpa_kernel(backend):
            for _ in range(calls):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2)

    return run
