"""The findings as a page: counts by outcome, then who is where and why."""

from __future__ import annotations

import collections
import re
import textwrap

from .probes import FAILS, NO_ATTENTION, NO_REFERENCE, REFUSED, RIGHT, WRONG, Finding

# What every model is refused, so that no architecture stands out by it.
_ALWAYS = ("attention weights", "dropout in training")

OUTCOMES = {
    "right": "equal to eager attention in every probe",
    "right in part": "right, and some settings or inputs are refused with the reason",
    "refused at load": "refused by us when the model is built",
    "refused at the first call": "refused by us when it runs",
    "no attention": "nothing to do: convolutions, state spaces and the like",
    "not built": "no tiny model here that runs with eager attention; nothing is known",
    "fails": "an error that is not ours, and eager attention has none",
    "wrong": "differs from eager attention, or never calls us",
}


def outcome(findings: list[Finding]) -> str:
    """What became of an architecture, a key of OUTCOMES."""
    seen = {finding.outcome for finding in findings}
    if WRONG in seen:
        return "wrong"
    if FAILS in seen:
        return "fails"
    refused = [finding for finding in findings if finding.outcome == REFUSED and not finding.probe.endswith(_ALWAYS)]
    if RIGHT in seen:
        return "right in part" if refused else "right"
    if refused:
        loads = all(finding.probe.endswith("load") for finding in refused)
        return "refused at load" if loads else "refused at the first call"
    return "no attention" if NO_ATTENTION in seen else "not built"


def summary(findings: list[Finding]) -> str:
    """One line for one architecture."""
    result = outcome(findings)
    telling = {"wrong": (WRONG,), "fails": (FAILS,), "not built": (NO_REFERENCE,)}.get(result, (REFUSED,))
    reasons = [f"{finding.probe}: {finding.reason}" for finding in _telling(findings) if finding.outcome in telling]
    return f"{result} ({len(findings)} probes)" + (f"; {reasons[0][:200]}" if reasons else "")


def render(found: dict[str, list[Finding]]) -> str:
    """Markdown of the whole sweep."""
    import transformers

    by_outcome: dict[str, list[str]] = {name: [] for name in OUTCOMES}
    for name in sorted(found):
        by_outcome[outcome(found[name])].append(name)
    probes = sum(len(findings) for findings in found.values())
    lines = [f"transformers {transformers.__version__}: {len(found)} architectures, {probes} probes.", ""]
    lines += ["| outcome | architectures | |", "|---|---|---|"]
    lines += [f"| {name} | {len(by_outcome[name])} | {meaning} |" for name, meaning in OUTCOMES.items()]
    for name, members in by_outcome.items():
        if not members:
            continue
        lines += ["", f"### {name.capitalize()} ({len(members)})", ""]
        if name in ("right", "no attention"):
            lines += _wrapped(members)
        else:
            lines += _by_reason({member: found[member] for member in members})
    return "\n".join(lines) + "\n"


def _by_reason(found: dict[str, list[Finding]]) -> list[str]:
    """A paragraph for every reason, most frequent first."""
    members = collections.defaultdict(list)
    for name, findings in found.items():
        for reason in dict.fromkeys(_reason(finding) for finding in _telling(findings)):
            members[reason].append(name)
    lines = []
    for reason, names in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += _wrapped(names, f"- {reason}: ")
    return lines


def _telling(findings: list[Finding]) -> list[Finding]:
    """The findings that say why, the gravest only."""
    for kind in (WRONG, FAILS, REFUSED, NO_REFERENCE):
        told = [item for item in findings if item.outcome == kind and not item.probe.endswith(_ALWAYS)]
        if told:
            return told
    return []


def _reason(finding: Finding) -> str:
    """A finding's reason without what differs from one architecture to the next."""
    text = finding.reason.partition(": ")[2] or finding.reason
    if finding.outcome in (WRONG, FAILS):
        return f"{finding.probe}: {text}"
    if finding.outcome == NO_REFERENCE:
        return _REFERENCE[0] if re.search("library|No module named|ImportError", finding.reason) else _REFERENCE[1]
    for pattern, meaning in _REASONS:
        if re.search(pattern, text):
            return re.search(pattern, text).expand(meaning)  # type: ignore[union-attr]
    return text


_REFERENCE = (
    "needs a package that is not installed",
    "the sweep knows no small configuration or inputs",
)
_REASONS = (
    (r"(\w+) \([^)]*\) is attention code", r"a layer computes attention in code of its own (`\1`)"),
    ("its attention is code of its own", "attention is code of its own, not behind the attention interface"),
    ("of the flash implementations it allows", "allows only kernels that know its sparsity"),
    ("attention sinks|has sinks", "attention sinks of each query"),
    ("position bias", "an additive position bias"),
    ("sparse attention", "sparse attention to selected keys"),
    ("packed into one row", "sequences packed into one row"),
    (r"asks for an attention mask \(([^)]*)\)", r"a mask that is not causal, sliding or full (`\1`)"),
    ("works on the attention mask itself", "code of its own changes the mask"),
    ("made by the model or the caller", "makes a four-dimensional mask of its own"),
    ("gives no attention mask", "causal layers without a mask"),
    ("bound on positions", "a window over a static cache that reaches behind the last query"),
    ("attention_mask has shape", "a mask of other lengths than the attention"),
    ("padding between tokens", "padding between tokens in a sliding window"),
    (r"head_dim\w*\) is (\d+)", r"head dim \1"),
)


def _wrapped(names: list[str], head: str = "") -> list[str]:
    indent = "  " if head else ""
    return textwrap.wrap(
        head + ", ".join(names), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
