"""`torch.nn.functional.scaled_dot_product_attention` on cuteflash, through torch's registry of flash implementations.

    cuteflash.integrations.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("cuteflash")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # or wherever torch chooses that backend on a GPU
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.nn.attention.restore_flash_attention_impl()

Forward only; dropout and the debug mask are refused. Nested tensors and `varlen_attn` use another operator and stay
with torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuteflash.ops import fwd_lse
from cuteflash.transforms import NO_BACKWARD

NAME = "cuteflash"
# What aten::_scaled_dot_product_flash_attention returns: output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
# rng_state, unused, debug_attn_mask.
FlashResult = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]


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
    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p}; cuteflash supports 0")
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask is True; cuteflash supports False")
    s_q, s_k = query.shape[2], key.shape[2]
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    right = -1
    if is_causal:
        if s_k > s_q:  # no query sees the keys beyond the last query
            k, v = k[:, :s_q], v[:, :s_q]
        right = max(s_q - s_k, 0)  # ours is aligned bottom-right
    o, lse = fwd_lse(q, k, v, scale, -1, right)
    output = o.transpose(1, 2)
    like_query = torch.empty_like(query)  # the strides torch.compile was promised
    if like_query.stride() != output.stride():
        output = like_query.copy_(output)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return output, lse, None, None, s_q, s_k, rng_state, unused, query.new_empty(0)


def flash_attention_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator `aten::_scaled_dot_product_flash_attention_backward`: NotImplementedError in this release."""
    raise NotImplementedError(
        f"{NO_BACKWARD}: call scaled_dot_product_attention under torch.no_grad(), or "
        "torch.nn.attention.restore_flash_attention_impl() first"
    )
