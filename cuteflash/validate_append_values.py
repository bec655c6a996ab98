"""What the small tensors of an append or a rotation say, checked before anything is written. Reads them."""

from __future__ import annotations

import itertools

from torch import Tensor

from cuteflash.append_problem import AppendOptions, RotaryOptions
from cuteflash.validate import FP32_MAX, FP32_TINY, POSITIVE
from cuteflash.validate_append import AppendInputs, RotaryInputs


def check_append_values(inputs: AppendInputs, options: AppendOptions) -> None:
    """Raise ValueError, naming the sequence, if a token would be written, or its angle read, where nothing is."""
    begins = inputs.cache_seqlens.tolist()
    new = _lengths("cu_seqlens_k_new", inputs.cu_seqlens_k_new, inputs.k, len(begins))
    capacity = inputs.capacity
    for i, (begin, count) in enumerate(zip(begins, new, strict=True)):
        if not 0 <= begin <= capacity - count:
            raise ValueError(
                f"cache_seqlens[{i}] is {begin}; allowed: 0 to {capacity - count}, as sequence {i} gets {count} tokens "
                f"and has {capacity} positions"
            )
    _check_batch_idx(inputs, new)
    _check_pages(inputs, begins, new)
    for name in ("k_descale", "v_descale"):
        _check_descale(name, getattr(inputs, name))
    if inputs.rotary_cos is None:
        return
    name, positions = "cache_seqlens", begins
    if inputs.rotary_seqlens is not None:
        name, positions = "rotary_seqlens", inputs.rotary_seqlens.tolist()
    _check_positions(name, positions, new, inputs.rotary_cos)
    if inputs.q is not None:
        queries = _lengths("cu_seqlens_q", inputs.cu_seqlens_q, inputs.q, len(begins))
        if options.fixed_q:
            queries = [min(count, 1) for count in queries]
        _check_positions(name, positions, queries, inputs.rotary_cos)


def check_rotary_values(inputs: RotaryInputs, options: RotaryOptions) -> None:
    """Raise ValueError, naming the sequence, if the angle of a token would be read where none is."""
    x, cos, _, offsets, ends = inputs
    batch = x.shape[0] if ends is None else ends.shape[0] - 1
    tokens = _lengths("cu_seqlens", ends, x, batch)
    if options.fixed:
        tokens = [min(count, 1) for count in tokens]
    positions = [options.offset] * batch if offsets is None else offsets.tolist()
    _check_positions("seqlen_offsets", positions, tokens, cos)


def _lengths(name: str, ends: Tensor | None, x: Tensor, batch: int) -> list[int]:
    """The tokens of each sequence."""
    if ends is None:
        return [x.shape[1]] * batch
    values = ends.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}, the begin of sequence 0; allowed: 0")
    for i, (begin, end) in enumerate(itertools.pairwise(values)):
        if not begin <= end <= x.shape[0]:
            raise ValueError(f"{name}[{i + 1}] is {end}, the end of sequence {i}; allowed: {begin} to {x.shape[0]}")
    return [end - begin for begin, end in itertools.pairwise(values)]


def _check_batch_idx(inputs: AppendInputs, new: list[int]) -> None:
    if inputs.cache_batch_idx is None:
        return
    entries = inputs.k_cache.shape[0]
    owners: dict[int, int] = {}
    for i, (entry, count) in enumerate(zip(inputs.cache_batch_idx.tolist(), new, strict=True)):
        if not 0 <= entry < entries:
            raise ValueError(f"cache_batch_idx[{i}] is {entry}; allowed: 0 to {entries - 1}, an entry of k_cache")
        if count and owners.setdefault(entry, i) != i:
            raise ValueError(
                f"cache_batch_idx[{i}] is {entry}, that of sequence {owners[entry]}; allowed: one that no other "
                "sequence with new tokens has"
            )


def _check_pages(inputs: AppendInputs, begins: list[int], new: list[int]) -> None:
    if inputs.page_table is None:
        return
    num_pages, page_size = inputs.k_cache.shape[:2]
    for i, (row, begin, count) in enumerate(zip(inputs.page_table.tolist(), begins, new, strict=True)):
        for j in range(begin // page_size, -(-(begin + count) // page_size)) if count else ():
            if not 0 <= row[j] < num_pages:
                raise ValueError(
                    f"page_table[{i}, {j}] is {row[j]}, to which sequence {i} writes; allowed: 0 to {num_pages - 1}"
                )


def _check_positions(name: str, begins: list[int], counts: list[int], table: Tensor) -> None:
    for i, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        if count and not 0 <= begin <= table.shape[0] - count:
            raise ValueError(
                f"{name}[{i}] is {begin}; allowed: 0 to {table.shape[0] - count}, as sequence {i} has {count} tokens "
                f"and the rotary table {table.shape[0]} positions"
            )


def _check_descale(name: str, descale: Tensor | None) -> None:
    if descale is None:
        return
    wrong = ~((descale >= FP32_TINY) & (descale <= FP32_MAX))  # a NaN, too
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{name}{list(index)} is {descale[index].item()}; allowed: a {POSITIVE}")
