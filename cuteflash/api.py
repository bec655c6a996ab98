"""The public functions. They check what an operator's schema cannot say; the operators check the rest."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from cuteflash.ops import fwd, fwd_cuda, fwd_lse, fwd_lse_cuda, is_plain_cuda_call
from cuteflash.traits.arch import FAMILIES, Family

Window = tuple[int, int]
UNBOUNDED_WINDOW: Window = (-1, -1)


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: Window | None = ...,
    softcap: float = ...,
    pack_gqa: bool | None = ...,
    family: Family | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: Window | None = ...,
    softcap: float = ...,
    pack_gqa: bool | None = ...,
    family: Family | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: Window | None = ...,
    softcap: float = ...,
    pack_gqa: bool | None = ...,
    family: Family | None = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = UNBOUNDED_WINDOW,
    softcap: float = 0.0,
    pack_gqa: bool | None = None,
    family: Family | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(softmax_scale * q k^T + mask) v``, without the score matrix in memory.

    Query i of a sequence sits at position ``i + seqlen_k - seqlen_q`` of the keys (masks are aligned bottom-right), and
    sees key j where ``position - left <= j <= position + right``. A query that sees no key gets O = 0 and LSE = -inf.

    Args:
        q: (batch, seqlen_q, heads, head_dim). fp16 or bf16; on a CPU also fp32 and fp64. `head_dim` is a multiple of 8
            up to 256. The last dimension is contiguous; every other stride is free as long as rows start on 16-byte
            boundaries (0, as of an expanded tensor, too).
        k: (batch, seqlen_k, kv_heads, head_dim), dtype and device of q; `heads` is a multiple of `kv_heads`, and query
            head h reads KV head ``h // (heads // kv_heads)``.
        v: (batch, seqlen_k, kv_heads, head_dim_v); `head_dim_v` is a multiple of 8 up to 256.
        softmax_scale: factor of the scores, positive and finite; None is ``1 / sqrt(head_dim)``.
        causal: a query sees no key after its position; with a window, its right side becomes 0.
        window_size: (left, right) keys seen before and after a query's position; -1 is all, None is (-1, -1).
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask; 0 is none.
        pack_gqa: fold the query heads of a KV head into the rows of a tile, which pays for short `seqlen_q`. None
            leaves it to a heuristic, True needs at most 64 query heads a KV head. Never changes what is computed.
        family: kernel family to run on a GPU, ``"sm80"`` or ``"sm90"``; None is the best it has. CPUs ignore it.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        O, (batch, seqlen_q, heads, head_dim_v), contiguous, in q's dtype; with `return_lse` also LSE,
        (batch, heads, seqlen_q), fp32, natural logarithm. A dimension of size 0 gives an empty result, and
        `seqlen_k` 0 gives O = 0 and LSE = -inf.

    Raises:
        TypeError: an argument of the wrong type, a dtype that is not supported, or two dtypes mixed.
        ValueError: a shape, stride, alignment, device mix, scale, softcap or window that is not allowed.
        NotImplementedError: a device or family that is not supported; also from ``backward()``, which this release
            does not have.
    """
    is_plain = is_plain_cuda_call(q, k, v)
    if not (is_plain or (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor))):
        raise _not_tensors(q=q, k=k, v=v)
    left, right = (-1, -1) if window_size is UNBOUNDED_WINDOW or window_size is None else _window(window_size)
    if causal is not False:
        _check_bool("causal", causal)
        right = 0
    if softmax_scale is not None and not isinstance(softmax_scale, float):
        softmax_scale = _number("softmax_scale", softmax_scale, "None or a number")
    if not isinstance(softcap, float):
        softcap = _number("softcap", softcap, "a number")
    if is_plain:
        op = fwd_lse_cuda if return_lse else fwd_cuda
    else:
        op = fwd_lse if return_lse else fwd
    if pack_gqa is None and family is None:  # trailing defaults are cheapest left out: 0.1 us each in the dispatcher
        result: Tensor | tuple[Tensor, Tensor] = op(q, k, v, softmax_scale, left, right, softcap)
        return result
    if pack_gqa is not None:
        _check_bool("pack_gqa", pack_gqa)
    if family is not None and not isinstance(family, str):
        raise TypeError(f"family is {family!r}; allowed: None, {', '.join(map(repr, FAMILIES))}")
    result = op(q, k, v, softmax_scale, left, right, softcap, pack_gqa, family)
    return result


def _not_tensors(**tensors: object) -> TypeError:
    name, value = next((n, x) for n, x in tensors.items() if not isinstance(x, Tensor))
    return TypeError(f"{name} is a {type(value).__name__}; allowed: a torch.Tensor")


def _window(window_size: Window) -> Window:
    if isinstance(window_size, (tuple, list)) and len(window_size) == 2:
        left, right = window_size
        if _is_int(left) and _is_int(right):
            if left < -1 or right < -1:
                raise ValueError(f"window_size is {tuple(window_size)}; allowed: -1 (unbounded) or more on each side")
            return left, right
    raise TypeError(f"window_size is {window_size!r}; allowed: None or a pair of ints (left, right), -1 is unbounded")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        allowed = "True, False" if name == "causal" else "None, True, False"
        raise TypeError(f"{name} is {value!r}; allowed: {allowed}")


def _number(name: str, value: object, allowed: str) -> float:
    """`value` as an operator takes it. Not tensors: reading one would synchronise the host with the GPU."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; allowed: {allowed}")
