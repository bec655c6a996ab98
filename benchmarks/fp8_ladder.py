"""The ladder of 8-bit operands: from the 16-bit row to the shipped one of 8 bits with V^T given, then with V turned.

Beside its speed each rung has its error: two levels of accumulation cost time and buy accuracy. Maxima that are fixed
without a repair would be wrong for e4m3, so there is no such rung.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from cuteflash.dispatch import choose_shipped
from cuteflash.mla_problem import AnyProblem
from cuteflash.traits.arch import Family
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.row import Traits
from cuteflash.tune.cells import Cell, Inputs
from cuteflash.tune.timing import Runner
from cuteflash.tune.trials import fwd_runner

from .backward_ladder import SHIPPED, Rung, climbed
from .contest import Maker
from .judges import ModelledJudge

HALF = Rung("16 bits", (), "the row of bf16, on what the 8-bit operands stand for")
STORED = Rung("V turned", (), "the row for V as it is stored: the producer warpgroup turns each tile")
# Of the lowest rung of 8 bits. Maxima that move want a row's exponentials before the wait for the PV product.
PLAIN: Mapping[str, Any] = {
    "fixed_max": False,
    "repair_apart": False,
    "masked_by_fixed_max": False,
    "two_level": False,
    "exp_rows_before_wait": 1,
    "q_stage": 1,
}
RUNGS = (
    Rung("8 bits", (), "e4m3 with V^T given: one level of accumulation, maxima that move"),
    Rung(
        "fixed maxima",
        ("fixed_max", "exp_rows_before_wait"),
        "blocks seen whole look for no maxima; one that outgrows them is repaired",
    ),
    Rung("two levels", ("two_level",), "each block's product is added to O in fp32; up to 160 columns"),
    Rung("repair apart", ("repair_apart",), "the repair is outside of the loop"),
    Rung("Q ahead", ("q_stage",), "the next tile's Q loads beside this one's products"),
    Rung("masked blocks", ("masked_by_fixed_max",), "blocks that a causal mask cuts keep the maxima, too"),
    SHIPPED,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Ladder:
    """The rungs of the sm90 forward on 8-bit operands, for cells that give V^T."""

    name: str = "sm90 e4m3"
    family: Family = "sm90"
    peer: None = None  # the lowest rung is the yardstick

    def serves(self, cell: Cell, target: str) -> bool:
        """Every cell whose V^T is given."""
        return cell.transposed_v

    def variants(self, cell: Cell, target: str) -> dict[str, tuple[Cell, Traits]]:
        """Title → the cell in the form that a rung reads, and its traits."""
        half = dataclasses.replace(cell, dtype="bf16", transposed_v=False)
        stored = dataclasses.replace(cell, transposed_v=False)
        shipped = _shipped(cell, target)
        assert isinstance(shipped, FwdTraitsFp8Sm90)
        given = {title: (cell, traits) for title, traits in climbed(RUNGS, shipped, PLAIN).items()}
        return {
            HALF.title: (half, _shipped(half, target)),
            **given,
            STORED.title: (stored, _shipped(stored, target)),
        }

    def told(self) -> list[dict[str, Any]]:
        """Titles and words of its rungs, as a result has them."""
        return [{"title": rung.title, "does": rung.does} for rung in (HALF, *RUNGS, STORED)]

    def kernels(self, cell: Cell, target: str) -> list[tuple[Traits, AnyProblem]]:
        """What has to be compiled for a cell."""
        return [(traits, own.problem) for own, traits in self.variants(cell, target).values()]

    def makers(self, cell: Cell, target: str) -> dict[str, Maker]:
        """Title → what makes a rung's runner."""
        return {
            title: functools.partial(rung_runner, traits, target, own)
            for title, (own, traits) in self.variants(cell, target).items()
        }

    def judge(self, cell: Cell, where: torch.device) -> ModelledJudge:
        """What the outputs of all rungs are compared with."""
        return ModelledJudge(cell, where)


LADDERS = (Fp8Ladder(),)


def rung_runner(traits: Traits, target: str, cell: Cell, inputs: Inputs) -> Runner:
    """A kernel over inputs that give V^T, in the form of a rung's cell."""
    if cell.dtype == inputs.cell.dtype:
        own = inputs if cell.transposed_v else inputs.with_stored_v()
    else:
        own = inputs.in_16_bits()
    return fwd_runner(traits, target, own)


def _shipped(cell: Cell, target: str) -> Traits:
    return choose_shipped(cell.problem, target, Fp8Ladder().family, cell.lengths).traits
