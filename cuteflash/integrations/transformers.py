"""Hugging Face transformers on cuteflash: `register()`, then `attn_implementation="cuteflash"`.

    model = AutoModel.from_pretrained(name, attn_implementation="cuteflash", dtype=torch.bfloat16)

Encoders and decoders, grouped heads, sliding windows, softcap, key-value caches (also static and sliding ones) and
padding on either side. A padded batch makes one operator call for every distinct row of its padding mask. Refused are
dropout, attention weights as an output, sinks, position biases, sequences packed into one row, paged
caches, and masks that are not causal, sliding or full with padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cuteflash.api import flash_attn_func
from cuteflash.integrations.padding import Group, attend_groups, groups

NAME = "cuteflash"
MaskFunction = Callable[..., Any]

# Arguments that some models pass and that change the result in a way the operator does not know.
_REFUSED = {
    "s_aux": "attention sinks",
    "position_bias": "an additive position bias",
    "cache": "a paged cache (continuous batching)",
    "cu_seq_lens_q": "sequences packed into one row",
    "head_mask": "a head mask",
}

# The groups of the masks made here, so that the layers of a model share one look at a mask.
_known_groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def register() -> None:
    """Make `attn_implementation="cuteflash"` known to transformers. Calling it again changes nothing.

    Raises:
        ImportError: transformers 5 is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "cuteflash.integrations.transformers needs transformers 5; install it with: pip install 'cuteflash[demo]'"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    _announce_to_flash_loader()


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An entry of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its `is_causal` counts where the call does not say.
        query: (batch, heads, query length, head_dim), fp16 or bf16 on a GPU.
        key, value: (batch, kv heads, key length, head_dim or head_dim_v).
        attention_mask: what `padding_mask` made.
        dropout: 0.
        scaling: None is 1 / sqrt(head_dim).
        **kwargs: `sliding_window`, `softcap` and `is_causal` count.

    Returns:
        O (batch, query length, heads, head_dim_v), and None for the attention weights.

    Raises:
        NotImplementedError: dropout, or an argument that cuteflash does not support.
        ValueError: `output_attentions`, a mask that is not two-dimensional, or inputs that the operator refuses.
        TypeError: a dtype that the operator refuses.
    """
    _refuse_unsupported(dropout, kwargs)
    is_causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = kwargs.get("sliding_window")
    # transformers counts the query itself in a window of n keys; encoders reach as far to the right.
    left = -1 if window is None else window - 1
    right = 0 if causal else left
    attend = functools.partial(
        flash_attn_func,
        softmax_scale=scaling,
        window_size=(left, right),
        softcap=kwargs.get("softcap") or 0.0,
    )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if attention_mask is None:
        return attend(q, k, v), None
    return _attend_padded(attend, (q, k, v), attention_mask, causal, window), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads the mask on the host
def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """An entry of transformers' `AttentionMaskInterface`: which key positions hold tokens.

    Args:
        batch_size, q_length, kv_length: sizes of the attention to come; `kv_length` counts unused cache slots, too.
        q_offset, kv_offset: position of the first query and of the first key in the sequence.
        mask_function: who sees whom; causal (the default), full or sliding.
        attention_mask: bool (batch, sequence), True for tokens; None is no padding.
        **kwargs: `device` counts.

    Returns:
        None where every key holds a token, else bool (batch, n), n <= kv_length. Keys from n on are
        unused cache slots, and in causal attention the last query stands at position n - 1.

    Raises:
        ValueError: the mask function is none of these three.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if attention_mask is not None and attention_mask in _known_groups:
        return attention_mask  # made here for a static cache, and handed back by the model
    mask_function = causal_mask_function if mask_function is None else mask_function
    if not _is_interval(mask_function):
        name = getattr(mask_function, "__qualname__", mask_function)
        raise ValueError(
            f"the model asks for an attention mask ({name}) that cuteflash does not support; "
            "allowed: causal, sliding window and full attention, each with padding"
        )
    if mask_function is bidirectional_mask_function:
        used = kv_length
    else:
        used = min(int(q_offset) + q_length - kv_offset, kv_length)
    if attention_mask is None:
        if used == kv_length:
            return None
        mask = torch.ones(batch_size, used, dtype=torch.bool, device=kwargs.get("device"))
    else:
        mask = attention_mask[:, kv_offset : kv_offset + used].bool()
        mask = torch.nn.functional.pad(mask, (0, used - mask.shape[1]))
        if used == kv_length and bool(mask.all()):
            return None
    _known_groups[mask] = groups(mask)
    return mask


def _refuse_unsupported(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(
            f"dropout is {dropout}; supported: 0 (set attention_dropout to 0, or call model.eval())"
        )
    for name, meaning in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} is given: {meaning} is not supported by cuteflash")
    if kwargs.get("output_attentions"):
        raise ValueError('output_attentions is True; attention weights exist only with attn_implementation="eager"')


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the mask's values decide which calls are made
def _attend_padded(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    causal: bool,
    window: int | None,
) -> Tensor:
    q, k, v = qkv
    found = _groups_of(mask, q, k)
    if window is not None and any(isinstance(group.keys, Tensor) for group in found):
        raise ValueError(
            f"attention_mask has padding between tokens; with a sliding window ({window}) it is allowed "
            "only before or after them"
        )
    positional = causal or window is not None
    offset = mask.shape[1] - q.shape[1] if positional else None
    return attend_groups(attend, q, k, v, found, offset)


def _groups_of(mask: Tensor, q: Tensor, k: Tensor) -> list[Group]:
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {shape}; allowed: a padding mask (batch, positions)")
    batch, positions = mask.shape
    if batch != q.shape[0] or not positions <= k.shape[1]:
        raise ValueError(f"attention_mask has shape {(batch, positions)}; allowed: ({q.shape[0]}, up to {k.shape[1]})")
    found: list[Group] | None = _known_groups.get(mask)
    return groups(mask.bool()) if found is None else found


def _is_interval(mask_function: MaskFunction) -> bool:
    """Whether a mask function of transformers is an interval of keys: causal, full, or a window around the query.

    Windows are closures made anew for each mask, and known by their code. Under `torch.compile` transformers always
    asks for packed sequences; that is an interval where there is only one sequence.
    """
    from transformers import masking_utils as masks

    if mask_function in (masks.causal_mask_function, masks.bidirectional_mask_function):
        return True
    code = getattr(mask_function, "__code__", None)
    if code in (
        masks.sliding_window_overlay(1).__code__,
        masks.sliding_window_bidirectional_overlay(1).__code__,
    ):
        return True
    if code is None:
        return False
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, mask_function.__closure__ or ())}
    if code is masks.and_masks(masks.causal_mask_function).__code__:
        return all(map(_is_interval, cells["mask_functions"]))
    if code is masks.packed_sequence_mask_function(torch.empty(0)).__code__:
        return not bool(cells["packed_sequence_mask"].any())
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)  # transformers before 5.18 has none
    if remap is not None and code is remap(masks.causal_mask_function, torch.empty(0)).__code__:
        return _is_interval(cells["mask_function"])
    return False


def _announce_to_flash_loader() -> None:
    """Keep transformers from looking for a package behind our name.

    It takes every name with "flash" in it for one of the flash-attn packages and, before it asks the interfaces, loads
    that package's functions. We answer for our own name; those functions are for packed sequences, which we refuse.
    """
    from transformers import modeling_flash_attention_utils as loader

    load = loader._lazy_imports
    if getattr(load, "knows_cuteflash", False):
        return

    @functools.wraps(load)
    def load_or_ours(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return _no_varlen, _no_varlen, _no_varlen, loader._pad_input, loader._unpad_input
        return load(implementation, *args, **kwargs)

    load_or_ours.knows_cuteflash = True  # type: ignore[attr-defined]
    loader._lazy_imports = load_or_ours


def _no_varlen(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("cuteflash does not support packed sequences or continuous batching in transformers yet")
