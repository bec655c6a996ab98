"""Padding and several sequences in one row of transformers' batches: one packed call, and what it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as masks  # noqa: E402

from cuteflash import flash_attn_varlen_func  # noqa: E402
from cuteflash.integrations.transformers import attention, make_mask  # noqa: E402
from cuteflash.integrations.transformers.sequences import HIDDEN, Sequences, rows_of  # noqa: E402
from tests.operators_called import Operators  # noqa: E402
from tests.test_transformers import ENCODERS, VOCABULARY, batch, each_decoder, each_model, model  # noqa: E402
from tests.test_transformers_training import assert_gradients_equal  # noqa: E402

LENGTHS = (5, 9, 1, 7)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def flattened(*, boundaries: bool = True) -> dict[str, Any]:
    """The documents in one row, as transformers' collator makes it."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=boundaries)
    row = dict(collator([{"input_ids": ids} for ids in documents()]))
    del row["labels"]
    return row


def two_rows() -> dict[str, Tensor]:
    """Two rows, of 3 and of 2 documents."""
    positions = [[*range(5), *range(9), *range(2)], [*range(4), *range(12)]]
    return {"input_ids": torch.cat(documents((16, 16))).view(2, 16), "position_ids": torch.tensor(positions)}


@each_model
@torch.no_grad()
def test_a_padded_batch_makes_one_call_a_layer(name):
    ours = model(name, "cuteflash")
    for padding in ("right", "left"):
        ids, mask = batch(padding)
        with Operators() as operators:
            ours(input_ids=ids, attention_mask=mask)
        assert operators.names == ["varlen_fwd"] * ours.config.num_hidden_layers


@each_decoder
def test_packed_rows_equal_eager(name):
    outputs, gradients = [], []
    for implementation in ("cuteflash", "eager"):
        trained = model(name, implementation)
        with Operators() as operators:
            logits = trained(**two_rows(), use_cache=False).logits
            logits.log_softmax(-1).square().mean().backward()
        outputs.append(logits.detach())
        gradients.append({key: x.grad for key, x in trained.named_parameters() if x.grad is not None})
        calls = ["varlen_fwd_lse"] * 2 + ["varlen_bwd"] * 2
        assert implementation == "eager" or operators.names == calls
    torch.testing.assert_close(*outputs, atol=2e-4, rtol=2e-4)
    assert_gradients_equal(*gradients)


def logits(name: str, given: dict[str, Any]) -> Tensor:
    uncached = {} if name in ENCODERS else {"use_cache": False}
    output: Tensor = model(name, "cuteflash")(**given, **uncached).logits
    return output


@each_model
@torch.no_grad()
def test_the_collators_row_equals_the_sequences_alone(name):
    """A model with attention to both sides needs the boundaries: its mask does not tell sequences apart."""
    alone = torch.cat([logits(name, {"input_ids": ids[None]})[0] for ids in documents()])
    for boundaries in (True,) if name in ENCODERS else (True, False):
        torch.testing.assert_close(logits(name, flattened(boundaries=boundaries))[0], alone, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"position_ids": None}, ValueError, r"cu_seq_lens_q and cu_seq_lens_k and the attention mask do not agree"),
        ({"attention_mask": torch.ones(1, 22)}, ValueError, "do not agree .* without an attention_mask"),
        ({"use_cache": True}, ValueError, "do not agree .* use_cache=False"),
        (
            {"cu_seq_lens_q": None, "cu_seq_lens_k": torch.tensor([0, 22]), "max_length_k": 22},
            ValueError,
            "^cu_seq_lens_k and the attention mask do not agree",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 21])}, ValueError, "cu_seq_lens_q goes from 0 to 21; allowed: .* 22"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 22])}, ValueError, "cu_seq_lens_q .* never decreasing"),
        ({"cu_seq_lens_q": [0, 22]}, TypeError, "cu_seq_lens_q is list; allowed: a vector of integers"),
        ({"cu_seq_lens_q": torch.zeros(2, 2)}, TypeError, r"float32 of shape \(2, 2\)"),
        ({"max_length_k": 8}, ValueError, "max_length_k is 8; allowed: 9 or more"),
    ],
)
def test_boundaries_that_are_not_those_of_the_mask_are_refused(changed, error, message):
    with pytest.raises(error, match=message):
        model("llama", "cuteflash")(**{**flattened(), "use_cache": False, **changed})


def test_boundaries_that_do_not_fit_attention_to_both_sides_are_refused():
    _, q, k, v = random_inputs(2, 6, 6)
    mask = make_mask(2, 6, 6, mask_function=masks.bidirectional_mask_function)
    ends = {name: torch.tensor([0, 4, 6, 12]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    window = make_mask(2, 6, 6, mask_function=masks.sliding_window_bidirectional_mask_function(2))
    for given, of_mask, message in (
        ({"cu_seq_lens_q": torch.tensor([0, 4, 12])}, mask, "goes beyond a row of 6 positions"),
        ({"cu_seq_lens_k": None}, mask, "cu_seq_lens_k is missing"),
        ({"cu_seq_lens_k": torch.tensor([0, 6, 12])}, mask, "are of different sequences"),
        ({"cu_seq_lens_k": torch.tensor([0, 3, 6, 12])}, window, "are of different sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(torch.nn.Module(), q, k, v, of_mask, **{**ends, **given})
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q is given and Module gives no attention mask"):
        attention(torch.nn.Module(), q, k, v, None, **ends)


def test_boundaries_of_queries_and_of_keys_may_differ_in_full_attention():
    _, q, k, v = random_inputs(1, 5, 7)
    mask = make_mask(1, 5, 7, mask_function=masks.bidirectional_mask_function)
    ends = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 6, 6, 7])}
    o, _ = attention(torch.nn.Module(), q, k, v, mask, **ends)
    sees = torch.zeros(5, 7, dtype=torch.bool)
    sees[:2, :6], sees[2:, 6:] = True, True
    torch.testing.assert_close(o, by_definition(q, k, v, sees))


def test_a_mask_of_one_query_serves_any_number_of_queries():
    """As some models make masks of full attention; each number has boundaries of its own."""
    mask = make_mask(1, 1, 7, mask_function=masks.bidirectional_mask_function)
    ends = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 6, 7])}
    for queries in (5, 4):
        _, q, k, v = random_inputs(1, queries, 7)
        o, _ = attention(torch.nn.Module(), q, k, v, mask)
        torch.testing.assert_close(o, by_definition(q, k, v, torch.ones(queries, 7, dtype=torch.bool)))
        if queries == 5:
            attention(torch.nn.Module(), q, k, v, mask, **ends)
        else:
            with pytest.raises(ValueError, match="cu_seq_lens_q goes from 0 to 5; allowed: from 0 to 4"):
                attention(torch.nn.Module(), q, k, v, mask, **ends)


def test_the_layers_share_one_inspection(monkeypatch):
    inspected = []
    init = Sequences.__init__
    monkeypatch.setattr(Sequences, "__init__", lambda self, *labels: (inspected.append(1), init(self, *labels))[0])
    ids, mask = batch("left")
    with torch.no_grad():
        model("llama", "cuteflash")(input_ids=ids, attention_mask=mask)
        assert len(inspected) == 1
        logits("bert", flattened())
    assert len(inspected) == 2


def test_several_sequences_in_a_row_with_a_cache_are_refused():
    position_ids = two_rows()["position_ids"]
    packed = masks.find_packed_sequence_indices(position_ids)
    function = masks.packed_sequence_compatibility_function(masks.causal_mask_function, position_ids, packed)
    with pytest.raises(ValueError, match="no key-value cache then: give use_cache=False"):
        make_mask(2, 16, 20, 4, mask_function=function)


def random_inputs(batch: int, queries: int, keys: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = (4, queries), (2, keys), (2, keys)  # grouped heads
    q, k, v = (torch.randn(batch, heads, length, 16, generator=generator) for heads, length in shapes)
    return generator, q, k, v


def by_definition(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Attention in the layout of the interface's results; 0 for a query that sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


FUNCTIONS = {
    "causal": masks.causal_mask_function,
    "full": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(3),
    "both sides": masks.sliding_window_bidirectional_mask_function(2),
}
SPANS = ["1111111", "0000000", "0011111", "1110000", "0111110"]
GAPS = ["1111111", "0101101", "0000000", "1000001", "0111010"]


@pytest.mark.parametrize("rows", [SPANS, GAPS], ids=["spans", "gaps"])
@pytest.mark.parametrize("queries", [7, 3, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_padding_is_right(name, queries, rows):
    """With all keys cached but those of the last queries; also of keys laid out as in a cache, and gradients."""
    generator, q, k, v = random_inputs(len(rows), queries, 7)
    padding = torch.tensor([[int(bit) for bit in row] for row in rows]).bool()
    arguments = {"q_offset": 7 - queries, "mask_function": FUNCTIONS[name], "attention_mask": padding}
    mask = make_mask(len(rows), queries, 7, **arguments)
    if rows is GAPS and name in ("window", "both sides"):
        with pytest.raises(ValueError, match="padding between tokens"):
            attention(torch.nn.Module(), q, k, v, mask)
        return
    sees = masks.sdpa_mask(len(rows), queries, 7, **arguments, allow_is_causal_skip=False)
    if name != "full":
        sees = sees & padding[:, None, 7 - queries :, None]  # a query on padding gives 0
    expected = by_definition(q, k, v, sees)
    with torch.no_grad():
        torch.testing.assert_close(attention(torch.nn.Module(), q, k, v, mask)[0], expected)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    do = torch.randn(expected.shape, generator=generator)
    got = torch.autograd.grad(attention(torch.nn.Module(), *leaves, mask)[0], leaves, do)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    o = by_definition(*exact, sees | ~sees.any(-1, keepdim=True)) * sees.any(-1)[:, 0, :, None, None]
    for ours, reference in zip(got, torch.autograd.grad(o, exact, do.double()), strict=True):
        torch.testing.assert_close(ours, reference.float(), atol=1e-5, rtol=1e-4)


def test_a_key_value_cache_is_not_copied():
    cache = torch.randn(3, 2, 10, 16)  # (batch, heads, length, head_dim), 4 slots unused
    (rows,), step = rows_of(cache.transpose(1, 2)[:, :6], indices=None, may_stride=True)
    assert rows.data_ptr() == cache.data_ptr() and step == 20
    for i in range(3):
        assert torch.equal(rows[i * step : i * step + 6], cache[i, :, :6].transpose(0, 1))
    (rows,), step = rows_of(cache.transpose(1, 2)[:, :6], indices=None, may_stride=False)
    assert torch.equal(rows, cache[:, :, :6].transpose(1, 2).flatten(0, 1)) and step == 6


def test_sequences_without_queries_or_keys():
    queries, keys = torch.tensor([[0, 0, 1], [0, 2, 2]]), torch.tensor([[0, 1, 1, 2], [HIDDEN, 0, 0, 1]])
    _, q, k, v = random_inputs(2, 3, 4)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = Sequences(queries, keys).attend(flash_attn_varlen_func, q, k, v)
    sees = (queries[:, :, None] == keys[:, None])[:, None]
    torch.testing.assert_close(o, by_definition(*(x.transpose(1, 2) for x in (q, k, v)), sees))


@pytest.mark.parametrize("rows", [SPANS, GAPS], ids=["spans", "gaps"])
def test_a_call_knows_its_longest_sequences(rows):
    keys = torch.tensor([[int(bit) - 1 for bit in row] for row in rows])
    _, q, k, v = random_inputs(len(rows), 3, 7)
    given = {}
    attend = lambda *tensors, **named: given.update(named) or flash_attn_varlen_func(*tensors, **named)  # noqa: E731
    Sequences(None, keys).attend(attend, *(x.transpose(1, 2) for x in (q, k, v)))
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (3, 7)
