"""A real model with FP8 attention: the sentence model of `cuteflash demo`, its embeddings beside those in fp32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import cuteflash
from cuteflash.cli import demo
from cuteflash.integrations import transformers as integration
from cuteflash.problem import FwdProblem, Operands
from cuteflash.quantize import quantize_qkv
from cuteflash.quantize_problem import QuantizeOptions, QuantizeProblem

NAME = "e4m3"  # transformers takes a name with "flash" for a package of kernels
EAGER = "eager"
TEXTS = (*demo.SENTENCES, " ".join(demo.SENTENCES))  # sentences, and a text of some 200 tokens
QUANTIZED: dict[str, dict[str, Any]] = {
    "FP8": {},
    "FP8, V minus its mean": {"smooth_v": True},
    "FP8, Hadamard 32": {"hadamard": demo.HEAD_DIM},
}


def attention_problems() -> list[FwdProblem]:
    """What the attention kernels of the model are generated for."""
    eight_bits = dataclasses.replace(Operands.of("e4m3", demo.HEAD_DIM, demo.HEAD_DIM), transposed_v=True)
    return [FwdProblem.dense("bf16", demo.HEAD_DIM, demo.HEAD_DIM), FwdProblem(eight_bits)]


def quantize_problems() -> list[QuantizeProblem]:
    """Likewise its quantising kernels."""
    columns = demo.HEAD_DIM, demo.HEAD_DIM
    options = [QuantizeOptions(**(given | {"transpose_v": True})) for given in QUANTIZED.values()]
    return [
        QuantizeProblem("bf16", *columns, hadamard=o.hadamard, transposes_v=True, smooths_v=o.smooth_v) for o in options
    ]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    options: dict[str, Any],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An entry of transformers' attention interface for whole sequences: (batch, heads, length, head_dim) each."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    given = quantize_qkv(q, k, v, transpose_v=True, **options)
    assert given.vt is not None
    out: Tensor = cuteflash.flash_attn_func(
        given.q,
        given.k,
        given.vt,
        q_descale=given.q_descale,
        k_descale=given.k_descale,
        v_descale=given.v_descale,
        transposed_v=True,
        softmax_scale=scaling,
    )
    if given.v_mean is not None:
        out = out + given.v_mean[:, None].repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return out.to(query.dtype), None


@torch.inference_mode()
def embed(implementation: str, dtype: torch.dtype, device: torch.device, texts: Sequence[str]) -> Tensor:
    """Unit-length embeddings, fp64 on the CPU. Each text is a batch of its own, so that no key is padding."""
    from transformers import AutoModel, AutoTokenizer

    with demo.model_directory() as directory:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        load = functools.partial(AutoModel.from_pretrained, directory, local_files_only=True)
        model = load(attn_implementation=implementation, dtype=dtype).to(device).eval()
        states = [model(**tokenizer(text, return_tensors="pt").to(device)).last_hidden_state for text in texts]
    return torch.nn.functional.normalize(torch.cat([x.double().mean(1) for x in states]), dim=1).cpu()


def compare(device: torch.device, texts: Sequence[str] = TEXTS) -> dict[str, dict[str, float]]:
    """How far embeddings are from those of eager attention in fp32, with eager and our attention in bf16, and in FP8.

    Each with the largest and the mean distance, 1 - cosine, and the largest change of a similarity of two texts.
    """
    from transformers import AttentionInterface

    integration.register()
    right = embed(EAGER, torch.float32, device, texts)
    ways: dict[str, Callable[[], Tensor]] = {
        "eager, bf16": functools.partial(embed, EAGER, torch.bfloat16, device, texts),
        "ours, bf16": functools.partial(embed, integration.NAME, torch.bfloat16, device, texts),
    }
    found = {name: _distances(make(), right) for name, make in ways.items()}
    for name, options in QUANTIZED.items():
        AttentionInterface.register(NAME, functools.partial(attention, options=options))
        found[name] = _distances(embed(NAME, torch.bfloat16, device, texts), right)
    return found


def _distances(made: Tensor, right: Tensor) -> dict[str, float]:
    apart = 1 - (made * right).sum(1)
    change = (made @ made.T - right @ right.T).abs().max()
    return {"largest": apart.max().item(), "mean": apart.mean().item(), "similarity": change.item()}
