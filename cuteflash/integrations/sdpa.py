"""`torch.nn.functional.scaled_dot_product_attention` on cuteflash, through torch's registry of flash implementations.

    cuteflash.integrations.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("cuteflash")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # or wherever torch chooses that backend on a GPU
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.nn.attention.restore_flash_attention_impl()

Forward and backward; dropout and the debug mask are refused. Nested tensors and `varlen_attn` use another operator and
stay with torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash.ops import bwd, fwd_lse

NAME = "cuteflash"
# What aten::_scaled_dot_product_flash_attention returns: output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
# rng_state, unused, debug_attn_mask.
FlashResult = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


# Arguments of aten::_scaled_dot_product_flash_attention_backward after logsumexp.
REST = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "philox_seed", "philox_offset")


class _Activation:
    """What torch keeps while the implementation is active; `remove` gives the operators back."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None  # the registrations live as long as the library object


def register() -> None:
    """Make "cuteflash" known to `torch.nn.attention.activate_flash_attention_impl`, without activating it.

    Raises:
        NotImplementedError: this torch has no registry of flash implementations.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise NotImplementedError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; a newer torch has"
        ) from error
    register_flash_attention_impl(NAME, register_fn=_activate)


def _activate() -> _Activation:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash_attention, "CUDA", allow_override=True)
    library.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward, "CUDA", allow_override=True)
    return _Activation(library)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> FlashResult:
    """The operator `aten::_scaled_dot_product_flash_attention`.

    Args:
        query: (batch, heads, s_q, head_dim).
        key, value: (batch, kv heads, s_k, head_dim).
        dropout_p: 0.
        is_causal: torch's, aligned top-left: query i sees keys 0 to i, whatever the lengths.
        return_debug_mask: False.
        scale: None is 1 / sqrt(head_dim).

    Returns:
        O, shaped and strided as `torch.empty_like(query)`; LSE, fp32 (batch, heads, s_q); and
        what the operator has for dropout.

    Raises:
        NotImplementedError: dropout, or the debug mask.
        TypeError, ValueError: inputs that cuteflash refuses.
    """
    _refuse_dropout(dropout_p)
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask is True; cuteflash supports False")
    q, k, v, right = _bottom_right(query, key, value, is_causal)
    o, lse = fwd_lse(q, k, v, scale, -1, right)
    output = _like(query, o)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return output, lse, None, None, query.shape[2], key.shape[2], rng_state, unused, query.new_empty(0)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator `aten::_scaled_dot_product_flash_attention_backward`.

    Args:
        grad_out: gradient of `out`.
        query, key, value, out, logsumexp: arguments and results of `flash_attention`.
        rest: `REST`, of which `dropout_p` and `is_causal` count.
        named: those of `REST` that go by name, and scale.

    Returns:
        The gradients, each shaped and strided as `torch.empty_like` of what it belongs to.

    Raises:
        NotImplementedError: dropout.
        TypeError, ValueError: inputs that cuteflash refuses.
    """
    given = dict(zip(REST, rest, strict=False)) | named
    _refuse_dropout(given["dropout_p"])
    q, k, v, right = _bottom_right(query, key, value, given["is_causal"])
    dout, o = grad_out.transpose(1, 2), out.transpose(1, 2)
    dq, *gradients = bwd(dout, q, k, v, o, logsumexp, None, given.get("scale"), -1, right)
    unseen = key.shape[2] - k.shape[1]
    dk, dv = (F.pad(x, (0, 0, 0, 0, 0, unseen)) if unseen else x for x in gradients)
    return _like(query, dq), _like(key, dk), _like(value, dv)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p}; cuteflash supports 0")


def _bottom_right(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    """Q, K and V as our operators take them, and the right side of the window that is torch's causal mask."""
    s_q, s_k = query.shape[2], key.shape[2]
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if not is_causal:
        return q, k, v, -1
    if s_k > s_q:  # no query sees the keys beyond the last query
        k, v = k[:, :s_q], v[:, :s_q]
    return q, k, v, max(s_q - s_k, 0)  # ours is aligned bottom-right


def _like(tensor: Tensor, x: Tensor) -> Tensor:
    """`x` (batch, seqlen, heads, head_dim) as (batch, heads, ...), with the strides torch.compile was promised."""
    x = x.transpose(1, 2)
    promised = torch.empty_like(tensor)
    return x if promised.stride() == x.stride() else promised.copy_(x)
