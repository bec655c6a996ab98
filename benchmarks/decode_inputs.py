"""What a decode step attends to: queries, KV caches in a row or in pages, and what is right for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

L2_BYTES = 256 << 20  # of all caches that are visited in turn: several times what a GPU's cache holds
CHUNK_BYTES = 1 << 30  # of fp32 keys that are looked at together
RMS_MAX, LARGEST_MAX = 1e-2, 2**-5  # of an error, beside the root mean square and the largest element of what is right
PAGES = (1, 16, 64)
SCALE = 0.01  # of e4m3 caches: their numbers end at 4.48,
E4M3_MAX = 448.0  # beyond which some versions of torch make NaN


class Shape(NamedTuple):
    """A decode step.

    Attributes:
        lengths: cached keys of each sequence.
        is_e4m3: caches have 8 bits and a scale for each KV head, not 16.
    """

    head_dim: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    queries: int = 1
    is_e4m3: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether sequences have different lengths."""
        return len(set(self.lengths)) > 1

    @property
    def label(self) -> str:
        longest, batch = max(self.lengths), len(self.lengths)
        beside = f"1 × {longest // 1024}k beside {batch - 1} × {min(self.lengths) // 1024}k"
        sizes = beside if self.is_mixed else f"{batch} × {longest // 1024}k"
        return f"D{self.head_dim}, {self.heads}/{self.kv_heads} heads, {sizes}" + ", e4m3" * self.is_e4m3

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return 2 * (1 if self.is_e4m3 else 2) * sum(self.lengths) * self.kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True)
class Caches:
    """Queries and one cache.

    Attributes:
        q: (batch, queries, heads, head_dim) bf16.
        k, v: (batch, seqlen, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim).
        page_table: (batch, pages of the longest sequence) int32; None if the caches are not paged.
        lengths: (batch,) int32 keys of each sequence; None if all are full.
        descales: (2, kv_heads) fp32, of K and V if these are e4m3; None if they are bf16.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    lengths: Tensor | None = None
    descales: Tensor | None = None

    def meant(self, k: Tensor, v: Tensor, first: int) -> Iterator[Tensor]:
        """What rows of K and V stand for, fp32, (keys, kv_heads, head_dim) of the heads from `first` on."""
        for i, x in enumerate((k, v)):
            scale = None if self.descales is None else self.descales[i, first : first + x.shape[1], None]
            yield x.float() if scale is None else x.float() * scale


def copies_of(shape: Shape, one_cache: bool) -> int:
    """How many caches are visited in turn."""
    return 1 if one_cache else max(1, -(-L2_BYTES // max(shape.nbytes, 1)))


def make_caches(shape: Shape, where: torch.device, page_size: int, seed: int = 0, with_lengths: bool = False) -> Caches:
    """Normal tensors; `page_size` 0 is a cache without pages, which all sequences fill.

    Pages lie in a random order. A sequence has as many as it needs; the others of its row of the table are those of the
    first sequence, which it does not look at. There are lengths on the device if sequences do not fill their pages, or
    `with_lengths`.
    """
    generator = torch.Generator(where).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=where, dtype=torch.bfloat16)

    def cache(*size: int) -> Tensor:
        if not shape.is_e4m3:
            return normal(*size)
        return (normal(*size) / SCALE).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)

    descales = torch.full((2, shape.kv_heads), SCALE, device=where) if shape.is_e4m3 else None
    batch, row = len(shape.lengths), (shape.kv_heads, shape.head_dim)
    q = normal(batch, shape.queries, shape.heads, shape.head_dim)
    is_full = not shape.is_mixed and shape.lengths[0] % max(page_size, 1) == 0
    lengths = None
    if with_lengths or not is_full:
        lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=where)
    if not page_size:
        size = batch, max(shape.lengths)
        return Caches(q, cache(*size, *row), cache(*size, *row), None, lengths, descales)
    counts = [-(-length // page_size) for length in shape.lengths]
    order = torch.randperm(sum(counts), generator=generator, device=where).to(torch.int32)
    table = order[:1].repeat(batch, max(counts))
    for i, pages in enumerate(order.split(counts)):
        table[i, : len(pages)] = pages
    size = sum(counts), page_size
    return Caches(q, cache(*size, *row), cache(*size, *row), table, lengths, descales)


def pages_of(cache: Tensor, pages: Tensor) -> Tensor:
    """Some pages of a cache; torch does not index elements of 8-bit floats by a tensor."""
    return cache.view(torch.uint8)[pages].view(cache.dtype) if cache.element_size() == 1 else cache[pages]


def attention_in_fp32(caches: Caches) -> Tensor:
    """O by definition, every query sees every key of its sequence; one sequence and a few KV heads at a time."""
    batch, queries, heads, head_dim = caches.q.shape
    kv_heads = caches.k.shape[2]
    out = torch.empty(caches.q.shape, device=caches.q.device)
    lengths: Sequence[int] = [] if caches.lengths is None else caches.lengths.tolist()
    for b in range(batch):
        pages = None if caches.page_table is None else caches.page_table[b].long()
        used = lengths[b] if lengths else caches.k.shape[1] * (1 if pages is None else len(pages))
        if pages is not None:
            pages = pages[: -(-used // caches.k.shape[1])]
        step = max(1, CHUNK_BYTES // max(4 * used * head_dim, 1))
        for first in range(0, kv_heads, step):
            some = slice(first, first + step)
            k, v = (
                x[b, :, some] if pages is None else pages_of(x, pages)[:, :, some].flatten(0, 1)
                for x in (caches.k, caches.v)
            )
            k, v = (x.transpose(0, 1) for x in caches.meant(k[:used], v[:used], first))  # (kv_heads, keys, head_dim)
            group = heads // kv_heads
            q = caches.q[b].float().unflatten(1, (kv_heads, group))[:, some].permute(1, 2, 0, 3).flatten(1, 2)
            found = torch.softmax(q @ k.transpose(1, 2) * head_dim**-0.5, -1) @ v
            turned = found.unflatten(1, (group, queries)).permute(2, 0, 1, 3).flatten(1, 2)
            out[b, :, first * group : (first + k.shape[0]) * group] = turned
    return out


def complaint(found: Tensor, right: Tensor) -> str | None:
    """None for a right result, else what is wrong with it."""
    if found.shape != right.shape:
        return f"O has shape {tuple(found.shape)}, not {tuple(right.shape)}"
    error = found.float() - right
    rms, largest = (float(error.square().mean() / right.square().mean()) ** 0.5, float(error.abs().max()))
    if not rms <= RMS_MAX:
        return f"rms error {rms:.2g} of O's, allowed {RMS_MAX:.2g}"
    limit = LARGEST_MAX * float(right.abs().max())
    return None if largest <= limit else f"largest error {largest:.2g}, allowed {limit:.2g}"
