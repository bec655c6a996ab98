"""Ways of doing one thing on several shapes, each checked, then timed beside a copy of as many bytes."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cuteflash.tune.timing import Runner, first_call, interleaved, median

from . import device
from .contest import add_shapes, one_line


class Trial(NamedTuple):
    """One way on one shape.

    Attributes:
        nbytes: what a call reads and writes.
        call: the call.
        complaint: the first call's result → what is wrong with it, None if nothing is.
    """

    nbytes: int
    call: Callable[[], Any]
    complaint: Callable[[Any], str | None]


class Measured(NamedTuple):
    """Of each way its bytes, and the problem or microseconds, GB/s and the rate over that of the copy.

    Attributes:
        results: by way.
        runners: of the ways without a problem.
    """

    results: dict[str, dict[str, Any]]
    runners: dict[str, Runner]


def measure(trials: Mapping[str, Callable[[], Trial]], where: torch.device, rounds: int) -> Measured:
    """All ways; a trial is made right before it is checked."""
    results: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    copies: dict[str, Runner] = {}
    for name, make in trials.items():
        trial = make()
        results[name] = {"bytes": trial.nbytes}
        repeat = functools.partial(_repeat, trial.call)
        try:
            wrong = trial.complaint(first_call(repeat, where))
        except Exception as failure:
            wrong = one_line(failure)
        if wrong:
            results[name]["problem"] = wrong
            continue
        runners[name] = repeat
        if _copy_name(trial.nbytes) not in copies:
            copies[_copy_name(trial.nbytes)] = copier(trial.nbytes, where)
    times = interleaved(runners | copies, where, rounds)
    for name in runners:
        nbytes = results[name]["bytes"]
        us, copied = (1e3 * median(times[key]) for key in (name, _copy_name(nbytes)))
        results[name] |= {"us": us, "gbps": nbytes / us / 1e3, "of_copy": copied / us}
    return Measured(results, runners)


def _repeat(call: Callable[[], Any], calls: int) -> Any:
    with torch.inference_mode():
        for _ in range(calls):
            out = call()
    return out


def _copy_name(nbytes: int) -> str:
    return f"copy of {nbytes}"


def copier(nbytes: int, where: torch.device) -> Runner:
    """A runner that copies, reading and writing `nbytes` together."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=where)
    return functools.partial(_repeat, functools.partial(torch.empty_like(source).copy_, source))


def run(
    shapes: Sequence[Any], measure: Callable[[Any], dict[str, Any]], where: torch.device, path: pathlib.Path | None
) -> dict[str, Any]:
    """Measure all shapes; the file at `path` is rewritten after each."""
    result: dict[str, Any] = {"environment": device.environment(where)}
    result["copy_gbps"] = device.copy_gbps(where, *(() if where.type == "cuda" else (1 << 20,)))
    return add_shapes(result, shapes, measure, where, path)


def table(result: dict[str, Any], about: str, ways: Sequence[str], text: Callable[[dict[str, Any], str], str]) -> str:
    """A row for each way, a column for each shape, and notes, in markdown.

    Args:
        result: of `run`.
        about: what the cells are, in words.
        ways: their names.
        text: (a shape's entry, way) → the cell of a way without a problem.
    """
    shapes, environment = result["shapes"], result["environment"]

    def cell(shape: dict[str, Any], way: str) -> str:
        return "wrong" if "problem" in shape["results"][way] else text(shape, way)

    lines = [
        f"{environment['gpu']}, {environment['date']}. {about}",
        "",
        f"| | {' | '.join(shape['label'] for shape in shapes)} |",
        f"|---|{'---|' * len(shapes)}",
        *(f"| {way} | {' | '.join(cell(shape, way) for shape in shapes)} |" for way in ways),
        "",
        f"- same run: copy {result['copy_gbps']:.0f} GB/s",
    ]
    return "\n".join([*lines, *(f"- {line}" for line in problem_lines(result))]) + "\n"


def problem_lines(result: dict[str, Any]) -> list[str]:
    """Everything that was wrong or failed, in words."""
    return [
        f"{shape['label']}, {way}: {entry['problem']}"
        for shape in result["shapes"]
        for way, entry in shape["results"].items()
        if "problem" in entry
    ]


def is_wrong(result: dict[str, Any]) -> bool:
    """Whether something was wrong or failed."""
    return bool(problem_lines(result))
