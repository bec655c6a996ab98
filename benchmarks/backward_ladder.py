"""The ladders of the backward: what each trait of a shipped row is worth, switched on one by one above a plain kernel.

A ladder climbs on the cells whose shipped row is of its kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from cuteflash.dispatch import choose_shipped
from cuteflash.mla_problem import AnyProblem
from cuteflash.problem import BwdProblem
from cuteflash.traits.arch import Family, get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.row import Traits
from cuteflash.tune.cells import Cell
from cuteflash.tune.trials import bwd_runner

from .contest import Maker
from .implementations import backward_runner
from .judges import GradientJudge

AnyTraits = TypeVar("AnyTraits")
BwdTraits = BwdTraitsSm80 | BwdTraitsSm90 | BwdTwoPassTraitsSm90


@dataclasses.dataclass(frozen=True, slots=True)
class Rung:
    """One optimisation: the traits that get the shipped row's values, and what they do."""

    title: str
    traits: tuple[str, ...]
    does: str


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardLadder:
    """The rungs of one kernel.

    Attributes:
        name: in results and reports.
        peer: the yardstick.
        kind: of the kernel's traits.
        plain: the traits of the lowest rung that differ from the shipped row's, in one or more ways; a cell takes the
            first with which all rungs can run.
        rungs: the first is the plain kernel; above the others stands the shipped row.
    """

    name: str
    family: Family
    peer: str
    kind: type[BwdTraits]
    plain: tuple[Mapping[str, Any], ...]
    rungs: tuple[Rung, ...]

    def serves(self, cell: Cell, target: str) -> bool:
        """Whether the shipped row of a cell is of this kernel."""
        return isinstance(_shipped(problem_of(cell), cell, target, self.family), self.kind)

    def traits(self, cell: Cell, target: str) -> dict[str, BwdTraits]:
        """Title → traits of each rung, for a cell that it serves; last, where a row has one, the other way."""
        shipped = _shipped(problem_of(cell), cell, target, self.family)
        if not isinstance(shipped, self.kind):
            raise ValueError(f"cell is {cell.label}; its row on {target} is not one of {self.kind.__name__}")
        ways = [climbed(self.rungs, shipped, plain) for plain in self.plain]
        can_run = (way for way in ways if all(traits.check(get_arch(target)) is None for traits in way.values()))
        found = next(can_run, ways[-1])
        other = _shipped(problem_of(cell, softcap=True), cell, target, self.family)
        if self.kind is BwdTraitsSm90 and isinstance(other, BwdTwoPassTraitsSm90):
            found[TWO_PASSES.title] = other
        return found

    def told(self) -> list[dict[str, Any]]:
        """Titles and words of its rungs, as a result has them."""
        extra = (TWO_PASSES,) if self.kind is BwdTraitsSm90 else ()
        return [{"title": rung.title, "does": rung.does} for rung in (*self.rungs, *extra)]

    def kernels(self, cell: Cell, target: str) -> list[tuple[Traits, AnyProblem]]:
        """What has to be compiled for a cell."""
        return [(traits, problem_of(cell)) for traits in self.traits(cell, target).values()]

    def makers(self, cell: Cell, target: str) -> dict[str, Maker]:
        """Title → what makes a rung's runner, then the peer's."""
        found: dict[str, Maker] = {
            title: functools.partial(bwd_runner, traits, target) for title, traits in self.traits(cell, target).items()
        }
        return found | {self.peer: functools.partial(backward_runner, self.peer)}

    def judge(self, cell: Cell, where: torch.device) -> GradientJudge:
        """What the gradients of all rungs are compared with."""
        return GradientJudge.of(cell, where)


def climbed(rungs: Sequence[Rung], shipped: AnyTraits, plain: Mapping[str, Any]) -> dict[str, AnyTraits]:
    """Title → traits of each rung from a plain kernel up to the shipped row, the last one."""
    found: dict[str, AnyTraits] = {}
    fields = dict(plain)
    for rung in rungs[:-1]:
        fields = {name: value for name, value in fields.items() if name not in rung.traits}
        found[rung.title] = dataclasses.replace(shipped, **fields)  # type: ignore[type-var]
    return found | {SHIPPED.title: shipped}


SHIPPED = Rung("shipped row", (), "the table's own row")
TWO_PASSES = Rung("two passes", (), "in place of one: seven products, and no sum in memory")
LOADS_AHEAD = "Q and dO of later steps load while this one computes"

PLAIN_SM90: dict[str, Any] = {
    "tile_m": 64,
    "kv_stage": 1,
    "q_stage": 1,
    "do_stage": 1,
    "k_in_regs": False,
    "v_in_regs": False,
    "delta_early": False,
    "keep_thread": False,
    "pingpong": False,
    "persistent": False,
    "in_turn": False,
}

LADDERS = (
    BackwardLadder(
        "sm80",
        "sm80",
        "fa2",
        BwdTraitsSm80,
        ({"stages": 1, "double_buffer": False, "vector_add": False},),
        (
            Rung("plain", (), "each step waits for its loads; fragments are fetched when needed; dQ added by 4 bytes"),
            Rung("loads ahead", ("stages",), LOADS_AHEAD),
            Rung("double buffer", ("double_buffer",), "fragments are fetched one k-block ahead of the product"),
            Rung("vector add", ("vector_add",), "16 bytes of dQ are added at once"),
            SHIPPED,
        ),
    ),
    BackwardLadder(
        "sm90",
        "sm90",
        "fa4",
        BwdTraitsSm90,
        # Whole tiles of dQ if registers suffice for them.
        tuple(PLAIN_SM90 | {"dq": dq} for dq in ("turns", "columns")),
        (
            Rung(
                "plain",
                (),
                "one stage; 64 queries a step; whole dQ tiles in turns, from head dim 128 on half ones",
            ),
            Rung("loads ahead", ("q_stage", "do_stage"), LOADS_AHEAD),
            Rung("dQ share", ("tile_m", "dq"), "the row's own tile and division of dQ among the warpgroups"),
            Rung("keys in registers", ("k_in_regs", "v_in_regs"), "K and V are read from shared memory once a tile"),
            Rung("ping-pong", ("pingpong",), "one warpgroup's products run beside the other's exponentials"),
            Rung("delta early", ("delta_early",), "delta is fetched before the exponentials, not after them"),
            Rung("thread kept", ("keep_thread",), "addresses are not computed anew from the thread's index"),
            Rung("persistent", ("persistent", "kv_stage"), "the next tile's K and V load while this one ends"),
            Rung("in turn", ("in_turn",), "blocks add to dQ a step apart"),
            SHIPPED,
        ),
    ),
    BackwardLadder(
        "sm90 two passes",
        "sm90",
        "fa4",
        BwdTwoPassTraitsSm90,
        ({"q_stage": 2, "do_stage": 2, "k_stage": 1, "v_stage": 1, "pingpong": False},),
        (
            Rung("plain", (), "the fewest stages that either pass runs with"),
            Rung("dK, dV loads ahead", ("q_stage", "do_stage"), LOADS_AHEAD),
            Rung("dQ loads ahead", ("k_stage", "v_stage"), "the same of K and V in the pass for dQ"),
            Rung("ping-pong", ("pingpong",), "in the pass for dQ, one warpgroup's products beside the other's rest"),
            SHIPPED,
        ),
    ),
)


def problem_of(cell: Cell, softcap: bool = False) -> BwdProblem:
    """The backward's problem of a cell."""
    return BwdProblem.dense(cell.dtype, cell.head_dim, cell.head_dim_v, cell.mask, softcap=softcap)


def _shipped(problem: BwdProblem, cell: Cell, target: str, family: Family) -> BwdTraits | None:
    """The traits of the shipped row, None if no row runs the problem."""
    try:
        return cast(BwdTraits, choose_shipped(problem, target, family, cell.lengths).traits)
    except NotImplementedError:
        return None
