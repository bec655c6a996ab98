"""What a mask function of transformers becomes, and that nothing but our attention can work with it."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as masks  # noqa: E402

from cuteflash.integrations.transformers import make_mask  # noqa: E402
from cuteflash.integrations.transformers.rules import CAUSAL, FULL, Interval, rule_of  # noqa: E402

LENGTH = 9
NO_BLOCK, ONE_SEQUENCE = torch.full((1, LENGTH), -1), torch.zeros(1, LENGTH, dtype=torch.long)
START = torch.zeros(1, dtype=torch.long)

FUNCTIONS = {
    "causal": masks.causal_mask_function,
    "full": masks.bidirectional_mask_function,
    "window": masks.sliding_window_causal_mask_function(3),
    "window of none": masks.sliding_window_causal_mask_function(0),
    "window of one": masks.sliding_window_causal_mask_function(1),
    "both sides": masks.sliding_window_bidirectional_mask_function(3),
    "window in window": masks.and_masks(
        masks.sliding_window_causal_mask_function(5), masks.sliding_window_causal_mask_function(2)
    ),
    "causal or window": masks.or_masks(masks.causal_mask_function, masks.sliding_window_bidirectional_mask_function(2)),
    "long chunk": masks.chunked_causal_mask_function(LENGTH, START),
    "no image": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(NO_BLOCK)),
    "one sequence": masks.packed_sequence_compatibility_function(
        masks.sliding_window_causal_mask_function(3), torch.arange(LENGTH)[None], ONE_SEQUENCE
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_interval_is_what_the_function_says(name):
    """Every pair of positions, by transformers' own evaluation of the function."""
    expected = masks.sdpa_mask(1, LENGTH, LENGTH, mask_function=FUNCTIONS[name], allow_is_causal_skip=False)[0, 0]
    left, right = rule_of(FUNCTIONS[name], LENGTH).interval
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # of the key before the query
    seen = (distance <= (LENGTH if left is None else left)) & (-distance <= (LENGTH if right is None else right))
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    "function",
    [
        masks.chunked_causal_mask_function(LENGTH - 1, START),
        masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(ONE_SEQUENCE)),
        masks.or_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(torch.arange(LENGTH)[None])),
        masks.and_masks(*(masks.packed_sequence_mask_function(torch.arange(LENGTH)[None] // n) for n in (1, 2))),
        masks.packed_sequence_mask_function(torch.arange(LENGTH)[None] % 2),
        masks.or_masks(masks.causal_mask_function, lambda b, h, i, j: j < 2),
        masks.blockwise_overlay(NO_BLOCK),
    ],
    ids=["chunks", "images", "packed or causal", "packed twice", "interleaved", "custom", "nothing"],
)
def test_masks_that_are_not_intervals_are_refused(function):
    with pytest.raises(ValueError, match="cuteflash does not support"):
        make_mask(1, LENGTH, LENGTH, mask_function=function)


@pytest.mark.parametrize(
    ("arguments", "used", "offset", "has_padding"),
    [
        ({"q_length": 4, "kv_length": 4}, 4, 0, False),
        ({"q_length": 1, "kv_length": 8, "q_offset": 7}, 8, 7, False),
        (
            {"q_length": 3, "kv_length": 10, "q_offset": torch.tensor(2)},
            5,
            2,
            False,
        ),  # a static cache, half of it in use
        ({"q_length": 3, "kv_length": 3, "attention_mask": torch.ones(1, 3, dtype=torch.bool)}, 3, 0, False),
        (
            {"q_length": 1, "kv_length": 3, "q_offset": 4, "kv_offset": 2, "attention_mask": torch.arange(5)[None] > 2},
            3,
            2,
            True,
        ),
    ],
)
def test_positions_and_padding(arguments, used, offset, has_padding):
    mask = make_mask(1, device="cpu", **arguments)
    assert (mask.interval, mask.used, mask.offset) == (CAUSAL, used, offset)
    assert mask.has_padding == has_padding == (mask.sequences is not None)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (masks.causal_mask_function, {"q_length": 3, "kv_length": 4, "q_offset": 2}),
        (masks.sliding_window_bidirectional_mask_function(2), {"q_length": 3, "kv_length": 5}),
    ],
)
def test_positions_that_the_operator_cannot_align_are_refused(function, arguments):
    with pytest.raises(ValueError, match="bound on positions"):
        make_mask(1, mask_function=function, **arguments)


def test_padding_of_another_batch_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask is \(2, 4\); allowed: \(3, length\)"):
        make_mask(3, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool))


def test_a_mask_is_handed_back_moved_and_cut_to_all_its_keys():
    mask = make_mask(2, 3, 5, mask_function=masks.bidirectional_mask_function, attention_mask=torch.eye(2, 5) > 0)
    assert make_mask(2, 3, 5, attention_mask=mask) is mask
    assert mask[:, :, :, :5] is mask and mask.to(torch.float32) is mask and mask.contiguous() is mask
    assert (mask.shape, mask.dim(), mask.size(3), mask.interval) == ((2, 1, 3, 5), 4, 5, FULL)
    moved = mask.to("meta")
    assert moved.device.type == "meta" and moved.interval == mask.interval and moved.sequences is mask.sequences


SCORES = torch.zeros(1, 2, 3, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: SCORES + mask,
        lambda mask: mask + SCORES,
        lambda mask: (1.0 - mask) * -1e4,
        lambda mask: ~mask,
        lambda mask: mask == 0,
        lambda mask: mask[:, :, :, :2],
        lambda mask: mask[:, None],
        lambda mask: 0 in mask,
        lambda mask: bool(mask),
        lambda mask: mask.masked_fill(mask, 0),
        lambda mask: SCORES.masked_fill(mask, 0),
        lambda mask: torch.where(mask, SCORES, SCORES),
        lambda mask: torch.nn.functional.scaled_dot_product_attention(SCORES, SCORES, SCORES, attn_mask=mask),
    ],
)
def test_a_models_own_attention_cannot_use_the_mask(use):
    with pytest.raises(NotImplementedError, match="the model's code works on the attention mask itself"):
        use(make_mask(1, 3, 3))
    assert not hasattr(make_mask(1, 3, 3), "float")


@pytest.mark.parametrize("first", [0, 3, -1])
def test_documents_and_chunks(first):
    """A chunk may begin within a document, and it does if positions do not begin with 0."""
    positions = first + torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed = masks.find_packed_sequence_indices(positions)
    window, chunk = (
        masks.packed_sequence_compatibility_function(function, positions, packed)
        for function in (masks.sliding_window_causal_mask_function(3), masks.chunked_causal_mask_function(4, START))
    )
    rule = rule_of(window, LENGTH)
    assert rule.interval == Interval(2, 0) and torch.equal(rule.documents, packed)
    if first == 0:
        assert rule_of(chunk, LENGTH).interval == CAUSAL
    else:
        with pytest.raises(ValueError, match="cuteflash does not support"):
            rule_of(chunk, LENGTH)


def test_interval_of_nothing_given_is_causal():
    assert rule_of(None, 5).interval == Interval(None, 0)
