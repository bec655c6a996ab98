"""Inputs for any architecture: by the names of its forward's parameters; the first that eager takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

LENGTH, SHORT, TARGET = 12, 7, 9


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Batches of two without padding."""
    names = inspect.signature(model.forward).parameters
    config = model.config
    if "input_ids" in names or ("kwargs" in names and model.main_input_name == "input_ids"):
        base = {"input_ids": tokens(config, 2)}
        if "bbox" in names:
            base["bbox"] = torch.zeros(2, LENGTH, 4, dtype=torch.long)
        if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
            base["decoder_input_ids"] = tokens(config, 2)[:, :TARGET]
        yield base
        for pixels in _pixels(config):
            if "pixel_values" in names:
                yield base | {"pixel_values": pixels}
    if "grid_thw" in names:  # two images of 4 x 4 patches, one after the other
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        for width in (3 * 2 * 8 * 8, 3 * 8 * 8):
            for name in ("hidden_states", "pixel_values"):
                if name in names:
                    yield {name: noise(32, width), "grid_thw": grid}
    if "query_embeds" in names:
        yield {"query_embeds": noise(2, 8, _hidden(config)), "encoder_hidden_states": noise(2, LENGTH, _hidden(config))}
    if "spatial_shapes" in names:  # two images of 4 x 4 patches
        patches = noise(2, 16, 3 * getattr(config, "patch_size", 8) ** 2)
        yield {
            "pixel_values": patches,
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
            "spatial_shapes": torch.full((2, 2), 4),
        }
    if "aspect_ratio_ids" in names:
        yield {
            "pixel_values": noise(2, 1, 4, 3, 32, 32),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
        }
    floats: list[tuple[str, list[Tensor]]] = [
        ("pixel_values", _pixels(config)),
        ("pixel_values_videos", _pixels(config)),
        ("input_features", _features(config)),
        ("input_values", _waves(config)),
        ("hidden_states", [noise(2, LENGTH, _hidden(config)), noise(2, _hidden(config), 8, 8)]),
        ("inputs_embeds", [noise(2, LENGTH, _hidden(config))]),
        ("past_values", [noise(2, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1))]),
    ]
    for name, tensors in floats:
        if name in names:
            for tensor in tensors:
                base = {name: tensor}
                if "decoder_input_ids" in names:
                    base["decoder_input_ids"] = tokens(config, 2)[:, :TARGET]
                yield base
                if name == "pixel_values" and "input_ids" in names:
                    yield {"input_ids": tokens(config, 2), **base}


def tokens(config: Any, batch: int) -> Tensor:
    """Token ids clear of the special ones at both ends of the vocabulary."""
    try:
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    except ValueError:  # there are several texts
        vocabulary = None
    vocabulary = vocabulary if isinstance(vocabulary, int) else 199
    low, high = (10, min(vocabulary, 180)) if vocabulary > 20 else (min(3, vocabulary - 1), vocabulary)
    return torch.randint(low, high, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def padded(inputs: dict[str, Any], side: str, batch: int) -> tuple[dict[str, Any], Tensor]:
    """The text inputs with the last row short, and the mask of its tokens."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, SHORT:] = 0
    if side == "left":
        mask = mask.flip(1)
    kept = {name: value[2 - batch :] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return {**kept, "attention_mask": mask[2 - batch :]}, mask[2 - batch :].bool()


def packed(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with several sequences in each row, as position ids tell that restart, which count without a cache."""
    lengths = (SHORT, LENGTH - SHORT), (2, LENGTH - 2)
    positions = torch.tensor([[position for length in row for position in range(length)] for row in lengths])
    uncached = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return {**inputs, "position_ids": positions, **uncached}


def _hidden(config: Any) -> int:
    found = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    return found if isinstance(found, int) else 64


def _pixels(config: Any) -> list[Tensor]:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or 32
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    frames = getattr(vision, "num_frames", None) or 4
    if not all(isinstance(number, int) for number in (height, width, channels, frames)) or height * width > 2**18:
        return []
    return [noise(2, channels, height, width), noise(2, frames, channels, height, width), noise(2, channels, 64, 64)]


def _features(config: Any) -> list[Tensor]:
    audio = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    bins = getattr(audio, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
    bins = getattr(config, "feature_projection_input_dim", bins)
    frames = 2 * (getattr(config, "max_source_positions", None) or 32)
    if not isinstance(bins, int) or not isinstance(frames, int):
        return []
    return [noise(2, bins, frames), noise(2, frames, bins), noise(2, 1, frames, bins)]


def _waves(config: Any) -> list[Tensor]:
    length = getattr(config, "max_length", None)
    bins = getattr(config, "num_mel_bins", None)
    found = [noise(2, 3200), noise(2, 1, 3200)]
    if isinstance(length, int) and isinstance(bins, int):
        found.insert(0, noise(2, length, bins))
    return found
