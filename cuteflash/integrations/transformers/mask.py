"""What our entry of transformers' mask interface returns to the model: the rule of the mask, not its values.

A model that goes through the attention interface passes it on to `attention`, which applies it. Every other use of a
mask in transformers code (adding it to scores, filling, comparing) raises an error that says so: the model's own code
would otherwise drop the causal mask or take booleans for a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from cuteflash.integrations.transformers.padding import Group, groups
from cuteflash.integrations.transformers.rules import FULL, Interval, MaskFunction, interval_of


class MaskMisuseError(NotImplementedError, AttributeError):
    """The model's own code works on the mask. Also an AttributeError, so that `hasattr` returns False."""


class Mask:
    """Stands for a mask (batch, 1, q_length, kv_length) of transformers, and has no values.

    Attributes:
        interval: which keys a query sees around its own position.
        shape: (batch, 1, q_length, kv_length); `kv_length` counts unused cache slots, too.
        offset: index of the key that stands at the position of query 0.
        used: how many keys there are for the last query and its window; the others are unused cache slots.
        padding: bool (batch, used), True for tokens, or None if every key up to `used` holds one.
        device: the device that the model wants its mask on.
    """

    def __init__(
        self,
        interval: Interval,
        shape: tuple[int, int, int],
        offset: int,
        used: int,
        padding: Tensor | None,
        device: torch.device,
        found: list[Group] | None = None,
    ) -> None:
        batch, q_length, kv_length = shape
        self.interval = interval
        self.shape = torch.Size((batch, 1, q_length, kv_length))
        self.offset = offset
        self.used = used
        self.padding = padding
        self.device = device
        self.dtype = torch.bool
        self.ndim = 4
        # The layers of a model share one inspection of the padding.
        self.groups = groups(padding) if found is None and padding is not None else found

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Mask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Mask:
        """The same rule on another device; a dtype changes nothing. Called when a model spans devices."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None or device == self.device:
            return self
        padding = None if self.padding is None else self.padding.to(device)
        found = None if self.groups is None else [group.to(device) for group in self.groups]
        batch, _, q_length, kv_length = self.shape
        return Mask(self.interval, (batch, q_length, kv_length), self.offset, self.used, padding, device, found)

    def __getitem__(self, index: Any) -> Mask:
        """`mask[:, :, :, :n]` with every key: some layers cut a mask to their keys."""
        whole = slice(None)
        if isinstance(index, tuple) and len(index) == 4 and index[:3] == (whole, whole, whole):
            keys = index[3]
            if keys == whole or (isinstance(keys, slice) and keys == slice(keys.stop) and keys.stop >= self.shape[3]):
                return self
        raise misuse(f"mask[{index}]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise misuse(f"mask.{name}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise misuse(getattr(function, "__name__", str(function)))

    __hash__ = object.__hash__  # by identity; `==` is an operator on values, and refused as such


def _refused_operator(name: str) -> Callable[..., NoReturn]:
    def operator(self: Mask, *args: Any) -> NoReturn:
        raise misuse(name)

    return operator


for _operator in (
    *("add", "radd", "iadd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "neg", "invert", "and", "rand"),
    *("or", "ror", "xor", "eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "contains", "setitem", "float"),
):
    setattr(Mask, f"__{_operator}__", _refused_operator(_operator))


def misuse(what: str) -> MaskMisuseError:
    return MaskMisuseError(
        f"the model's code works on the attention mask itself ({what}), so this attention does not go through "
        "transformers' attention interface, or changes what is asked of it; cuteflash cannot follow that. "
        'Use attn_implementation="sdpa" or "eager" for this model'
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the mask on the host
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | Mask | None = None,
    **kwargs: Any,
) -> Mask:
    """An entry of transformers' `AttentionMaskInterface`.

    Args:
        batch_size, q_length, kv_length: sizes of the attention to come; `kv_length` counts unused cache slots, too.
        q_offset, kv_offset: position of the first query and of the first key in the sequence.
        mask_function: which query sees which key; None is causal.
        attention_mask: bool (batch, sequence), True for tokens; None means no padding. A mask made here, which
            `generate` passes again for a static cache, is returned as it is.
        **kwargs: `device` counts.

    Raises:
        ValueError: the mask function is not causal, full or a sliding window, queries stand behind the last key, or
            the padding is not of this batch.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    offset = int(q_offset) - kv_offset
    end = offset + q_length
    interval = interval_of(mask_function, max(end, kv_length) + kv_offset)
    used = min(end, kv_length) if interval.right == 0 else kv_length
    if interval != FULL and used != end:
        raise ValueError(
            f"the model asks for a mask with a bound on positions, queries at {offset}..{end - 1} and keys at "
            f"0..{kv_length - 1}; cuteflash allows the last query on the last key, and in causal attention before it"
        )
    device = torch.device(kwargs.get("device") or "cpu")
    padding = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, batch_size):
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}; allowed: ({batch_size}, length)")
        padding = attention_mask[:, kv_offset : kv_offset + used].bool()
        padding = torch.nn.functional.pad(padding, (0, used - padding.shape[1]))
        padding = None if bool(padding.all()) else padding
    return Mask(interval, (batch_size, q_length, kv_length), offset, used, padding, device)
