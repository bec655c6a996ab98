"""What the drawings of latent attention share in both families: its tensors in memory, and O's way from registers."""

from __future__ import annotations

import dataclasses
from typing import Final

from cuteflash.mla_problem import LATENT_DIM_V, MlaProblem

from .algebra import Layout, composition, concatenate
from .parts import IN_PLACE, part_tile, store_registers
from .read import Frame, Placed
from .scene import Step, Tile

ROWS: Final = "The rows of a tile are (token, head), heads first."
SHARES: Final = "Nothing but another view of K: the same bytes, whose rows are the product's k extent."
EXPONENTIALS: Final = "fma.rn.f32, ex2.approx.f32"
RESCALE: Final = "mul.f32, vote.sync.any"


def global_latent(frame: Frame, tensor: str, row: int, note: str) -> Tile:
    """A tile of a tensor whose rows have `row` elements, from its first column on."""
    shape = frame.shape(tensor)
    return Tile(f"g{tensor}", tensor, "global", shape, Layout(shape, (row, 1)), valid=shape, note=note)


def out_tiles(frame: Frame, problem: MlaProblem) -> tuple[Tile, ...]:
    """O in global memory, and of split keys the slot of a part.

    Of every 16 columns of a slot, four lanes have two pairs each, which are neighbours in it.
    """
    whole = global_latent(frame, "O", LATENT_DIM_V, ROWS)
    if not problem.is_split:
        return (whole,)
    tile = part_tile(frame)
    rows, columns = tile.shape
    layout = Layout((rows, (2, 4, 2, columns // 16)), (columns, (1, 4, 2, 16)))
    return whole, dataclasses.replace(tile, layout=layout)


def row_move(headroom: float) -> str:
    """When a row's maximum moves."""
    moves = f"exceeds it by more than {headroom:g} powers of two" if headroom else "is larger"
    return f"A row's maximum moves only if a score {moves}."


def rescale_note(headroom: float) -> str:
    """When O is rescaled, and by what."""
    return f"By exp2(old maximum - new maximum) of each row, if a maximum moved by more than {headroom:g}."


def store_out(frame: Frame, acc: Placed, problem: MlaProblem) -> tuple[Step, ...]:
    """O from its accumulator to memory, whole, and of split keys to the slot of a part."""
    whole = _wide_store(
        frame, acc, "gO", 4,
        "Rounded; there is no shared memory left to stage it. Four lanes have pairs of the same 32 columns: they "
        "trade them (shfl.sync.bfly.b32), so that each stores 8 neighbours.",
    )  # fmt: skip
    if not problem.is_split:
        return (whole,)
    part = _wide_store(
        frame, acc, "gO_part", 2,
        f"{IN_PLACE} A slot has the columns in the order in which lanes have them, two pairs of every 16 together. "
        "A second kernel merges the parts of a tile.",
    )  # fmt: skip
    return whole, part


def _wide_store(frame: Frame, acc: Placed, target: str, together: int, note: str) -> Step:
    """The O accumulator to `target`, the pairs of so many neighbouring groups of 8 columns by an instruction."""
    atom, m, n = acc.values.modes()
    pair, row, *groups = atom.modes()
    columns = concatenate(*groups, n)  # groups of 8
    near = composition(columns, Layout(together))
    others = concatenate(composition(columns, Layout(columns.size() // together, together)), row, m)
    own = concatenate(acc.threads, concatenate(pair, near), others)
    stored = own
    if target == "gO":  # after the trade
        ((_, column),) = pair.flat_modes()
        extents, strides = zip(*acc.threads.flat_modes(), strict=True)
        threads = Layout((extents,), ((pair.size() * together * column, *strides[1:]),))
        stored = concatenate(threads, Layout(pair.size() * together, column), others)
    return store_registers(frame, target, "st.global.v4.b32", (own, stored), note)
