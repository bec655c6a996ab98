"""The command line of benchmarks that print a markdown text: measure on a GPU or read results, print, write."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .report import insert

Result = dict[str, Any]


class Command(NamedTuple):
    """One such benchmark, `python -m benchmarks.<name>`.

    Attributes:
        name: its module.
        about: what is measured, in words that "measured" may follow.
        marker: between its markers a markdown file has the text.
        markdown: result → text.
        is_wrong: whether a result has errors or failures that the exit status tells.
        every: after what the JSON file is rewritten.
    """

    name: str
    about: str
    marker: str
    markdown: Callable[[Result], str]
    is_wrong: Callable[[Result], bool]
    every: str = "shape"

    def parser(self) -> argparse.ArgumentParser:
        """The options of all these benchmarks; a benchmark adds its own."""
        prog, described = f"python -m {__package__}.{self.name}", f"{self.about}, measured"
        parser = argparse.ArgumentParser(prog=prog, description=described)
        add_json(parser, self.every)
        parser.add_argument(
            "--from", dest="source", type=pathlib.Path, metavar="FILE", help="read results, measure nothing"
        )
        parser.add_argument("--into", type=pathlib.Path, metavar="MARKDOWN", help="write the text between its markers")
        return parser

    def main(self, options: argparse.Namespace, measure: Callable[[torch.device], Result]) -> int:
        """Measure or read, print, write; 1 if `is_wrong`, 2 without a GPU, else 0."""
        if options.source:
            result: Result = json.loads(options.source.read_text())
        elif (where := current_gpu(self.about)) is None:
            return 2
        else:
            result = measure(where)
        print(self.markdown(result), end="")
        if options.into:
            insert(self.markdown(result), options.into, self.marker)
        return int(self.is_wrong(result))


def add_json(parser: argparse.ArgumentParser, every: str) -> None:
    """The option `--json`, a file that is rewritten after every cell, shape or part."""
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help=f"write the results here after every {every}")


def current_gpu(about: str) -> torch.device | None:
    """The current GPU; without one stderr is told what needs it."""
    if not torch.cuda.is_available():
        print(f"measuring {about} needs a CUDA device; torch finds none", file=sys.stderr)
        return None
    return torch.device("cuda", torch.cuda.current_device())
