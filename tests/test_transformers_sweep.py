"""A telling part of the sweep over transformers, and that it finds what is wrong."""

from __future__ import annotations

import collections

import pytest

pytest.importorskip("transformers")

from cuteflash.integrations import transformers as integration
from tests.transformers_sweep import probes
from tests.transformers_sweep.probes import FAILS, NO_REFERENCE, REFUSED, RIGHT, WRONG, look_at


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2_moe",  # its mask has a window and its layers say none
        "nllb-moe",  # its layers say nothing of causality
        "gemma2",  # also with attention to both sides
        "t5gemma",  # windows to both sides do not count the query
        "qwen2_vl_vision",  # several images in one row
        "gpt_oss",  # attention sinks
    ],
)
def test_right_or_refused(model_type):
    findings = look_at(model_type)
    outcomes = collections.Counter(finding.outcome for finding in findings)
    assert not outcomes[WRONG] + outcomes[FAILS] + outcomes[NO_REFERENCE], findings
    refused = {finding.probe for finding in findings if finding.outcome == REFUSED}
    assert outcomes[RIGHT] and all(probe.endswith(("attention weights", "dropout in training")) for probe in refused)


@pytest.mark.parametrize("model_type", ["bloom", "minimax_m3_vl", "t5", "doge"])
def test_refused(model_type):
    assert {finding.outcome for finding in look_at(model_type)} == {REFUSED}


def test_attention_that_forgets_the_mask_is_found(monkeypatch):
    real = integration.attention
    monkeypatch.setattr(
        integration, "attention", lambda module, q, k, v, mask, **kwargs: real(module, q, k, v, None, is_causal=False)
    )
    wrong = {finding.probe for finding in look_at("llama") if finding.outcome == WRONG}
    assert {"LlamaModel", "LlamaForCausalLM future token changed", "LlamaForCausalLM generate, static cache"} <= wrong


def test_a_model_that_never_calls_us_is_found(monkeypatch):
    integration.register()
    monkeypatch.setattr(probes.CALLS, "install", lambda: None)  # what is called is not what is counted
    findings = look_at("vit")
    assert findings[0].outcome == WRONG and "ViTAttention" in findings[0].reason
