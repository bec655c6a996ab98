"""The ladders of decoding, of keys and values and of latents: from a block for each query tile to the shipped rows.

Memory is the limit, so that speeds are GB/s of what a call reads and writes once, beside the rate of a copy. Caches are
several times what a GPU's own cache holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from cuteflash.api import flash_attn_func
from cuteflash.dispatch import choose_shipped
from cuteflash.mla_planning import plan_of
from cuteflash.mla_problem import LATENT_DIM, LATENT_DIM_V, AnyProblem
from cuteflash.traits.arch import Family
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.cells import Cell, Inputs
from cuteflash.tune.timing import Runner
from cuteflash.tune.trials import fwd_runner, paged_latents

from .backward_ladder import SHIPPED, Rung, climbed
from .contest import Maker
from .judges import OutputJudge

WHOLE = Rung("whole tiles", (), "a block reads all keys of its query tile: a few sequences leave most of the GPU idle")
SPLIT = "the keys of all tiles are dealt to the blocks in equal shares, and parts are merged"


def decode_cell(batch: int, seqlen: int, heads: int = 32, group: int = 4) -> Cell:
    """One query a sequence, head dim 128, `group` query heads of a KV head."""
    return Cell(128, "full", seqlen, seqlen_q=1, tokens=batch * seqlen, hidden=heads * 128, form="decode", group=group)


def latent_cell(batch: int, seqlen: int, heads: int) -> Cell:
    """One query a sequence, on latents."""
    sizes: dict[str, Any] = {"seqlen_q": 1, "tokens": batch * seqlen, "hidden": heads * LATENT_DIM}
    return Cell(LATENT_DIM, "full", seqlen, head_dim_v=LATENT_DIM_V, operation="mla", form="mla", **sizes)


CELLS = (
    *(decode_cell(*size) for size in ((1, 131072), (16, 8192), (64, 4096))),
    *(latent_cell(*size) for size in ((128, 8192, 16), (1, 131072, 16), (128, 8192, 128), (1, 131072, 128))),
)


class BesideCopyJudge(OutputJudge):
    """An `OutputJudge` that tells the bytes of a call."""

    def __init__(self, inputs: Any, reference: Any):
        super().__init__(inputs, reference)
        self.facts["nbytes"] = inputs.cell.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeLadder:
    """The rungs of one kernel.

    Attributes:
        name: in results and reports.
        kind: of the kernel's traits.
        plain: the traits of the lowest rung with split keys that differ from the shipped row's.
        rungs: those with split keys; `WHOLE` stands below them.
    """

    name: str
    kind: type[Any]
    plain: Mapping[str, Any]
    rungs: tuple[Rung, ...]
    peer: None = None  # the copy is the yardstick

    @property
    def family(self) -> Family:
        """Of the kernel."""
        family: Family = self.kind.family
        return family

    def serves(self, cell: Cell, target: str) -> bool:
        """Whether the cell's shipped row is of this kernel; of latents, that which dispatch takes on its own."""
        return bool(cell.form) and type(self.shipped(cell, target)) is self.kind

    def shipped(self, cell: Cell, target: str) -> Traits:
        """Those of the shipped row."""
        family = None if cell.spec.latent_dims else self.family
        return choose_shipped(cell.problem, target, family, cell.lengths, cell.query_rows).traits

    def variants(self, cell: Cell, target: str) -> dict[str, Traits]:
        """Title → traits of each rung with split keys."""
        return climbed(self.rungs, self.shipped(cell, target), self.plain)

    def told(self) -> list[dict[str, Any]]:
        """Titles and words of its rungs, as a result has them."""
        return [{"title": rung.title, "does": rung.does} for rung in (WHOLE, *self.rungs)]

    def kernels(self, cell: Cell, target: str) -> list[tuple[Traits, AnyProblem]]:
        """What has to be compiled for a cell; the kernel of `WHOLE` is compiled when it is called."""
        return [(traits, cell.problem) for traits in self.variants(cell, target).values()]

    def makers(self, cell: Cell, target: str) -> dict[str, Maker]:
        """Title → what makes a rung's runner."""
        variants = self.variants(cell, target)
        found: dict[str, Maker]
        if cell.spec.latent_dims:
            found = {WHOLE.title: functools.partial(latent_runner, variants[self.rungs[0].title], 1)}
            of_rungs = {title: functools.partial(latent_runner, traits, 0) for title, traits in variants.items()}
            return found | of_rungs
        found = {WHOLE.title: functools.partial(whole_runner, self.family)}
        return found | {title: functools.partial(fwd_runner, traits, target) for title, traits in variants.items()}

    def judge(self, cell: Cell, where: torch.device) -> BesideCopyJudge:
        """What the outputs of all rungs are compared with."""
        return BesideCopyJudge.of(cell, where)


def whole_runner(family: Family, inputs: Inputs) -> Runner:
    """Attention that does not split keys, as dispatch runs it."""

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            out: torch.Tensor = flash_attn_func(inputs.q, inputs.k, inputs.v, family=family, num_splits=1)
        return out

    return run


def latent_runner(traits: Any, num_splits: int, inputs: Inputs) -> Runner:
    """Decoding of latents in pages, which lie in a random order; `num_splits` as `flash_mla_decode` has it."""
    pages, table, lengths = paged_latents(inputs)
    options = inputs.cell.head_dim**-0.5, False, num_splits, traits.family
    plan, out = plan_of(inputs.q, pages, table, options, traits), inputs.empty_out()

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            plan(inputs.q, pages, table, lengths, None, out)
        return out

    return run


HEADROOM = Rung("headroom", ("headroom",), "O is scaled only if a score exceeds its row's maximum by 8 powers of two")
LADDERS = (
    DecodeLadder(
        "sm80 decoding",
        FwdTraitsSm80,
        {"async_copy": False, "swizzle_bits": 0, "eager_loads": False, "kv_stage": 1, "blocks_per_sm": 1},
        (
            Rung("split keys", (), f"{SPLIT}; loads through registers, waited for"),
            Rung("cp.async", ("async_copy",), "global to shared memory without registers between"),
            Rung("swizzle", ("swizzle_bits",), "no bank conflicts of ldmatrix"),
            Rung("stages", ("eager_loads", "kv_stage"), "the next key blocks load beside this one's products"),
            Rung("two blocks", ("blocks_per_sm",), "of a multiprocessor: one reads on while the other ends a tile"),
            SHIPPED,
        ),
    ),
    DecodeLadder(
        "sm90 decoding",
        FwdTraitsSm90,
        {"overlap": False, "kv_stage": 2, "q_in_regs": False, "exp_rows_before_wait": 1},
        (
            Rung("split keys", (), SPLIT),
            Rung("three stages", ("kv_stage",), "96 kB of keys and values on their way"),
            Rung("overlap", ("overlap",), "QK of the next block runs beside PV and softmax of this"),
            Rung("Q in registers", ("q_in_regs", "exp_rows_before_wait"), "it is read from shared memory once a tile"),
            SHIPPED,
        ),
    ),
    DecodeLadder(
        "sm80 latents",
        MlaTraitsSm80,
        {"q_kept": 0, "chains": 1, "headroom": 0.0, "early_launch": False},
        (
            Rung("split keys", (), SPLIT),
            Rung("Q in registers", ("q_kept",), "it is read from shared memory once a tile"),
            Rung("two chains", ("chains",), "products with K go to two accumulators in turn"),
            HEADROOM,
            Rung("early launch", ("early_launch",), "blocks begin where those of the launch before end"),
            SHIPPED,
        ),
    ),
    DecodeLadder(
        "sm90 latents",
        MlaTraitsSm90,
        {"groups": (9,), "headroom": 0.0},
        (
            Rung("split keys", (), SPLIT),
            Rung("groups", ("groups",), "products with a page's first columns begin while the others are on their way"),
            HEADROOM,
            SHIPPED,
        ),
    ),
)
