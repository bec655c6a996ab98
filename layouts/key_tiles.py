"""What the kernels have in common that compute dK and dV of a tile of keys: its tensors, and Hopper's loads of them."""

from __future__ import annotations

from typing import Any

from cuteflash.problem import BwdProblem

from .gradient_steps import STEP
from .hopper import HopperSteps, Transfer, When, example_tensor
from .read import Frame, global_tile
from .scene import Step, Tile

TILE = "once a tile"
LONE = (
    "The only block of a sequence whose keys are one tile rounds dQ instead and stores it, if all of its queries see a "
    "key."
)


def global_tiles(frame: Frame, problem: BwdProblem) -> tuple[Tile, ...]:
    """What a block reads and writes of global memory, but for dQ."""
    wide, narrow = problem.operands.head_dim, problem.operands.head_dim_v
    return (
        global_tile(frame, "Q", wide, "The queries of one step, of one query head."),
        global_tile(frame, "K", wide, "A block's keys of one head."),
        global_tile(frame, "V", narrow, "The values of its keys."),
        global_tile(frame, "dO", narrow, "The gradient of the output, of one step."),
        global_tile(frame, "dV", narrow, "The gradient of the block's values."),
        global_tile(frame, "dK", wide, "The gradient of the block's keys."),
    )


def ahead(stages: int) -> str:
    """How far loads run ahead."""
    return f"Up to {stages} tile{'s' if stages > 1 else ''} ahead of the products."


def make_example_tma(kernel: Any) -> Any:
    """A kernel's TMA atoms over example tensors."""
    from cuteflash.arguments import BwdTensors
    from cuteflash.kernels.sm90.bwd_load import make_tma

    operands, dtype = kernel.problem.operands, kernel.dtype
    wide, narrow = (example_tensor(dtype, head_dim) for head_dim in (operands.head_dim, operands.head_dim_v))
    by_name = {"q": wide, "k": wide, "dq": wide, "dk": wide, "v": narrow, "do": narrow, "dv": narrow}
    return make_tma(kernel, BwdTensors(**{name: by_name.get(name) for name in BwdTensors._fields}))


def load_steps(draw: HopperSteps, kernel: Any, smem: Any, loader: str) -> tuple[Step, ...]:
    """TMA loads: K and V once, Q and dO step by step; in the order K, Q, V, dO."""
    tma, traits = make_example_tma(kernel), kernel.traits
    once, often = When("prologue", TILE, loader), When("loop", STEP, loader)
    found = []
    for tensor, atom, coords, tile, stages in (
        ("K", tma.load_k, tma.gK, smem.sK, 0),
        ("Q", tma.load_q, tma.gQ, smem.sQ, traits.q_stage),
        ("V", tma.load_v, tma.gV, smem.sV, 0),
        ("dO", tma.load_do, tma.gdO, smem.sdO, traits.do_stage),
    ):
        what = Transfer(tensor, atom, coords, tile, draw.frame.shape(tensor)[0])
        found.append(draw.load(what, often if stages else once, ahead(stages) if stages else ""))
    return tuple(found)
