"""The meaning of a mask function of transformers, as an interval of keys around the query.

transformers describes a mask by a function of the positions of query and key, put together from a few known ones:
causal, full, sliding windows, chunks, packed sequences, and unions and intersections of them. They are closures made
anew for each mask, and recognised here by their code objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

MaskFunction = Callable[..., Any]


class Interval(NamedTuple):
    """A query at position p sees the keys at p - left ... p + right; None means unbounded on that side.

    A window of 0 keys, which some models ask for and do not use, has left = -1: the query does not see itself.
    """

    left: int | None
    right: int | None


FULL = Interval(None, None)
CAUSAL = Interval(None, 0)


def interval_of(mask_function: MaskFunction | None, positions: int) -> Interval:
    """The keys that a mask function lets a query see.

    Args:
        mask_function: as transformers gives it to an entry of its mask interface; None is causal.
        positions: how many positions queries and keys span; a chunk at least as long contains them all.

    Raises:
        ValueError: the keys of a query are not one interval, or the function is not known here.
    """
    found = CAUSAL if mask_function is None else _interval(mask_function, positions)
    if found is None:
        raise _unsupported(mask_function)
    return found


def _interval(function: MaskFunction, positions: int) -> Interval | None:
    """As `interval_of`; None if a query sees no key at all."""
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return CAUSAL
    if function is masks.bidirectional_mask_function:
        return FULL
    code = getattr(function, "__code__", None)
    if code is None:
        raise _unsupported(function)
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or ())}
    if code is masks.sliding_window_overlay(1).__code__:
        return Interval(cells["sliding_window"] - 1, None)  # a causal window counts the query itself ...
    if code is masks.sliding_window_bidirectional_overlay(1).__code__:
        return Interval(cells["sliding_window"], cells["sliding_window"])  # ... and this one does not
    if code is masks.and_masks(masks.causal_mask_function).__code__:
        return _intersection([_interval(part, positions) for part in cells["mask_functions"]])
    if code is masks.or_masks(masks.causal_mask_function).__code__:
        return _union([_interval(part, positions) for part in cells["mask_functions"]])
    if code is masks.chunked_overlay(1, torch.empty(0)).__code__ and positions <= cells["chunk_size"]:
        return FULL
    if _is_single(code, cells):
        return FULL
    if _is_remap(code):
        return _interval(cells["mask_function"], positions)
    blockwise = getattr(masks, "blockwise_overlay", None)
    if blockwise and code is blockwise(torch.empty(0)).__code__ and not bool((cells["block_sequence_ids"] >= 0).any()):
        return None  # blocks of images that attend to themselves, in an input without images
    raise _unsupported(function)


def _is_single(code: Any, cells: dict[str, Any]) -> bool:
    """Whether this separates packed sequences and there is only one: `torch.compile` always includes the function."""
    from transformers import masking_utils as masks

    packed = masks.packed_sequence_mask_function(torch.empty(0)).__code__
    return code is packed and not bool(cells["packed_sequence_mask"].any())


def _is_remap(code: Any) -> bool:
    from transformers import masking_utils as masks

    remap = getattr(masks, "remap_positions_for_packed_sequence", None)  # transformers before 5.18 does not have it
    return remap is not None and code is remap(masks.causal_mask_function, torch.empty(0)).__code__


def _intersection(parts: list[Interval | None]) -> Interval | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Interval(*(min((bound for bound in side if bound is not None), default=None) for side in zip(*known)))


def _union(parts: list[Interval | None]) -> Interval | None:
    """An interval, too: each of them holds the query's own position."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return Interval(*(None if None in side else max(side) for side in zip(*known)))


def _unsupported(function: MaskFunction | None) -> ValueError:
    name = getattr(function, "__qualname__", function)
    return ValueError(
        f"the model asks for an attention mask ({name}) that cuteflash does not support; allowed: causal, "
        'sliding window and full attention, each with padding. Use attn_implementation="sdpa" or "eager" for this input'
    )
