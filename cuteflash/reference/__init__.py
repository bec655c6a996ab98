"""The ladder: attention in plain torch, one idea a step, from the formula to the algorithm of the GPU kernels.

Every step has the same signature and result; read them in the order of `LADDER`. The backward is that of the last step.
Beside it stand what decoding adds: keys that are split (`split_attention`), and latent attention (`latent_decode`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cuteflash.reference.bwd import flash_attention_2_backward, sink_gradient
from cuteflash.reference.fa1 import flash_attention_1
from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.reference.fp8 import fp8_attention, stored_rows
from cuteflash.reference.mla import latent_decode
from cuteflash.reference.naive import naive_attention
from cuteflash.reference.online_softmax import online_softmax_attention
from cuteflash.reference.safe_softmax import safe_softmax_attention
from cuteflash.reference.split import split_attention


class Attention(Protocol):
    """A step of the ladder, (q, k, v, scale, window, softcap) to (O, LSE); see `naive.naive_attention`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]: ...


LADDER: dict[str, Attention] = {
    "naive": naive_attention,
    "safe softmax": safe_softmax_attention,
    "online softmax": online_softmax_attention,
    "FlashAttention-1": flash_attention_1,
    "FlashAttention-2": flash_attention_2,
}

__all__ = [
    "LADDER",
    "Attention",
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_2_backward",
    "fp8_attention",
    "latent_decode",
    "naive_attention",
    "online_softmax_attention",
    "safe_softmax_attention",
    "sink_gradient",
    "split_attention",
    "stored_rows",
]
