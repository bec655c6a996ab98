"""The ablation ladder: from a plain kernel to the shipped one, one optimisation at a time, checked and timed.

    python -m benchmarks.ladder --json benchmarks/results/ladder.json [--plot PNG] [--into docs/ladder.md]
    python -m benchmarks.ladder --backward --json PATH [--plot PNG]
    python -m benchmarks.ladder --fp8 --json PATH [--plot PNG]
    python -m benchmarks.ladder --decode --json PATH [--plot PNG]
    python -m benchmarks.ladder --render benchmarks/results/ladder.json --plot PNG --into docs/ladder.md

Every rung is a trait of the shipped kernels (`cuteflash/traits/`): the ladder shows the code that runs, no copy of it.
All rungs of a cell are timed in one process, interleaved with the peer, after their outputs are checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from cuteflash.dispatch import choose_shipped
from cuteflash.mla_problem import AnyProblem
from cuteflash.traits.arch import Family
from cuteflash.traits.row import Traits
from cuteflash.tune import machine
from cuteflash.tune.cells import Cell, parse_cell
from cuteflash.tune.peers import missing_peer
from cuteflash.tune.timing import ROUNDS, HangError
from cuteflash.tune.variants import Variant

from . import backward_ladder, decode_ladder, device, fp8_ladder, ladder_report
from .ahead import compile_all
from .contest import Maker, measure, progress, write
from .implementations import runner, target_of, unavailable, variant_runner
from .judges import Judge, OutputJudge

CELLS = "64:4096:causal,128:4096:causal,128:16384:full,256:4096:causal"


@dataclasses.dataclass(frozen=True, slots=True)
class Rung:
    """One optimisation: the traits it switches on, and what it does."""

    title: str
    fields: Mapping[str, Any]
    does: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ladder:
    """A kernel family's rungs, the first being the plain kernel; `peer` is the family's yardstick."""

    family: Family
    peer: str
    rungs: tuple[Rung, ...]

    def variants(self, cell: Cell, target: str) -> dict[str, Variant]:
        """Title → traits of each rung: the shipped row's, without what higher rungs switch on."""
        shipped: dict[str, Any] = dataclasses.asdict(choose_shipped(cell.problem, target, self.family).traits)
        fields = {**shipped, **FIXED[self.family]}
        found = {}
        for rung in self.rungs:
            fields = shipped if rung is SHIPPED else {**fields, **rung.fields}
            found[rung.title] = Variant(self.family, fields)
        return found

    @property
    def name(self) -> str:
        """In results and reports."""
        return self.family

    def serves(self, cell: Cell, target: str) -> bool:
        """Every cell: all forward rows of a family are of one kernel."""
        return True

    def told(self) -> list[dict[str, Any]]:
        """Its rungs, as a result has them."""
        return [dataclasses.asdict(rung) for rung in self.rungs]

    def kernels(self, cell: Cell, target: str) -> list[tuple[Traits, AnyProblem]]:
        """What has to be compiled for a cell."""
        return [(variant.traits(cell), cell.problem) for variant in self.variants(cell, target).values()]

    def makers(self, cell: Cell, target: str) -> dict[str, Maker]:
        """Title → what makes a rung's runner, then the peer's."""
        found: dict[str, Maker] = {
            title: functools.partial(variant_runner, variant) for title, variant in self.variants(cell, target).items()
        }
        return found | {self.peer: functools.partial(runner, self.peer)}

    def judge(self, cell: Cell, where: torch.device) -> OutputJudge:
        """What the outputs of all rungs are compared with."""
        return OutputJudge.of(cell, where)


SHIPPED = Rung("shipped row", {}, "the table's own row: also more stages, and the repair outside of the loop")

# What is the same on all rungs below the shipped row: only one stage can be loaded without running ahead, and some
# traits are about the overlap that only a higher rung has.
FIXED: dict[Family, Mapping[str, Any]] = {
    "sm80": {"kv_stage": 1},
    "sm90": {"rescale_in_product": False, "q_stage": 1, "repair_apart": False},
}

LADDERS = (
    Ladder(
        "sm80",
        "fa2",
        (
            Rung(
                "plain",
                {
                    "async_copy": False,
                    "swizzle_bits": 0,
                    "eager_loads": False,
                    "double_buffer": False,
                    "fused_softmax": False,
                    "longest_first": False,
                },
                "tensor cores; loads through registers, waited for; rows stored as they are; a textbook softmax",
            ),
            Rung("cp.async", {"async_copy": True}, "global to shared memory without registers between"),
            Rung("swizzle", {"swizzle_bits": 3}, "no bank conflicts of ldmatrix and of the epilogue"),
            Rung("eager K/V", {"eager_loads": True}, "K of the next block loads beside the PV product, V beside QK"),
            Rung("double buffer", {"double_buffer": True}, "fragments are fetched one k-block ahead of the product"),
            Rung(
                "fused softmax",
                {"fused_softmax": True},
                "the scale folded into the exponent's multiply-add, row sums reduced once a tile",
            ),
            Rung("longest first", {"longest_first": True}, "a causal mask's long tiles start first"),
            SHIPPED,
        ),
    ),
    Ladder(
        "sm90",
        "fa4",
        (
            Rung(
                "TMA",
                {
                    "warp_specialized": False,
                    "pingpong": False,
                    "overlap": False,
                    "persistent": False,
                    "longest_first": False,
                    "fixed_max": False,
                },
                "TMA loads and WGMMA, issued by the warps that also do the softmax",
            ),
            Rung("producer", {"warp_specialized": True}, "a warp of its own loads; registers move to the consumers"),
            Rung("ping-pong", {"pingpong": True}, "one warpgroup's products run while another does its softmax"),
            Rung(
                "overlap", {"overlap": True}, "in a warpgroup, QK of the next block runs beside PV and softmax of this"
            ),
            Rung("persistent", {"persistent": True}, "as many blocks as multiprocessors, each loops over tiles"),
            Rung("causal order", {"longest_first": True}, "long tiles first, waves in turn forwards and backwards"),
            Rung(
                "fixed maxima",
                {"fixed_max": True},
                "blocks seen whole look for no maxima; one that outgrows them is repaired",
            ),
            SHIPPED,
        ),
    ),
)


class Climbable(Protocol):
    """What a run asks of a ladder; see `Ladder` for the methods."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> Family: ...
    @property
    def peer(self) -> str | None: ...
    def serves(self, cell: Cell, target: str) -> bool: ...
    def told(self) -> list[dict[str, Any]]: ...
    def kernels(self, cell: Cell, target: str) -> list[tuple[Traits, AnyProblem]]: ...
    def makers(self, cell: Cell, target: str) -> dict[str, Maker]: ...
    def judge(self, cell: Cell, where: torch.device) -> Judge: ...


def climb(ladder: Climbable, cell: Cell, where: torch.device, rounds: int) -> dict[str, Any]:
    """One cell: every rung and the peer, as `benchmarks.contest.measure` gives them."""
    makers = ladder.makers(cell, target_of(where))
    if ladder.peer is not None and missing_peer(ladder.peer) is not None:
        del makers[ladder.peer]
    told = {"family": ladder.name, "peer": ladder.peer}
    return told | measure(ladder.judge(cell, where), makers, where, rounds)


def run(ladders: Sequence[Climbable], cells: Sequence[Cell], arguments: argparse.Namespace) -> dict[str, Any]:
    """All ladders on all cells; the file is rewritten after each, so that an interrupted run keeps what it has."""
    where = torch.device("cuda", torch.cuda.current_device())
    target = target_of(where)
    pairs = [(ladder, cell) for ladder in ladders for cell in cells if ladder.serves(cell, target)]
    compile_all([kernel for ladder, cell in pairs for kernel in ladder.kernels(cell, target)], target, arguments.jobs)
    result: dict[str, Any] = {
        "environment": device.environment(where),
        "matmul_tflops": machine.make_matmul(where).tflops(where),
        "copy_gbps": device.copy_gbps(where),
        "rungs": {item.name: item.told() for item in ladders},
        "cells": [],
    }
    try:
        for ladder, cell in pairs:
            result["cells"].append(climb(ladder, cell, where, arguments.rounds))
            write(result, arguments.json)
            print(progress(result["cells"][-1]), flush=True)
    except HangError:
        # The context is lost with the kernel that never ends; a normal exit would wait for it.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `cells` and `ladders` are parsed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description="what each optimisation is worth")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--json", type=pathlib.Path, metavar="PATH", help="measure, and where the results go")
    source.add_argument("--render", type=pathlib.Path, metavar="PATH", help="a result file to render, no GPU needed")
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="draw the ladders")
    parser.add_argument("--into", type=pathlib.Path, metavar="MARKDOWN", help="write the tables between its markers")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--backward", action="store_true", help="the ladders of the backward")
    which.add_argument("--fp8", action="store_true", help="the ladder of 8-bit operands")
    which.add_argument("--decode", action="store_true", help="the ladders of decoding, on cells of their own")
    parser.add_argument("--family", choices=[item.family for item in LADDERS], help="only this family's")
    parser.add_argument("--cells", metavar="D:S:MASK,...", help=f"default: {CELLS}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiler processes")
    arguments = parser.parse_args(argv)
    ladders: Sequence[Climbable] = LADDERS
    if arguments.decode:
        if arguments.cells is not None:
            parser.error("--cells: the ladders of decoding have cells of their own")
        arguments.cells, ladders = list(decode_ladder.CELLS), decode_ladder.LADDERS
    else:
        try:
            form: dict[str, Any] = {"dtype": "e4m3", "transposed_v": True} if arguments.fp8 else {}
            arguments.cells = [parse_cell(text, **form) for text in (arguments.cells or CELLS).split(",")]
        except ValueError as failure:
            parser.error(f"--cells: {failure}")
    if arguments.backward or arguments.fp8:
        ladders = backward_ladder.LADDERS if arguments.backward else fp8_ladder.LADDERS
    arguments.ladders = [item for item in ladders if arguments.family in (None, item.family)]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or render; 0 where all outputs were right, 1 otherwise, 2 without a GPU."""
    arguments = parse(argv)
    if arguments.render:
        result = json.loads(arguments.render.read_text())
    else:
        if not torch.cuda.is_available():
            print("the ladder needs a CUDA device; torch finds none (--render draws a result file)", file=sys.stderr)
            return 2
        where = torch.device("cuda", torch.cuda.current_device())
        ladders = [item for item in arguments.ladders if not _left_out(item, where)]
        result = run(ladders, arguments.cells, arguments)
    if arguments.plot:
        ladder_report.plot(result, arguments.plot)
    if arguments.into:
        ladder_report.insert(ladder_report.markdown(result), arguments.into)
    print(ladder_report.markdown(result))
    wrong = any(entry.get("problem") for cell in result["cells"] for entry in cell["results"].values())
    return 1 if wrong else 0


def _left_out(ladder: Climbable, where: torch.device) -> bool:
    reason = unavailable(ladder.family, where)
    if reason:
        print(f"{ladder.name}: left out, {reason}", file=sys.stderr)
    return reason is not None


if __name__ == "__main__":
    sys.exit(main())
