"""What split keys add to a scene: the part of a tile that a block leaves in memory if its share lacks some keys.

How keys are shared is in `cuteflash/core/split.py`, and drawn in the lesson on it.
"""

from __future__ import annotations

from .algebra import Layout, composition, concatenate
from .read import Frame, Placed
from .scene import Step, Tile, Touch

FP32_BYTES = 4
IN_PLACE = "In place of O, if a border of shares cuts the tile, with the log-sum-exp of each row."
TITLES = {"gO": "O: registers → global memory", "gO_part": "O: a part of the keys → its slot"}
MERGED = "The last block to come merges a tile of few rows; of many rows its blocks meet, and each merges some."


def part_tile(frame: Frame) -> Tile:
    """The slot of a part, fp32."""
    rows, columns = shape = frame.shape("O")
    note = (
        "A slot: O of a block's share of the keys, divided by its own sums; log-sum-exps of rows lie behind all slots. "
        "A block has two, for a tile that began before its share and for one that goes on after it."
    )
    return Tile(
        id="gO_part",
        tensor="O",
        space="global",
        shape=shape,
        layout=Layout(shape, (columns, 1)),
        valid=(rows, columns),
        note=note,
        element_bytes=FP32_BYTES,
    )


def store_part(frame: Frame, acc: Placed) -> Step:
    """A part's way to its slot."""
    atom, m, n = acc.values.modes()
    pair, row, *groups = atom.modes()
    tv = concatenate(acc.threads, pair, concatenate(*groups, n, row, m))
    return store_registers(frame, "gO_part", "st.global.v2.b32", (tv, tv), f"{IN_PLACE} {MERGED}")


def store_octets(frame: Frame, acc: Placed) -> Step:
    """O's way from its accumulator to memory, if it is not staged."""
    note = (
        "Rounded; there is no shared memory left to stage it. Four lanes have pairs of the same 32 columns: they trade "
        "them (shfl.sync.bfly.b32), so that each stores 8 neighbours."
    )
    return store_registers(frame, "gO", "st.global.v4.b32", octets(acc, 4), note)


def octets(acc: Placed, together: int) -> tuple[Layout, Layout]:
    """What a thread has of an accumulator, the pairs of so many neighbouring groups of 8 columns by an instruction.

    And what it stores if four lanes trade the pairs of so many groups.
    """
    atom, m, n = acc.values.modes()
    pair, row, *groups = atom.modes()
    columns = concatenate(*groups, n)  # groups of 8
    near = composition(columns, Layout(together))
    others = concatenate(composition(columns, Layout(columns.size() // together, together)), row, m)
    ((_, column),) = pair.flat_modes()
    extents, strides = zip(*acc.threads.flat_modes(), strict=True)
    threads = Layout((extents,), ((pair.size() * together * column, *strides[1:]),))
    stored = concatenate(threads, Layout(pair.size() * together, column), others)
    return concatenate(acc.threads, concatenate(pair, near), others), stored


def quads(acc: Placed) -> tuple[Layout, Layout]:
    """What a thread has of an accumulator, by four neighbours and by two.

    Of each 16 columns the even ones are in one group of 8, the odd ones in the next.
    """
    atom, m, n = acc.values.modes()
    pair, row = atom.modes()
    parity, groups = composition(n, Layout(2)), composition(n, Layout(n.size() // 2, 2))
    fours = concatenate(acc.threads, concatenate(parity, pair), concatenate(groups, row, m))
    return fours, concatenate(acc.threads, parity, concatenate(pair, groups, row, m))


def store_registers(frame: Frame, target: str, instruction: str, tvs: tuple[Layout, Layout], note: str) -> Step:
    """O from its accumulator to `target` in global memory; `tvs` say what of either an instruction touches."""
    read, written = tvs
    touches = (Touch("acc_O", "read", read, frame.first_thread), Touch(target, "write", written, frame.first_thread))
    return Step(
        id=f"store_{target[1:].lower()}",
        title=TITLES[target],
        kind="st.global",
        instruction=instruction,
        role="every consumer warp" if frame.first_thread else "every warp",
        repeat="once a tile",
        phase="epilogue",
        touches=touches,
        note=note,
    )
