"""Each problem gets traits that can run it, and the choice says where it comes from."""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest

from cuteflash import dispatch
from cuteflash.dispatch import choose, choose_shipped, padded_head_dim
from cuteflash.problem import DTYPES, MASK_KINDS, BwdProblem, FwdProblem, MaskKind
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.length_class import LENGTH_CLASSES, length_class_of, length_class_of_packed
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, TableKey
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.usertable import TableWarning
from tests.user_tables import MEASURED, OwnTables


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(8, 32), (32, 32), (40, 64), (128, 128), (136, 160), (248, 256), (256, 256)]
)
def test_head_dims_pad_to_the_next_row(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded


def test_the_targets_best_family_is_the_default() -> None:
    problem = FwdProblem.dense("bf16", 64, 64)
    assert choose(problem, "sm_90a").family == "sm90"
    assert choose(problem, "sm_90a", "sm80").family == "sm80"
    assert choose(problem, "sm_120").family == "sm80"


def test_the_best_family_of_a_backward_depends_on_the_lengths() -> None:
    problem = BwdProblem.dense("bf16", 64, 64)
    families = {lengths: choose(problem, "sm_90a", None, lengths).family for lengths in LENGTH_CLASSES}
    assert families == {lengths: "sm80" if lengths in ("tiny", "small") else "sm90" for lengths in LENGTH_CLASSES}
    assert choose(problem, "sm_90a", "sm90", "tiny").family == "sm90"  # one that is named stays
    forward = FwdProblem.dense("bf16", 64, 64)
    assert {choose(forward, "sm_90a", None, lengths).family for lengths in LENGTH_CLASSES} == {"sm90"}


@pytest.mark.parametrize("head_dim", ROW_HEAD_DIMS)
def test_rows_for_tiny_and_small_sequences_run_them_all_and_nothing_else(head_dim: int) -> None:
    for mask, dtype, extras in itertools.product(MASK_KINDS, DTYPES, ([], ["softcap", "varlen", "deterministic"])):
        problem = BwdProblem.dense(dtype, head_dim, head_dim, mask).asking(extras)
        rows = {lengths: choose_shipped(problem, "sm_90a", "sm80", lengths).row for lengths in LENGTH_CLASSES}
        assert rows.pop("tiny").lengths == ("tiny",) and rows.pop("small").lengths == ("small",)
        assert all(row.lengths == LENGTH_CLASSES for row in rows.values())


def test_the_source_names_table_and_row() -> None:
    table = "shipped table fwd/sm_80/sm80, row of head dims"
    assert choose(FwdProblem.dense("bf16", 64, 64), "sm_80").source == f"{table} 64x64 (full)"
    assert choose(FwdProblem.dense("bf16", 128, 128), "sm_80").source == f"{table} 128x128"
    lent = choose(FwdProblem.dense("bf16", 40, 128), "sm_80")
    assert lent.source == "shipped table fwd/sm_80/sm80, row of head dims 128x128 lent to 64x128"
    assert (lent.traits.head_dim, lent.traits.head_dim_v) == (64, 128)


SPECIAL = FwdTraitsSm80(128, 128, 64, 64)
GENERAL = FwdTraitsSm80(64, 64, 64, 64)
TOO_LARGE = FwdTraitsSm80(128, 128, 64, 64, kv_stage=8)


def with_rows(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    key = TableKey(rows[0].traits.operation, "sm_80", "sm80")
    monkeypatch.setitem(dispatch.TABLES, key, rows)
    for name in ("choose", "choose_shipped", "choices"):
        monkeypatch.setattr(dispatch, name, inspect.unwrap(getattr(dispatch, name)))  # past the memo of the real tables


def test_a_special_row_above_the_general_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, Row(SPECIAL, masks=("causal",), dtypes=("fp16",)), Row(GENERAL))
    assert dispatch.choose(FwdProblem.dense("fp16", 64, 64, mask="causal"), "sm_80").traits == SPECIAL
    assert dispatch.choose(FwdProblem.dense("fp16", 64, 64, mask="full"), "sm_80").traits == GENERAL
    assert dispatch.choose(FwdProblem.dense("bf16", 64, 64, mask="causal"), "sm_80").traits == GENERAL


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rows_for_long_loops_begin_later_in_a_backward_than_in_a_forward(mask: MaskKind) -> None:
    chosen = {}
    for make in (FwdProblem.dense, BwdProblem.dense):
        problem = make("bf16", 64, 64, mask)
        for length in (1024, 2048, 4096):
            lengths = length_class_of(length, length, problem.operation)
            chosen[problem.operation, length] = choose_shipped(problem, "sm_90a", "sm90", lengths).row
            packed = length_class_of_packed(64 * length, 64 * length, 64, length, length)
            assert choose_shipped(problem, "sm_90a", "sm90", packed).row is chosen[problem.operation, length]
    assert chosen["fwd", 1024] is not chosen["fwd", 2048] is chosen["fwd", 4096]
    assert chosen["bwd", 1024] is chosen["bwd", 2048] is not chosen["bwd", 4096]


def test_a_row_serves_the_length_classes_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, Row(SPECIAL, lengths=("short", "decode")), Row(GENERAL))
    chosen = {
        lengths: dispatch.choose(FwdProblem.dense("bf16", 64, 64), "sm_80", None, lengths) for lengths in LENGTH_CLASSES
    }
    assert {lengths: choice.traits for lengths, choice in chosen.items()} == {
        "decode": SPECIAL,
        "tiny": GENERAL,
        "small": GENERAL,  # a forward's row for tiny ones
        "brief": GENERAL,
        "short": SPECIAL,
        "moderate": SPECIAL,  # a forward's row for short ones
        "medium": GENERAL,  # a forward's row for long ones
        "long": GENERAL,
    }
    assert chosen["short"].source == "shipped table fwd/sm_80/sm80, row of head dims 64x64 (decode, short)"
    assert chosen["short"].row.lengths == ("decode", "short")
    assert dispatch.choose(FwdProblem.dense("bf16", 64, 64), "sm_80") == chosen["long"]


@pytest.mark.parametrize(
    "narrowed",
    [{"masks": ("window",)}, {"dtypes": ("fp16",)}, {"lengths": ("decode",)}],
    ids=lambda narrowed: next(iter(narrowed)),
)
def test_a_users_row_takes_what_it_serves_and_nothing_else(
    own_tables: OwnTables, narrowed: dict[str, tuple[str, ...]]
) -> None:
    everything = list(itertools.product(MASK_KINDS, DTYPES, LENGTH_CLASSES))
    own_tables.write("sm_80", "sm80", [MEASURED(Row(GENERAL, **narrowed))])
    for mask, dtype, lengths in everything:
        problem = FwdProblem.dense(dtype, 64, 64, mask)
        choice, shipped = (choose(problem, "sm_80", "sm80", lengths) for choose in (choose, choose_shipped))
        mine = {"masks": mask, "dtypes": dtype, "lengths": lengths}
        if all(mine[name] in served for name, served in narrowed.items()):
            assert choice.traits == GENERAL and choice.source.startswith("user's table")
        else:
            assert choice == shipped
        assert shipped.source.startswith("shipped table")
    assert choose(FwdProblem.dense("bf16", 64, 64), "sm_90a").source.startswith("shipped table fwd/sm_90a/sm90")


def test_a_users_row_lends_itself_but_not_before_a_row_made_for_the_head_dims(own_tables: OwnTables) -> None:
    own_tables.write("sm_90a", "sm90", [MEASURED(Row(FwdTraitsSm90(128, 64, 192, 192)))])
    lent = choose(FwdProblem.dense("bf16", 40, 192), "sm_90a")
    assert (lent.traits.tile_n, lent.traits.head_dim, lent.traits.head_dim_v) == (64, 64, 192)
    assert lent.source.endswith("row of head dims 192x192 lent to 64x192, measured on Card, 2026-01-31, 123 TFLOP/s")
    latent = FwdProblem.dense("bf16", 192, 128)
    assert choose(latent, "sm_90a") == choose_shipped(latent, "sm_90a")


def test_an_unusable_table_warns_once_and_the_shipped_one_serves(own_tables: OwnTables) -> None:
    path = own_tables.put("sm_80", "sm80", "{")
    problems = [FwdProblem.dense("bf16", head_dim, head_dim) for head_dim in (64, 128)]
    with pytest.warns(TableWarning) as caught:
        choices = [choose(problem, "sm_80") for problem in problems]
    assert len(caught) == 1
    assert f"the shipped table fwd/sm_80/sm80 is used, because the user's table {path} " in str(caught[0].message)
    assert choices == [choose_shipped(problem, "sm_80") for problem in problems]


def test_a_row_that_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, Row(TOO_LARGE), Row(GENERAL))
    assert dispatch.choose(FwdProblem.dense("bf16", 64, 64), "sm_80").traits == GENERAL


def test_no_row_names_the_problem_the_reasons_and_what_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows(monkeypatch, Row(TOO_LARGE))
    with pytest.raises(NotImplementedError, match=r"head_dim 64.*head dims with rows: 64x64; 128x128 needs \d+ bytes"):
        dispatch.choose(FwdProblem.dense("bf16", 64, 64), "sm_80")
    with pytest.raises(NotImplementedError, match=r"head_dim 96.*head dims with rows: 64x64$"):
        dispatch.choose(FwdProblem.dense("bf16", 96, 64), "sm_80")


@pytest.mark.parametrize("wanted", ["softcap", "lse"])
def test_a_row_without_softcap_or_lse_leaves_them_to_others(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    problem = FwdProblem.dense("bf16", 64, 64, **{wanted: True})
    narrow = Row(SPECIAL, without=(wanted,))
    with_rows(monkeypatch, narrow, Row(GENERAL))
    assert dispatch.choose(FwdProblem.dense("bf16", 64, 64), "sm_80").traits == SPECIAL
    assert dispatch.choose(problem, "sm_80").traits == GENERAL
    with_rows(monkeypatch, narrow)
    with pytest.raises(NotImplementedError, match=f"features {wanted}, lengths long; head dims with rows: 64x64$"):
        dispatch.choose(problem, "sm_80")


def test_calls_with_few_blocks_take_rows_below_one_that_asks_for_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = BwdProblem.dense("bf16", 64, 64)
    plain = BwdTraitsSm80(64, 128, 64, 64, dq_warps=4)
    large, small, other = plain, dataclasses.replace(plain, stages=1), dataclasses.replace(plain, double_buffer=False)
    with_rows(monkeypatch, Row(large, waves=2.5), Row(small, waves=1, masks=("causal",)), Row(other), Row(small))
    assert dispatch.choose(problem, "sm_80").traits == large
    assert [choice.traits for choice in dispatch.choices(problem, "sm_80")] == [large, other]
    causal = BwdProblem.dense("bf16", 64, 64, "causal")
    assert [choice.traits for choice in dispatch.choices(causal, "sm_80")] == [large, small, other]
    with_rows(monkeypatch, Row(large, waves=2.5))
    assert [choice.traits for choice in dispatch.choices(causal, "sm_80")] == [large]


def test_blocks_are_key_tiles_or_heads_whose_dq_is_held() -> None:
    tiles = Row(BwdTraitsSm90(64, 128, 64, 64), waves=2)
    assert tiles.is_filled(50, 257, 75) and not tiles.is_filled(50, 256, 75)
    held = Row(BwdTraitsSm90(64, 128, 64, 64, persistent=True, lone_tiles=True, held_dq=4), waves=0.5)
    assert held.is_filled(50, 257, 100) and not held.is_filled(49, 257, 100)
    assert held.title == "64x64 (from 0.5 waves of blocks)"
    full = dataclasses.replace(held, waves=0, filled=0.75)
    assert [blocks for blocks in range(1, 30) if full.is_filled(blocks, 257, 8)] == [
        6,
        7,
        8,
        *range(12, 17),
        *range(18, 30),
    ]
    assert full.title == "64x64 (blocks fill 0.75 of waves)"


def test_unknown_target_and_family() -> None:
    problem = FwdProblem.dense("bf16", 64, 64)
    with pytest.raises(ValueError, match="arch is 'sm_90'; allowed: sm_80"):
        choose(problem, "sm_90")
    with pytest.raises(
        ValueError, match="lengths is 'middling'; allowed: decode, tiny, small, brief, short, moderate, medium, long"
    ):
        choose(problem, "sm_90a", None, "middling")
    with pytest.raises(ValueError, match="family is 'sm100'; allowed: sm80, sm90"):
        choose(problem, "sm_90a", "sm100")
    with pytest.raises(NotImplementedError, match="family is 'sm90', which sm_86 does not run; it runs: sm80"):
        choose(problem, "sm_86", "sm90")
