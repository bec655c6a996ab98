"""Run the sweep and print its table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
import warnings

from benchmarks.report import insert

from .probes import FAILS, NO_REFERENCE, WRONG, Finding, look_at
from .table import render, summary

SECONDS = 120  # an architecture


def main() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    parser = argparse.ArgumentParser(prog="python -m tests.transformers_sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--json", type=pathlib.Path, help="keep the findings here; those already in it are not made again"
    )
    parser.add_argument("--into", type=pathlib.Path, help="replace the table in this file")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.types) - set(CONFIG_MAPPING_NAMES))
    if unknown:
        parser.error(f"transformers has no model type {', '.join(unknown)}")
    types = arguments.types or sorted(CONFIG_MAPPING_NAMES)
    found: dict[str, list[Finding]] = {}
    if arguments.json and arguments.json.exists():
        saved = json.loads(arguments.json.read_text())
        found = {name: [Finding(*item) for item in items] for name, items in saved.items() if name in types}
    missing = [name for name in types if name not in found]
    _quiet()
    context = multiprocessing.get_context("fork")  # transformers and torch are imported once
    with context.Pool(arguments.jobs, maxtasksperchild=40) as pool:
        for number, (name, findings, seconds) in enumerate(pool.imap_unordered(_timed, missing), 1):
            found[name] = findings
            print(f"{number}/{len(missing)} {name} ({seconds:.1f} s): {summary(findings)}", file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))
    text = render(found)
    if arguments.into:
        insert(text, arguments.into, "sweep")
    else:
        print(text)
    if any(finding.outcome in (WRONG, FAILS) for findings in found.values() for finding in findings):
        raise SystemExit(1)


def _quiet() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")


class _Late(BaseException):
    """Not an Exception: those are findings."""


def _timed(model_type: str) -> tuple[str, list[Finding], float]:
    start = time.perf_counter()

    def late(*_: object) -> None:
        raise _Late(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        findings = look_at(model_type)
    except _Late as error:
        findings = [Finding("", NO_REFERENCE, str(error))]
    finally:
        signal.alarm(0)
    return model_type, findings, time.perf_counter() - start


if __name__ == "__main__":
    main()
