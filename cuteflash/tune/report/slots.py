"""Who wins each slot (mask, dtype, lengths, query rows), how far before the default and the next, and against peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuteflash.tune.report.columns import short
from cuteflash.tune.results import Run, Slot, lead
from cuteflash.tune.select import Decision, cover, decide

# What a slot comes to.
INCOMPLETE = "no candidate was timed on all its lengths"
DEFAULT_WINS = "the default wins"
FIRST = "nothing runs it yet"
UNCOMPARED = "the default was not timed"
REPLACED = "replaces the default"
CLOSE = "beats the default, which is close enough to stay"
STAYS = "the default stays"

ByCell = Mapping[str, Run]
ByPeer = Mapping[str, Run]


def slot_facts(
    runs: Sequence[Run], peers: Mapping[str, ByPeer], defaults: Mapping[Slot, str], number: Mapping[str, int]
) -> list[dict[str, Any]]:
    """What each slot of one family and pair of head dims comes to, as JSON values.

    Args:
        runs: of the candidates.
        peers: cell → peer's name → its run.
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
        slot = decision.slot
        row, default = rows.get(slot), defaults.get(slot)
        facts.append(
            {"mask": slot.mask, "dtype": slot.dtype, "lengths": slot.shape}
            | {"default": number.get(default) if default is not None else None}
            | {"outcome": _outcome(decision, row, default)}
            | (_winner(decision, row, timed[slot], peers, number) if decision.standings else {"winner": None})
        )
    return facts


def _outcome(decision: Decision, row: str | None, default: str | None) -> str:
    """One of the phrases above; `default` is the shipped row, timed or not."""
    if not decision.standings:
        return INCOMPLETE
    if default is None:
        return FIRST
    if decision.default is None:
        return UNCOMPARED
    if decision.standings[0].candidate == default:
        return DEFAULT_WINS
    if row != default:
        return REPLACED
    return STAYS if decision.allowed == (default,) else CLOSE


def _winner(
    decision: Decision,
    row: str | None,
    timed: Mapping[str, ByCell],
    peers: Mapping[str, ByPeer],
    number: Mapping[str, int],
) -> dict[str, Any]:
    """The fastest, its margins, and the row that the table would have with its gain over a timed default."""
    standings = decision.standings
    best = standings[0].candidate
    second = standings[1].candidate if len(standings) > 1 else None
    before_default = decision.default not in (None, best)
    chosen = decision.standing(row) if row is not None else None
    return {
        "winner": number[best],
        "margin": gain(timed[best], timed[str(decision.default)]) if before_default else None,
        "ahead": gain(timed[best], timed[second]) if second is not None else None,
        "row": number[row] if row is not None else None,
        "row_worst": short(chosen.worst) if chosen is not None else None,
        "row_gain": short(chosen.gain) if chosen is not None else None,
        "peers": _against_peers(timed[best], peers),
    }


def gain(run: ByCell, other: ByCell) -> list[float | None]:
    """How much faster a candidate is than another, 0.05 is 5 %: [at the medians, at least, at most].

    See `results.lead`. None is unknown: a single sample has no interval.
    """
    middle, least, most = lead(run, other)
    return [short(middle), short(least) if least > -1 else None, short(most)]


def _against_peers(best: ByCell, peers: Mapping[str, ByPeer]) -> dict[str, dict[str, Any]]:
    """Peer → how many times as fast the winner is: by geometric mean, in its worst cell; and if it is surely slower."""
    found = {}
    for name in sorted({name for cell in best for name in peers.get(cell, {})}):
        beside = {cell: peers[cell][name] for cell in best if name in peers.get(cell, {})}
        middle, _, most = lead(best, beside)
        worst = min(run.ms / best[cell].ms for cell, run in beside.items())
        found[name] = {"mean": short(1 + middle), "worst": short(worst), "behind": most < 0}
    return found
