"""What a user's type checker has to see; `make typecheck` reads this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

from torch import Tensor

import cuteflash
from cuteflash import flash_attn_func, flash_attn_kvpacked_func, flash_attn_varlen_func, pad_input, unpad_input


def types(q: Tensor, k: Tensor, v: Tensor, flag: bool) -> None:
    assert_type(flash_attn_func(q, k, v), Tensor)
    assert_type(flash_attn_func(q, k, v, causal=True, window_size=None, family="sm80", deterministic=True), Tensor)
    assert_type(flash_attn_func(q, k, v, return_lse=False), Tensor)
    assert_type(flash_attn_func(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_func(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    flash_attn_func(q, k, v, causl=True)  # type: ignore[call-overload]  # an ignore that is not needed is an error
    flash_attn_func(q, k, v, family="sm70")  # type: ignore[call-overload]
    assert_type(flash_attn_varlen_func(q, k, v, q, q, 7, causal=True), Tensor)
    assert_type(flash_attn_varlen_func(q, k, v, q, q, seqused_k=q, return_lse=True), tuple[Tensor, Tensor])
    flash_attn_varlen_func(q, k, v, q, q, seqused=q)  # type: ignore[call-overload]
    assert_type(flash_attn_kvpacked_func(q, k, softcap=3.0), Tensor)
    assert_type(flash_attn_kvpacked_func(q, k, return_lse=True), tuple[Tensor, Tensor])
    assert_type(unpad_input(q, k), tuple[Tensor, Tensor, Tensor, int, Tensor])
    assert_type(pad_input(q, k, 2, 3), Tensor)
    assert_type(cuteflash.flash_mla_decode(q, k, 5, causal=True), Tensor)
    assert_type(cuteflash.flash_mla_decode(q, k, v, page_table=q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(cuteflash.flash_mla_decode(q, k, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(cuteflash.flash_mla_prefill(q, k, q, v, causal=True), Tensor)
    assert_type(cuteflash.flash_mla_prefill(q, k, q, v, cu_seqlens_q=q, return_lse=True), tuple[Tensor, Tensor])
    cuteflash.flash_mla_decode(q, k, pages=q)  # type: ignore[call-overload]
    assert_type(cuteflash.__version__, str)
