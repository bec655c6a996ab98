"""Hugging Face transformers on cuteflash: `register()`, then `attn_implementation="cuteflash"`.

    model = AutoModel.from_pretrained(name, attn_implementation="cuteflash", dtype=torch.bfloat16)

Encoders and decoders, grouped heads, sliding windows, softcap, attention sinks, key-value caches (also static and
sliding ones), padding on either side and several sequences packed into one row. A layer makes one operator call,
whatever the padding. Continuous batching (`generate_batch`) attends to the pages of its cache.

`attn_implementation="cuteflash_fp8"` is for inference: attention of 128 queries and more is computed in FP8; of fewer,
as in the steps of generation, in 16 bits. It refuses tensors that require a gradient and, of 128 queries and more,
padding and several sequences in a row.

Refused, by name, are models whose attention does not go through transformers' attention interface; dropout, attention
weights as an output, position biases, sparse attention; and masks that are not causal, sliding or
full, with padding or packed sequences. docs/transformers.md lists every architecture.
"""

from __future__ import annotations

from cuteflash.integrations.transformers.attention import attention, fp8_attention, paged_attention
from cuteflash.integrations.transformers.batching import join_batches, tell_apart_from_flash_attn
from cuteflash.integrations.transformers.load import FP8_NAME, NAME, PAGED_NAME, guard
from cuteflash.integrations.transformers.mask import make_mask

__all__ = [
    "FP8_NAME",
    "NAME",
    "PAGED_NAME",
    "attention",
    "fp8_attention",
    "make_mask",
    "paged_attention",
    "register",
]


def register() -> None:
    """Make "cuteflash" and "cuteflash_fp8" known to transformers as implementations. Calling it again changes nothing.

    Raises:
        ImportError: transformers 5 is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "cuteflash.integrations.transformers needs transformers 5; install it with: pip install 'transformers>=5'"
        ) from error
    for name, implementation in ((NAME, attention), (FP8_NAME, fp8_attention)):
        AttentionInterface.register(name, implementation)
        AttentionMaskInterface.register(name, make_mask)
    AttentionInterface.register(PAGED_NAME, paged_attention)  # without a mask, which transformers then does not make
    guard()
    tell_apart_from_flash_attn()
    join_batches()
