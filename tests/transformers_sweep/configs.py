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
    (r"(head_dim|kv_channels|d_kv|head_size|attention_head_size|key_size|value_size)$", 16),
    (r"(key_value|kv)_heads$|num_key_value_groups$|_kv_head$", 2),
    (r"(^|_)(n|num).*heads?$|attention_heads$|^heads$", 4),
    (r"(experts_per_tok|top_?k|moe_k|num_selected_experts)$", 2),
    (r"n_groups?$|topk_group$", 1),
    (r"(n|num).*experts$", 4),
    (r"(n|num).*layers?$|(en|de)coder_layers$|^depth$|^n_layers?$|num_blocks$|_depth$|num_stages$", 2),
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
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": 199, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"qk_rope_head_dim": 16, "head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "mobilebert": {"hidden_size": 64, "embedding_size": 64, "intra_bottleneck_size": 64, "true_hidden_size": 64},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
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
        rope = known["rope_parameters"] or {}
        frequencies = int(16 * rope.get("partial_rotary_factor", 1)) // 2
        part = 3 * frequencies // 8
        fields["rope_parameters"] = {**rope, "mrope_section": [frequencies - 2 * part, part, part]}
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
