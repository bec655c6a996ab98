"""The search space: every candidate of a kernel family for padded head dims, and why an architecture cannot run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cuteflash.traits.arch import FAMILIES, ArchSpec, Family
from cuteflash.traits.candidates import fwd_candidates_sm80, fwd_candidates_sm90
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

Traits = FwdTraitsSm80 | FwdTraitsSm90

_FWD_CANDIDATES: dict[Family, Callable[[int, int], Iterator[Traits]]] = {
    "sm80": fwd_candidates_sm80,
    "sm90": fwd_candidates_sm90,
}


def enumerate_fwd(family: Family, head_dim: int, head_dim_v: int) -> Iterator[Traits]:
    """The forward candidates of a family for padded head dims, each once.

    Raises:
        ValueError: no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    yield from dict.fromkeys(_FWD_CANDIDATES[family](head_dim, head_dim_v))


def prune(candidates: Iterable[Traits], arch: ArchSpec) -> list[tuple[Traits, str | None]]:
    """Each candidate with the reason why it cannot run on `arch`, None where it can; nothing is compiled."""
    return [(traits, traits.check(arch)) for traits in candidates]
