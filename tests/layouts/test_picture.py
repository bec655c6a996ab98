"""Static pictures: every cell is there, says what the scene says, and every format shows the same."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from cuteflash.dispatch import choose
from cuteflash.problem import FwdProblem
from layouts.algebra import Layout
from layouts.command import read_scene, scene_json
from layouts.picture import ascii, colors, lay_out, make_table, panels, part_of, png, svg
from layouts.picture.colors import ABSENT, CATEGORIES, category, ink, ramp
from layouts.picture.model import TEXT_CELLS
from layouts.picture.svg import TIP_CELLS

SVG = "{http://www.w3.org/2000/svg}"
SCENES = {"sm80": ("sm_80", "sm80", 64), "sm90": ("sm_90a", "sm90", 64), "padded": ("sm_80", "sm80", 72)}


@pytest.fixture(scope="module")
def scenes() -> dict[str, dict[str, Any]]:
    found = {}
    for name, (target, family, head_dim) in SCENES.items():
        problem = FwdProblem.dense("bf16", head_dim, head_dim, mask="causal")
        found[name] = scene_json(read_scene(problem, target, choose(problem, target, family)))
    return found


def layout(shape: list[Any], stride: list[Any]) -> dict[str, Any]:
    return {"shape": shape, "stride": stride}


def tile(rows: int = 2, cols: int = 4, **changes: Any) -> dict[str, Any]:
    spec = {
        "id": "sK",
        "tensor": "K",
        "space": "shared",
        "axes": ["n", "d"],
        "shape": [rows, cols],
        "stages": 2,
        "layout": layout([rows, cols, 2], [cols, 1, rows * cols]),
        "swizzle": None,
        "base": 256,
        "element_bytes": 2,
        "valid": None,
        "note": "K waits here.",
    }
    return spec | changes


def toy(*tiles: dict[str, Any], steps: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A scene of the given tiles and the accumulator of one mma.m16n8k16."""
    accumulator = {
        "id": "acc",
        "tensor": "S",
        "axes": ["m", "n"],
        "shape": [16, 8],
        "dtype": "f32",
        "registers": 4,
        "first_thread": 32,
        "tv": layout([[4, 8], [2, 2]], [[32, 1], [16, 8]]),
    }
    return {
        "id": "toy",
        "title": "a toy",
        "kernel": {"element_bytes": 2},
        "tiles": list(tiles),
        "fragments": [accumulator],
        "steps": steps or [],
    }


def cells(document: str) -> list[ElementTree.Element]:
    return cells_of(ElementTree.fromstring(document))


def cells_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    (group,) = (item for item in root.iter(f"{SVG}g") if item.get("id") == "cells")
    return list(group.iter(f"{SVG}rect"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_an_svg_has_one_rect_a_cell_inside_its_borders(scenes: dict[str, Any], name: str) -> None:
    for panel in panels(scenes[name]):
        picture = lay_out(make_table(scenes[name], panel))
        root = ElementTree.fromstring(svg.render(picture))
        rects = cells_of(root)
        rows, cols = part_of(scenes[name], panel).shape
        assert len(rects) == rows * cols
        assert len({(rect.get("x"), rect.get("y")) for rect in rects}) == rows * cols
        right = max(float(rect.attrib["x"]) + float(rect.attrib["width"]) for rect in rects)
        bottom = max(float(rect.attrib["y"]) + float(rect.attrib["height"]) for rect in rects)
        assert right <= picture.width
        assert bottom <= picture.height
        titles = root.findall(f".//{SVG}rect/{SVG}title")
        assert len(titles) == (rows * cols if rows * cols <= TIP_CELLS else 0)


def test_a_png_has_the_size_and_colours_of_its_picture() -> None:
    table = make_table(toy(tile()), "sK")
    picture = lay_out(table)
    image = Image.open(io.BytesIO(png.render(picture)))
    assert image.size == (math.ceil(picture.width), math.ceil(picture.height))
    for number, rect in enumerate(picture.cells):
        inside = image.getpixel((int(rect.x) + 2, int(rect.y) + 2))
        assert "#{:02x}{:02x}{:02x}".format(*inside) == table.fills[number // table.cols][number % table.cols]


def test_text_has_coordinates_and_breaks_to_the_width() -> None:
    assert ascii.render(make_table(toy(tile()), "sK", stage=1), width=32) == (
        "sK of a toy\n"
        "K in shared memory; stage 1 of\n"
        "2.\n"
        "In a cell: byte address in\n"
        "hexadecimal / bank.\n"
        "K waits here.\n"
        "Colour: bank.\n"
        "\n"
        "n \\ d      0      1      2\n"
        "    0 0110/4 0112/4 0114/5\n"
        "    1 0118/6 011a/6 011c/7\n"
        "\n"
        "n \\ d      3\n"
        "    0 0116/5\n"
        "    1 011e/7\n"
    )


def test_text_says_what_it_crops() -> None:
    table = make_table(toy(tile(64, 64)), "sK")
    lines = ascii.render(table, width=2000, crop=(2, 3)).splitlines()
    assert "Cropped: rows 0 to 1 of 64, columns 0 to 2 of 64." in lines
    assert [line.split()[0] for line in lines[-2:]] == ["0", "1"]
    assert len(lines[-1].split()) == 1 + 3
    assert "Cropped" not in ascii.render(table, width=2000, crop=(64, 64))


def test_fragments_print_the_thread_and_value_of_the_ptx_manual() -> None:
    labels = make_table(toy(), "acc").labels
    for lane in range(32):
        for value in range(4):
            row, col = lane // 4 + 8 * (value // 2), 2 * (lane % 4) + value % 2
            assert labels[row][col] == f"T{32 + lane} V{value}"


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_tiles_print_the_scenes_addresses_and_banks(scenes: dict[str, Any], name: str, swizzled: bool) -> None:
    scene = scenes[name]
    spec = next(spec for spec in scene["tiles"] if spec["id"] == "sK")
    stage = spec["stages"] - 1
    bits, base, shift = spec["swizzle"]
    table = make_table(scene, "sK", stage=stage, swizzled=swizzled)
    for row in range(0, table.rows, 3):
        for col in range(0, table.cols, 5):
            offset = Layout(**spec["layout"])((row, col, stage)[: len(spec["layout"]["shape"])])
            if swizzled:
                offset ^= ((offset >> (base + shift)) & ((1 << bits) - 1)) << base
            address = spec["base"] + 2 * offset
            assert table.labels[row][col] == f"{address:0{len(table.labels[0][0].split('/')[0])}x}/{address // 4 % 32}"
            assert table.fills[row][col] == ramp(address // 4 % 32 / 31)
    assert ("left out" in " ".join(table.remarks)) is not swizzled


def test_columns_beyond_the_tensor_are_marked(scenes: dict[str, Any]) -> None:
    table = make_table(scenes["padded"], "gQ")
    assert table.cols == 96
    for labels, fills in zip(table.labels, table.fills, strict=True):
        assert [label == "-" for label in labels] == [fill == ABSENT for fill in fills] == [False] * 72 + [True] * 24
    assert "beyond the tensor" in table.tips[0][72]


def test_owners_of_a_tile_are_the_threads_that_write_it() -> None:
    warp_writes = {
        "title": "K arrives",
        "descriptor": None,
        "touches": [
            {"id": "sK", "mode": "read", "first_thread": 0, "thread_step": 1, "tv": layout([8, 1, 1], [1, 0, 0])},
            {"id": "sK", "mode": "write", "first_thread": 64, "thread_step": 32, "tv": layout([4, 2, 1], [2, 1, 0])},
        ],
    }
    table = make_table(toy(tile(), steps=[warp_writes]), "sK", "owner")
    assert {text for text, _ in table.legend} == {"warp 2", "warp 3", "warp 4", "warp 5"}
    assert len({table.fills[row][col] for row in range(2) for col in range(4)}) == 4
    assert table.fills[0][0] == table.fills[1][0] != table.fills[0][1]
    assert any("K arrives" in remark for remark in table.remarks)


def test_copies_of_an_operand_are_counted(scenes: dict[str, Any]) -> None:
    table = make_table(scenes["sm80"], "rK")
    warps = scenes["sm80"]["kernel"]["threads"] // 32
    assert all(label.endswith(f" +{warps - 1}") for row in table.labels for label in row)


def test_core_matrices_are_8_rows_of_16_bytes(scenes: dict[str, Any]) -> None:
    numbers = part_of(scenes["sm90"], "sK").core_matrices()
    assert numbers is not None
    for number in range(int(numbers.max()) + 1):
        found = (numbers == number).nonzero()
        assert [len(set(axis.tolist())) for axis in found] == [8, 8]
        assert len(found[0]) == 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_every_colouring_of_every_panel_draws(scenes: dict[str, Any], name: str) -> None:
    for panel in panels(scenes[name]):
        for color in colors(part_of(scenes[name], panel)):
            table = make_table(scenes[name], panel, color)
            assert all(re.fullmatch("#[0-9a-f]{6}", fill) for row in table.fills for fill in row)
            assert table.legend or color == "plain"


def test_the_standard_colouring_and_what_panels_have(scenes: dict[str, Any]) -> None:
    scene = scenes["sm90"]
    assert colors(part_of(scene, "acc_S")) == ["owner", "value", "plain"]
    assert {"bank", "address", "core"} <= set(colors(part_of(scene, "sK")))
    assert make_table(scene, "sK").legend[0][0] == "bank 0"
    assert make_table(scene, "gQ").legend[0][0] == "byte 0"
    assert make_table(scene, "acc_S").legend[0][0] == "warp 4"


@pytest.mark.parametrize(
    ("panel", "options", "complaint"),
    [
        ("sX", {}, "panel is 'sX'; toy has: sK, acc"),
        ("acc", {"color": "bank"}, "color is 'bank'; panel acc has: owner, value, plain"),
        ("sK", {"color": "core"}, "color is 'core'; panel sK has: bank, address, plain"),
        ("sK", {"stage": 2}, "stage is 2; panel sK has: 0, 1"),
        ("acc", {"stage": 1}, "stage is 1; panel acc has: 0"),
    ],
)
def test_what_a_panel_lacks_is_an_error_that_lists_what_it_has(panel: str, options: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        make_table(toy(tile()), panel, **options)


def test_large_tiles_are_drawn_without_text_and_say_so() -> None:
    small, large = (lay_out(make_table(toy(tile(rows, 128)), "sK")) for rows in (128, 129))
    assert len(small.cell_texts) == TEXT_CELLS
    assert large.cell_texts == ()
    assert [any("without their text" in text.text for text in p.texts) for p in (small, large)] == [False, True]


def test_pictures_are_the_same_every_time(scenes: dict[str, Any]) -> None:
    again = json.loads(json.dumps(scenes["sm80"]))
    for panel in ("sQ", "acc_S"):
        first, second = (lay_out(make_table(scene, panel)) for scene in (scenes["sm80"], again))
        assert svg.render(first) == svg.render(second)
    assert png.render(lay_out(make_table(toy(tile()), "sK"))) == png.render(lay_out(make_table(toy(tile()), "sK")))


def test_titles_are_escaped() -> None:
    scene = toy(tile(note="1 < 2 & 3")) | {"title": "<b>"}
    root = ElementTree.fromstring(svg.render(lay_out(make_table(scene, "sK"))))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "sK of <b>" in texts
    assert "1 < 2 & 3" in texts


def test_text_reads_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for fill in [*CATEGORIES, *(ramp(step / 31) for step in range(32))]:
        low, high = sorted((luminance(fill), luminance(ink(fill))))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    assert category(0) == category(8)
