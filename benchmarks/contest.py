"""One cell, several implementations: each is checked, and the correct ones are timed side by side."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cuteflash.tune import accuracy
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.machine import Matmul
from cuteflash.tune.peers import PEERS
from cuteflash.tune.results import round_factors
from cuteflash.tune.timing import BATCH_MS, ROUNDS, HangError, Runner, first_call, interleaved, median, spread

MATMUL = "matmul"  # its name among the runners

Maker = Callable[[Inputs], Runner]  # an implementation over the inputs of one cell


def measure(
    cell: Cell, makers: Mapping[str, Maker], device: torch.device, rounds: int = ROUNDS, matmul: Matmul | None = None
) -> dict[str, Any]:
    """Check every implementation, then time the correct ones side by side, and a matrix product if one is given.

    The last correct one (peers come last) provides the output that the others are compared with. An implementation
    that raises or is wrong has a "problem"; a peer without such a mask is "left out", and a peer's rms error is
    reported, not judged. Times are medians of the rounds, after the removal of each round's common drift.

    Raises:
        HangError: the device does not finish a call.
    """
    inputs = make_inputs(cell, device)
    reference = accuracy.make_reference(inputs)
    results: dict[str, dict[str, Any]] = {name: {} for name in makers}
    runners: dict[str, Runner] = {}
    known_right: torch.Tensor | None = None
    for name in reversed(list(makers)):
        checked = results[name]
        try:
            run = makers[name](inputs)
            out = _checked_call(run, inputs, device)
        except HangError:
            raise
        except Exception as failure:
            kind = "left out" if name in PEERS and isinstance(failure, NotImplementedError) else "problem"
            checked[kind] = one_line(failure)
            continue
        errors = accuracy.errors(out, reference)
        checked |= {"error": errors.maximum, "rms": errors.rms, "rms_ratio": reference.rms_ratio(errors)}
        problem = accuracy.complaint(out, reference, known_right)
        if problem is None and name not in PEERS:
            problem = accuracy.imprecision(out, reference)
        if problem:
            checked["problem"] = problem
        elif known_right is None:
            known_right = out.clone()
        runners[name] = run
    del known_right
    ordered = {name: runners[name] for name in makers if name in runners}
    times = _times(ordered | ({MATMUL: matmul.run} if matmul else {}), device, rounds)
    for name in ordered:
        milliseconds = median(times[name])
        tflops = cell.flops / (milliseconds * 1e9)
        results[name] |= {"ms": milliseconds, "spread": spread(times[name]), "tflops": tflops}
    beside = {"matmul_tflops": matmul.flops / (median(times[MATMUL]) * 1e9)} if matmul else {}
    return {
        "label": cell.label,
        "head_dim": cell.head_dim,
        "mask": cell.mask,
        "dtype": cell.dtype,
        "inputs": cell.inputs,
        "seqlen": cell.seqlen,
        "batch": cell.batch,
        "heads": cell.heads,
        "torch_error": reference.low_precision.maximum,
        "tolerance": reference.tolerance.maximum,
        "torch_rms": reference.low_precision.rms,
        "results": results,
        **beside,
    }


def _times(runners: Mapping[str, Runner], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call in each round, with each round's common drift removed."""
    samples = interleaved(runners, device, rounds, BATCH_MS)
    factors = round_factors(list(samples.values()))
    return {name: [ms / factor for ms, factor in zip(own, factors, strict=True)] for name, own in samples.items()}


def _checked_call(run: Runner, inputs: Inputs, device: torch.device) -> torch.Tensor:
    first_call(run, device)  # compiles
    accuracy.poison(inputs.q)
    return first_call(run, device)


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
