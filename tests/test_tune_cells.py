"""Cells: what they count as work, what they are called, how they are written; references and checks of outputs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from cuteflash.problem import MASK_KINDS, FwdProblem, MaskKind
from cuteflash.tune import accuracy, cells
from cuteflash.tune.cells import Cell, Inputs, make_inputs, parse_cell
from cuteflash.tune.cuda_backend import gate_cells

CPU = torch.device("cpu")


def visible(cell: Cell) -> torch.Tensor:
    """(seqlen_q, seqlen) bools, by the definition: key j of query i, whose own is i + seqlen - seqlen_q."""
    own = torch.arange(cell.seqlen_q)[:, None] + cell.seqlen - cell.seqlen_q
    key = torch.arange(cell.seqlen)[None, :]
    left, right = cell.window
    return (key >= own - left) & (key <= own + right)


@pytest.mark.parametrize("window", [(3, 0), (7, 0), (100, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (5, 20), (17, 20)])
def test_pairs_of_a_window_are_those_it_leaves(
    queries: int, keys: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "WINDOW", window)
    cell = Cell(32, "window", keys, seqlen_q=queries, tokens=keys)
    assert cell.pairs == int(visible(cell).sum())


@pytest.mark.parametrize("queries", [0, 4])
def test_a_cells_bytes_are_those_of_all_four_tensors(queries: int) -> None:
    inputs = make_inputs(Cell(32, "full", 16, head_dim_v=48, seqlen_q=queries, tokens=32, hidden=64), CPU)
    assert inputs.cell.nbytes == inputs.nbytes + inputs.empty_out().nbytes


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (6, 20)])
def test_a_causal_diagonal_counts_half(queries: int, keys: int) -> None:
    cell = Cell(32, "causal", keys, seqlen_q=queries, tokens=keys)
    assert cell.pairs == int(visible(cell).sum()) - queries // 2


def test_cells_of_other_inputs_differ_in_name_and_values_and_in_nothing_else() -> None:
    plain = Cell(64, "causal", 512, "fp16", tokens=512, hidden=64)
    sink = dataclasses.replace(plain, inputs="sink:12.0")
    assert sink.inputs == "sink:12"
    assert (sink.label, sink.id) == (f"{plain.label} sink:12", f"{plain.id} sink:12")
    assert (sink.flops, sink.problem) == (plain.flops, plain.problem)
    inputs, others = make_inputs(plain, CPU), make_inputs(sink, CPU)
    assert torch.equal(inputs.v, others.v)
    assert not torch.equal(inputs.k, others.k)
    with pytest.raises(ValueError, match="inputs is 'sinks'"):
        Cell(64, "causal", 512, inputs="sinks")


def test_cells_of_older_databases_have_plain_inputs() -> None:
    fields = dataclasses.asdict(Cell(64, "full", 512))
    del fields["inputs"]
    assert Cell(**fields) == Cell(64, "full", 512)
    assert Cell(64, "full", 512).id == "D64 full 512 bf16 batch 32 heads 32"


def test_flops_are_those_of_two_products() -> None:
    cell = Cell(192, "full", 64, head_dim_v=128, seqlen_q=16, tokens=128)
    assert cell.flops == 2 * cell.batch * cell.heads * 16 * 64 * (192 + 128)
    assert cell.problem == FwdProblem.dense("bf16", 192, 128)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"seqlen": 1000}, "seqlen is 1000; it must divide the 16384"),
        ({"seqlen": 0}, "seqlen is 0"),
        ({"seqlen": 512, "seqlen_q": 513}, "seqlen_q is 513; allowed: 1 to the 512"),
        ({"seqlen": 512, "seqlen_q": 1, "mask": "causal"}, "takes the kernel of mask full"),
        ({"seqlen": 512, "hidden": 32}, "head_dim is 64; allowed: 1 to the hidden size 32"),
    ],
)
def test_a_cell_that_cannot_be_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Cell(**{"head_dim": 64, "mask": "full"} | fields)


def test_cells_with_one_id_are_equal() -> None:
    lengths = ((512, 512), (512, 16), (1024, 1024))
    every = [
        Cell(d, mask, keys, dtype, head_dim_v=d_v, seqlen_q=queries, hidden=hidden)
        for d, mask, dtype, d_v in itertools.product((64, 128), MASK_KINDS, ("fp16", "bf16"), (0, 32))
        for (keys, queries), hidden in itertools.product(lengths, (512, 2048))
    ]
    assert len({cell.id for cell in every}) == len(set(every))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("128:16384:causal", Cell(128, "causal", 16384, "fp16")),
        ("64:512:window", Cell(64, "window", 512, "fp16")),
        ("192x128:1x8192:full", Cell(192, "full", 8192, "fp16", head_dim_v=128, seqlen_q=1)),
        ("64:512:causal:sink:12", Cell(64, "causal", 512, "fp16", inputs="sink:12")),
        ("64:512:causal:peaked", Cell(64, "causal", 512, "fp16", inputs="peaked")),
    ],
)
def test_cells_parse_from_text(text: str, cell: Cell) -> None:
    assert parse_cell(text, "fp16") == cell


@pytest.mark.parametrize(
    "text", ["128", "128:512:alibi", "x:512:full", "128:1000:full", "64:1x512:causal", "64:512:full:sink"]
)
def test_malformed_cells_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"the form is HEAD_DIM\[xHEAD_DIM_V\]:\[SEQLEN_Qx\]SEQLEN:full\|causal\|window\[:INPUTS\]"
    ):
        parse_cell(text)


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_reference_is_attention_over_the_visible_keys(mask: MaskKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "WINDOW", (9, 0))
    monkeypatch.setattr(accuracy, "CHUNK_ROWS", 7)
    cell = Cell(32, mask, 24, head_dim_v=16, seqlen_q=20, tokens=48, hidden=64)
    made = make_inputs(cell, CPU)
    inputs = Inputs(cell, made.q.float(), made.k.float(), made.v.float())
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible(cell)).transpose(1, 2)
    reference = accuracy.make_reference(inputs, heads=4)
    assert len(reference.index) == cell.batch * cell.heads
    assert accuracy.errors(out, reference).maximum < 1e-5


@pytest.mark.parametrize("mask", MASK_KINDS)
def test_gate_cells_are_small_ragged_and_of_the_problem(mask: MaskKind) -> None:
    problem = FwdProblem.dense("fp16", 192, 128, mask)
    for cell in gate_cells(problem):
        assert cell.problem == problem
        assert cell.flops < 2e9
        assert cell.seqlen % 16 and cell.seqlen_q % 16
    long, few, *others = gate_cells(problem)
    assert long.inputs == few.inputs == "plain"
    assert {"sink:30", "peaked"} <= {cell.inputs for cell in others}
    assert long.seqlen > cells.WINDOW[0] and few.batch > 1
