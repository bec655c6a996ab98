"""A scene's tile or fragment as a `Table`: addresses and banks, or threads and values, in colour."""

from __future__ import annotations

from .coloring import colored, colors, standard_color
from .model import Table
from .parts import Json, Part, banks, part_of

SPACES = {"global": "global memory", "shared": "shared memory"}
Words = list[list[str]]


def make_table(scene: Json, panel: str, color: str | None = None, stage: int = 0, swizzled: bool = True) -> Table:
    """The content of a static picture of a panel.

    Args:
        scene: one row's scene as JSON values.
        panel: a tile's or fragment's name.
        color: one of `colors(part_of(scene, panel))`; None takes the bank in shared memory, the address in global
            memory, the owner in registers.
        stage: which buffer of a tile with several.
        swizzled: False shows the addresses that elements would have without the swizzle.

    Raises:
        ValueError: no such panel, colouring or stage; the message lists those that exist.
    """
    part = part_of(scene, panel)
    color = color or standard_color(part)
    if color not in colors(part):
        raise ValueError(f"color is {color!r}; panel {panel} has: {', '.join(colors(part))}")
    if not 0 <= stage < part.stages:
        raise ValueError(f"stage is {stage}; panel {panel} has: {', '.join(map(str, range(part.stages)))}")
    coloring = colored(part, color, stage, swizzled)
    if part.kind == "tile":
        remarks, (labels, tips) = _tile_remarks(part, stage, swizzled), _tile_cells(part, stage, swizzled)
    else:
        remarks, (labels, tips) = _fragment_remarks(part), _fragment_cells(part)
    row_axis, col_axis = part.spec["axes"]
    return Table(
        title=f"{panel} of {scene['title']}",
        remarks=tuple(filter(None, (*remarks, part.spec.get("note"), coloring.remark))),
        row_axis=row_axis,
        col_axis=col_axis,
        labels=labels,
        tips=tips,
        fills=coloring.fills,
        legend=coloring.legend,
    )


def _tile_remarks(part: Part, stage: int, swizzled: bool) -> list[str]:
    spec = part.spec
    what = [f"{spec['tensor']} in {SPACES[spec['space']]}"]
    if part.stages > 1:
        what.append(f"stage {stage} of {part.stages}")
    if spec.get("swizzle"):
        bits, base, shift = spec["swizzle"]
        what.append(f"swizzle S<{bits},{base},{shift}> of elements" + ("" if swizzled else ", left out here"))
    cell = "byte address in hexadecimal / bank" if part.shared else "byte offset in hexadecimal"
    absent = "" if part.valid == part.shape else "; - is beyond the tensor and read as zero"
    return ["; ".join(what) + ".", f"In a cell: {cell}{absent}."]


def _tile_cells(part: Part, stage: int, swizzled: bool) -> tuple[Words, Words]:
    addresses = part.addresses(stage, swizzled)
    digits = max(4, len(f"{int(addresses.max()):x}"))
    valid_rows, valid_cols = part.valid
    labels, tips = [], []
    for row, (line, its_banks) in enumerate(zip(addresses.tolist(), banks(addresses).tolist(), strict=True)):
        there = valid_cols if row < valid_rows else 0
        pairs = list(zip(line, its_banks, strict=True))[:there]
        words = [f"{byte:0{digits}x}/{bank}" if part.shared else f"{byte:0{digits}x}" for byte, bank in pairs]
        tails = [f"0x{byte:0{digits}x}" + (f", bank {bank}" if part.shared else "") for byte, bank in pairs]
        beyond = len(line) - there
        labels.append(words + ["-"] * beyond)
        tips.append(_placed(part, row, tails + ["beyond the tensor, read as zero"] * beyond))
    return labels, tips


def _fragment_remarks(part: Part) -> list[str]:
    spec, owners = part.spec, part.owners()
    copies = owners is not None and int(owners.count.max()) > 1
    more = " of the first owner, + number of other owners" if copies else ""
    return [
        f"{spec['tensor']} in registers: {spec['registers']} a thread, {spec['dtype']}.",
        f"In a cell: T thread V value index{more}.",
    ]


def _fragment_cells(part: Part) -> tuple[Words, Words]:
    owners = part.owners()
    assert owners is not None, "a fragment has owners"
    labels, tips = [], []
    for row in range(part.shape[0]):
        entries = zip(*(grid[row].tolist() for grid in (owners.thread, owners.value, owners.count)), strict=True)
        words = [_owner(*entry) for entry in entries]
        labels.append(words)
        tips.append(_placed(part, row, words))
    return labels, tips


def _owner(thread: int, value: int, count: int) -> str:
    if not count:
        return "-"
    return f"T{thread} V{value}" + (f" +{count - 1}" if count > 1 else "")


def _placed(part: Part, row: int, words: list[str]) -> list[str]:
    row_axis, col_axis = part.spec["axes"]
    return [f"{row_axis} {row}, {col_axis} {col}: {word}" for col, word in enumerate(words)]
