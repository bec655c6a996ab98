"""Attention over the paged cache of transformers' continuous batching: `generate_batch` and its manager.

For continuous batching a model with `attn_implementation="cuteflash"` is switched to `PAGED_NAME`, for which
transformers makes no mask: lengths say what a query sees, so that CUDA graphs of a step replay with other lengths. A
step in which every request has one token reads the pages where they lie (`block_table`), if all layers are full
attention. In any other step transformers gathers keys and values before the call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuteflash.append import append_kv
from cuteflash.packed_api import flash_attn_varlen_func

SLIDING = "sliding_attention"  # the type of a layer


class Keys(NamedTuple):
    """What a layer's cache says of a step, in which it has the step's tokens already unless `pages` is given.

    Attributes:
        k, v: (tokens, kv heads, head_dim), and head_dim_v; the keys of all requests, or with `pages` the new ones.
        ends: (requests + 1,) int32, where the keys of each request begin, the new ones included.
        longest: keys of the longest request.
        window: how many keys a query sees, itself among them; None is all.
        pages: the pages of keys and of values, (pages, page size, kv heads, head_dim), and the table of each request's.
    """

    k: Tensor
    v: Tensor
    ends: Tensor
    longest: int
    window: int | None
    pages: tuple[Tensor, Tensor, Tensor] | None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled graph would copy the cache that is written to
def attend_paged(module: torch.nn.Module, tensors: tuple[Tensor, ...], options: dict[str, Any], step: Any) -> Tensor:
    """Append the new keys and values to the cache and attend to it.

    Args:
        module: the layer; its `layer_idx` counts.
        tensors: query, key and value, (1, heads, tokens, head_dim), of all requests one after the other.
        options: of `flash_attn_varlen_func`.
        step: what transformers passes to the layers of a step, with `cache`, its `PagedAttentionCache`.

    Returns:
        O, (1, tokens, heads, head_dim_v); rows after the last request's are 0.

    Raises:
        ValueError: a tensor has more than one row.
        NotImplementedError: a cache of another version of transformers.
    """
    if tensors[0].shape[0] != 1:
        raise ValueError(f"query has {tensors[0].shape[0]} rows; allowed in continuous batching: 1, with all requests")
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    keys = _keys_of(int(module.layer_idx), k, v, step)  # type: ignore[arg-type]
    if keys.window is not None:
        options["window_size"] = (keys.window - 1, 0)
    ends_q = step["cu_seq_lens_q"].to(torch.int32)
    longest_q = step.get("max_length_q", step.get("max_seqlen_q"))
    options |= {"causal": True, "num_splits": 0}
    o: Tensor
    if keys.pages is None:
        o = flash_attn_varlen_func(q, keys.k, keys.v, ends_q, keys.ends, longest_q, keys.longest, **options)
    else:
        k_pages, v_pages, table = keys.pages
        used = keys.ends.diff()
        # Requests that only fill up the rows of a CUDA graph have no token and no page: nothing of them is written.
        append_kv(k_pages, v_pages, k, v, used - ends_q.diff(), page_table=table, cu_seqlens_k_new=ends_q)
        o = flash_attn_varlen_func(
            q, k_pages, v_pages, ends_q, max_seqlen_q=longest_q, seqused_k=used, page_table=table, **options
        )
    return o[None]


def _keys_of(layer: int, k: Tensor, v: Tensor, step: Any) -> Keys:
    """The keys and values of a layer, written to the cache and gathered from it, or its pages."""
    cache = step["cache"]
    if hasattr(cache, "layer_to_allocator"):
        return _keys_of_allocators(layer, k, v, step)
    if hasattr(cache, "layer_index_to_group_indices"):
        return _keys_of_groups(layer, k, v, step)
    from transformers import __version__

    raise NotImplementedError(
        f"cache is a {type(cache).__name__} of transformers {__version__}, whose pages cuteflash does not know; "
        "supported: those of transformers 5.17 and 5.23"
    )


def _keys_of_allocators(layer: int, k: Tensor, v: Tensor, step: Any) -> Keys:
    """As `_keys_of`, of transformers 5.23: the cache has an allocator for each type of layers."""
    allocator = step["cache"].layer_to_allocator[layer]
    window = allocator.sliding_window if allocator.layer_type == SLIDING else None
    own = dict(step)  # of this layer: `update` replaces what is of all layers
    rows = (x.transpose(0, 1)[None] for x in (k, v))
    k, v = (x[0].transpose(0, 1) for x in own["cache"].update(*rows, layer, own))
    table = own.get("block_table")
    pages = None if table is None else (own["k_cache"], own["v_cache"], table)
    return Keys(k, v, own["cu_seq_lens_k"], own["max_length_k"], window, pages)


def _keys_of_groups(layer: int, k: Tensor, v: Tensor, step: Any) -> Keys:
    """As `_keys_of`, of transformers 5.17: the cache has groups of equally many layers of one type."""
    cache = step["cache"]
    group, index = cache.layer_index_to_group_indices[layer]
    window = cache.sliding_windows[layer]  # 1 of full attention
    kind = "full_attention" if window == 1 else SLIDING
    ends, longest = step["cu_seq_lens_k"], step["max_seqlen_k"]
    if isinstance(ends, dict):  # there are layers of both types
        ends, longest = ends[kind], longest[kind]
    ends, window = ends.to(torch.int32), None if window == 1 else window
    table = step.get("block_table")
    if table is not None:
        k_pages, v_pages = (x[index].unflatten(0, (-1, cache.block_size)) for x in (cache.key_cache, cache.value_cache))
        return Keys(k, v, ends, longest, window, (k_pages, v_pages, table[group]))
    rows = (x.transpose(0, 1)[None] for x in (k, v))
    k, v = cache.update(*rows, layer, step["read_index"], step["write_index"])
    return Keys(k, v, ends, longest, window, None)
