"""Appending and rotating token by token, from the definition, and random calls to compare with it on any device."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass
class Call:
    """A call of `append_kv`; on a device the same values."""

    tensors: dict[str, Any]
    options: dict[str, Any]

    def on(self, device: torch.device) -> Call:
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.tensors.items()}
        return Call(moved, self.options)

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: x.clone() if "cache" in name else x for name, x in self.tensors.items()} | self.options


def tables(positions: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Cosines and sines of a rotary embedding."""
    angles = torch.arange(positions)[:, None] * 100.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    return {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}


def turn(row: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One token's heads (heads, head_dim), rotated by one row of the tables, fp32."""
    row, cos, sin = row.float(), cos.float(), sin.float()
    out, half = row.clone(), cos.shape[0]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        out[:, a] = row[:, a] * cos[i] - row[:, b] * sin[i]
        out[:, b] = row[:, a] * sin[i] + row[:, b] * cos[i]
    return out


def begins_of(x: Tensor, ends: Tensor | None) -> list[tuple[int, int, Any]]:
    """(sequence, number in it, index into x) of each token."""
    if ends is None:
        return [(b, i, (b, i)) for b in range(x.shape[0]) for i in range(x.shape[1])]
    pairs = zip(ends.tolist(), ends.tolist()[1:], strict=False)
    return [(b, t - begin, t) for b, (begin, end) in enumerate(pairs) for t in range(begin, end)]


def rounded(values: Tensor, descale: Tensor) -> Tensor:
    """(heads, head_dim) as e4m3."""
    return (values.float() * (1 / descale)[:, None]).clamp(-448, 448).to(FP8)


def append_by_hand(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both caches after the call, and the rotated queries."""
    named = {"page_table": None, "cache_batch_idx": None, "cu_seqlens_k_new": None, "cu_seqlens_q": None, "q": None}
    given = named | {"rotary_cos": None, "rotary_seqlens": None} | call.arguments
    interleaved = given.get("rotary_interleaved", False)
    seqlens, rotary = given["cache_seqlens"].tolist(), given["rotary_cos"] is not None
    starts = seqlens if given["rotary_seqlens"] is None else given["rotary_seqlens"].tolist()
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    for b, i, at in begins_of(given["k"], given["cu_seqlens_k_new"]):
        position = seqlens[b] + i
        entry, slot = b if given["cache_batch_idx"] is None else int(given["cache_batch_idx"][b]), position
        if given["page_table"] is not None:
            entry, slot = int(given["page_table"][b, position // k_cache.shape[1]]), position % k_cache.shape[1]
        k, v = given["k"][at], given["v"][at]
        if rotary:
            k = turn(k, given["rotary_cos"][starts[b] + i], given["rotary_sin"][starts[b] + i], interleaved)
        for cache, x, name in ((k_cache, k, "k_descale"), (v_cache, v, "v_descale")):
            if cache.dtype == FP8:
                descale = given[name]
                x = rounded(x, descale if descale.dim() == 1 else descale[b])
            cache[entry, slot] = x.to(cache.dtype)
    if given["q"] is None:
        return k_cache, v_cache, None
    q = given["q"].clone()
    for b, i, at in begins_of(q, given["cu_seqlens_q"]):
        position = starts[b] + (0 if given.get("fixed_q") else i)
        q[at] = turn(q[at], given["rotary_cos"][position], given["rotary_sin"][position], interleaved).to(q.dtype)
    return k_cache, v_cache, q


def random_call(seed: int, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> Call:
    """A call with options drawn from all that there are; rows after the last packed sequence are NaN."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, table_dtype = rng.choice(dtypes), rng.choice(("same", "fp32"))
    batch, kv_heads, group = rng.randint(1, 5), rng.choice((1, 2, 3)), rng.choice((1, 2, 4))
    head_dim, head_dim_v = rng.choice(((64, 64), (128, 128), (80, 48), (72, 72), (256, 256), (192, 128), (16, 16)))
    is_fp8 = rng.random() < 0.3 and head_dim % 16 == 0
    longest = rng.choice((1, 1, 3, 9))
    counts = [rng.randint(0, longest) if rng.random() < 0.9 else 0 for _ in range(batch)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def packed(lengths: list[int], heads: int, columns: int) -> tuple[Tensor, Tensor]:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        x = normal(sum(lengths) + rng.choice((0, 3)), heads, columns)
        x[sum(lengths) :] = torch.nan
        return x, ends

    tensors: dict[str, Any] = {}
    if rng.random() < 0.5:
        k, tensors["cu_seqlens_k_new"] = packed(counts, kv_heads, head_dim)
        v = normal(k.shape[0], kv_heads, head_dim_v)
    else:
        counts = [longest] * batch
        k, v = normal(batch, longest, kv_heads, head_dim), normal(batch, longest, kv_heads, head_dim_v)
    capacity, page_size = 40, rng.choice((0, 1, 3, 8, 16))
    seqlens = [rng.randint(0, capacity - count) for count in counts]
    entries, slots = batch + 2, capacity
    if page_size:
        pages = -(-capacity // page_size)
        entries, slots = batch * pages + 3, page_size
        order = torch.randperm(entries, generator=generator)[: batch * pages]
        tensors["page_table"] = order.reshape(batch, pages).to(torch.int32)
    elif rng.random() < 0.5:
        tensors["cache_batch_idx"] = torch.randperm(entries, generator=generator)[:batch].to(torch.int32)
    cache_dtype = FP8 if is_fp8 else dtype
    caches = [torch.randn(entries, slots, kv_heads, x).to(cache_dtype) for x in (head_dim, head_dim_v)]
    tensors |= {"k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v}
    tensors["cache_seqlens"] = torch.tensor(seqlens, dtype=torch.int32)
    if is_fp8:
        shape = (kv_heads,) if rng.random() < 0.3 else (batch, kv_heads)
        tensors |= {f"{x}_descale": torch.rand(shape, generator=generator) * 0.05 + 1e-3 for x in "kv"}
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        rotary_dim = rng.choice([dim for dim in (16, 32, 48, head_dim // 16 * 16) if dim <= head_dim])
        tensors |= tables(64, rotary_dim, dtype if table_dtype == "same" else torch.float32)
        options["rotary_interleaved"] = rng.random() < 0.5
        if rng.random() < 0.3:
            tensors["rotary_seqlens"] = torch.randint(0, 40, (batch,), generator=generator).to(torch.int32)
        if rng.random() < 0.7:
            options["fixed_q"] = rng.random() < 0.3
            if rng.random() < 0.5:
                lengths = [rng.randint(0, 7) for _ in range(batch)]
                tensors["q"], tensors["cu_seqlens_q"] = packed(lengths, kv_heads * group, head_dim)
            else:
                tensors["q"] = normal(batch, rng.randint(1, 7), kv_heads * group, head_dim)
    return Call(tensors, options)
