"""What the Kernel view computes from a scene, run in node: addresses, owners, touches, colours, flow, descriptors.

The scene is a 16 x 32 tile that one warp copies, reads by ldmatrix and holds as the A operand of mma.m16n8k16; what is
expected of it follows from the PTX manual's figures and the definition of a layout, not from the page's scripts.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.layouts.web import BASE_JS, run_js

ROWS, COLS = 16, 32
BASE = 2048
ELEMENT_BYTES = 2
FILES = (
    BASE_JS,
    "core.js",
    "explain.js",
    "algebra.js",
    "scene.js",
    "coloring.js",
    "marks.js",
    "flow.js",
    "inspector.js",
    "stepper.js",
)
BROWSER = """
const location = { hash: "" };
const history = {};
"""


def layout(shape: list[Any], stride: list[Any]) -> dict[str, Any]:
    return {"shape": shape, "stride": stride}


def touch(part: str, mode: str, tv: dict[str, Any], first_thread: int = 32) -> dict[str, Any]:
    return {"id": part, "mode": mode, "first_thread": first_thread, "tv": tv, "lane_bytes": None}


def step(name: str, kind: str, touches: list[dict[str, Any]], descriptor: Any = None) -> dict[str, Any]:
    return {"id": name, "title": name, "kind": kind, "touches": touches, "descriptor": descriptor, "phase": "loop"}


# Of mma.m16n8k16's A operand, lane l holds rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and 8 further, two at a time.
A_LANES = layout([4, 8], [2 * ROWS, 1])
A_VALUES = layout([2, 2, 2], [ROWS, 8, 8 * ROWS])
COPY = layout([[4, 8], 8, 2], [[8 * ROWS, 1], ROWS, 8])
LDMATRIX = layout([[16, 2], 8, 2], [[1, 8 * ROWS], ROWS, 16 * ROWS])
OPERAND = layout([A_LANES["shape"], A_VALUES["shape"], 2], [A_LANES["stride"], A_VALUES["stride"], 16 * ROWS])
SHARED = layout([[16, 2], 8, 2], [[1, 0], ROWS, 8 * ROWS])  # lanes l and l + 16 read the same
CORE = layout([8, 8, [2, 2]], [1, ROWS, [8, 8 * ROWS]])
DESCRIPTOR = {"tile": "sQ", "major": "K", "swizzle_bytes": 64, "leading_bytes": 1, "stride_bytes": 512}


@pytest.fixture(scope="module")
def scene() -> dict[str, Any]:
    def tile(name: str, space: str, stages: int, swizzle: list[int] | None, base: int) -> dict[str, Any]:
        grid = layout([ROWS, COLS, stages], [COLS, 1, ROWS * COLS])
        shape = {"axes": ["m", "d"], "shape": [ROWS, COLS], "stages": stages, "valid": [ROWS, COLS - 2]}
        shape["element_bytes"] = ELEMENT_BYTES
        return {"id": name, "tensor": "Q", "space": space, "layout": grid, "swizzle": swizzle, "base": base, **shape}

    fragment = {
        "id": "frag_Q",
        "tensor": "Q",
        "axes": ["m", "d"],
        "shape": [ROWS, COLS],
        "operand": "A",
        "dtype": "bf16",
        "registers": 8,
        "first_thread": 32,
        "tv": layout([A_LANES["shape"], [2, 2, 2, 2]], [A_LANES["stride"], [ROWS, 8, 8 * ROWS, 16 * ROWS]]),
    }
    return {
        "id": "small",
        "title": "small",
        "kernel": {
            "element_bytes": ELEMENT_BYTES,
            "threads": 64,
            "roles": [{"name": "w", "first_thread": 32, "threads": 32}],
        },
        "axes": {},
        "loop": "key blocks",
        "lanes": [["Q"]],
        "tiles": [tile("gQ", "global", 1, None, 0), tile("sQ", "shared", 2, [2, 3, 3], BASE)],
        "fragments": [fragment],
        "steps": [
            step("load", "cp.async", [touch("gQ", "read", COPY), touch("sQ", "write", COPY)]),
            step("ldmatrix", "ldmatrix", [touch("sQ", "read", LDMATRIX), touch("frag_Q", "write", OPERAND)]),
            step("both_halves", "ld.shared", [touch("gQ", "read", SHARED)]),
            step(
                "wgmma",
                "wgmma",
                [touch("sQ", "read", LDMATRIX)],
                {"a": {**DESCRIPTOR, "starts": [0, 32], "core": CORE}, "b": None},
            ),
        ],
    }


@pytest.fixture(scope="module")
def ask(scene: dict[str, Any]) -> Any:
    """Evaluates a JavaScript expression in which `s` is the scene."""

    def ask(expression: str) -> Any:
        load = 'CF.scene.load({ scenes: { small: data } }); const s = CF.scene.of("small");'
        body = f"(() => {{ {load} return {expression}; }})()"
        return run_js(FILES, body, data=scene, prelude=BROWSER)

    return ask


def swizzled(offset: int) -> int:
    """S<2,3,3>: bits 6 and 7 are XORed onto bits 3 and 4."""
    return offset ^ ((offset >> 6 & 3) << 3)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("on", [True, False])
def test_addresses_follow_layout_stage_swizzle_and_base(ask: Any, stage: int, on: bool) -> None:
    found = ask(
        f"Array.from({{ length: {ROWS * COLS} }}, (_, i) => "
        f's.address("sQ", i % {ROWS}, Math.floor(i / {ROWS}), {stage}, {str(on).lower()}))'
    )
    for cell, address in enumerate(found):
        offset = cell % ROWS * COLS + cell // ROWS + ROWS * COLS * stage
        assert address == BASE + ELEMENT_BYTES * (swizzled(offset) if on else offset)


def test_a_bank_is_four_bytes_wide_and_there_are_32(ask: Any) -> None:
    assert ask("[0, 3, 4, 127, 128, 2052].map((byte) => s.bank(byte))") == [0, 0, 1, 31, 0, 1]


def test_every_element_of_a_fragment_has_its_one_owner(ask: Any) -> None:
    found = ask(
        f"Array.from({{ length: {ROWS * COLS} }}, (_, i) => s.owners('frag_Q', i % {ROWS}, Math.floor(i / {ROWS})))"
    )
    for cell, owners in enumerate(found):
        row, col = cell % ROWS, cell // ROWS
        lane = row % 8 * 4 + col % 8 // 2
        value = col % 2 + 2 * (row // 8) + 4 * (col % 16 // 8) + 8 * (col // 16)
        assert owners == [{"thread": 32 + lane, "value": value}]


def test_an_instruction_touches_its_cells_once(ask: Any) -> None:
    cells, threads = ask('(([t]) => [[...t.cells], [...t.threads]])(s.touched("ldmatrix", 1))')
    assert sorted(cells) == [row + ROWS * col for col in range(16, 32) for row in range(ROWS)]
    assert set(threads) == set(range(32, 64))


def test_one_thread_of_ldmatrix_points_at_sixteen_bytes(ask: Any) -> None:
    cells = ask('[...s.touched("ldmatrix", 0, { range: { first: 51, last: 51 } })[0].cells]')
    assert cells == [3 + ROWS * col for col in range(8, 16)]  # lane 19: row 3 of the right half


def test_a_warp_outside_the_role_touches_nothing(ask: Any) -> None:
    assert ask('s.touched("load", null, { warp: 0 }).map((t) => t.cells.length)') == [0, 0]
    assert ask('s.touched("load", null, { warp: 1 }).map((t) => t.cells.length)') == [ROWS * COLS] * 2


def test_threads_that_share_cells_are_all_named(ask: Any) -> None:
    assert ask('s.touches(s.part("gQ"), 3, 8)[1].entries') == [
        {"thread": 32 + 3, "value": 0, "instruction": 1},
        {"thread": 32 + 19, "value": 0, "instruction": 1},
    ]
    assert ask('s.touched("both_halves", 1)[0].cells.length') == 32 * 8
    assert ask('s.touchValues(s.step("both_halves").touches[0]).count(1, null)') == {"cells": 16 * 8, "threads": 32}
    assert ask('[...s.touched("both_halves", 0, { range: { first: 51, last: 51 } })[0].threads]') == [51] * 8


def test_touches_of_a_cell_name_step_thread_and_instruction(ask: Any) -> None:
    found = ask('s.touches(s.part("sQ"), 9, 17).map(({ step, mode, entries }) => [step.id, mode, entries])')
    assert found == [
        ["load", "write", [{"thread": 32 + 2 + 4 * 1, "value": 1, "instruction": 1}]],
        ["ldmatrix", "read", [{"thread": 32 + 9, "value": 1, "instruction": 1}]],
        ["wgmma", "read", [{"thread": 32 + 9, "value": 1, "instruction": 1}]],
    ]


def test_an_element_is_placed_only_where_the_axes_agree(ask: Any) -> None:
    assert ask('s.part("sQ").place({ m: 3, n: 8 })') == [3, None]
    assert ask('s.part("sQ").place({ m: 3, d: 31 })') == [3, 31]
    assert ask('s.part("sQ").place({ m: 16, d: 32 })') == [None, None]


def test_cells_beyond_the_tensor_do_not_exist(ask: Any) -> None:
    assert ask('[[0, 29], [0, 30]].map(([row, col]) => s.part("gQ").exists(row, col))') == [True, False]


def test_colour_modes_fit_the_part(ask: Any) -> None:
    def modes(part: str) -> list[str]:
        return [mode for mode, _ in ask(f's && CF.coloring.modes(s, s.part("{part}"))')]

    assert modes("gQ") == ["plain", "owner", "value", "instruction", "address"]
    assert modes("sQ") == ["plain", "owner", "value", "instruction", "bank", "address", "core"]
    assert modes("frag_Q") == ["plain", "owner", "value", "instruction"]


def test_a_mode_the_part_lacks_becomes_its_standard_one(ask: Any) -> None:
    options = "{ step: null, instruction: null, stage: 0, swizzled: true }"
    assert ask(f'CF.coloring.of(s, s.part("frag_Q"), "bank", {options}).mode') == "owner"
    assert ask(f'CF.coloring.of(s, s.part("sQ"), null, {options}).mode') == "bank"


@pytest.mark.parametrize("instruction", [0, 1])
def test_core_matrices_move_with_the_instruction(ask: Any, instruction: int) -> None:
    options = f'{{ step: "wgmma", instruction: {instruction}, stage: 0, swizzled: true }}'
    found = ask(f'[...CF.coloring.of(s, s.part("sQ"), "core", {options}).numbers]')
    for cell, core in enumerate(found):
        row, col = cell % ROWS, cell // ROWS
        assert core == (row // 8 + 2 * (col % 16 // 8) if col // 16 == instruction else -1)


def test_marks_count_what_is_held_read_and_written(ask: Any) -> None:
    selection = '{ step: s.step("ldmatrix"), instruction: 0, range: CF.scene.rangeOf({ thread: 32 }) }'
    assert ask(f'CF.marks.count(CF.marks.flags(s, s.part("frag_Q"), {selection}))') == {
        "read": 0,
        "write": 8,
        "held": 16,
    }
    assert ask(f'CF.marks.count(CF.marks.flags(s, s.part("sQ"), {selection}))') == {"read": 8, "write": 0, "held": 0}
    assert ask('CF.marks.flags(s, s.part("sQ"), { step: null, instruction: null, range: null })') is None


def test_the_flow_runs_from_left_to_right(ask: Any) -> None:
    columns = dict(ask("[...CF.flow.columns(s)]"))
    assert columns["gQ"] < columns["step load"] < columns["sQ"] < columns["step ldmatrix"] < columns["frag_Q"]


@pytest.fixture(scope="module")
def scores(scene: dict[str, Any]) -> dict[str, Any]:
    """Scores that for some key blocks are exponentiated in place and then rounded, and go straight to P for others."""
    grid = {"axes": ["m", "n"], "shape": [ROWS, COLS], "first_thread": 0, "tv": COPY, "registers": 8, "dtype": "f32"}
    parts = [{"id": id, "tensor": id[-1], "operand": "C", **grid} for id in ("acc_S", "rP", "acc_O")]

    def does(name: str, repeat: str, *touched: tuple[str, str]) -> dict[str, Any]:
        return step(name, name, [touch(part, mode, COPY) for part, mode in touched]) | {"repeat": repeat}

    return scene | {
        "fragments": [*scene["fragments"], *parts],
        "steps": [
            does("qk", "all", ("sQ", "read"), ("acc_S", "write")),
            does("softmax", "first", ("acc_S", "read"), ("acc_S", "write")),
            does("convert", "first", ("acc_S", "read"), ("rP", "write")),
            does("rescale", "cut", ("acc_O", "read"), ("acc_O", "write")),
            does("fixed", "whole", ("acc_S", "read"), ("rP", "write")),
            does("repair", "seldom", ("acc_S", "read"), ("rP", "write"), ("acc_O", "read"), ("acc_O", "write")),
            does("pv", "all", ("rP", "read"), ("acc_O", "write")),
            does("store", "once", ("acc_O", "read"), ("gQ", "write")),
        ],
    }


def of_scores(scores: dict[str, Any], expression: str) -> Any:
    load = 'CF.scene.load({ scenes: { small: data } }); const s = CF.scene.of("small");'
    return run_js(FILES, f"(() => {{ {load} return {expression}; }})()", data=scores, prelude=BROWSER)


def test_rounding_follows_the_softmax_of_its_blocks_and_other_ways_part_before_it(scores: dict[str, Any]) -> None:
    links = {
        link["key"].removeprefix("step "): (link["reads"], link["writes"])
        for link in of_scores(scores, "CF.flow.links(s).map(({ key, reads, writes }) => ({ key, reads, writes }))")
    }
    assert links["softmax"] == (["acc_S"], [])
    assert links["convert"] == (["step softmax"], ["rP"])
    assert links["fixed"] == links["repair"] == (["acc_S"], ["rP"])
    assert links["rescale"] == ([], ["acc_O"])  # of the product before: no arrow goes back
    column = dict(of_scores(scores, "[...CF.flow.columns(s)]"))
    assert column["acc_S"] < column["step softmax"] < column["step convert"] < column["rP"]
    assert column["step fixed"] == column["step repair"] == column["step softmax"]
    assert column["step rescale"] == column["step pv"] == column["acc_O"] - 1


def test_marked_cells_that_hang_together_are_one_island(ask: Any) -> None:
    cells = [(0, 0), (0, 1), (1, 1), (3, 3), (15, 0), (0, 31)]  # (15, 0) and (0, 1) are neighbours in memory only
    marks = "".join(f"flags[{row + ROWS * col}] = CF.marks.{'WRITE' if row == 3 else 'READ'};" for row, col in cells)
    flags = f"const flags = new Uint8Array({ROWS * COLS}); {marks}"
    found = ask(f"(() => {{ {flags} return CF.marks.islands(flags, {ROWS}, {COLS}); }})()")
    boxes = [(box["row0"], box["row1"], box["col0"], box["col1"], box["write"]) for box in found]
    assert sorted(boxes) == [(0, 0, 31, 31, False), (0, 1, 0, 1, False), (3, 3, 3, 3, True), (15, 15, 0, 0, False)]


def test_a_tile_a_fragment_and_an_axis_say_what_they_are(scores: dict[str, Any]) -> None:
    assert of_scores(scores, "CF.explain.partWords(s.part('acc_S'))").startswith("S, the scores Q Kᵀ: an accumulator")
    assert "shared memory" in of_scores(scores, "CF.explain.partWords(s.part('sQ'))")
    axes = scores | {"axes": {"m": {"label": "query", "size": ROWS}}}
    assert (
        of_scores(axes, "CF.explain.axisWords(s, 'm')")
        == "query: an axis of Q, S, P, O, 16 long in one tile of this row."
    )


def test_a_view_that_the_page_has_not_is_as_if_none_were_named(ask: Any) -> None:
    read = "(location.hash = '#view={}', CF.state.limit('view', ['kernel']), CF.state.readHash(), CF.state.get('view'))"
    assert ask(read.format("nope")) is None
    assert ask(read.format("kernel")) == "kernel"


def test_the_spoken_line_names_place_address_and_bank(ask: Any) -> None:
    described = "CF.inspector.describe(s, part, 2, 5, { stage: 1, swizzled: true })"
    line = ask(f'((part) => CF.inspector.sentence(part, {described}))(s.part("sQ"))')
    address = BASE + ELEMENT_BYTES * swizzled(2 * COLS + 5 + ROWS * COLS)
    assert line == f"sQ m 2, d 5: address 0x{address:04x}, bank {address // 4 % 32}, stage 1"


def test_a_descriptor_is_encoded_as_the_ptx_manual_says(ask: Any) -> None:
    desc = "{ swizzle_bytes: 128, leading_bytes: 16, stride_bytes: 1024 }"
    word = int(ask(f"CF.stepper.descriptorWord(CF.stepper.descriptorFields({desc}, 0x2420)).toString()"))
    assert word & 0x3FFF == 0x2420 >> 4
    assert word >> 16 & 0x3FFF == 1
    assert word >> 32 & 0x3FFF == 64
    assert word >> 62 == 1


def test_the_hash_holds_the_state_that_matters(ask: Any) -> None:
    changes = '{ view: "kernel", panel: "sK", pin: { n: 3, d: 17 }, thread: 130, instruction: 3, swizzle: false }'
    assert ask(f"CF.state.link({changes})") == "#view=kernel&panel=sK&el=n3,d17&thread=130&i=3&swizzle=0"


@pytest.mark.parametrize(
    "text, element", [("n3,d17", {"n": 3, "d": 17}), ("m0", {"m": 0}), ("nonsense", None), ("", None)]
)
def test_an_element_is_read_from_the_hash(ask: Any, text: str, element: dict[str, int] | None) -> None:
    assert ask(f'CF.state.parseElement("{text}")') == element
