"""What of a call decides its launch, as a key to look that up by, and what was planned for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor

from cuteflash.problem import LENGTH_MAX, Operation
from cuteflash.traits.length_class import length_class_of

# Shapes of q, k and v, their strides, element types and device indices, and the options: flat, because it is hashed at
# every call, and a nested tuple costs 0.1 us more.
Call = tuple[Any, ...]
Options = tuple[Any, ...]  # an operator's, flat; trailing defaults may be left out


LAUNCHES_MAX = 4096  # a serving process sees ever new lengths: a launch is about 1 kB, and planned again in 10 us

Kept = TypeVar("Kept")


class Known(Generic[Kept]):
    """What was planned, by what it depends on.

    Attributes:
        last: what was found last, after what it depends on, which takes 0.8 us less to compare than to look up. One
            tuple, since another thread may replace it at any time.
    """

    __slots__ = ("_all", "last")

    def __init__(self) -> None:
        self._all: dict[Hashable, Kept] = {}
        self.last: tuple[Hashable, Any] = None, None

    def find(self, key: Hashable, plan: Callable[..., Kept], *arguments: Any) -> Kept:
        """What was planned for a key; if nothing was, what `plan` makes of the arguments."""
        found = self.get(key)
        if found is None:
            found = plan(*arguments)
            self.keep(key, found)
        return found

    def get(self, key: Hashable) -> Kept | None:
        """What was planned for a key, None if nothing was."""
        found = self._all.get(key)
        if found is not None:
            self.last = key, found
        return found

    def keep(self, key: Hashable, planned: Kept) -> None:
        """Note what was planned for a key."""
        if len(self._all) >= LAUNCHES_MAX:
            self._all.clear()
        self._all[key] = planned
        self.last = key, planned


def looks_of(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """What a launch depends on of its tensors. RuntimeError: a sparse tensor has no strides, a nested one no shape."""
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors])


def call_of(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Call:
    """What a launch depends on. RuntimeError: a sparse tensor has no strides, a nested one no shape."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), options,
    )  # fmt: skip


def sizes_kind(
    operation: Operation, q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> tuple[Any, ...] | None:
    """What of the sizes decides a plan; None if the shapes do not belong together, are empty or are too long."""
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        return None
    batch, seqlen_q, heads, head_dim = q_shape
    k_batch, seqlen_k, kv_heads, k_head_dim = k_shape
    v_batch, v_seqlen, v_heads, head_dim_v = v_shape
    if (
        batch == k_batch == v_batch != 0
        and head_dim == k_head_dim
        and seqlen_k == v_seqlen
        and kv_heads == v_heads != 0 != heads
        and heads % kv_heads == 0
        and 0 < seqlen_q <= LENGTH_MAX
        and 0 < seqlen_k <= LENGTH_MAX
    ):
        heads_per_kv = heads // kv_heads
        fits_packed = seqlen_q * heads_per_kv <= LENGTH_MAX
        lengths = length_class_of(seqlen_q, seqlen_k, operation)
        return head_dim, head_dim_v, heads_per_kv, fits_packed, lengths, seqlen_q == 1
    return None


def bwd_call_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, options: Options
) -> Call:
    """What a backward's launch depends on, the first six as in `call_of`. RuntimeError as there."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        out.shape, dout.shape, lse.shape, dlse if dlse is None else dlse.shape,
        out.stride(), dout.stride(), lse.stride(), dlse if dlse is None else dlse.stride(),
        q.dtype, k.dtype, v.dtype, out.dtype, dout.dtype, lse.dtype, dlse if dlse is None else dlse.dtype,
        q.get_device(), k.get_device(), v.get_device(), out.get_device(), dout.get_device(), lse.get_device(),
        dlse if dlse is None else dlse.get_device(), options,
    )  # fmt: skip


def call_with_sinks(call: Call, sinks: Tensor) -> Call:
    """What the launch of a call with sinks depends on: that of them is part of what decides its plan."""
    return *call[:-1], (sinks.shape, sinks.stride(), sinks.dtype, sinks.get_device()), call[-1]
