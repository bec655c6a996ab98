"""The GPU test receipt: on which GPU, with which sources, the GPU tests last ran, and how they went.

Continuous integration has no GPU. A GPU run (`pytest -m gpu --receipt PATH tests/gpu`) writes the receipt, which is
committed; `python -m tests.receipt check PATH` tells whether `cuteflash/` has changed since. It informs and exits 0
either way; a receipt that cannot be read, or that records failures, exits 1. A run may be split into several, each of
some files of tests/gpu: `python -m tests.receipt join PATH PART PART ..` makes one receipt of theirs.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cuteflash"
DEFAULT_PATH = ROOT / "tests" / "gpu_receipt.json"
OUTCOMES = ("passed", "failed", "skipped")
VERSIONED = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers")


def fingerprint(package: pathlib.Path = PACKAGE) -> str:
    """sha256 over the names and contents of every Python file under `package`."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda p: p.relative_to(package).as_posix()):
        name = path.relative_to(package).as_posix().encode()
        content = path.read_bytes()
        for part in (name, content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """The versions of Python and of the packages the result depends on, where installed."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gpu() -> dict[str, str]:
    """Name, driver and compute capability of the first GPU; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver_version(),
        "cuda": str(torch.version.cuda),
    }


def _driver_version() -> str:
    proc = pathlib.Path("/proc/driver/nvidia/version")
    if proc.exists():
        words = proc.read_text().split("\n", 1)[0].split()
        dotted = [word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()]
        if dotted:
            return dotted[0]
    import subprocess

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def make_receipt(counts: dict[str, int], seconds: float) -> dict[str, Any]:
    """The receipt of a run that ended with `counts` (passed, failed, skipped)."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "fingerprint": fingerprint(),
        "gpu": gpu(),
        "versions": versions(),
        "counts": {outcome: counts.get(outcome, 0) for outcome in OUTCOMES},
        "seconds": round(seconds, 1),
    }


def describe(path: pathlib.Path, package: pathlib.Path = PACKAGE) -> tuple[str, bool]:
    """One line on the receipt at `path`, and whether it is sound: readable (or absent) and without failures."""
    if not path.exists():
        return f"GPU receipt: none at {path.name} (run `make gpu-test` on a GPU)", True
    try:
        receipt = json.loads(path.read_text())
        counts, stored = receipt["counts"], receipt["fingerprint"]
        where = f"{receipt['gpu'].get('name', 'no GPU')}, {receipt['date']}"
        tally = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"GPU receipt: {path.name} cannot be read: {error!r}", False
    state = "fresh" if stored == fingerprint(package) else "STALE, cuteflash/ has changed since"
    return f"GPU receipt: {state} ({where}: {tally})", counts["failed"] == 0 and counts["passed"] > 0


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The receipt of a run in parts, each of other tests. ValueError: they differ in sources, GPU or versions."""
    first, *others = parts
    for key, other in ((key, other) for other in others for key in ("fingerprint", "gpu", "versions")):
        if other[key] != first[key]:
            raise ValueError(f"parts of a run differ in {key}: {first[key]} and {other[key]}")
    counts = {outcome: sum(part["counts"][outcome] for part in parts) for outcome in OUTCOMES}
    seconds = round(sum(part["seconds"] for part in parts), 1)
    return first | {"date": max(part["date"] for part in parts), "counts": counts, "seconds": seconds}


class ReceiptPlugin:
    """Pytest plugin that counts outcomes (in the controlling process under xdist) and writes the receipt at the end."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.outcome: dict[str, str] = {}
        self.seconds = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of a test's set-up, call and tear-down."""
        before = self.outcome.get(report.nodeid)
        if report.failed:
            self.outcome[report.nodeid] = "failed"
        elif report.skipped and before != "failed":
            self.outcome[report.nodeid] = "skipped"
        elif report.when == "call" and before is None:
            self.outcome[report.nodeid] = "passed"
        self.seconds += report.duration

    def counts(self) -> dict[str, int]:
        """How many tests passed, failed and were skipped."""
        outcomes = list(self.outcome.values())
        return {outcome: outcomes.count(outcome) for outcome in OUTCOMES}

    def pytest_sessionfinish(self) -> None:
        """Write the receipt."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(make_receipt(self.counts(), self.seconds), indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """`check [PATH]` and `join PATH PART ..` print one line; 1 if the receipt is unreadable or records failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.receipt", description="the GPU test receipt")
    parser.add_argument("command", choices=["check", "join"])
    parser.add_argument("path", nargs="?", type=pathlib.Path, default=DEFAULT_PATH)
    parser.add_argument("parts", nargs="*", type=pathlib.Path, help="receipts that `join` makes one of")
    arguments = parser.parse_args(argv)
    if bool(arguments.parts) != (arguments.command == "join"):
        parser.error("join needs a path and the receipts of the parts; check takes a path alone")
    if arguments.parts:
        joined = join([json.loads(part.read_text()) for part in arguments.parts])
        arguments.path.write_text(json.dumps(joined, indent=2) + "\n")
    line, sound = describe(arguments.path)
    print(line)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
