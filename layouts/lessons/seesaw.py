"""The lesson on decoding latent attention: two warpgroups that trade P, what each waits for, a model of the timeline.

The order of issue is that of `attend_first`, `take_second` and `attend_second` (`kernels/sm90/mla_decode_mma.py`), and
the page shows their lines. The model leaves out latencies, loads, maxima, conversions and rescaling.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.kernels.sm90 import mla_decode_mma
from cuteflash.mla_problem import HEADS_MAX, LATENT_DIM, LATENT_DIM_V, MlaProblem
from cuteflash.traits.mla_sm90 import CONSUMERS, MlaTraitsSm90

from ..rows import Drawn
from .sources import source_of
from .timeline import (
    EXPONENTIAL,
    EXPONENTIALS_PER_CLOCK,
    FLOPS_PER_CLOCK,
    TENSOR,
    Key,
    Task,
    simulate,
    spans_data,
)

PAGES = 6  # of the model: three pairs
FUNCTIONS = ("attend_first", "take_second", "attend_second", "take_first")


class Event(NamedTuple):
    """One thing that a warpgroup does of a pair of pages, and where the kernel does it.

    Attributes:
        what: "S", "exp", or the product with P of the "own" or the "other" warpgroup's page.
        page: 0 or 1, of the pair.
        waits: of the same pair the events, as (warpgroup, what, page), that come before, beside the warpgroup's own
            products, which run in the order of issue.
        function, call: a call in the kernel's source, which is in one line of it.
        words: what happens.
    """

    warpgroup: int
    what: str
    page: int
    waits: tuple[Key, ...]
    function: str
    call: str
    words: str


EVENTS = (
    Event(0, "S", 0, (), "attend_first", "issue_scores(", "S of the first page, group by group as it arrives."),
    Event(1, "S", 1, (), "attend_second", "issue_scores(", "S of the second page, issued behind that of the first."),
    Event(0, "exp", 0, ((0, "S", 0),), "attend_first", "soften(", "Maxima and exponentials of the first page."),
    Event(
        0, "own", 0, ((0, "exp", 0),), "attend_first", "issue_own(",
        "P0 has gone to shared memory, and a barrier has said so; the left half of O takes it from the registers.",
    ),
    Event(
        1, "other", 0, ((0, "exp", 0),), "take_first", "issue_other(",
        "The right half of O takes P0 from shared memory. Its maxima are those that the second page's go on from.",
    ),
    Event(
        1, "exp", 1, ((1, "S", 1), (0, "exp", 0)), "attend_second", "soften(",
        "Maxima and exponentials of the second page, while the product with P0 runs.",
    ),
    Event(
        1, "own", 1, ((1, "exp", 1), (1, "other", 0)), "attend_second", "issue_own(",
        "P1 has gone to shared memory. O could be scaled once the product before was done.",
    ),
    Event(
        0, "other", 1, ((1, "exp", 1), (1, "other", 0)), "take_second", "issue_other(",
        "The left half of O takes P1 from shared memory, by P1's maxima.",
    ),
)  # fmt: skip


def latent_lesson_row() -> tuple[Drawn, str, Choice]:
    """The shipped row of 128 query heads on Hopper."""
    problem, target = MlaProblem("bf16"), "sm_90a"
    return problem, target, choose_shipped(problem, target, "sm90", "decode", HEADS_MAX)


def clocks(traits: MlaTraitsSm90) -> dict[str, tuple[str, int]]:
    """(unit, clocks) of each kind of event."""
    scores = traits.tile_m * traits.tile_n
    half = TENSOR, 2 * scores * (LATENT_DIM_V // CONSUMERS) // FLOPS_PER_CLOCK
    return {
        "S": (TENSOR, 2 * scores * LATENT_DIM // FLOPS_PER_CLOCK),
        "exp": (EXPONENTIAL, scores // EXPONENTIALS_PER_CLOCK),
        "own": half,
        "other": half,
    }


def tasks(traits: MlaTraitsSm90) -> list[Task]:
    """The events of all pairs. A warpgroup waits for its last product before it issues the next pair's scores."""
    units, found = clocks(traits), []
    queues: dict[int, list[Key]] = {who: [] for who in range(CONSUMERS)}
    for first in range(0, PAGES, CONSUMERS):
        for event in EVENTS:
            unit, cost = units[event.what]
            key = event.warpgroup, event.what, first + event.page
            after = [(who, what, first + page) for who, what, page in event.waits]
            if unit == TENSOR:
                after += queues[event.warpgroup][-1:]
                queues[event.warpgroup].append(key)
            found.append(Task(key, unit, cost, tuple(dict.fromkeys(after))))
    return found


def seesaw_data() -> dict[str, Any]:
    """The model's schedule, and each event with its line of the kernel's source."""
    _, _, choice = latent_lesson_row()
    traits = cast(MlaTraitsSm90, choice.traits)
    sources = {name: source_of(getattr(mla_decode_mma, name)) for name in FUNCTIONS}
    events = [
        event._asdict()
        | {"waits": [list(key) for key in event.waits], "line": sources[event.function].line(event.call)}
        for event in EVENTS
    ]
    return {
        "pages": PAGES,
        "clocks": {what: cost for what, (_, cost) in clocks(traits).items()},
        "schedule": spans_data(simulate(tasks(traits))),
        "events": events,
        "sources": {name: source.as_dict() for name, source in sources.items()},
    }
