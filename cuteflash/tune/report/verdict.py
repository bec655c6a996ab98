"""A sweep's result in a sentence: how many problems get a faster row, by how much, and which peers stay ahead."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cuteflash.traits.length_class import LENGTH_CLASSES
from cuteflash.traits.row import Traits
from cuteflash.tune.explain import percent, title
from cuteflash.tune.peers import PEERS
from cuteflash.tune.report.slots import FIRST, INCOMPLETE, REPLACED, UNCOMPARED

PEER_WORDS = dict(zip(PEERS, ("FA4", "cuDNN", "FA2"), strict=True))
SHAPE_WORDS = {name: "decoding" if name == "decode" else name for name in LENGTH_CLASSES}
# What else a slot may come to that its reader should know, by outcome.
BESIDES = {
    FIRST: "{} {have} no shipped row",
    UNCOMPARED: "{} {have} a default that was not timed",
    INCOMPLETE: "{} {have} no candidate that was timed on all lengths",
}

Facts = Mapping[str, Any]


def headline(spaces: Sequence[Facts]) -> list[str]:
    """The verdict on all spaces of a page, a sentence for each kernel family; without any timing on the candidates."""
    families: dict[str, list[Facts]] = {}  # by the space's title without its head dims
    for space in spaces:
        if space["slots"]:
            families.setdefault(space["title"].rpartition(" ")[0], []).extend(space["slots"])
    if not families:
        considered = sum(len(space["ids"]) for space in spaces)
        left = sum(clocks is not None for space in spaces for clocks in space["costs"]["clocks"])
        return [f"Nothing has been timed yet: {left} of {considered} candidates are left."]
    sentences = {family: measured(slots) for family, slots in families.items()}
    if len(sentences) > 1:
        return [f"{family}: {sentence}." for family, sentence in sentences.items()]
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences.values()]


def measured(slots: Sequence[Facts]) -> str:
    """What timings came to, of `slots.slot_facts`."""
    gains = [slot["row_gain"] for slot in slots if slot["outcome"] == REPLACED]
    if gains:
        verb = "gets" if len(gains) == 1 else "get"
        words = [f"{len(gains)} of {_problems(len(slots))} {verb} a faster row, by up to {percent(max(gains))}"]
    else:
        words = [f"none of {_problems(len(slots))} gets a faster row"]
    counts = collections.Counter(slot["outcome"] for slot in slots)
    for outcome, text in BESIDES.items():
        if counts[outcome]:
            words.append(text.format(counts[outcome], have="has" if counts[outcome] == 1 else "have"))
    return "; ".join(words + _peers(slots))


def _peers(slots: Sequence[Facts]) -> list[str]:
    """Which peers are surely faster than the winner, and in how many problems of which length class."""
    timed = [slot for slot in slots if slot["winner"] is not None]
    present = [name for name in PEERS if any(name in slot["peers"] for slot in timed)]
    behind: dict[tuple[int, ...], list[str]] = {}  # places → peers that are ahead there
    for name in present:
        slower = [place for place, slot in enumerate(timed) if slot["peers"].get(name, {}).get("behind")]
        if slower:
            behind.setdefault(tuple(slower), []).append(PEER_WORDS[name])
    if present and not behind:
        return [f"nowhere behind {_and([PEER_WORDS[name] for name in present], 'or')}"]
    words = []
    for places, names in behind.items():
        counts = collections.Counter(timed[place]["lengths"].partition(",")[0] for place in places)
        some = [f"{counts[lengths]} {SHAPE_WORDS[lengths]}" for lengths in LENGTH_CLASSES if counts[lengths]]
        words.append(f"behind {_and(names)} in {_and(some)} {'one' if len(places) == 1 else 'ones'}")
    return [", ".join(words)] if words else []


def estimated(candidates: Mapping[str, Traits], scores: Sequence[float | None], shipped: Collection[str]) -> str:
    """What the analytic score says of candidates that were never timed.

    Args:
        candidates: by id.
        scores: their clocks, None of those that cannot run or were rejected.
        shipped: ids of those that are shipped rows.
    """
    clocks = {name: score for name, score in zip(candidates, scores, strict=True) if score is not None}
    if not clocks:
        return "no candidate is left"
    first = min(clocks, key=lambda name: clocks[name])
    said = f"not timed; by the analytic score {title(candidates[first])} comes first"
    rows = [name for name in clocks if name in shipped]
    if not rows:
        return said
    best = min(rows, key=lambda name: clocks[name])
    if best == first:
        return f"{said}, a shipped row"
    more = percent(clocks[best] / clocks[first] - 1)
    return f"{said}; the best shipped row takes {more} more clocks"


def _problems(count: int) -> str:
    return f"{count} problem" if count == 1 else f"{count} problems"


def _and(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
