"""What our entry of transformers' mask interface returns to the model: the rule of the mask, not its values.

A model that goes through the attention interface passes it on to `attention`, which applies it. Every other use of a
mask in transformers code (adding it to scores, filling, comparing) raises an error that says so: the model's own code
would otherwise drop the causal mask or take booleans for a bias.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from cuteflash.integrations.transformers.rules import CAUSAL, FULL, Interval, MaskFunction, rule_of
from cuteflash.integrations.transformers.sequences import HIDDEN, Sequences


class MaskMisuseError(NotImplementedError, AttributeError):
    """The model's own code works on the mask. Also an AttributeError, so that `hasattr` returns False."""


class Mask:
    """Stands for a mask (batch, 1, q_length, kv_length) of transformers, and has no values.

    Attributes:
        interval: which keys a query sees around its own position.
        shape: (batch, 1, q_length, kv_length); `kv_length` counts unused cache slots, too.
        offset: index of the key that stands at the position of query 0.
        used: how many keys there are for the last query and its window; the others are unused cache slots.
        lengths: if only the device knows `used`, that of each row, (batch,) int32; reading `offset` or `used` then
            waits for the device.
        device: the device that the model wants its mask on.
        documents: the number of each position's document in its row, (batch, used), on the CPU; None if every row is
            one document.
        has_padding: whether some of the keys up to `used` hold no token.
        sequences: the documents without padding; None if every row is one document and has no padding.
        answers: boundaries that were given beside the mask, a number of queries, and the sequences of a call with them.
    """

    def __init__(
        self,
        interval: Interval,
        shape: tuple[int, int, int],
        keys: tuple[int, int] | Tensor,
        device: torch.device,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> None:
        """`keys` are offset and used, or lengths."""
        batch, q_length, kv_length = shape
        self.interval = interval
        self.shape = torch.Size((batch, 1, q_length, kv_length))
        self._keys = keys
        self.lengths = keys if isinstance(keys, Tensor) else None
        self.device = device
        self.documents = documents
        self.has_padding = padding is not None
        self.sequences = self._inspected(padding)
        self.answers: list[tuple[tuple[Any, ...], int, Sequences | None]] = []
        self.dtype = torch.bool
        self.ndim = 4

    @property
    def used(self) -> int:
        return int(self._keys[0]) if isinstance(self._keys, Tensor) else self._keys[1]

    @property
    def offset(self) -> int:
        return self.used - self.shape[2] if isinstance(self._keys, Tensor) else self._keys[0]

    def _inspected(self, padding: Tensor | None) -> Sequences | None:
        """What the layers of a model share; `padding` is True for tokens, (batch, used), on the CPU."""
        if self.documents is None and padding is None:
            return None
        documents = (
            torch.zeros(self.shape[0], self.used, dtype=torch.long) if self.documents is None else self.documents
        )
        keys = documents if padding is None else documents.where(padding, HIDDEN)
        if self.interval == FULL:  # a query on padding sees what others see, as in eager attention
            return Sequences(self.documents, keys)
        return Sequences(pad(keys, (-self.offset, 0), value=HIDDEN) if self.offset else keys, keys)

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
        moved = copy.copy(self)
        moved.device = device
        if self.lengths is not None:
            moved._keys = moved.lengths = self.lengths.to(device)
        return moved

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
        ValueError: the mask function is not causal, full or a sliding window, queries stand behind the last key, rows
            of several documents have a cache, or the padding is not of this batch.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    from transformers.masking_utils import causal_mask_function

    sizes = batch_size, q_length, kv_length
    is_plain = mask_function is causal_mask_function and attention_mask is None and kv_offset == 0
    if is_plain and isinstance(q_offset, Tensor):  # a static cache without padding: there is nothing to read
        return Mask(CAUSAL, sizes, _lengths(q_offset, sizes), q_offset.device)
    mask: Mask = _read_mask(sizes, q_offset, kv_offset, mask_function, attention_mask, kwargs.get("device"))
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the mask on the host
def _read_mask(
    sizes: tuple[int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction | None,
    attention_mask: Tensor | None,
    device: Any,
) -> Mask:
    """As `make_mask`, of a mask that is read."""
    batch_size, q_length, kv_length = sizes
    offset = int(q_offset) - kv_offset
    end = offset + q_length
    rule = rule_of(mask_function, max(end, kv_length) + kv_offset)
    interval = rule.interval
    used = min(end, kv_length) if interval.right == 0 else kv_length
    if interval != FULL and used != end:
        raise ValueError(
            f"the model asks for a mask with a bound on positions, queries at {offset}..{end - 1} and keys at "
            f"0..{kv_length - 1}; cuteflash allows the last query on the last key, and in causal attention before it"
        )
    documents = None
    if rule.documents is not None:
        if (q_length, kv_length, offset, kv_offset) != (kv_length, rule.documents.shape[1], 0, 0):
            raise ValueError(
                f"the model asks for a mask of {tuple(rule.documents.shape)} positions of several sequences, with "
                f"queries at {offset}..{end - 1} and {kv_length} keys; cuteflash allows no key-value cache then: give "
                "use_cache=False"
            )
        documents = _numbered(rule.documents).expand(batch_size, -1)
    padding = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, batch_size):
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}; allowed: ({batch_size}, length)")
        padding = attention_mask[:, kv_offset : kv_offset + used].bool()
        padding = pad(padding, (0, used - padding.shape[1]))
        padding = None if bool(padding.all()) else padding.cpu().expand(batch_size, -1)
    keys: tuple[int, int] | Tensor = (offset, used)
    if isinstance(q_offset, Tensor) and kv_offset == 0 and interval == CAUSAL and documents is None and padding is None:
        keys = _lengths(q_offset, sizes)  # so that a compiled step does not depend on the numbers
    return Mask(interval, sizes, keys, torch.device(device or "cpu"), documents, padding)


def _lengths(q_offset: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """The keys of each row after a step, which only the device knows; not a view of what the cache changes."""
    batch_size, q_length, _ = sizes
    return (q_offset + q_length).to(torch.int32).repeat(batch_size)


def _numbered(documents: Tensor) -> Tensor:
    """The documents of each row with the numbers 0, 1, 2 and so on, on the CPU."""
    steps = documents.cpu().diff(dim=1)
    if bool((steps < 0).any()):
        raise ValueError(
            "the model asks for a mask of several sequences in a row that do not lie one after the other; cuteflash "
            'does not support it. Use attn_implementation="sdpa" or "eager" for this input'
        )
    return pad((steps != 0).long().cumsum(1), (1, 0))
