"""What the drawings of latent attention share in both families: its tensors in memory, and O's way from registers."""

from __future__ import annotations

import dataclasses
from typing import Final

from cuteflash.mla_problem import LATENT_DIM_V, MlaProblem

from .algebra import Layout
from .parts import IN_PLACE, octets, part_tile, quads, store_octets, store_registers
from .read import ELEMENT_BYTES, Frame, Placed
from .scene import Step, Tile

ROWS: Final = "The rows of a tile are (token, head), heads first."
SHARES: Final = "Nothing but another view of K: the same bytes, whose rows are the product's k extent."
MERGED_LATER: Final = "A second kernel merges the parts of a tile."
EXPONENTIALS: Final = "fma.rn.f32, ex2.approx.f32"
RESCALE: Final = "mul.f32, vote.sync.any"


def global_latent(frame: Frame, tensor: str, row: int, note: str, element_bytes: int = ELEMENT_BYTES) -> Tile:
    """A tile of a tensor whose rows have `row` elements, from its first column on."""
    shape = frame.shape(tensor)
    layout = Layout(shape, (row, 1))
    return Tile(f"g{tensor}", tensor, "global", shape, layout, valid=shape, note=note, element_bytes=element_bytes)


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
    whole = store_octets(frame, acc)
    if not problem.is_split:
        return (whole,)
    own, _ = octets(acc, 2)
    note = (
        f"{IN_PLACE} A slot has the columns in the order in which lanes have them, two pairs of every 16 together. "
        f"{MERGED_LATER}"
    )
    return whole, store_registers(frame, "gO_part", "st.global.v4.b32", (own, own), note)


def store_quads(frame: Frame, acc: Placed, problem: MlaProblem) -> tuple[Step, ...]:
    """O from an accumulator whose threads have four neighbours of each 16 columns, the even ones in a group of 8."""
    whole, part = quads(acc)
    alone = "Rounded. A lane has four neighbouring columns of each 16."
    of_part = f"{IN_PLACE} A slot has pairs of every 16 columns in another order. {MERGED_LATER}"
    stores = [store_registers(frame, "gO", "st.global.v2.b32", (whole, whole), alone)]
    if problem.is_split:
        stores.append(store_registers(frame, "gO_part", "st.global.v2.b32", (part, part), of_part))
    return tuple(stores)
