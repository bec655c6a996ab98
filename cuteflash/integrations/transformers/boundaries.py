"""Boundaries of sequences that are given beside the mask, as `DataCollatorWithFlattening` makes them for flash-attn.

Eager attention does not know them: the mask alone decides. A causal mask keeps sequences apart if the model's
`position_ids` restart with each of them, and then these boundaries say the same or are refused. Masks of attention to
both sides know nothing of positions, so there the boundaries decide, as they do for flash-attn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash.integrations.transformers.mask import Mask
from cuteflash.integrations.transformers.rules import FULL
from cuteflash.integrations.transformers.sequences import Sequences

ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")


def sequences_of(mask: Mask, queries: int, kwargs: dict[str, Any]) -> Sequences | None:
    """The sequences of a call: those of the mask, which boundaries may add to. None if every row is one sequence.

    Args:
        mask: of the call.
        queries: in a row of the batch.
        kwargs: `cu_seq_lens_q` and `cu_seq_lens_k`, integers from 0 to the end of the flattened batch, `max_length_q`
            and `max_length_k`; all of them may be missing. Read once for all layers of a model.

    Raises:
        TypeError, ValueError: the boundaries are none, or are not those of the mask.
    """
    given = tuple(kwargs.get(name) for name in ENDS + LONGEST)
    if all(ends is None for ends in given[:2]):
        return mask.sequences
    for known, of_length, sequences in mask.answers:
        if of_length == queries and all(x is y for x, y in zip(known, given, strict=True)):
            return sequences
    answer = _answer(mask, queries, given)
    mask.answers.append((given, queries, answer))
    return answer


def _answer(mask: Mask, queries: int, given: tuple[Any, ...]) -> Sequences | None:
    batch = mask.shape[0]
    found: list[Tensor | None] = []
    agrees = True
    for index, length in enumerate((queries, mask.used)):
        documents = None
        if given[index] is not None:
            ends = _read(ENDS[index], given[index], batch, length)
            _check_longest(LONGEST[index], given[index + 2], ends)
            documents = _documents(ends, batch, length)
            of_mask = torch.zeros_like(documents) if mask.documents is None else mask.documents
            agrees = agrees and torch.equal(documents, of_mask)
        found.append(documents)
    if agrees:
        return mask.sequences
    if mask.interval.right == 0 or mask.documents is not None or mask.has_padding:
        names = " and ".join(name for name, ends in zip(ENDS, given) if ends is not None)
        raise ValueError(
            f"{names} and the attention mask do not agree on the sequences of a row; cuteflash follows the mask, which "
            "keeps sequences apart if position_ids restart with each of them, without an attention_mask and with "
            "use_cache=False"
        )
    of_q, of_k = found
    if of_q is None or of_k is None:
        raise ValueError(f"{ENDS[of_k is None]} is missing; allowed: both {' and '.join(ENDS)}, or neither")
    if torch.equal(of_q, of_k):
        return Sequences(of_q, of_q)
    if mask.interval != FULL or not torch.equal(of_q[:, -1:], of_k[:, -1:]):
        raise ValueError(
            f"{ENDS[0]} and {ENDS[1]} are of different sequences; allowed: equal ones, and in full attention equally "
            "many in every row"
        )
    return Sequences(of_q, of_k)


def _read(name: str, ends: Tensor | object, batch: int, length: int) -> Tensor:
    """Where sequences end in the flattened batch, on the CPU."""
    if not isinstance(ends, Tensor) or ends.dtype.is_floating_point or ends.dim() != 1 or not len(ends):
        what = f"{ends.dtype} of shape {tuple(ends.shape)}" if isinstance(ends, Tensor) else type(ends).__name__
        raise TypeError(f"{name} is {what}; allowed: a vector of integers")
    ends = ends.to("cpu", torch.long)
    if ends[0] != 0 or ends[-1] != batch * length or bool((ends.diff() < 0).any()):
        raise ValueError(
            f"{name} goes from {int(ends[0])} to {int(ends[-1])}; allowed: from 0 to {batch * length}, the positions "
            "of this attention, never decreasing"
        )
    if not bool(torch.isin(torch.arange(batch) * length, ends).all()):
        raise ValueError(f"{name} has a sequence that goes beyond a row of {length} positions; allowed: whole rows")
    return ends


def _check_longest(name: str, limit: Any, ends: Tensor) -> None:
    longest = max(ends.diff().tolist(), default=0)
    if limit is not None and int(limit) < longest:
        raise ValueError(f"{name} is {int(limit)}; allowed: {longest} or more, the length of the longest sequence")


def _documents(ends: Tensor, batch: int, length: int) -> Tensor:
    """The number of each position's sequence in its row, (batch, length)."""
    number = torch.searchsorted(ends.unique(), torch.arange(batch * length), right=True).view(batch, length)
    return number - number[:, :1]
