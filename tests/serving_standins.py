"""Attention over pages with sinks, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend_with_sinks(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, cu_seqlens_q: Tensor, *, sinks: Tensor, **options: Any
) -> Tensor:
    """As `cuteflash.flash_attn_varlen_func` with a page table, causal, and sinks (heads,)."""
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    size, left = k_pages.shape[1], options.get("window_size", (-1, 0))[0]
    for row, used in enumerate(options["seqused_k"].tolist()):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        pages = options["page_table"][row, : -(-used // size)].long()
        k, v = (x[pages].flatten(0, 1)[:used] for x in (k_pages, v_pages))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k) * options["softmax_scale"]
        before = torch.arange(used - (end - begin), used)[:, None] - torch.arange(used)
        hidden = (before < 0) | (before > left if left >= 0 else False)
        scores = scores.masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - begin, 1)], dim=2)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2)[..., :used], v)
    return out
