"""Other implementations of attention, over given inputs: what ours are measured beside.

`fa2` and `cudnn` are torch's SDPA backends, `fa4` the flash-attn-4 package. They see the same memory in the layout they
want.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuteflash.tune.cells import Cell
from cuteflash.tune.gradients import BwdInputs, Gradients
from cuteflash.tune.timing import Runner

PEERS = ("fa4", "cudnn", "fa2")
BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """An implementation, ready for the problem of a cell.

    Attributes:
        call: (q, k, v) → O; differentiable.
        heads_first: its tensors are (batch, heads, seqlen, head_dim), not (batch, seqlen, heads, head_dim).
        context: of its calls; entered once for many.
    """

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads_first: bool = False
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def turned(self, tensor: Tensor) -> Tensor:
        """A (batch, seqlen, heads, head_dim) tensor as this implementation takes it, or what it returns as such."""
        return tensor.transpose(1, 2) if self.heads_first else tensor


def missing_peer(name: str) -> str | None:
    """None if the package of a peer is installed, else the reason in words. ValueError: no such peer."""
    if name not in PEERS:
        raise ValueError(f"peers is {name!r}; allowed: {', '.join(PEERS)}")
    return "flash-attn-4 is not installed" if name == "fa4" and importlib.util.find_spec("flash_attn") is None else None


def peer_attention(name: str, cell: Cell, deterministic: bool = False) -> Attention:
    """The peer called `name`. NotImplementedError if its interface has no such mask, or no such backward."""
    if name == "fa4":
        return _fa4(cell, deterministic)
    if deterministic:
        raise NotImplementedError("torch's SDPA has no option for a deterministic backward")
    return _sdpa(cell, BACKENDS[name])


def forward_runner(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Runner:
    """A runner that repeats the forward without gradients."""
    q, k, v = (attention.turned(tensor) for tensor in (q, k, v))
    call = attention.call

    def run(calls: int) -> Tensor:
        with torch.no_grad(), attention.context():
            for _ in range(calls):
                out = call(q, k, v)
        return attention.turned(out)

    return run


def backward_runner(attention: Attention, inputs: BwdInputs[Any]) -> Runner:
    """A runner that repeats the backward of a forward that is computed here, through autograd."""
    leaves, dout = differentiable(attention, inputs)
    with attention.context():
        out = attention.call(*leaves)

    def run(calls: int) -> Gradients:
        for _ in range(calls):
            found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return Gradients(*map(attention.turned, found))

    return run


def differentiable(attention: Attention, inputs: BwdInputs[Any]) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The leaves and the gradient of the output, as an implementation takes them."""
    forward = inputs.forward
    q, k, v = (attention.turned(tensor).detach().requires_grad_() for tensor in (forward.q, forward.k, forward.v))
    return (q, k, v), attention.turned(inputs.dout)


def _fa4(cell: Cell, deterministic: bool) -> Attention:
    from flash_attn.cute import flash_attn_func

    mask: dict[str, Any] = {"window_size": cell.window} if cell.mask == "window" else {"causal": cell.mask == "causal"}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, deterministic=deterministic, **mask)[0]
        return out

    return Attention(call)


def _sdpa(cell: Cell, backend: SDPBackend) -> Attention:
    if cell.mask == "window" or (cell.mask == "causal" and cell.seqlen_q != cell.seqlen):
        raise NotImplementedError("torch's SDPA has no windows, and aligns a causal mask to the first key")
    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=cell.mask == "causal")
    return Attention(call, heads_first=True, context=functools.partial(sdpa_kernel, backend))
