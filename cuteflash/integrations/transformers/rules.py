"""The meaning of a mask function of transformers: an interval of keys around the query, and documents in a row.

transformers describes a mask by a function of the positions of query and key, put together from a few known ones:
causal, full, sliding windows, chunks, packed sequences, and unions and intersections of them. They are closures made
anew for each mask, and recognised here by their code objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[..., Any]


class Interval(NamedTuple):
    """A query at position p sees the keys at p - left ... p + right; None means unbounded on that side.

    A window of 0 keys, which some models ask for and do not use, has left = -1: the query does not see itself.
    """

    left: int | None
    right: int | None


FULL = Interval(None, None)
CAUSAL = Interval(None, 0)


class Rule(NamedTuple):
    """Which keys a query sees: those of its interval that belong to its own document.

    Attributes:
        interval: the keys around the query.
        documents: (batch, positions), equal numbers for positions of one document of a row, ascending; None if every
            row is one document.
    """

    interval: Interval
    documents: Tensor | None = None


def rule_of(mask_function: MaskFunction | None, positions: int) -> Rule:
    """What a mask function lets a query see.

    Args:
        mask_function: as transformers gives it to an entry of its mask interface; None is causal.
        positions: how many positions queries and keys span; a chunk at least as long contains them all.

    Raises:
        ValueError: the keys of a query are not one interval of its document, or the function is not known here.
    """
    found = Rule(CAUSAL) if mask_function is None else _rule(mask_function, positions)
    if found is None:
        raise _unsupported(mask_function)
    return found


def _rule(function: MaskFunction, positions: int) -> Rule | None:
    """As `rule_of`; None if a query sees no key at all."""
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return Rule(CAUSAL)
    if function is masks.bidirectional_mask_function:
        return Rule(FULL)
    code = getattr(function, "__code__", None)
    if code is None:
        raise _unsupported(function)
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or ())}
    if code is masks.sliding_window_overlay(1).__code__:
        return Rule(Interval(cells["sliding_window"] - 1, None))  # a causal window counts the query itself ...
    if code is masks.sliding_window_bidirectional_overlay(1).__code__:
        return Rule(Interval(cells["sliding_window"], cells["sliding_window"]))  # ... and this one does not
    if code is masks.and_masks(masks.causal_mask_function).__code__:
        return _intersection([_rule(part, positions) for part in cells["mask_functions"]], function)
    if code is masks.or_masks(masks.causal_mask_function).__code__:
        return _union([_rule(part, positions) for part in cells["mask_functions"]], function)
    if code is masks.chunked_overlay(1, torch.empty(0)).__code__ and positions <= cells["chunk_size"]:
        return Rule(FULL)
    if code is masks.packed_sequence_mask_function(torch.empty(0)).__code__:
        documents = cells["packed_sequence_mask"]
        return Rule(FULL, documents if bool(documents.any()) else None)  # `torch.compile` includes it for one, too
    if _is_remap(code):
        return _rule(cells["mask_function"], _span(cells["position_ids"]))
    blockwise = getattr(masks, "blockwise_overlay", None)
    if blockwise and code is blockwise(torch.empty(0)).__code__ and not bool((cells["block_sequence_ids"] >= 0).any()):
        return None  # blocks of images that attend to themselves, in an input without images
    raise _unsupported(function)


def _is_remap(code: Any) -> bool:
    """Whether this counts positions from the beginning of each document, which changes no distance within one."""
    from transformers import masking_utils as masks

    remap = getattr(masks, "remap_positions_for_packed_sequence", None)  # transformers before 5.18 does not have it
    return remap is not None and code is remap(masks.causal_mask_function, torch.empty(0)).__code__


def _span(position_ids: Tensor) -> int:
    """How many positions these span, counted from 0; more than any chunk has if one lies before 0."""
    return sys.maxsize if bool((position_ids < 0).any()) else int(position_ids.max()) + 1


def _intersection(parts: list[Rule | None], function: MaskFunction) -> Rule | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    documents = [part.documents for part in known if part.documents is not None]
    if len(documents) > 1:
        raise _unsupported(function)
    sides = zip(*(part.interval for part in known))
    interval = Interval(*(min((bound for bound in side if bound is not None), default=None) for side in sides))
    return Rule(interval, documents[0] if documents else None)


def _union(parts: list[Rule | None], function: MaskFunction) -> Rule | None:
    """An interval, too: each of them holds the query's own position."""
    known = [part for part in parts if part is not None]
    if len(known) <= 1:
        return known[0] if known else None
    if any(part.documents is not None for part in known):
        raise _unsupported(function)
    return Rule(Interval(*(None if None in side else max(side) for side in zip(*(part.interval for part in known)))))


def _unsupported(function: MaskFunction | None) -> ValueError:
    name = getattr(function, "__qualname__", function)
    return ValueError(
        f"the model asks for an attention mask ({name}) that cuteflash does not support; allowed: causal, "
        "sliding window and full attention, each with padding or with several sequences in a row. "
        'Use attn_implementation="sdpa" or "eager" for this input'
    )
