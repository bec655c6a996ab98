"""Hugging Face transformers on cuteflash: `register()`, then `attn_implementation="cuteflash"`.

    model = AutoModel.from_pretrained(name, attn_implementation="cuteflash", dtype=torch.bfloat16)

Encoders and decoders, grouped heads, sliding windows, softcap, attention sinks, key-value caches (also static and
sliding ones), padding on either side and several sequences packed into one row. A layer makes one operator call,
whatever the padding.

`attn_implementation="cuteflash_fp8"` is for inference: attention of 128 queries and more is computed in FP8; of fewer,
as in the steps of generation, in 16 bits. It refuses tensors that require a gradient and, of 128 queries and more,
padding and several sequences in a row.

Refused, by name, are models whose attention does not go through transformers' attention interface; dropout, attention
weights as an output, position biases, sparse attention, paged caches; and masks that are not causal, sliding or
full, with padding or packed sequences. docs/transformers.md lists every architecture.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from cuteflash.integrations.transformers.attention import attention, fp8_attention
from cuteflash.integrations.transformers.load import FP8_NAME, NAME, NAMES, guard
from cuteflash.integrations.transformers.mask import make_mask

__all__ = ["FP8_NAME", "NAME", "attention", "fp8_attention", "make_mask", "register"]


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
    guard()
    _tell_apart_from_flash_attn()


def _tell_apart_from_flash_attn() -> None:
    """Keep transformers from treating us as one of the flash-attn packages, as it treats every name with "flash".

    For those it loads functions of the package, and vision towers pack images into one row without a mask; for any
    other name they give the interface one image at a time. Its modules import the function that decides this by name.
    """
    from transformers.utils import generic

    ask = generic.is_flash_attention_requested
    if getattr(ask, "knows_cuteflash", False):
        return

    @functools.wraps(ask)
    def ask_of_others(config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name not in NAMES and ask(config, requested_attention_implementation, **kwargs)

    ask_of_others.knows_cuteflash = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is ask:
            module.is_flash_attention_requested = ask_of_others  # type: ignore[attr-defined]
