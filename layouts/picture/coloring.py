"""How the cells of a part are coloured: by owner, bank, value, address or core matrix, as the page does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..banks import BANKS, WARP
from .colors import ABSENT, CATEGORIES, PLAIN, category, mix, ramp
from .parts import NONE, Numbers, Owners, Part, banks

COLORS = ("owner", "bank", "value", "address", "core", "plain")
LEGEND_STEPS = 5

Legend = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Coloring:
    """Fill of every cell [row][col], the legend of the fills, and a sentence that explains them (empty for plain)."""

    fills: list[list[str]]
    legend: Legend
    remark: str


def colors(part: Part) -> list[str]:
    """The colourings that apply to a part."""
    owners = part.owners()
    says_something = {
        "owner": owners is not None and owners.threads > 1,
        "value": owners is not None and owners.values > 1,
        "bank": part.shared,
        "address": part.kind == "tile",
        "core": part.kind == "tile" and part.core_matrices() is not None,
        "plain": True,
    }
    return [color for color in COLORS if says_something[color]]


def standard_color(part: Part) -> str:
    """The default colouring of a part."""
    return {"fragment": "owner", "tile": "bank" if part.shared else "address"}[part.kind]


def colored(part: Part, color: str, stage: int, swizzled: bool) -> Coloring:
    """One of `colors(part)`, for one stage of a tile, with its swizzle or without."""
    numbers, color_of, legend, remark = _scale(part, color, stage, swizzled)
    fill_of = {number: ABSENT if number == NONE else color_of(number) for number in np.unique(numbers).tolist()}
    fills = [[fill_of[number] for number in row] for row in numbers.tolist()]
    valid_rows, valid_cols = part.valid
    for row, cells in enumerate(fills):
        first = valid_cols if row < valid_rows else 0
        cells[first:] = [ABSENT] * (len(cells) - first)
    return Coloring(fills, legend, remark)


Scale = tuple[Numbers, Callable[[int], str], Legend, str]  # number of each cell, number -> colour, legend, remark


def _scale(part: Part, color: str, stage: int, swizzled: bool) -> Scale:
    match color:
        case "bank":
            return _ramped(banks(part.addresses(stage, swizzled)), "bank", 0, BANKS - 1, "Colour: bank.")
        case "address":
            address = part.addresses(stage, swizzled)
            return _ramped(address, "byte", int(address.min()), int(address.max()), "Colour: address.")
        case "core":
            return _core(part)
        case "owner" | "value":
            owners = part.owners()
            assert owners is not None, f"{part.spec['id']} has no {color}"
            if color == "owner":
                return _owner(owners)
            return _ramped(owners.value, "value", 0, owners.values - 1, f"Colour: value index{_whose(owners)}.")
        case _:
            return np.zeros(part.shape, dtype=np.int64), lambda _: PLAIN, (), ""


def _ramped(numbers: Numbers, what: str, low: int, high: int, remark: str) -> Scale:
    def color_of(number: int) -> str:
        return ramp((number - low) / max(high - low, 1))

    shown = sorted({low + (high - low) * step // (LEGEND_STEPS - 1) for step in range(LEGEND_STEPS)})
    return numbers, color_of, tuple((f"{what} {number}", color_of(number)) for number in shown), remark


def _owner(owners: Owners) -> Scale:
    warps = np.unique(owners.thread[owners.thread != NONE] // WARP).tolist()
    legend = tuple((f"warp {warp}", _thread_color(warp * WARP + WARP // 2)) for warp in warps)
    remark = f"Colour: thread{_whose(owners)}; warps by hue, lanes from dark to light."
    return owners.thread, _thread_color, legend, remark


def _whose(owners: Owners) -> str:
    return f' in the step "{owners.step}"' if owners.step else ""


def _core(part: Part) -> Scale:
    numbers = part.core_matrices()
    assert numbers is not None, f"{part.spec['id']} has no core matrices"
    last = int(numbers.max())
    legend = tuple((f"core matrix {number}", _core_color(number)) for number in range(min(last + 1, len(CATEGORIES))))
    repeat = f", colours repeating up to {last}" if last >= len(CATEGORIES) else ""
    return numbers, _core_color, legend, f"Colour: core matrix of the first instruction that reads here{repeat}."


def _core_color(number: int) -> str:
    """Shifted by one every eight: matrices side by side are a multiple of eight apart in many tiles."""
    return category(number + number // len(CATEGORIES))


def _thread_color(thread: int) -> str:
    """Warps differ in hue, lanes run from dark to light, the second eight of sixteen warps are darker."""
    warp, lane = divmod(thread, WARP)
    hue = mix(category(warp), "#000000", 0.3 if warp % 16 > 7 else 0.0)
    return mix(hue, "#000000", (16 - lane) / 56) if lane < 16 else mix(hue, "#ffffff", (lane - 15) / 28)
