"""The entry of transformers' attention interface: it applies the mask, and refuses arguments that it does not support.

The mask decides what a query sees, as in eager attention: layers and masks of a model do not always agree on windows
and causality. Without a mask nothing is hidden, unless the layer says that it is causal.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cuteflash.api import flash_attn_func
from cuteflash.integrations.transformers.boundaries import ENDS, sequences_of
from cuteflash.integrations.transformers.mask import Mask
from cuteflash.integrations.transformers.paged import attend_paged
from cuteflash.integrations.transformers.rules import FULL
from cuteflash.kvcache_api import flash_attn_with_kvcache
from cuteflash.packed_api import flash_attn_varlen_func

INSTEAD = 'use attn_implementation="sdpa" or "eager"'
FP8_QUERIES = 128  # of a call that is computed in FP8; for fewer, quantising all keys and values takes longer

# Arguments that some models pass and that change the result in a way the operator does not know.
_REFUSED = {
    "sinks": "attention sinks of each query",
    "position_bias": "an additive position bias",
    "head_mask": "a head mask",
    "indices": "sparse attention to selected keys",
    "block_indices": "sparse attention to selected blocks",
    "cache": "a paged cache (continuous batching)",
}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An entry of transformers' `AttentionInterface`.

    Args:
        module: the attention layer; its `is_causal` counts if there is neither a mask nor an `is_causal` in the call.
        query: (batch, heads, query length, head_dim), fp16 or bf16 on a GPU.
        key, value: (batch, kv heads, key length, head_dim or head_dim_v).
        attention_mask: the result of `make_mask`, or None.
        dropout: 0.
        scaling: None is 1 / sqrt(head_dim).
        **kwargs: `softcap` counts, without a mask `is_causal` and `sliding_window`, and with one `cu_seq_lens_q`,
            `cu_seq_lens_k`, `max_length_q` and `max_length_k`, see `sequences_of`; `s_aux` are attention sinks, a logit
            of each head.

    Returns:
        O (batch, query length, heads, head_dim_v), and None for the attention weights.

    Raises:
        NotImplementedError: dropout, or an argument that cuteflash does not support.
        ValueError: attention weights are asked for, a mask that is not ours or for other lengths, sequences that are
            not those of the mask, or inputs that the operator refuses.
        TypeError: a dtype that the operator refuses.
    """
    _refuse_unsupported(module, dropout, kwargs)
    return _attend(module, (query, key, value), attention_mask, {"softmax_scale": scaling}, kwargs), None


def fp8_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attention` for inference, in FP8 if there are `FP8_QUERIES` queries or more.

    Calls with fewer, such as the steps of generation, are computed in 16 bits.

    Raises:
        NotImplementedError: also if a tensor requires a gradient, or there are as many queries and padding or several
            sequences in a row.
    """
    _refuse_unsupported(module, dropout, kwargs)
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            's_aux is given: attention sinks are not supported by cuteflash in FP8; use attn_implementation="cuteflash"'
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise NotImplementedError(
                f"{name}.requires_grad is True; attention in FP8 is for inference: run the model under "
                'torch.no_grad(), or use attn_implementation="cuteflash"'
            )
    options = {"softmax_scale": scaling, "fp8": query.shape[2] >= FP8_QUERIES}
    return _attend(module, (query, key, value), attention_mask, options, kwargs), None


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention over the paged cache of continuous batching, to which the new keys and values are appended.

    Args:
        module: the attention layer; its `layer_idx` counts.
        query, key, value: (1, heads, tokens, head_dim), of all requests of a step, one after the other.
        attention_mask: None.
        dropout: 0.
        scaling: None is 1 / sqrt(head_dim).
        **kwargs: `softcap` and `s_aux` count, as in `attention`, and what continuous batching passes: `cache`,
            `cu_seq_lens_q`, `cu_seq_lens_k`, the lengths' limits, and `block_table` or `read_index` and `write_index`.
            Windows are those of the cache's layers.

    Returns:
        O (1, tokens, heads, head_dim_v), and None for the attention weights.

    Raises:
        NotImplementedError: as `attention`, but for `cache`; or a cache of an unknown version of transformers.
        ValueError: there is no cache, or a mask.
    """
    if kwargs.get("cache") is None:
        raise ValueError(
            "cache is None; cuteflash_paged is what generate_batch switches a model to, for its steps: load the model "
            'with attn_implementation="cuteflash"'
        )
    if attention_mask is not None:
        raise ValueError("attention_mask is given; allowed in continuous batching: None, as lengths say what is seen")
    _refuse_unsupported(module, dropout, {**kwargs, "cache": None})
    options = {"softmax_scale": scaling, "softcap": kwargs.get("softcap") or 0.0}
    if kwargs.get("s_aux") is not None:
        options["sinks"] = _sinks_of(kwargs["s_aux"], query)
    return attend_paged(module, (query, key, value), options, kwargs), None


def _attend(
    module: torch.nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    attention_mask: Mask | Tensor | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """O of query, key and value as transformers has them; `options` are of `flash_attn_func`."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    options["softcap"] = kwargs.get("softcap") or 0.0
    if kwargs.get("s_aux") is not None:
        options["sinks"] = _sinks_of(kwargs["s_aux"], q)
    o: Tensor
    if attention_mask is None:
        _check_no_mask(module, q.shape[1], k.shape[1], kwargs)
        o = flash_attn_func(q, k, v, **options)
        return o
    mask = _ours_for(attention_mask, q, k)
    if mask.lengths is not None and _takes_lengths(q, k, v, options, kwargs):
        options.pop("fp8", None)
        o = flash_attn_with_kvcache(q, k, v, cache_seqlens=mask.lengths, causal=True, **options)
        return o
    options["window_size"] = tuple(-1 if bound is None else bound for bound in mask.interval)
    if mask.sequences is None and mask.used == k.shape[1] and all(kwargs.get(name) is None for name in ENDS):
        o = flash_attn_func(q, k, v, **options)
    else:
        o = _attend_sequences(q, k, v, mask, options, kwargs)
    return o


def _takes_lengths(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], kwargs: dict[str, Any]) -> bool:
    """Whether attention to a cache takes lengths that the device knows: not in FP8, nor with gradients."""
    if options.get("fp8") or any(kwargs.get(name) is not None for name in ENDS):
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def _sinks_of(s_aux: Tensor, q: Tensor) -> Tensor:
    """The logit of each head, of a type that the operator takes."""
    return s_aux.flatten() if s_aux.dtype == q.dtype else s_aux.flatten().float()


def _refuse_unsupported(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(
            f"dropout is {dropout}; cuteflash supports 0: set the config's attention dropout to 0, or call model.eval()"
        )
    for name, meaning in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} is given: {meaning} is not supported by cuteflash; {INSTEAD}")
    if getattr(module, "sinks", None) is not None and kwargs.get("s_aux") is None:
        raise NotImplementedError(
            f"{type(module).__name__} has sinks and no s_aux is given: attention sinks are supported by cuteflash only "
            f"as s_aux; {INSTEAD}"
        )
    if kwargs.get("output_attentions") or (not torch.compiler.is_compiling() and _weights_are_collected()):
        raise ValueError(
            'output_attentions is True; cuteflash has no attention weights to give, attn_implementation="eager" has'
        )


def _weights_are_collected() -> bool:
    """Whether transformers collects attention weights of the layers; the call does not say so."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # transformers before 5.2 passes output_attentions on
        return False
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def _check_no_mask(module: torch.nn.Module, queries: int, keys: int, kwargs: dict[str, Any]) -> None:
    """Our masks are never None. Without one, eager attention hides nothing; ours does the same or refuses."""
    for name in ENDS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} is given and {type(module).__name__} gives no attention mask: sequences packed into one row "
                f"are supported by cuteflash only if transformers' masking_utils make the mask; {INSTEAD}"
            )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    window = kwargs.get("sliding_window")
    if (causal and queries > 1) or (window is not None and window < keys):
        raise ValueError(
            f"{type(module).__name__} asks for is_causal={causal}, sliding_window={window} and gives no attention "
            f"mask; cuteflash takes both from the mask that transformers' masking_utils make; {INSTEAD}"
        )


def _ours_for(mask: Mask | Tensor, q: Tensor, k: Tensor) -> Mask:
    if not isinstance(mask, Mask):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}, made by the model or the caller; cuteflash allows padding (batch, length) "
            f"given to the model, and masks that transformers' masking_utils make; {INSTEAD}"
        )
    expected = (q.shape[0], 1, q.shape[1], k.shape[1])
    # Full attention is the same for every query, and some models make its mask for one query only.
    if mask.shape != expected and not (mask.interval == FULL and mask.shape == (q.shape[0], 1, 1, k.shape[1])):
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; the attention is {expected}; {INSTEAD}")
    if mask.interval.left == -1:
        raise ValueError(f"the model's sliding window is 0; cuteflash allows 1 key and more; {INSTEAD}")
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]  # reads values on the host
def _attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Attention over the keys that hold tokens, each sequence for itself; unused cache slots are cut off."""
    k, v = k[:, : mask.used], v[:, : mask.used]
    sequences = sequences_of(mask, q.shape[1], kwargs)
    if sequences is None:
        o: Tensor = flash_attn_func(q, k, v, **options)
        return o
    if options.pop("fp8", False):
        raise NotImplementedError(
            f"attention_mask has padding, or several sequences in a row, of {q.shape[1]} queries; attention in FP8 "
            'allows neither: give inputs of one length, or use attn_implementation="cuteflash"'
        )
    left, right = mask.interval
    if sequences.are_gathered and (left is not None or right not in (None, 0)):
        raise ValueError(
            f"attention_mask has padding between tokens; with a sliding window ({left}, {right}) it is allowed "
            "only before or after them"
        )
    return sequences.attend(functools.partial(flash_attn_varlen_func, **options), q, k, v)
