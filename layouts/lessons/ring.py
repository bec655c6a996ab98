"""The methods of `TmaRing`, for the lesson that plays its producer and consumers."""

from __future__ import annotations

from typing import Any

from cuteflash.atoms.barriers import TmaRing

from .sources import source_of

METHODS = ("stage", "phase", "acquire", "wait", "release")


def ring_data() -> dict[str, Any]:
    """The source of every method that moves a tile through the ring."""
    return {"sources": {name: source_of(getattr(TmaRing, name)).as_dict() for name in METHODS}}
