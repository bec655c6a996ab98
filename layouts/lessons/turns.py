"""A model of ping-pong: when the tensor cores and the exponentials of the consumer warpgroups are busy.

It models two units of a multiprocessor, with the rates of docs/performance.md ("The floor") and the order in which
`step_in_order` and `step_overlapped` issue their work; it leaves out latencies, maxima, conversions and rescaling.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cuteflash.dispatch import choose
from cuteflash.problem import FwdProblem
from cuteflash.traits.sm90 import WGMMA_M, FwdTraitsSm90

from .timeline import EXPONENTIAL, EXPONENTIALS_PER_CLOCK, FLOPS_PER_CLOCK, TENSOR, Key, Task, simulate, spans_data

HEAD_DIMS = (64, 128, 256)
BLOCKS = 4


def tasks(warpgroups: int, overlap: bool, pingpong: bool, product: int, softmax: int) -> list[Task]:
    """The work of `BLOCKS` key blocks in each warpgroup's own order.

    Args:
        overlap: the scores of a block are issued before the PV product of the block before it.
        pingpong: a warpgroup issues its products only in its turn, so that they queue whole instead of mixing.
        product: clocks of one product; softmax: clocks of the exponentials of a block.
    """
    found = []
    for wg in range(warpgroups):
        queue: list[Key] = []  # products of a warpgroup run in the order of issue
        for stage in _issue_order(overlap):
            name, block = stage
            after = list(queue[-1:]) if name != "softmax" else [(wg, "QK", block)]
            if name == "PV":
                after.append((wg, "softmax", block))
            if name == "QK" and block > 0:  # S is overwritten: its exponentials have been taken
                after.append((wg, "softmax", block - 1))
            if name == "softmax" and block > 0 and not overlap:
                after.append((wg, "PV", block - 1))
            unit, clocks = (EXPONENTIAL, softmax) if name == "softmax" else (TENSOR, product)
            found.append(Task((wg, name, block), unit, clocks, tuple(after)))
            if name != "softmax":
                queue.append((wg, name, block))
    return _in_turns(found, warpgroups, overlap) if pingpong else found


def _issue_order(overlap: bool) -> list[tuple[str, int]]:
    order: list[tuple[str, int]] = []
    if not overlap:
        for block in range(BLOCKS):
            order += [("QK", block), ("softmax", block), ("PV", block)]
        return order
    order += [("QK", 0), ("softmax", 0)]
    for block in range(1, BLOCKS):
        order += [("QK", block), ("PV", block - 1), ("softmax", block)]
    return [*order, ("PV", BLOCKS - 1)]


def _in_turns(found: list[Task], warpgroups: int, overlap: bool) -> list[Task]:
    """The same tasks; the first product of a turn also waits for the last product of the turn before it."""

    def turn_before(wg: int, block: int) -> tuple[Key, ...]:
        wg, block = (wg - 1, block) if wg > 0 else (warpgroups - 1, block - 1)
        if block < 0:
            return ()
        return ((wg, "PV", block - 1) if overlap and block > 0 else (wg, "QK", block),)

    return [
        dataclasses.replace(task, after=task.after + turn_before(task.key[0], task.key[2]))
        if task.key[1] == "QK"
        else task
        for task in found
    ]


def schedule(head_dim: int, warpgroups: int, overlap: bool, pingpong: bool) -> dict[str, Any]:
    """Spans `[warpgroup, what, block, start, end]` of the row of a head dim, the clocks of all, the tensor share."""
    traits = row_traits(head_dim)
    product, softmax = clocks(head_dim, traits.tile_n)
    spans = simulate(tasks(warpgroups, overlap, pingpong, product, softmax))
    return spans_data(spans)


def clocks(head_dim: int, tile_n: int) -> tuple[int, int]:
    """Clocks of one product and of the exponentials of one warpgroup's 64 x tile_n scores."""
    return 2 * WGMMA_M * tile_n * head_dim // FLOPS_PER_CLOCK, WGMMA_M * tile_n // EXPONENTIALS_PER_CLOCK


def row_traits(head_dim: int) -> FwdTraitsSm90:
    """Traits of the shipped sm90 row for full attention."""
    problem = FwdProblem.dense(dtype="bf16", head_dim=head_dim, head_dim_v=head_dim, mask="full")
    traits = choose(problem, "sm_90a", "sm90").traits
    if not isinstance(traits, FwdTraitsSm90):
        raise TypeError(f"the sm90 row of head dim {head_dim} has traits {traits!r}")
    return traits


def turn_data() -> dict[str, Any]:
    """Schedules of every choice, by head dim and then "warpgroups overlap pingpong" as "2 1 1"."""
    found: dict[str, Any] = {}
    for head_dim in HEAD_DIMS:
        traits = row_traits(head_dim)
        product, softmax = clocks(head_dim, traits.tile_n)
        choices = [(traits.mma_warpgroups, overlap, turns) for overlap in (False, True) for turns in (False, True)]
        choices += [(1, overlap, False) for overlap in (False, True)]
        found[str(head_dim)] = {
            "tile_n": traits.tile_n,
            "warpgroups": traits.mma_warpgroups,
            "product": product,
            "softmax": softmax,
            "schedules": {
                f"{warpgroups} {overlap:d} {turns:d}": schedule(head_dim, warpgroups, overlap, turns)
                for warpgroups, overlap, turns in choices
            },
        }
    return {"blocks": BLOCKS, "head_dims": found}
