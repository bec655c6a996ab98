"""The lesson on the backward: a model of its steps' timeline, and the sum that delta replaces.

The order of issue is that of `step` (`cuteflash/kernels/sm90/bwd_mma.py`) and `compute_dq`
(`cuteflash/kernels/sm90/bwd_dq_product.py`). The model leaves out latencies, masks, conversions, copies to shared
memory and the additions in memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.sm90 import WGMMA_M

from .timeline import (
    EXPONENTIAL,
    EXPONENTIALS_PER_CLOCK,
    FLOPS_PER_CLOCK,
    FP32,
    TENSOR,
    Key,
    Task,
    simulate,
    spans_data,
)

TARGET = "sm_90a"
HEAD_DIMS = (64, 96, 128)  # those with rows in one pass
STEPS = 3
FP32_PER_CLOCK = 128  # lanes of one multiprocessor
DIFFERENTIATE = 2  # instructions an element: a subtraction, a multiplication
QUERIES, KEYS, COLUMNS = 2, 4, 3  # of the small example


def backward_row(head_dim: int) -> tuple[BwdProblem, str, Choice]:
    """The shipped row of a head dim for full attention, of short sequences, whose tiles are not the special ones."""
    problem = BwdProblem.dense("bf16", head_dim, head_dim)
    return problem, TARGET, choose_shipped(problem, TARGET, "sm90", "short")


def row_traits(head_dim: int) -> BwdTraitsSm90:
    """Traits of that row."""
    _, _, choice = backward_row(head_dim)
    if not isinstance(choice.traits, BwdTraitsSm90):
        raise TypeError(f"the sm90 backward row of head dim {head_dim} has traits {choice.traits!r}")
    return choice.traits


def clocks(traits: BwdTraitsSm90) -> dict[str, tuple[str, int]]:
    """(unit, clocks) of each task of one warpgroup's step; dQ is that of all keys of a block."""
    pairs = WGMMA_M * traits.tile_m

    def product(outputs: int, extent: int) -> tuple[str, int]:
        return TENSOR, 2 * outputs * extent // FLOPS_PER_CLOCK

    return {
        "S": product(pairs, traits.head_dim),
        "dP": product(pairs, traits.head_dim_v),
        "dV": product(pairs, traits.head_dim_v),
        "dK": product(pairs, traits.head_dim),
        "dQ": product(traits.tile_m * traits.head_dim, traits.tile_n),
        "exp": (EXPONENTIAL, pairs // EXPONENTIALS_PER_CLOCK),
        "dS": (FP32, pairs * DIFFERENTIATE // FP32_PER_CLOCK),
    }


def issue_order(apart: bool) -> list[tuple[str, int]]:
    """(what, step) of one consumer warpgroup in its order of issue; dQ is not its work if that is `apart`."""
    order: list[tuple[str, int]] = []
    for step in range(STEPS):
        dq = [("dQ", step - 1)] if step and not apart else []
        order += [("S", step), ("dP", step), ("exp", step), ("dV", step), ("dS", step), *dq, ("dK", step)]
    return [*order, *([] if apart else [("dQ", STEPS - 1)])]


def tasks(traits: BwdTraitsSm90, apart: bool, pingpong: bool) -> list[Task]:
    """The work of `STEPS` query blocks in each warpgroup's own order; one more computes dQ if that is `apart`."""
    units, groups = clocks(traits), traits.mma_warpgroups
    orders = [issue_order(apart)] * groups + ([[("dQ", step) for step in range(STEPS)]] if apart else [])
    found = []
    for wg, order in enumerate(orders):
        queue: list[Key] = []  # products of a warpgroup run in the order of issue
        for what, step in order:
            unit, cost = units[what]
            after = queue[-1:] if unit == TENSOR else []
            after += [(wg, needed, step) for needed in NEEDS[what]]
            if what == "dQ":  # of all consumers' dS, and a part of it each
                after += [(other, "dS", step) for other in range(groups)]
                cost //= 1 if apart else groups
            if what in ("S", "dP") and step:  # overwrites what the step before held
                after.append((wg, "dS", step - 1))
            if what == "S" and pingpong:
                turn = (wg - 1, "exp", step) if wg else (groups - 1, "exp", step - 1)
                after += [turn] if turn[2] >= 0 else []
            found.append(Task((wg, what, step), unit, cost, tuple(after)))
            if unit == TENSOR:
                queue.append((wg, what, step))
    return found


NEEDS: dict[str, tuple[str, ...]] = {
    "S": (),
    "exp": ("S",),
    "dP": (),
    "dS": ("exp", "dP"),
    "dV": ("exp",),
    "dK": ("dS",),
    "dQ": (),
}


def example() -> dict[str, Any]:
    """A small attention whose dS is computed in both ways: the sum over keys of P dP, and delta = rowsum(dO O)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    scores, v, do = normal(QUERIES, KEYS), normal(KEYS, COLUMNS), normal(QUERIES, COLUMNS)
    p = torch.softmax(scores, dim=-1)
    dp, delta = do @ v.T, (do * (p @ v)).sum(dim=-1)
    found = {"p": p, "dp": dp, "sum": (p * dp).sum(dim=-1), "delta": delta, "ds": p * (dp - delta[:, None])}
    return {
        name: [[round(x, 3) for x in row] for row in value.reshape(QUERIES, -1).tolist()]
        for name, value in found.items()
    }


def gradient_data() -> dict[str, Any]:
    """Schedules of every choice, by head dim and then "apart pingpong" as "0 1", and the small example."""
    found: dict[str, Any] = {}
    for head_dim in HEAD_DIMS:
        traits = row_traits(head_dim)
        found[str(head_dim)] = {
            "traits": dataclasses.asdict(traits),
            "apart": traits.is_dq_apart,
            "warpgroups": traits.mma_warpgroups,
            "clocks": {what: cost for what, (_, cost) in clocks(traits).items()},
            "schedules": {
                f"{apart:d} {turns:d}": spans_data(simulate(tasks(traits, apart, turns)))
                for apart in (False, True)
                for turns in (False, True)
            },
        }
    return {"steps": STEPS, "head_dims": found, "example": example()}
