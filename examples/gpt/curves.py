"""Loss curves: do ours and torch's agree within noise, and the picture of them.

Two correct implementations of attention round differently, and training amplifies the differences: curves from the
same seed drift apart without either being wrong. How far is measured, not assumed: torch is trained several times, from
initial weights that are *nudged*. Each is changed at random by at most as much as rounding it to the run's dtype would,
an error that autocast makes anyway. Batches and weights being equal otherwise, the far larger noise of data and
initialisation can hide nothing.

The distance of two runs is the root mean square, over all steps, of the difference of their training losses. It varies
severalfold from pair to pair, so that the largest among torch's runs is the measure of the noise; of five runs, since
the largest of three varies twofold itself. Ours agrees if at most `FACTOR` times that are

- the median of its distances to torch's runs,
- and the distance of its last validation loss from the mean of torch's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from .training import History

FACTOR = 2.0
RESOLUTION = 1e-6  # nats; fp32 losses of a few nats are not told apart more finely

# Drawn in this order: a thinner line lies within a thicker one if the two agree.
TORCHS_STYLE = {"color": "#d1495b", "linewidth": 2.4}
NUDGED_STYLE = {"color": "#8d99ae", "linewidth": 1.2}
OUR_STYLE = {"color": "#0b6e4f", "linewidth": 0.9}


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """How far our run is from torch's, and those from each other; all in nats a byte.

    Attributes:
        gap: the median of the distances of our run to torch's runs.
        validation_gap: of our last validation loss from the mean of torch's.
        noise: the largest distance of two of torch's runs.
    """

    gap: float
    validation_gap: float
    noise: float

    @property
    def allowed(self) -> float:
        return max(FACTOR * self.noise, RESOLUTION)

    @property
    def agree(self) -> bool:
        return self.gap <= self.allowed and self.validation_gap <= self.allowed  # False for NaN

    def __str__(self) -> str:
        verdict = "agree" if self.agree else "DO NOT agree"
        return (
            f"The loss curves {verdict} within noise: cuteflash's differs from torch's by {self.gap:.2e} nats (rms "
            f"over the steps; validation {self.validation_gap:.2e}), torch's own, from weights that differ by one "
            f"rounding, by up to {self.noise:.2e}; allowed are {self.allowed:.2e}."
        )


def judge(ours: History, torchs: Sequence[History]) -> Judgement:
    """Compare our run with torch's, of which there are at least two."""
    validation = fmean(history.validation[-1][1] for history in torchs)
    return Judgement(
        median(distance(ours.losses, history.losses) for history in torchs),
        abs(ours.validation[-1][1] - validation),
        max(distance(a.losses, b.losses) for a, b in itertools.combinations(torchs, 2)),
    )


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """Root mean square of the differences."""
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(losses, others, strict=True)) / len(losses))


def plot(histories: Mapping[str, History], path: pathlib.Path, title: str) -> None:
    """The losses of all runs, and below them how far each is from the first, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(2, 1))
    first, *others = histories
    for name, history in histories.items():
        style: Any = TORCHS_STYLE if name == first else OUR_STYLE if name == others[-1] else NUDGED_STYLE
        above.plot(history.losses, label=name, **style)
        above.plot(*zip(*history.validation), linestyle="none", marker="o", markersize=4, color=style["color"])
        if name != first:
            gaps = [abs(a - b) for a, b in zip(history.losses, histories[first].losses, strict=True)]
            below.plot(gaps, label=f"{name} - {first}", **style)
    above.set_ylabel("loss, nats a byte (dots: validation)")
    below.set_ylabel("absolute difference")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9)
    if below.lines:
        below.set_yscale("log")
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
