"""Draws a result: TFLOP/s over sequence length."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from cuteflash.tune.inputs import PLAIN

from .names import DETERMINISTIC, TITLES, is_of_peer
from .rates import Result, kind_of, names_of, parts, rate, types_of

COLOURS = {
    "sm90": "#0b6e4f",
    "sm80": "#7cb518",
    "fa4": "#d1495b",
    "cudnn": "#3066be",
    "fa2": "#8d99ae",
    "sm90-fp8-vt": "#e07a1f",
    "sm90-fp8": "#f2b134",
    "cudnn-fp8": "#3066be",
}


def plot(result: Result, path: pathlib.Path) -> None:
    """TFLOP/s over sequence length on plain inputs, one panel per head dim, mask and element type, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for cell in result["cells"] if kind_of(cell) == PLAIN]
    head_dims = sorted({cell["head_dim"] for cell in cells})
    kinds = list(dict.fromkeys((cell["mask"], cell.get("dtype", result["dtype"])) for cell in cells))
    size = (4.2 * len(head_dims) + 0.6, 3.2 * len(kinds) + 0.6)
    figure, axes = pyplot.subplots(len(kinds), len(head_dims), figsize=size, squeeze=False, sharex=True)
    for row, (mask, dtype) in enumerate(kinds):
        for column, head_dim in enumerate(head_dims):
            same = {"mask": mask, "head_dim": head_dim, "dtype": dtype}
            panel = [cell for cell in cells if all(cell.get(name, dtype) == value for name, value in same.items())]
            _plot_panel(axes[row][column], sorted(panel, key=lambda cell: int(cell["seqlen"])))
            title = f"head dim {head_dim}, {mask}"
            axes[row][column].set_title(title if dtype == result["dtype"] else f"{title}, {dtype}", fontsize=10)
        axes[row][0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"Attention {parts(result)['cells']}, {types_of(result)}, {result['environment']['gpu']}", fontsize=12
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_panel(axis: Any, cells: Sequence[Result]) -> None:
    for name in names_of(cells):
        if name.endswith(DETERMINISTIC):
            continue  # a point of a table, and one line too many in a panel
        points = [(cell["seqlen"], value) for cell in cells if (value := rate(cell, name)) is not None]
        ours = not is_of_peer(name)
        style = {"color": COLOURS[name], "linewidth": 2.2 if ours else 1.4, "linestyle": "-" if ours else "--"}
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=TITLES[name], **style)
    lengths = sorted({cell["seqlen"] for cell in cells})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
