"""Who wins each slot (mask, dtype, shape class), by how much before the default and the next, and against the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuteflash.tune.report.columns import short
from cuteflash.tune.results import Run, Slot, lead
from cuteflash.tune.select import Decision, cover, decide, geometric_mean

ByCell = Mapping[str, Run]


def slot_facts(
    runs: Sequence[Run],
    peers: Mapping[str, Mapping[str, float]],
    defaults: Mapping[Slot, str],
    number: Mapping[str, int],
) -> list[dict[str, Any]]:
    """What each slot of one family and pair of head dims comes to, as JSON values.

    Args:
        runs: of the candidates.
        peers: cell → peer's name → milliseconds.
        defaults: slot → id of the shipped row's candidate.
        number: candidate id → its place in the page's lists.
    """
    decisions = decide(runs, defaults)
    rows = cover(decisions)
    timed: dict[Slot, dict[str, dict[str, Run]]] = {}
    for run in runs:
        timed.setdefault(run.slot, {}).setdefault(run.candidate, {})[run.cell] = run
    facts = []
    for decision in decisions:
        slot, own = decision.slot, timed[decision.slot]
        default = defaults.get(slot)
        facts.append(
            {"mask": slot.mask, "dtype": slot.dtype, "shape": slot.shape}
            | {"default": number.get(default) if default is not None else None, "has_default": default is not None}
            | {"default_timed": decision.default is not None}
            | (_winner(decision, rows.get(slot), own, number) if decision.standings else {"winner": None})
            | {"peers": _against_peers(decision, own, peers)}
        )
    return facts


def _winner(
    decision: Decision, row: str | None, timed: Mapping[str, ByCell], number: Mapping[str, int]
) -> dict[str, Any]:
    """The fastest, its margins, and the row that the table would have."""
    standings = decision.standings
    best = standings[0].candidate
    second = standings[1].candidate if len(standings) > 1 else None
    before_default = decision.default not in (None, best)
    chosen = decision.standing(row) if row is not None else None
    return {
        "winner": number[best],
        "margin": gain(timed[best], timed[str(decision.default)]) if before_default else None,
        "second": number[second] if second is not None else None,
        "ahead": gain(timed[best], timed[second]) if second is not None else None,
        "replaces": decision.default is None or decision.allowed != (decision.default,),
        "row": number[row] if row is not None else None,
        "row_worst": short(chosen.worst) if chosen is not None else None,
    }


def gain(run: ByCell, other: ByCell) -> list[float | None]:
    """How much faster a candidate is than another, 0.05 is 5 %: [at the medians, at least, at most].

    See `results.lead`. None is unknown: a single sample has no interval.
    """
    middle, least, most = lead(run, other)
    return [short(middle), short(least) if least > -1 else None, short(most)]


def _against_peers(
    decision: Decision, timed: Mapping[str, ByCell], peers: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float | None]]:
    """Peer → how many times as fast the winner is: by geometric mean, and in its worst cell."""
    if not decision.standings:
        return {}
    best = timed[decision.standings[0].candidate]
    found = {}
    for name in sorted({name for cell in best for name in peers.get(cell, {})}):
        ratios = [peers[cell][name] / run.ms for cell, run in best.items() if name in peers.get(cell, {})]
        found[name] = {"mean": short(geometric_mean(ratios)), "worst": short(min(ratios))}
    return found
