"""Attention in FP8 for a model that was trained in 16 bits: what its loss would be at inference."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cuteflash import flash_attn_func, quantize_qkv
from cuteflash.nn import MHA

from .settings import Settings

STEP = 16  # columns of a head are a multiple of it


def check(settings: Settings) -> None:
    """Raise ValueError, naming the setting, unless a model with these settings can attend in FP8."""
    for name in ("packed", "compile"):
        if getattr(settings, name):
            raise ValueError(f"{name} is given with fp8; allowed: without it")
    if settings.dim % (STEP * settings.heads):
        raise ValueError(
            f"dim is {settings.dim}; allowed with fp8: multiples of {STEP} columns for each of {settings.heads} heads"
        )


@contextlib.contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """While it is entered, the model's attention quantises Q, K and V: V minus its mean, which is added to O."""
    layers = [layer for layer in model.modules() if isinstance(layer, MHA)]
    for layer in layers:
        layer.attend = functools.partial(_attend, layer.options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.attend  # the class has it again


@torch.no_grad()
def _attend(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *sequences: None) -> Tensor:
    half = q.dtype if q.dtype != torch.float32 else torch.bfloat16
    given = quantize_qkv(q.to(half), k.to(half), v.to(half), transpose_v=True, smooth_v=True)
    assert given.vt is not None and given.v_mean is not None
    scales: dict[str, Any] = {"q_descale": given.q_descale, "k_descale": given.k_descale, "v_descale": given.v_descale}
    out: Tensor = flash_attn_func(given.q, given.k, given.vt, transposed_v=True, **scales, **options)
    mean = given.v_mean[:, None].repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return (out + mean).to(q.dtype)
