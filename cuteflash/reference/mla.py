"""Decoding of latent attention: one cached row a token, which is its key for every head, and whose first columns are
its value.

    S = scale Q C^T        P = softmax(S)        O = P C[:, :head_dim_v]        LSE = log rowsum(exp(S))

C are the rows of a sequence's cache, and each query head attends to all of them. It is multi-query attention whose
values are a part of its keys, so the tiles, masks and sums are those of `fa2.flash_attention_2`.
DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

from torch import Tensor

from cuteflash.reference.fa2 import flash_attention_2
from cuteflash.reference.tiles import compute_dtype


def latent_decode(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor | None,
    cache_seqlens: Tensor,
    *,
    head_dim_v: int,
    softmax_scale: float,
    causal: bool,
    descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's queries to the latent rows of its cache, one sequence after the other.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any floating dtype of 16 bits or more.
        kv_cache: (num_pages, page_size, 1, head_dim), or without a table (batch, seqlen_cache, 1, head_dim).
        page_table: (batch, pages of a sequence); None is a row of the cache for each sequence.
        cache_seqlens: (batch,), rows of each sequence; further rows and pages are not read.
        head_dim_v: columns of a row that are its value, the first ones.
        softmax_scale: multiplies Q C^T.
        causal: the last query is aligned with the last row, and a query sees no row after its own.
        descale: (), (1,) or (batch,), what the elements of an 8-bit cache are multiplied with.

    Returns:
        O (batch, seqlen_q, heads, head_dim_v) in q's dtype and LSE (batch, heads, seqlen_q) in fp32 (fp64 for fp64
        inputs); a query that sees no row has 0 and -inf.
    """
    batch, seqlen_q, heads, _ = q.shape
    o = q.new_zeros(batch, seqlen_q, heads, head_dim_v)
    lse = q.new_full((batch, heads, seqlen_q), float("-inf"), dtype=compute_dtype(q))
    for i, length in enumerate(cache_seqlens.tolist()):
        rows = cached_rows(kv_cache, page_table, i, length)[None]
        if descale is not None:
            rows = rows.to(compute_dtype(q)) * descale.expand(batch)[i]
        o[i], lse[i] = (x[0] for x in flash_attention_2(
            q[i, None], rows, rows[..., :head_dim_v], softmax_scale, window_right=0 if causal else -1
        ))  # fmt: skip
    return o, lse


def cached_rows(kv_cache: Tensor, page_table: Tensor | None, sequence: int, length: int) -> Tensor:
    """The first `length` rows of a sequence, (length, 1, head_dim), its pages gathered."""
    if page_table is None:
        return kv_cache[sequence, :length]
    pages = page_table[sequence, : -(-length // kv_cache.shape[1])].long()
    return kv_cache[pages].flatten(0, 1)[:length]
