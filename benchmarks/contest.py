"""One cell, several implementations: each is checked, and the correct ones are timed side by side."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cuteflash.tune.machine import Matmul
from cuteflash.tune.results import round_factors
from cuteflash.tune.timing import BATCH_MS, ROUNDS, HangError, Runner, first_call, interleaved, median, spread

from .judges import Judge
from .names import is_of_peer

MATMUL, FP8_MATMUL = "matmul", "fp8_matmul"  # their names among the runners

Maker = Callable[[Any], Runner]  # an implementation over the inputs of one cell


def measure(
    judge: Judge,
    makers: Mapping[str, Maker],
    device: torch.device,
    rounds: int = ROUNDS,
    matmul: Matmul | None = None,
    fp8_matmul: Matmul | None = None,
) -> dict[str, Any]:
    """Check every implementation, then time the correct ones side by side, and the matrix products that are given.

    The last correct one (peers come last) provides the result that the others are compared with. An implementation
    that raises or is wrong has a "problem"; a peer that lacks what a cell needs is "left out", and a peer's rms error
    is reported, not judged. Times are medians of the rounds, after the removal of each round's common drift.

    Raises:
        HangError: the device does not finish a call.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in makers}
    runners: dict[str, Runner] = {}
    known_right: Any = None
    for name in reversed(list(makers)):
        checked = results[name]
        is_peer = is_of_peer(name)
        try:
            run = makers[name](judge.inputs)
            result = _checked_call(run, judge, device)
        except HangError:
            raise
        except Exception as failure:
            kind = "left out" if is_peer and isinstance(failure, NotImplementedError) else "problem"
            checked[kind] = one_line(failure)
            continue
        checked |= judge.measured(result)
        problem = judge.complaint(result, known_right)
        if problem is None and not is_peer:
            problem = judge.imprecision(result)
        if problem:
            checked["problem"] = problem
        elif known_right is None:
            known_right = judge.kept(result)
        runners[name] = run
    del known_right
    ordered = {name: runners[name] for name in makers if name in runners}
    matmuls = {name: one for name, one in ((MATMUL, matmul), (FP8_MATMUL, fp8_matmul)) if one}
    times = _times(ordered | {name: one.run for name, one in matmuls.items()}, device, rounds)
    for name in ordered:
        milliseconds = median(times[name])
        tflops = judge.flops / (milliseconds * 1e9)
        results[name] |= {"ms": milliseconds, "spread": spread(times[name]), "tflops": tflops}
    beside = {f"{name}_tflops": one.flops / (median(times[name]) * 1e9) for name, one in matmuls.items()}
    return {**judge.facts, "results": results, **beside}


def _times(runners: Mapping[str, Runner], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call in each round, with each round's common drift removed."""
    samples = interleaved(runners, device, rounds, BATCH_MS)
    factors = round_factors(list(samples.values()))
    return {name: [ms / factor for ms, factor in zip(own, factors, strict=True)] for name, own in samples.items()}


def _checked_call(run: Runner, judge: Judge, device: torch.device) -> Any:
    first_call(run, device)  # compiles
    judge.poison()
    return first_call(run, device)


def remarks(cells: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ("problem", "left out")) -> list[str]:
    """What was wrong, failed or was left out in cells, each of which has a label and results by name: in words."""
    return [
        f"{cell['label']}, {name}: {kind}: {entry[kind]}"
        for cell in cells
        for name, entry in cell["results"].items()
        for kind in kinds
        if kind in entry
    ]


def one_line(failure: BaseException) -> str:
    """The failure in at most 300 characters."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]


def progress(cell: Mapping[str, Any]) -> str:
    """A cell's results in one line."""
    texts = [
        f"{name} {entry['tflops']:.0f}{' WRONG' if entry.get('problem') else ''}" if "tflops" in entry else f"{name} -"
        for name, entry in cell["results"].items()
    ]
    return f"{cell['label']:<26} {'  '.join(texts)}"


def add_shapes(
    result: dict[str, Any],
    shapes: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    where: torch.device,
    path: pathlib.Path | None,
) -> dict[str, Any]:
    """The result with what was measured of all shapes; the file at `path` is rewritten after each."""
    result["shapes"] = []
    for shape in shapes:
        result["shapes"].append(measure(shape))
        if path is not None:
            write(result, path)
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return result


def write(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a result as JSON, figures rounded to five digits; makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(dict(result)), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """JSON values with figures rounded to five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
