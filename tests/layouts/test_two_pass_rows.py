"""Every shipped row of the backward in two passes, drawn pass by pass, against the DSL and the compiler."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from cuteflash.atoms.sm90 import store_copy
from cuteflash.dispatch import Choice
from cuteflash.kernels.sm90.bwd_dkv import DkvPass
from cuteflash.kernels.sm90.bwd_dq import DqPass
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.row import Row
from layouts.dsl import context, plain
from layouts.measured import apart
from layouts.rows import PARTS, ShippedRow, make_scene, shipped_rows, touch_ways, worst_ways
from layouts.scene import Scene
from layouts.site import chosen_rows, make_entry
from tests.cubins import row_kernels
from tests.kernel_store import KernelStore
from tests.layouts.drawings import WARPGROUP, by_issuer, descriptors_in, descriptors_of, elements
from tests.layouts.dsl_oracle import copied_by, owned_by, smem_offsets
from tests.slow import slow_but

ROWS = {
    f"{row.choice.row.title} {row.part}": row
    for row in shipped_rows("bwd")
    if isinstance(row.choice.traits, BwdTwoPassTraitsSm90)
}
WIDEST = "256x256"
DKV, DQ = ([name for name in ROWS if name.endswith(part)] for part in (" dkv", " dq"))
every_pass = pytest.mark.parametrize("name", slow_but(ROWS, f"{WIDEST} dkv", f"{WIDEST} dq"))
every_dkv = pytest.mark.parametrize("name", slow_but(DKV, f"{WIDEST} dkv"))
every_dq = pytest.mark.parametrize("name", slow_but(DQ, f"{WIDEST} dq"))
EACH_ONCE = ("tma", "stmatrix", "st.shared", "ld.shared", "exponentials", "differentiate", "convert")


@functools.cache
def scene_of(name: str) -> Scene:
    row = ROWS[name]
    return make_scene(row.problem, row.target, row.choice, part=row.part)


def pass_of(row: ShippedRow) -> Any:
    """The kernel of one pass."""
    make: Any = DkvPass if row.part == "dkv" else DqPass
    return make(row.choice.traits, row.problem)


@dataclasses.dataclass(frozen=True)
class Layouts:
    """A pass's layouts by the names that a kernel of one launch has for them."""

    made: Any
    family: str = "sm90"

    def __getattr__(self, name: str) -> Any:
        if isinstance(self.made, DqPass):
            return functools.partial(self.made.smem_layout, name.removeprefix("smem_layout_"))
        return getattr(self.made, name)


def test_every_row_is_drawn_in_two_parts() -> None:
    rows = {row.choice.row for row in ROWS.values()}
    assert len(ROWS) == 2 * len(rows) and len({scene_of(f"{WIDEST} {part}").id for part in ("dkv", "dq")}) == 2
    drawn = chosen_rows("bwd", ["sm_90a"], ["sm90"], [256])[:2]
    assert [row.part for row in drawn] == ["dkv", "dq"]
    for row in ROWS.values():
        assert apart(row.peers, row.choice.traits).keys() <= {
            field.name for field in dataclasses.fields(row.choice.traits)
        }
    first, second = (make_entry(row).summary for row in drawn)
    assert (first["part"], second["part"]) == ("pass for dK and dV", "pass for dQ")
    traits: Any = drawn[0].choice.traits
    assert first["tile"] == f"{traits.tile_m}x64" and second["tile"] == f"128x{traits.dq_tile_n}"
    assert first["kin"] != second["kin"]
    assert ["dQ"] not in scene_of(f"{WIDEST} dkv").as_dict()["lanes"]
    capped = dataclasses.replace(drawn[0], problem=drawn[0].problem.asking(["softcap"]))
    assert make_entry(capped).summary["features"] == "softcap" and first["features"] == ""
    with pytest.raises(ValueError, match="part is 'dv'; FlashBwdTwoPassSm90 has the parts dkv, dq"):
        make_scene(drawn[0].problem, "sm_90a", drawn[0].choice, part="dv")


def test_kernels_of_one_launch_have_no_parts() -> None:
    assert all(len(parts) == 1 and not parts[0].name for parts in PARTS.values() if len(parts) < 2)
    (row,) = (row for row in shipped_rows("bwd") if row.target == "sm_80" and row.problem.operands.head_dim == 32)
    with pytest.raises(ValueError, match="part is 'dq'; FlashBwdSm80 has no parts"):
        make_scene(row.problem, row.target, row.choice, part="dq")


@every_pass
@pytest.mark.parametrize("tensor", ["q", "k", "v", "do"])
def test_shared_addresses_are_the_dsls(name: str, tensor: str) -> None:
    row, tile = ROWS[name], next(one for one in scene_of(name).tiles if one.id.lower() == f"s{tensor}")
    expected = smem_offsets(Layouts(pass_of(row)), row.target, tensor)
    drawn = tile.offsets() * 2
    if row.part == "dq" and tensor in ("q", "do"):  # the kernel counts (row, col, warpgroup), the drawing all rows
        rows, cols = tile.shape
        drawn = drawn.reshape(cols, rows // 64, 64).transpose(1, 0, 2)
    assert np.array_equal(drawn.reshape(-1), expected)


@every_pass
def test_tiles_fill_the_plan_of_their_pass(name: str) -> None:
    scene, traits = scene_of(name), ROWS[name].choice.traits
    regions = {region["id"]: (region["start"], region["bytes"]) for region in scene.budget["smem"]["regions"]}
    place = {"sdK": "sK", "sdV": "sV", "sdQ": "sQ"}
    drawn = {tile.id: tile for tile in scene.tiles if tile.space == "shared"}
    statistics = {"sLSE", "sDelta"} if ROWS[name].part == "dkv" else set()
    assert set(regions) == {"barriers", *statistics, *drawn} - set(place)
    for tile in drawn.values():
        assert (tile.base, tile.layout.size() * 2) == regions[place.get(tile.id, tile.id)]
        assert tile.base % 1024 == 0 and tile.offsets().max() + 1 == tile.layout.size()
    assert scene.budget["smem"]["total"] == traits.smem_bytes


def fragment_cases(made: Any, part: str) -> dict[str, tuple[Any, str, bool, int]]:
    """Fragment → (product, operand, whether it is held transposed, first thread)."""
    traits = made.traits if part == "dkv" else made.rows
    if part == "dq":
        s, dq = made.tiled_mma_s(), made.tiled_mma_dq()
        cases = {"acc_S": (s, "C"), "acc_dP": (s, "C"), "rdS": (dq, "A"), "acc_dQ": (dq, "C")}
        return {id: (*case, False, WARPGROUP) for id, case in cases.items()}
    s, dv, dk = made.tiled_mma_s(), *map(made.tiled_mma_gradient, (traits.head_dim_v, traits.head_dim))
    return {
        "acc_S": (s, "C", True, WARPGROUP),
        "rP": (dv, "A", True, WARPGROUP),
        "acc_dV": (dv, "C", False, WARPGROUP),
        "acc_dP": (s, "C", True, 2 * WARPGROUP),
        "rW": (dk, "A", True, 2 * WARPGROUP),
        "rdS": (dk, "A", True, 2 * WARPGROUP),
        "acc_dK": (dk, "C", False, 2 * WARPGROUP),
    }


@every_pass
def test_fragments_are_the_dsls_partitions(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    with context(row.target):
        cases = fragment_cases(pass_of(row), row.part)
        capped = {"acc_P"} if row.problem.scores.softcap and row.part == "dkv" else set()  # type: ignore[union-attr]
        assert {fragment.id for fragment in scene.fragments} == cases.keys() | capped
        for id, (mma, operand, transposed, first) in cases.items():
            fragment = scene.fragment(id)
            rows, cols = fragment.shape
            threads, values = (mode.size() for mode in fragment.tv.modes())
            owned = fragment.tv.indices().reshape(values, threads)
            assert fragment.first_thread == first
            assert np.array_equal(np.sort(owned.reshape(-1)), np.arange(rows * cols))
            for group in range(threads // WARPGROUP):
                at = owned_by(mma, 77, operand, (cols, rows) if transposed else (64, cols))
                row_at, col_at = (at[:, 1], at[:, 0]) if transposed else (at[:, 0] + 64 * group, at[:, 1])
                assert np.array_equal(owned[:, 77 + WARPGROUP * group], row_at + rows * col_at), id


@every_dkv
def test_p_passes_between_the_warpgroups_in_the_order_of_their_registers(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    tile, traits = scene.tile("sP"), row.choice.traits
    with context(row.target):
        made = pass_of(row)
        pairs = plain(made.smem_layout_weights())
        at = owned_by(made.tiled_mma_gradient(traits.head_dim), 77, "A", (tile.shape[1], tile.shape[0]))
    stages, (rows, _) = tile.offsets(), tile.shape
    places = pairs.indices().reshape(traits.p_stage, WARPGROUP, -1)[:, 77, :]  # type: ignore[union-attr]
    mine = np.stack([2 * places, 2 * places + 1], axis=-1).reshape(len(places), -1)  # of elements, two a word
    assert np.array_equal(stages.reshape(len(stages), -1)[:, at[:, 1] + rows * at[:, 0]], mine)
    for step in ("store_p", "load_p"):
        assert {touch.id for touch in scene.step(step).touches} & {"sP"}


@every_pass
def test_copies_are_the_dsls_partitions(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    with context(row.target):
        made = pass_of(row)
        for tensor in ("dV", "dK") if row.part == "dkv" else ("dQ",):
            step = scene.step(f"stmatrix_{tensor.lower()}")
            rows, cols = scene.tile(f"s{tensor}").shape
            mma = made.tiled_mma_dq() if tensor == "dQ" else made.tiled_mma_gradient(cols)
            for side, touch in zip("SD", step.touches, strict=True):
                at = copied_by(store_copy(made.dtype, mma), 9, side, (64, cols))
                assert np.array_equal(elements(touch)[:, :, 9].reshape(-1), at[:, 0] + rows * at[:, 1])


@every_pass
def test_steps_move_every_element_and_nothing_else(name: str) -> None:
    scene = scene_of(name)
    shapes = {part.id: part.shape for part in (*scene.tiles, *scene.fragments)}
    for step in scene.steps:
        for touch in step.touches:
            rows, cols = shapes[touch.id]
            counts = np.bincount(by_issuer(touch).reshape(-1), minlength=rows * cols)
            assert len(counts) == rows * cols and counts.min() >= 1, (step.id, touch.id)
            if step.kind in EACH_ONCE:
                assert counts.max() == 1, (step.id, touch.id)
    roles = {role.name: range(role.first_thread, role.first_thread + role.threads) for role in scene.roles}
    assert sum(map(len, roles.values())) == scene.kernel["threads"]


@every_pass
def test_no_shipped_row_has_a_conflict(name: str) -> None:
    scene = scene_of(name)
    assert worst_ways(scene) == 1
    banked = [(step, touch) for step in scene.steps for touch in step.touches if touch.lane_bytes]
    assert max(int(touch_ways(scene, step, touch, swizzled=False).max()) for step, touch in banked) >= 4


@every_pass
def test_the_drawn_registers_are_those_that_the_traits_count(name: str) -> None:
    row, scene = ROWS[name], scene_of(name)
    traits: Any = row.choice.traits
    producer, *consumers = scene.budget["registers"]["roles"]
    drawn = [sum(part["registers"] for part in role["parts"]) for role in consumers]
    assert {role["limit"] for role in consumers} == {traits.mma_regs} and producer["limit"] == traits.producer_regs
    assert sum(role["threads"] for role in scene.budget["registers"]["roles"]) == traits.num_threads
    scores, operand = traits.tile_m // 2, traits.tile_m // 4
    if row.part == "dq":
        assert drawn == [traits.head_dim // 2 + traits.dq_tile_n + traits.dq_tile_n // 4]
        return
    slopes = scores if row.problem.scores.softcap else 0  # type: ignore[union-attr]
    # The weights that come from the other warpgroup lie beside dS of the step before, which a product still reads.
    assert drawn == [
        traits.head_dim_v // 2 + scores + operand + slopes,
        traits.head_dim // 2 + scores + operand + operand,
    ]
    assert all(sum_ <= traits.mma_regs for sum_ in drawn)


@pytest.mark.slow
def test_descriptors_are_the_compilers(kernels: KernelStore) -> None:
    row = ROWS[f"{WIDEST} dkv"]
    # The problem with which `tests/test_tables.py` compiles it, too.
    problem = next(case.problem for case in row_kernels() if case.traits == row.choice.traits)
    compiled = kernels(row.choice.kernel_cls, row.choice.traits, problem, row.target)
    for part in ("dkv", "dq"):
        scene = make_scene(problem, row.target, row.choice, part=part)
        assert descriptors_in(compiled) >= descriptors_of(scene)


def scene_of_own(part: str, changes: dict[str, Any] | None = None, **problem: Any) -> Scene:
    """The scene of a row of head dim 64."""
    traits = dataclasses.replace(BwdTwoPassTraitsSm90(64, 64, 64, 64), **(changes or {}))
    choice = Choice("sm90", traits, Row(traits), "a table of one's own")
    return make_scene(BwdProblem.dense("bf16", 64, 64, **problem), "sm_90a", choice, part=part)


def test_a_softcap_passes_on_p_times_its_slope() -> None:
    plain_, capped = scene_of_own("dkv"), scene_of_own("dkv", softcap=True)
    assert [touch.id for touch in plain_.step("store_p").touches] == ["rP", "sP"]
    assert [touch.id for touch in capped.step("store_p").touches] == ["acc_P", "sP"]
    assert "acc_P" in [touch.id for touch in capped.step("exponentials").touches]
    assert "slope" in capped.tile("sP").note and "slope" not in plain_.tile("sP").note


def test_stages_and_turns_are_the_traits() -> None:
    scene = scene_of_own("dq", {"k_stage": 3, "v_stage": 1, "dq_tile_n": 96, "pingpong": False})
    assert scene.sizes == {"m": 128, "n": 96, "d": 64, "e": 64} and scene.loop == "key blocks"
    assert (scene.tile("sK").stages, scene.tile("sV").stages) == (3, 1)
    assert "Up to 3 tiles ahead" in scene.step("load_k").note and "Up to 1 tile ahead" in scene.step("load_v").note
    assert "start of a step" in scene.step("wgmma_s").note
    assert "in the warpgroup's turn" in scene_of_own("dq").step("wgmma_s").note
    first = scene_of_own("dkv", {"tile_m": 48, "q_stage": 2})
    assert (first.sizes["m"], first.tile("sQ").stages, first.tile("sdO").stages, first.loop) == (
        48,
        2,
        3,
        "query blocks",
    )
