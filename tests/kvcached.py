"""Random calls of `flash_attn_with_kvcache`, and what they give by definition: appended by hand, then gathered."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import torch
from torch import Tensor

import cuteflash
from tests import appended
from tests.gpu.checks import Case, reference

APPENDED = (
    "k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx", "cu_seqlens_k_new", "rotary_cos",
    "rotary_sin", "rotary_seqlens", "q", "cu_seqlens_q",
)  # fmt: skip
CAPACITY = 48
HEAD_DIMS = ((64, 64), (128, 128), (72, 72), (192, 128), (256, 256), (16, 16))


@dataclasses.dataclass
class Call:
    """A call: its tensors by name, further arguments, and the mask, softcap and scale as a `Case`."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    case: Case

    def on(self, device: torch.device) -> Call:
        """The same values on a device."""
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.tensors.items()}
        return Call(moved, self.options, self.case)

    def copy(self) -> Call:
        """The same with caches of its own, in which nothing is written yet."""
        return Call({n: x.clone() if n.endswith("_cache") else x for n, x in self.tensors.items()}, *self.rest)

    @property
    def rest(self) -> tuple[dict[str, Any], Case]:
        return self.options, self.case

    @property
    def seqlens(self) -> list[int]:
        """Tokens of each sequence before the call."""
        given = self.tensors.get("cache_seqlens")
        if isinstance(given, Tensor):
            return [int(n) for n in given.tolist()]
        capacity = self.tensors["k_cache"].shape[1]
        if "page_table" in self.tensors:
            capacity *= self.tensors["page_table"].shape[1]
        return [capacity if given is None else given] * self.batch

    @property
    def batch(self) -> int:
        ends = self.tensors.get("cu_seqlens_q")
        return int(self.tensors["q"].shape[0] if ends is None else ends.shape[0] - 1)

    def run(self, **more: Any) -> tuple[Tensor, Tensor]:
        """O and LSE of the public function, which writes to this call's caches."""
        mask = self.case.options()
        found: tuple[Tensor, Tensor] = cuteflash.flash_attn_with_kvcache(
            **self.tensors, **self.options, **mask | {"return_lse": True}, **more
        )
        return found


def by_hand(call: Call, dtype: torch.dtype, caches: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Both caches after the call, O and LSE; attention in `dtype`, of the given caches instead if there are any."""
    given = call.copy().tensors
    lengths, q = call.seqlens, given["q"]
    if "k" in given:
        tokens = given | {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        options = {"rotary_interleaved": call.options.get("rotary_interleaved", True)}
        if "rotary_cos" in given:
            case = call.case
            options["fixed_q"] = not (case.causal or max(case.window) >= 0 or case.attention_chunk)
        else:
            del tokens["q"]
        call_of_append = appended.Call({n: tokens[n] for n in APPENDED if n in tokens}, options)
        given["k_cache"], given["v_cache"], rotated = appended.append_by_hand(call_of_append)
        q = q if rotated is None else rotated
        ends = given.get("cu_seqlens_k_new")
        new = [given["k"].shape[1]] * call.batch if ends is None else ends.diff().tolist()
        lengths = [a + b for a, b in zip(lengths, new, strict=True)]
    k_cache, v_cache = caches or (given["k_cache"], given["v_cache"])
    o = q.new_zeros(*q.shape[:-1], v_cache.shape[3], dtype=torch.float32)
    *rows, heads, _ = q.shape
    lse = q.new_full((*rows[:-1], heads, rows[-1]), float("-inf"), dtype=torch.float32)
    for b, of_q in enumerate(query_spans(call)):
        k, v = (keys_of(given, cache, b, lengths[b]) for cache in (k_cache, v_cache))
        part_o, part_lse = reference(q[of_q].reshape(1, -1, *q.shape[-2:]), k[None], v[None], call.case, dtype)
        if "sinks" in given:
            whole = torch.logaddexp(part_lse, given["sinks"].float()[:, None])
            part_o, part_lse = part_o * torch.exp(part_lse - whole).transpose(1, 2)[..., None], whole
        o[of_q] = part_o.reshape(o[of_q].shape)
        lse[(slice(None), of_q) if o.dim() == 3 else of_q] = part_lse.reshape(heads, -1)
    return {"k_cache": given["k_cache"], "v_cache": given["v_cache"], "o": o, "lse": lse}


def query_spans(call: Call) -> list[Any]:
    """The rows of q that each sequence has."""
    ends = call.tensors.get("cu_seqlens_q")
    if ends is None:
        return list(range(call.batch))
    values = ends.tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(values)]


def keys_of(given: dict[str, Any], cache: Tensor, b: int, end: int) -> Tensor:
    """The rows of a sequence's keys, or values."""
    begin = int(given["cache_leftpad"][b]) if "cache_leftpad" in given else 0
    entry = int(given["cache_batch_idx"][b]) if "cache_batch_idx" in given else b
    if "page_table" in given:
        size, table = cache.shape[1], given["page_table"][entry].tolist()
        rows = [cache[table[row // size], row % size] for row in range(begin, end)]
        return torch.stack(rows) if rows else cache[:0, 0]
    return cache[entry, begin:end]


def random_call(seed: int, dtypes: tuple[torch.dtype, ...]) -> Call:
    """A call with options drawn from all that there are; what belongs to no sequence is NaN or no page."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, batch, kv_heads = rng.choice(dtypes), rng.randint(1, 4), rng.choice((1, 2))
    heads, (head_dim, head_dim_v) = kv_heads * rng.choice((1, 2, 4)), rng.choice(HEAD_DIMS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def packed(lengths: list[int], heads: int, columns: int) -> tuple[Tensor, Tensor]:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return normal(sum(lengths), heads, columns), ends

    tensors: dict[str, Any] = {}
    longest = rng.choice((1, 1, 3, 9))
    new, queries = [longest] * batch, [longest] * batch
    appends = rng.random() < 0.75
    if appends and rng.random() < 0.4:
        new = [rng.randint(0, longest) for _ in range(batch)]
        tensors["k"], tensors["cu_seqlens_k_new"] = packed(new, kv_heads, head_dim)
        tensors["v"], _ = packed(new, kv_heads, head_dim_v)
    elif appends:
        tensors["k"] = normal(batch, longest, kv_heads, head_dim)
        tensors["v"] = normal(batch, longest, kv_heads, head_dim_v)
    else:
        new = [0] * batch
    if rng.random() < 0.4:
        queries = [rng.randint(0, longest) for _ in range(batch)]
        tensors["q"], tensors["cu_seqlens_q"] = packed(queries, heads, head_dim)
        if rng.random() < 0.5:
            tensors["max_seqlen_q"] = longest
    else:
        tensors["q"] = normal(batch, longest, heads, head_dim)
    before = [rng.choice((0, rng.randint(0, CAPACITY - n), CAPACITY - n)) for n in new]
    if rng.random() < 0.2:
        before = [min(before)] * batch
        tensors["cache_seqlens"] = before[0]
    else:
        tensors["cache_seqlens"] = torch.tensor(before, dtype=torch.int32)
    if rng.random() < 0.3:
        left = [rng.randint(0, n) for n in before]
        tensors["cache_leftpad"] = torch.tensor(left, dtype=torch.int32)
    add_caches(tensors, rng, before, (kv_heads, head_dim, head_dim_v), dtype, generator)
    options: dict[str, Any] = {}
    if appends and rng.random() < 0.6:
        rotary_dim = rng.choice([dim for dim in (16, 32, head_dim // 16 * 16) if dim <= head_dim])
        tensors |= appended.tables(64, rotary_dim, rng.choice((dtype, torch.float32)))
        options["rotary_interleaved"] = rng.random() < 0.5
        if rng.random() < 0.3:
            tensors["rotary_seqlens"] = torch.randint(0, 40, (batch,), generator=generator).to(torch.int32)
    if rng.random() < 0.3:
        tensors["sinks"] = torch.randn(heads, generator=generator).to(rng.choice((dtype, torch.float32)))
    if rng.random() < 0.3:
        options["num_splits"] = rng.choice((0, 1, 3))
    case = Case(
        causal=rng.random() < 0.5,
        window=rng.choice(((-1, -1), (-1, -1), (5, 2), (9, -1))),
        attention_chunk=rng.choice((0, 0, 0, 7)),
        softcap=rng.choice((0.0, 0.0, 3.0)),
        scale=rng.choice((None, 0.2)),
        pack_gqa=rng.choice((None, True, False)),
        lse=True,
    )
    return Call(tensors, options, case)


def add_caches(
    tensors: dict[str, Any],
    rng: random.Random,
    before: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Caches that hold `before` tokens of each sequence, and the table or vector that says where."""
    (kv_heads, *columns), batch, page_size = shape, len(before), rng.choice((0, 0, 1, 5, 8, 16))
    owners = list(range(batch))
    if rng.random() < 0.4:
        owners = torch.randperm(batch + 2, generator=generator)[:batch].tolist()
        tensors["cache_batch_idx"] = torch.tensor(owners, dtype=torch.int32)
    entries, slots = (batch + 2 if "cache_batch_idx" in tensors else batch), CAPACITY
    pages = -(-CAPACITY // page_size) if page_size else 1
    table = torch.arange(entries)[:, None]
    if page_size:
        table = torch.randperm(entries * pages + 2, generator=generator)[: entries * pages].reshape(entries, pages)
        entries, slots = entries * pages + 2, page_size
    for name, width in zip(("k_cache", "v_cache"), columns, strict=True):
        cache = torch.full((entries, slots, kv_heads, width), torch.nan, dtype=dtype)
        for owner, length in zip(owners, before, strict=True):
            for row in range(length):
                values = torch.randn(kv_heads, width, generator=generator)
                cache[table[owner, row // slots], row % slots] = values.to(dtype)
        tensors[name] = cache
    if page_size:  # entries of pages that no sequence reaches, before or after the call
        new = tensors["cu_seqlens_k_new"].diff().tolist() if "cu_seqlens_k_new" in tensors else None
        for b, (owner, length) in enumerate(zip(owners, before, strict=True)):
            tokens = new[b] if new else tensors["k"].shape[1] if "k" in tensors else 0
            table[owner, -(-(length + tokens) // page_size) :] = -12345
        tensors["page_table"] = table.to(torch.int32)
