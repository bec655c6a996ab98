"""Models that do not go through transformers' attention interface are refused at load, by name."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from cuteflash.integrations import transformers as integration  # noqa: E402
from tests.transformers_sweep.configs import tiny  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def settings(model_type: str, implementation: Any = None) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny(CONFIG_MAPPING[model_type])
    config._attn_implementation = implementation
    return config


@pytest.mark.parametrize(
    ("model_type", "cls", "reason"),
    [
        ("bloom", "BloomForCausalLM", "BloomForCausalLM does not run on cuteflash: its attention is code of its own"),
        ("falcon", "FalconModel", "FalconModel does not run on cuteflash"),
        ("roformer", "RoFormerForCausalLM", "RoFormerForCausalLM does not run on cuteflash"),
        ("git", "GitModel", "GitModel does not run on cuteflash"),
        ("blip", "BlipForConditionalGeneration", "Blip.* does not run on cuteflash"),
        ("minimax_m3_vl_text", "MiniMaxM3VLTextModel", "MiniMaxM3VL.* does not run on cuteflash: of the flash impl"),
        ("sam", "SamModel", "SamModel does not run on cuteflash"),
        ("bigbird_pegasus", "BigBirdPegasusModel", "BigBirdPegasusBlockSparseAttention"),
        ("pegasus_x", "PegasusXModel", "PegasusXGlobalLocalAttention"),
    ],
)
def test_refused_by_name(model_type, cls, reason):
    with pytest.raises(NotImplementedError, match=reason) as error:
        getattr(transformers, cls)(settings(model_type, "cuteflash"))
    assert 'attn_implementation="sdpa" or "eager"' in str(error.value)


def test_a_part_of_a_model_is_refused_unless_it_is_left_out():
    with pytest.raises(NotImplementedError, match="ClapAudioSelfAttention"):
        transformers.ClapModel(settings("clap", "cuteflash"))
    model = transformers.ClapModel(settings("clap", {"text_config": "cuteflash", "audio_config": "eager"}))
    assert model.config.text_config._attn_implementation == "cuteflash"
    assert model.config.audio_config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("model_type", "cls"),
    [
        ("bloom", "BloomModel"),
        ("git", "GitModel"),
        ("clap", "ClapModel"),
        ("minimax_m3_vl_text", "MiniMaxM3VLTextModel"),
    ],
)
def test_a_refused_change_leaves_the_model_as_it_was(model_type, cls):
    model = getattr(transformers, cls)(settings(model_type, "eager"))
    with pytest.raises(NotImplementedError, match="does not run on cuteflash"):
        model.set_attn_implementation("cuteflash")
    parts = [model.config, *(getattr(model.config, name) for name in model.config.sub_configs)]
    assert {part._attn_implementation for part in parts} == {"eager"}


def test_a_change_that_works():
    model = transformers.LlamaModel(settings("llama", "eager"))
    model.set_attn_implementation("cuteflash")
    assert model.config._attn_implementation == "cuteflash"


def test_a_name_set_behind_transformers_back_fails_at_the_first_mask():
    model = transformers.FalconModel(settings("falcon", "eager"))
    model.config._attn_implementation = "cuteflash"
    with pytest.raises(NotImplementedError, match="works on the attention mask itself"):
        model(**model.dummy_inputs)


def test_other_implementations_are_left_alone():
    transformers.BloomModel(settings("bloom", "eager")).set_attn_implementation("eager")
    transformers.MiniMaxM3VLTextModel(settings("minimax_m3_vl_text", "eager"))


def test_registering_again_wraps_nothing_twice():
    methods = [getattr(transformers.PreTrainedModel, name) for name in ("post_init", "set_attn_implementation")]
    integration.register()
    assert methods == [getattr(transformers.PreTrainedModel, name) for name in ("post_init", "set_attn_implementation")]


def test_we_are_not_taken_for_a_flash_attn_package():
    from transformers import masking_utils, modeling_utils

    for module in (masking_utils, modeling_utils, transformers.utils.generic):
        ask = module.is_flash_attention_requested
        assert not ask(requested_attention_implementation="cuteflash")
        assert ask(requested_attention_implementation="flash_attention_2")
        assert not ask(settings("llama", "cuteflash"))
