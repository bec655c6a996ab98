"""The cp.async pipeline of the sm80 kernel, action by action, for a small number of key blocks.

The order of calls is that of `prologue`, `load_block` and `attend_block` in `cuteflash/kernels/sm80/fwd_mma.py`; every
action names its line there. What a page shows of a buffer is what the kernel may rely on: copies are in flight until a
wait and a barrier have seen their group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from cuteflash.kernels.sm80 import fwd_mma
from cuteflash.traits.tables import FWD_ROWS
from layouts.lessons.sources import Source, source_of

BLOCKS = 5
# Stages, and whether Q is kept in registers: as most rows of one stage, and as the lessons' row, which has two.
SHOWN = {1: False, 2: True, 3: True}

# "read": this warp is done with it, others may not be; only a barrier makes it free.
Status = Literal["free", "loading", "ready", "reading", "read"]


@dataclasses.dataclass(slots=True)
class Buffer:
    """A stage of K or V: which block it holds (None: nothing yet) and whether that may be read."""

    block: int | None = None
    status: Status = "free"


class Pipeline:
    """Runs the kernel's calls on buffers and commit groups; `actions` keeps what each did."""

    def __init__(self, stages: int, blocks: int, q_in_regs: bool) -> None:
        self.stages = stages
        self.blocks = blocks
        self.q_in_regs = q_in_regs
        self.buffers = {f"{tensor}{stage}": Buffer() for tensor in "KV" for stage in range(stages)}
        self.sources = {name: source_of(getattr(fwd_mma, name)) for name in ("prologue", "load_block", "attend_block")}
        self.open: list[str] = []  # buffers with copies that no group holds yet
        self.groups: list[list[str]] = []  # committed groups that no wait has seen, oldest first
        self.actions: list[dict[str, Any]] = []

    def run(self) -> None:
        """The whole tile: prologue, then every key block, last block first."""
        last = self.blocks - 1
        self._prologue(last)
        for block in range(last, -1, -1):
            if self.stages == 1:
                self._step_of_one_stage(block)
            else:
                self._step(block, (last - block) % self.stages)

    def _prologue(self, last: int) -> None:
        at = self.sources["prologue"]
        self._load(at, "load_kv(loads.k, n_last, 0, rows)", "K", last, 0)
        if self.stages > 1:
            self._load(at, "load_kv(loads.v, n_last, 0, rows)", "V", last, 0)
        self._commit(at, "cute.arch.cp_async_commit_group()")
        for stage in range(1, self.stages - 1):
            self._load_block(last - stage, stage)
        if self.q_in_regs:
            pending = max(self.stages - 2, 0)
            self._wait(at, "arrived(max(traits.kv_stage - 2, 0))", pending, "; Q goes to registers by ldmatrix")

    def _load_block(self, block: int, stage: int) -> None:
        at = self.sources["load_block"]
        if block >= 0:
            self._load(at, "load_kv(loads.k, n_block, stage, None)", "K", block, stage)
            self._load(at, "load_kv(loads.v, n_block, stage, None)", "V", block, stage)
        self._commit(at, "cute.arch.cp_async_commit_group()")

    def _step_of_one_stage(self, block: int) -> None:
        at = self.sources["attend_block"]
        self._wait(at, "arrived(0)  # K is here", 0)
        self._load(at, "load_kv(loads.v, n_block, 0", "V", block, 0)
        self._commit(at, "load_kv(loads.v, n_block, 0", line_below=True)
        self._read(at, "product_qk(kernel, f, stage)", "K", block, 0, "S = Q Kᵀ")
        self._wait(at, "arrived(0)  # V is here", 0)
        if block > 0:
            self._load(at, "load_kv(loads.k, n_block - 1, 0, None)", "K", block - 1, 0)
        self._commit(at, "load_kv(loads.k, n_block - 1, 0, None)", line_below=True)
        self._compute(at, "soften(kernel, f, tile", block)
        self._read(at, "product_pv(kernel, f, stage)", "V", block, 0, "O += P V")

    def _step(self, block: int, stage: int) -> None:
        at = self.sources["attend_block"]
        self._wait(at, "arrived(stages - 2)", self.stages - 2)
        self._load_block(block - (self.stages - 1), (stage + self.stages - 1) % self.stages)
        self._read(at, "product_qk(kernel, f, stage)", "K", block, stage, "S = Q Kᵀ")
        self._compute(at, "soften(kernel, f, tile", block)
        self._read(at, "product_pv(kernel, f, stage)", "V", block, stage, "O += P V")

    def _load(self, at: Source, text: str, tensor: str, block: int, stage: int) -> None:
        name = f"{tensor}{stage}"
        self.buffers[name] = Buffer(block, "loading")
        self.open.append(name)
        self._act(at, at.line(text), "load", f"issue the copies of {tensor} block {block} into stage {stage}", block)

    def _commit(self, at: Source, text: str, line_below: bool = False) -> None:
        self.groups.append(self.open)
        self.open = []
        what = "close the group" if self.groups[-1] else "close an empty group: the count of groups stays right"
        self._act(at, at.line(text) + line_below, "commit", what, None)

    def _wait(self, at: Source, text: str, pending: int, then: str = "") -> None:
        seen = len(self.groups) - pending
        for buffer in self.buffers.values():
            if buffer.status == "read":  # the barrier has seen every warp past its product
                buffer.status = "free"
        for name in (name for group in self.groups[: max(seen, 0)] for name in group):
            self.buffers[name].status = "ready"
        self.groups = self.groups[max(seen, 0) :]
        what = "wait for every group" if pending == 0 else f"wait for all but the last {pending} of the groups"
        self._act(at, at.line(text), "wait", f"{what}, then a block-wide barrier{then}", None)

    def _read(self, at: Source, text: str, tensor: str, block: int, stage: int, product: str) -> None:
        name = f"{tensor}{stage}"
        self.buffers[name].status = "reading"
        self._act(at, at.line(text), "product", f"{product} reads {tensor} block {block} from stage {stage}", block)
        self.buffers[name].status = "read"

    def _compute(self, at: Source, text: str, block: int) -> None:
        self._act(at, at.line(text), "softmax", f"softmax of the scores of block {block}, in registers", block)

    def _act(self, at: Source, line: int, kind: str, text: str, block: int | None) -> None:
        state = {name: [buffer.block, buffer.status] for name, buffer in self.buffers.items()}
        groups = [list(group) for group in self.groups]
        action = {"function": at.name, "line": line, "kind": kind, "text": text, "block": block}
        self.actions.append(action | {"buffers": state, "groups": groups, "open": list(self.open)})


def run(stages: int, blocks: int = BLOCKS, q_in_regs: bool = True) -> list[dict[str, Any]]:
    """The actions of one tile of `blocks` key blocks with `stages` K/V stages."""
    pipeline = Pipeline(stages, blocks, q_in_regs)
    pipeline.run()
    return pipeline.actions


def rows_with(stages: int) -> Iterator[str]:
    """The shipped sm80 rows of that depth, as "sm_80 D128 full, causal"."""
    for (target, family), rows in FWD_ROWS.items():
        for row in rows:
            if family == "sm80" and row.traits.kv_stage == stages:
                yield f"{target} D{row.traits.head_dim} {', '.join(row.masks)}"


def pipeline_data() -> dict[str, Any]:
    """Actions by number of stages, the shipped rows of each, and the functions that the actions stand in."""
    sources = Pipeline(1, 1, True).sources
    return {
        "blocks": BLOCKS,
        "actions": {str(stages): run(stages, BLOCKS, q_in_regs) for stages, q_in_regs in SHOWN.items()},
        "rows": {str(stages): list(rows_with(stages)) for stages in SHOWN},
        "sources": {name: source.as_dict() for name, source in sources.items()},
    }
