"""Tiny configurations of any architecture: the default one with every known size made small."""

from __future__ import annotations

import copy
import inspect
import pathlib
import re
from typing import Any

# The first pattern that matches a field's name decides; only numbers above it are lowered.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)(q|o)_lora_rank$", 32),
    (r"kv_lora_rank$", 32),
    (r"qk_(rope|nope)_head_dim$|v_head_dim$", 16),
    (r"^qk_head_dim$", 32),
    (r"(head_dim|kv_channels|d_kv|head_size|attention_head_size|key_size|value_size)$", 16),
    (r"(key_value|kv)_heads$|num_key_value_groups$|_kv_head$", 2),
    (r"(^|_)(n|num).*heads?$|attention_heads$|^heads$", 4),
    (r"(experts_per_tok|experts_per_token|top_?k|moe_k|num_selected_experts)$", 2),
    (r"n_groups?$|topk_group$", 1),
    (r"(n|num).*experts$", 4),
    (r"(n|num).*layers?$|(en|de)coder_layers$|^depth$|^n_layers?$|num_blocks$|_depth$", 2),
    (r"codebook_size$", 128),
    (r"vocab_size|vocab_sizes", 199),
    (
        r"(intermediate|ffn|ffn_hidden|mlp|inner|feed_forward)_(size|dim|hidden_size)$|ffn_dim$|^d_ff$|d_inner$|n_inner$",
        96,
    ),
    (
        r"^(d_model|dim|n_embd|hidden_dim|embedding_dim|projection_dim|width|d_embed)$|(hidden|embed|embedding)_(size|dim)$",
        64,
    ),
    (r"(output|projection|encoder|decoder|feature|mask|model|feat)_(size|dim)$|out_hidden_size$|d_hidden$", 64),
    (r"image_size$|img_size$", 32),
    (r"^patch_size$", 8),
    (r"max_position_embeddings|n_positions|max_seq_len|max_(source|target)_positions|max_sequence_length", 128),
    (r"num_queries$|num_query_tokens$|num_frames$", 8),
    (r"num_mel_bins$", 16),
)
_WINDOW = 5  # shorter than the sequences of the probes

# What the patterns above get wrong.
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
_WITHOUT_TIMM: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "conditional_detr": _WITHOUT_TIMM,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deformable_detr": {**_WITHOUT_TIMM, "num_feature_levels": 3},
    "detr": _WITHOUT_TIMM,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 199, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "informer": {"prediction_length": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimi": {"upsample_groups": 64},
    "mistral4": {"qk_rope_head_dim": 16, "head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "mobilebert": {"hidden_size": 64, "embedding_size": 64, "intra_bottleneck_size": 64, "true_hidden_size": 64},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p5": {"sliding_window": _WINDOW},
    "shieldgemma2": {"yes_token_index": 20, "no_token_index": 30},
    "swin": {"window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "patch_size": 4},
    "xclip_vision_model": {"num_frames": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
}


def tiny(config_class: type, **settings: Any) -> Any:
    """A small configuration of this class; `settings` go over it."""
    default = config_class()
    fields = {}
    for name, value in vars(default).items():
        small = _small(name.lstrip("_"), value)
        if small != value and name != "layer_types":
            fields[name] = small
    known = vars(default)
    if "head_dim" in known and known["head_dim"] is None:
        fields["head_dim"] = 16
    if "kv_lora_rank" in known and "num_key_value_heads" in known:  # latent attention has as many keys as queries
        fields["num_key_value_heads"] = 4
    if "rope_parameters" in known and _has_sections(config_class):
        fields["rope_parameters"] = _with_sections(known["rope_parameters"] or {})
    for name in config_class.sub_configs:
        sub = getattr(default, name, None)
        if sub is not None:
            fields[name] = tiny(type(sub)).to_dict()
    fields |= OVERRIDES.get(config_class.model_type, {}) | settings
    return _with_layer_types(config_class(**fields), default)


def _has_sections(config_class: type) -> bool:
    """Whether the model splits its rotary frequencies among time, height and width."""
    source = pathlib.Path(inspect.getfile(config_class).replace("configuration_", "modeling_"))
    return source.exists() and "mrope_section" in source.read_text()


def _with_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Sections that fit heads of 16; some models have a dict for every kind of layer."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _with_sections(value) for kind, value in rope.items()}
    frequencies = int(16 * rope.get("partial_rotary_factor", 1)) // 2
    part = 3 * frequencies // 8
    return {**rope, "mrope_section": [frequencies - 2 * part, part, part]}


def _with_layer_types(config: Any, default: Any) -> Any:
    """`layer_types` and its kin have an entry a layer: as few as there are layers, and of every kind."""
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        usual = vars(default).get(name)
        if isinstance(usual, list) and isinstance(layers, int):
            kinds = sorted(set(usual), key=usual.index)
            have = vars(config).get(name)
            if have is None or len(have) != layers or not set(kinds[:layers]) <= set(have):
                setattr(config, name, [kinds[i % len(kinds)] for i in range(layers)])
    return config


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if (
        isinstance(value, list)
        and value
        and all(type(item) is int for item in value)
        and re.search("^depths$|^layers$", name)
    ):
        return [1] * len(value)
    if name == "image_size" and isinstance(value, (list, tuple)):
        return [32] * len(value)
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 3, 3]}
    if isinstance(value, int) and name not in ("num_feat_extract_layers", "num_adapter_layers"):
        if re.search("token_(id|index)$|_token_ids?$|^(image|audio|video)_token", name):
            return value if value < 190 else 190 + value % 9
        for pattern, size in _SIZES:
            if re.search(pattern, name):
                return min(value, size)
    return value


def variants(config: Any) -> dict[str, Any]:
    """Other settings that change what attention is asked for, by name."""
    found = {"": config}
    text = _text(config)
    fields = vars(text)
    if "sliding_window" in fields:
        found["window"] = changed(config, sliding_window=_WINDOW, use_sliding_window=True, max_window_layers=0)
    if fields.get("attention_chunk_size"):
        found["chunk"] = changed(config, attention_chunk_size=_WINDOW)
    if fields.get("is_decoder") is False and not getattr(config, "is_encoder_decoder", False):
        found["decoder"] = changed(config, is_decoder=True)
    if "use_bidirectional_attention" in fields:
        found["bidirectional"] = changed(config, use_bidirectional_attention=True)
        found["bidirectional"] = found["bidirectional"] or changed(config, use_bidirectional_attention="all")
    return {name: variant for name, variant in found.items() if variant is not None}


def changed(config: Any, **settings: Any) -> Any | None:
    """A copy with these settings, made anew so that what derives from them follows; None where they are not allowed."""
    text = _text(config)
    fields = {name: value for name, value in text.to_dict().items() if name != "layer_types"}
    known = {name: value for name, value in settings.items() if name in fields}
    try:
        new = _with_layer_types(type(text)(**{**fields, **known}), text)
    except Exception:
        return None
    kinds = getattr(new, "layer_types", None)
    if kinds is not None and "sliding_window" in settings and not any("sliding" in kind for kind in kinds):
        new.layer_types = ["sliding_attention", *kinds[1:]]
    if text is config:
        return new
    whole = copy.deepcopy(config)
    for name in config.sub_configs:
        if getattr(config, name, None) is text:
            setattr(whole, name, new)
    return whole


def _text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # there are several
        return config


def with_dropout(config: Any) -> tuple[Any, bool]:
    """A copy in which attention drops half of its weights, and whether it has such a setting."""
    new = copy.deepcopy(config)
    found = False
    for part in [new, *(getattr(new, name, None) for name in new.sub_configs)]:
        for name, value in list(vars(part).items()) if part is not None else []:
            if isinstance(value, (int, float)) and re.search("att.*(drop|pdrop)", name):
                setattr(part, name, 0.5)
                found = True
    return new, found
