"""Autograd of the attention operators: one node for a forward, and one that refuses to differentiate a backward.

A node of a forward keeps Q, K, V, O, LSE and the vectors of packed sequences and nothing else, and computes the three
gradients in one call. All nodes are applied by the dispatcher's implementation for autograd, which tracers, modes and
`torch.func` see, and those of forwards by the public functions themselves for plain CUDA tensors: that saves the
dispatcher's share of a call twice.

O and LSE share a node, so that a gradient of either runs the same backward; one that is missing costs nothing if it is
LSE's and a tensor of zeros if it is O's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from cuteflash.arguments import bwd_options
from cuteflash.torch_internals import direct_node

NO_SECOND_DERIVATIVES = (
    "cuteflash has no second derivatives: call backward() and torch.autograd.grad() without create_graph, or take the "
    "attention whose gradient is differentiated from torch.nn.functional.scaled_dot_product_attention with "
    "SDPBackend.MATH"
)
NO_GRADIENT = (
    "cuteflash has no gradient of torch.ops.cuteflash.{}: call it under torch.no_grad() or torch.inference_mode(), or "
    "detach the inputs"
)


class Route(Protocol):
    """What computes an attention and its gradients, for calls with certain options."""

    @property
    def returns_lse(self) -> bool:
        """Whether LSE is a result of the node, too."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, /, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        """O and LSE."""

    def backward(self, dout: Tensor, /, *saved: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV; `saved` are q, k, v, out, lse, the others, and dlse, which is None if there is none."""


class Dispatched(NamedTuple):
    """The route through the dispatcher.

    Attributes:
        implementation: of the forward, below autograd.
        operator: of the backward.
        options: of the forward, flat.
        returns_lse: see `Route`.
    """

    implementation: Callable[..., tuple[Tensor, Tensor]]
    operator: Callable[..., tuple[Tensor, Tensor, Tensor]]
    options: tuple[Any, ...]
    returns_lse: bool

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Route`."""
        return self.implementation(*tensors, *self.options)

    def backward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Route`."""
        return self.operator(*tensors, *bwd_options(self.options))


class DispatchedSinks(NamedTuple):
    """The route of a forward with sinks, likewise: a `SinkRoute`.

    Attributes:
        implementation, options, returns_lse: as of `Dispatched`; all options are there.
        operator: of the backward, by its name below `torch.ops.cuteflash`.
    """

    implementation: Callable[..., tuple[Tensor, Tensor]]
    operator: str
    options: tuple[Any, ...]
    returns_lse: bool

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """O and LSE of q, k, v, the vectors and the sinks."""
        return self.implementation(*tensors[:-1], *self.options, tensors[-1])

    def backward(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of q, k, v and sinks, from dout, q, k, v, out, lse, sinks, the vectors, and dlse."""
        operator = getattr(torch.ops.cuteflash, self.operator)
        gradients: tuple[Tensor, Tensor, Tensor, Tensor] = operator(*tensors, *bwd_options(self.options))
        return gradients


class Attention(Function):
    """The node of a dense forward. `PackedAttention` apart, as calls with lists of tensors would cost it 1.4 us."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: Route) -> Any:
        """O, and LSE if `route.returns_lse`."""
        out, lse = route.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.route = route
        return (out, lse) if route.returns_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv = ctx.route.backward(dout, q, k, v, out, lse, dlse)
        return dq, dk, dv, None  # autograd drops those that are not needed


class PackedAttention(Function):
    """The node of a forward of packed sequences, which keeps the vectors that describe them, too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: Route, *vectors: Tensor | None) -> Any:
        """As of `Attention`."""
        out, lse = route.forward(q, k, v, *vectors)
        ctx.save_for_backward(q, k, v, out, lse, *vectors)
        ctx.set_materialize_grads(False)
        ctx.route = route
        return (out, lse) if route.returns_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *vectors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv = ctx.route.backward(dout, q, k, v, out, lse, *vectors, dlse)
        return dq, dk, dv, None, *(None for _ in vectors)


class SinkAttention(Function):
    """The node of a forward with sinks, dense or of packed sequences."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, route: DispatchedSinks, sinks: Tensor, *vectors: Tensor | None
    ) -> Any:
        """As of `Attention`."""
        out, lse = route.forward(q, k, v, *vectors, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *vectors)
        ctx.set_materialize_grads(False)
        ctx.route = route
        return (out, lse) if route.returns_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, sinks, *vectors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, dsinks = ctx.route.backward(dout, q, k, v, out, lse, sinks, *vectors, dlse)
        return dq, dk, dv, None, dsinks, *(None for _ in vectors)


class NotDifferentiable(Function):
    """A node whose results have no gradient: an error if one is asked for, not silence."""

    @staticmethod
    def forward(ctx: Any, name: str, implementation: Callable[..., Any], *arguments: Any) -> Any:
        ctx.name = name
        return implementation(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(NO_SECOND_DERIVATIVES if ctx.name.endswith("bwd") else NO_GRADIENT.format(ctx.name))


attend = direct_node(Attention)
attend_packed = direct_node(PackedAttention)
attend_sinks = direct_node(SinkAttention)
not_differentiable = direct_node(NotDifferentiable)
