"""The loads of the sm80 kernel's main loop, action by action, for a small number of key blocks.

The kernel's own `prologue`, `load_block` and `attend_block` run (`cuteflash/kernels/sm80/fwd_mma.py`), with stand-ins
for what they call; every action is such a call and names its line. `cuteflash.atoms.row_copies.load` decides whether a
load is still in flight when its call returns. A page shows the state of a buffer that the kernel may rely on: copies
count as in flight until a wait for their group and a barrier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from cutlass.cute.nvgpu import cpasync

from cuteflash.atoms import row_copies
from cuteflash.dispatch import kernel_class
from cuteflash.kernels.sm80 import fwd_mma
from cuteflash.problem import FwdProblem
from cuteflash.traits.arch import get_arch
from cuteflash.traits.docs import attribute_docs
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.tables import tables_of

from ..dsl import context
from .replay import Anything, Replay

BLOCKS = 5
# By number of stages, whether Q is kept in registers: as in most rows of one stage, and in the lessons' row of two.
SHOWN = {1: False, 2: True, 3: True}
# Title, and which of the two switches is off. All shipped rows have both on.
ORDERS = {"as shipped": None, "loads waited for": "eager_loads", "without cp.async": "async_copy"}
SWITCHES = ("eager_loads", "async_copy")

# "stored": by the threads that loaded it; visible to others only after a barrier. "read": by this warp; others may not
# have read it, so that only a barrier makes it free.
Status = Literal["free", "loading", "stored", "ready", "reading", "read"]
Action = dict[str, Any]


@dataclasses.dataclass(slots=True)
class Buffer:
    """A stage of K or V: which block it holds (None: none yet) and whether it may be read."""

    block: int | None = None
    status: Status = "free"


class Pipeline:
    """Runs the kernel's functions on buffers and commit groups; `actions` records each call."""

    def __init__(self, traits: FwdTraitsSm80, problem: FwdProblem, blocks: int) -> None:
        self.traits = traits
        self.blocks = blocks
        self.asynchronous = loads_asynchronously(traits, problem)
        self.buffers = {f"s{tensor}[{stage}]": Buffer() for tensor in "KV" for stage in range(traits.kv_stage)}
        self.open = ["sQ"] if self.asynchronous else []  # tiles whose copies are not in a group yet
        self.groups: list[list[str]] = []  # committed groups not waited for yet, oldest first
        self.actions: list[Action] = []
        self.kernel = Replay(
            (fwd_mma.prologue, fwd_mma.load_block, fwd_mma.attend_block),
            {
                "cutlass": SimpleNamespace(range_constexpr=range),
                "const_expr": bool,
                "cute": SimpleNamespace(arch=SimpleNamespace(cp_async_commit_group=self._commit), copy=self._fetch_q),
                "load_kv": self._load,
                "wait_loads": self._wait,
                "product_qk": lambda kernel, f, stage: self._read("K", stage, "S = Q Kᵀ"),
                "product_pv": lambda kernel, f, stage: self._read("V", stage, "O += P V"),
                "softmax_block": self._softmax,
                "scale_rows": Anything(),
            },
        )

    def run(self) -> None:
        """The whole tile: prologue, then every key block, last block first."""
        last, seqlen = self.blocks - 1, self.blocks * self.traits.tile_n
        kernel, f = SimpleNamespace(traits=self.traits, converts=False), Anything()
        loads = SimpleNamespace(k="K", v="V")
        tile = SimpleNamespace(mask=SimpleNamespace(seqlen_k=seqlen))
        self.kernel.functions["prologue"](kernel, f, loads, tile, 0, last)
        for block in range(last, -1, -1):
            self.kernel.functions["attend_block"](kernel, f, loads, tile, (0, last), block, block == last)

    def _load(self, tensor: str, block: int, stage: int, rows: int | None) -> None:
        name = f"s{tensor}[{stage}]"
        if self.asynchronous:
            self.buffers[name] = Buffer(block, "loading")
            self.open.append(name)
            text = f"issue the copies of {tensor} block {block} into stage {stage}"
        else:
            self.buffers[name] = Buffer(block, "stored")
            text = f"load {tensor} block {block} to registers, wait for it, store it into stage {stage}"
        self._act("load", text, block)

    def _commit(self) -> None:
        self.groups.append(self.open)
        self.open = []
        why = "the count of groups stays right" if self.asynchronous else "no copy is in flight"
        self._act("commit", "close the group" if self.groups[-1] else f"close an empty group: {why}")

    def _wait(self, pending: int) -> None:
        seen = max(len(self.groups) - pending, 0)
        landed = {name for group in self.groups[:seen] for name in group}
        self.groups = self.groups[seen:]
        for name, buffer in self.buffers.items():
            if name in landed or buffer.status == "stored":
                buffer.status = "ready"
            elif buffer.status == "read":  # past the barrier, every warp has finished its product
                buffer.status = "free"
        what = "wait for every group" if pending == 0 else f"wait for all but the last {pending} of the groups"
        empty = "" if self.asynchronous else ", all of them empty"
        self._act("wait", f"{what}{empty}, then a block-wide barrier")

    def _fetch_q(self, copy: Anything, source: Anything, target: Anything) -> None:
        self._act("ldmatrix", "Q goes to registers by ldmatrix")

    def _read(self, tensor: str, stage: int, product: str) -> None:
        buffer = self.buffers[f"s{tensor}[{stage}]"]
        buffer.status = "reading"
        text = f"{product} reads {tensor} block {buffer.block} from stage {stage}"
        self._act("product", text, buffer.block)
        buffer.status = "read"

    def _softmax(self, kernel: Any, f: Anything, tile: Any, block: int, masked: bool) -> None:
        self._act("softmax", f"softmax of the scores of block {block}, in registers", block)

    def _act(self, kind: str, text: str, block: int | None = None) -> None:
        function, line = self.kernel.place()
        state = {name: [buffer.block, buffer.status] for name, buffer in self.buffers.items()}
        groups = [list(group) for group in self.groups]
        action = {"function": function, "line": line, "kind": kind, "text": text, "block": block}
        self.actions.append(action | {"buffers": state, "groups": groups, "open": list(self.open)})


def loads_asynchronously(traits: FwdTraitsSm80, problem: FwdProblem) -> bool:
    """Whether the kernel's loads are asynchronous, from global to shared memory, past the registers."""
    copies = []
    cute = SimpleNamespace(
        copy=lambda copy, source, target, pred=None: copies.append((source, target)),
        make_rmem_tensor_like=lambda tensor: Anything(),
    )
    load = Replay((row_copies.load,), {"cute": cute, "cpasync": cpasync}).functions["load"]
    with context("sm_80"):
        load(kernel_class(traits)(traits, problem).load_copy(traits.head_dim), "global", "shared", None)
    return copies == [("global", "shared")]


def traits_of(row: FwdTraitsSm80, stages: int, off: str | None = None) -> FwdTraitsSm80:
    """The traits of a row with this number of stages and a switch off, not limited by the number of resident blocks."""
    switches = {name: name != off for name in SWITCHES}
    return dataclasses.replace(row, kv_stage=stages, q_in_regs=SHOWN[stages], blocks_per_sm=1, **switches)


def run(traits: FwdTraitsSm80, problem: FwdProblem, blocks: int = BLOCKS) -> list[Action]:
    """The actions of one tile of `blocks` key blocks."""
    pipeline = Pipeline(traits, problem, blocks)
    pipeline.run()
    return pipeline.actions


def tally(actions: Sequence[Action]) -> dict[str, int]:
    """How often a tile waits, its products and softmaxes, and how many of these run while a copy is in flight."""
    work = [action for action in actions if action["kind"] in ("product", "softmax")]
    covered = [any(status == "loading" for _, status in action["buffers"].values()) for action in work]
    waits = sum(action["kind"] == "wait" for action in actions)
    return {"waits": waits, "work": len(work), "covered": sum(covered)}


def rows_with(traits: FwdTraitsSm80) -> Iterator[str]:
    """The shipped sm80 rows of these stages and switches, as "sm_80 D128 full, causal"."""
    for (_, target, family), rows in tables_of("fwd").items():
        for row in rows:
            if family == "sm80" and all(
                getattr(row.traits, name) == getattr(traits, name) for name in ("kv_stage", *SWITCHES)
            ):
                yield f"{target} D{row.traits.head_dim} {', '.join(row.masks)}"


def order_data(row: FwdTraitsSm80, problem: FwdProblem, target: str, title: str, off: str | None) -> dict[str, Any]:
    """One order of loads: by number of stages its actions and the shipped rows, or why it rules that number out."""
    found: dict[str, Any] = {"title": title, "off": off, "stages": {}, "refused": {}}
    if off is not None:
        found["does"] = attribute_docs(FwdTraitsSm80)[off]
    for stages in SHOWN:
        traits = traits_of(row, stages, off)
        reason = traits.check(get_arch(target))
        if reason is not None:
            found["refused"][str(stages)] = reason
            continue
        actions = run(traits, problem)
        found["stages"][str(stages)] = {"actions": actions, "rows": list(rows_with(traits)), **tally(actions)}
    return found


def pipeline_data(row: FwdTraitsSm80, problem: FwdProblem, target: str) -> dict[str, Any]:
    """The orders of loads of a row's kernel, and the source of the functions with their actions."""
    sources = Pipeline(row, problem, BLOCKS).kernel.sources
    return {
        "blocks": BLOCKS,
        "orders": [order_data(row, problem, target, title, off) for title, off in ORDERS.items()],
        "sources": {name: source.as_dict() for name, source in sources.items()},
    }
