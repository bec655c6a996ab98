"""Attention over pages by torch, for the engine's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def append_kv(k_pages, v_pages, k, v, cache_seqlens, *, page_table, cu_seqlens_k_new) -> None:
    size = k_pages.shape[1]
    for row, cached in enumerate(cache_seqlens.tolist()):
        begin, end = cu_seqlens_k_new[row : row + 2].tolist()
        for index in range(begin, end):
            position = cached + index - begin
            page = page_table[row, position // size]
            k_pages[page, position % size] = k[index]
            v_pages[page, position % size] = v[index]


def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, cu_seqlens_q: Tensor, *, max_seqlen_q, max_seqlen_k, seqused_k, page_table, causal, softmax_scale, window_size=(-1, -1), softcap=0.0, sinks=None) -> Tensor:
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    size = k_pages.shape[1]
    for row, used in enumerate(seqused_k.tolist()):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        assert end - begin <= max_seqlen_q and used <= max_seqlen_k
        pages = page_table[row, : -(-used // size)].long()
        k, v = (x[pages].flatten(0, 1)[:used].repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (k_pages, v_pages))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k) * softmax_scale
        places = torch.arange(used - (end - begin), used)[:, None] - torch.arange(used)
        hidden = places < 0
        if window_size[0] >= 0:
            hidden |= places > window_size[0]
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - begin, 1)], -1)
        weights = scores.softmax(-1)[..., :used]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
