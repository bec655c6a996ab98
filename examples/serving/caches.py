"""What the engine knows of a cache: pages of tokens, in each layer of a kind that brings its own attention.

A layer hands its new tokens over as a `Call`. The call names its `Layout`, which makes the layer's pages once, and from
then on these store the tokens and attend to them. `kv_cache` and `latent_cache` have the kinds that there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Shared = TypeVar("Shared")


class Pages(Protocol):
    """The cache of one layer."""

    def attend(self, call: Any, step: Step) -> Tensor:
        """Store the new tokens of a call of this kind, and attend to those of their rows: (tokens, heads, columns)."""


class Layout(Protocol):
    """What a layer keeps of a token."""

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def captures_prompts(self) -> bool:
        """Whether steps with prompts can be captured: what is launched depends on no lengths but `Step`'s tensors."""

    def check(self, page_size: int, device: torch.device) -> None:
        """Raise ValueError if there is no attention to such pages on this device."""

    def make(self, pages: int, page_size: int, device: torch.device) -> Pages:
        """Pages of zeros."""


class Call(Protocol):
    """One layer's attention in a step."""

    @property
    def layer(self) -> int:
        """Its index."""

    @property
    def layout(self) -> Layout: ...

    def nothing(self) -> Tensor:
        """A result of the right shape, zeros."""


class Attends(Protocol):
    """What a model's layers are given as `step`."""

    def attend(self, call: Call) -> Tensor:
        """O, (tokens, heads, columns of a value)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What the layers share in a step; the tensors are int32, on the model's device.

    Attributes:
        positions: (tokens,), the place of each token in its row; tokens that follow the last row's do not count.
        cu_seqlens: (rows + 1,), where each row's new tokens begin.
        cached: (rows,), tokens in the pages before the step.
        used: (rows,), tokens in the pages after the layer has stored its own.
        page_table: (rows, pages), the pages of each row; entries beyond `used` do not count.
        starts, counts: what the host knows of `cached` and of the new tokens of each row, which ascend. In a captured
            step, which is replayed with others, they say how long rows can be at most.
        caches: of each layer.
    """

    positions: Tensor
    cu_seqlens: Tensor
    cached: Tensor
    used: Tensor
    page_table: Tensor
    starts: Sequence[int]
    counts: Sequence[int]
    caches: Sequence[Pages]
    _shared: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def longest_q(self) -> int:
        """New tokens of a row, at most."""
        return self.counts[-1]

    @property
    def longest_k(self) -> int:
        """Tokens of a row, at most."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    def attend(self, call: Call) -> Tensor:
        return self.caches[call.layer].attend(call, self)

    def once(self, key: Hashable, make: Callable[[], Shared]) -> Shared:
        """What layers with the same key share: the first of them makes it."""
        if key not in self._shared:
            self._shared[key] = make()
        shared: Shared = self._shared[key]
        return shared


class Probe:
    """Notes the layouts of the layers, and attends to nothing."""

    def __init__(self) -> None:
        self.layouts: dict[int, Layout] = {}

    def attend(self, call: Call) -> Tensor:
        self.layouts[call.layer] = call.layout
        return call.nothing()
