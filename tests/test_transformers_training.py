"""Training tiny models of transformers: the gradients of all parameters against those of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.test_transformers import batch, each_model, model


def loss_of(trained: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    """A loss over the logits of tokens."""
    tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    logits: Tensor = trained(input_ids=ids, attention_mask=mask, use_cache=False).logits[tokens]
    return logits.log_softmax(-1).square().mean()


def gradients(trained: Any, padding: str) -> dict[str, Tensor]:
    loss_of(trained, *batch(padding)).backward()
    return {name: x.grad for name, x in trained.named_parameters() if x.grad is not None}


@each_model
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_gradients_equal_eager(name: str, padding: str) -> None:
    assert_gradients_equal(
        *(gradients(model(name, implementation), padding) for implementation in ("cuteflash", "eager"))
    )


def assert_gradients_equal(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    """Up to rounding of the largest of each parameter."""
    assert ours.keys() == eager.keys()
    for parameter, gradient in ours.items():
        scale = eager[parameter].abs().max().item()
        torch.testing.assert_close(
            gradient, eager[parameter], atol=1e-4 * max(scale, 1e-3), rtol=1e-3, msg=lambda m, p=parameter: f"{p}: {m}"
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    expected = gradients(model("llama", "cuteflash").train(), "right")
    checkpointed = model("llama", "cuteflash").train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = gradients(checkpointed, "right")
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name])


def test_dropout_in_training_is_refused_with_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match=r"dropout is 0\.1; .*attention dropout to 0"):
        loss_of(model("bert", "cuteflash").train(), *batch("none"))
