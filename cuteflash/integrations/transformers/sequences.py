"""A batch whose rows hold padding or several sequences, as one call of the packed operator.

Every position of a batch has a label: the number of its document in its row, or HIDDEN. A sequence is all positions of
a row with one label. It usually is a span, and then nothing is moved: `cu_seqlens` begins each sequence at its place,
and `seqused` leaves out what lies between its end and the next one. Only if positions are hidden between others of
their sequence are all sequences gathered before the call, and the result is put back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cuteflash.packing import pad_input

HIDDEN = -1


class Side(NamedTuple):
    """Where the sequences of a batch lie among its queries, or among its keys. On the CPU.

    Attributes:
        starts: (sequences,), ascending; the place of each in the flattened batch.
        counts: (sequences,), how many positions each has, from its place on.
        length: positions of a row of the batch.
        indices: if they are to be gathered, the places of all positions, one sequence after the other; else None.
    """

    starts: Tensor
    counts: Tensor
    length: int
    indices: Tensor | None = None

    def starts_in(self, step: int, total: int) -> Tensor:
        """The row at which each sequence begins in the operator's tensor.

        Args:
            step: rows from one row of the batch to the next.
            total: rows of the tensor.
        """
        if self.indices is not None:
            return self.counts.cumsum(0) - self.counts
        row, position = self.starts // max(self.length, 1), self.starts % max(self.length, 1)
        return (row * step + position).clamp(max=total)


class Layout(NamedTuple):
    """What the operator is told, by the names of its arguments."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


class Sequences:
    """The sequences of a batch. The layers of a model share one, which keeps what it computed for their calls.

    Args:
        queries: (batch, queries), the labels of the queries, HIDDEN for those that get zeros. None if there are no
            documents and every query sees all keys of its row.
        keys: (batch, keys), likewise; HIDDEN for padding. Both on the CPU.
    """

    def __init__(self, queries: Tensor | None, keys: Tensor) -> None:
        documents = 1 + max([0, *(int(x.max()) for x in (queries, keys) if x is not None and x.numel())])
        self._keys = _side(keys, documents)
        self._queries: Side | None = None
        if queries is not None:
            of_q = self._keys if queries is keys else _side(queries, documents)
            kept = (of_q.counts > 0) | (self._keys.counts > 0)
            self._queries, self._keys = (
                side._replace(starts=side.starts[kept], counts=side.counts[kept]) for side in (of_q, self._keys)
            )
        self._layouts: dict[Hashable, Layout] = {}
        self._indices: dict[Hashable, Tensor] = {}

    @property
    def are_gathered(self) -> bool:
        """Whether positions are hidden between others of their sequence, so that places do not tell distances."""
        return any(side is not None and side.indices is not None for side in (self._queries, self._keys))

    def attend(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the queries of each sequence to its keys, in one call.

        Args:
            attend: `flash_attn_varlen_func` with its options.
            q, k, v: (b, s_q, h_q, d), (b, s_k, h_k, d), (b, s_k, h_k, d_v).

        Returns:
            O (b, s_q, h_q, d_v); 0 for hidden queries and for those without a key.
        """
        batch, length = q.shape[:2]
        of_q = self._queries or _whole(batch, length)
        indices_q, indices_k = (self._indices_on(q.device, side) for side in (of_q, self._keys))
        (q_rows,), _ = rows_of(q, indices=indices_q, may_stride=False)
        differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        (k_rows, v_rows), step = rows_of(k, v, indices=indices_k, may_stride=not differentiates)
        o = attend(q_rows, k_rows, v_rows, **self._layout(of_q, step, q_rows, k_rows)._asdict())
        return o.unflatten(0, (batch, length)) if indices_q is None else pad_input(o, indices_q, batch, length)

    def _indices_on(self, device: torch.device, side: Side) -> Tensor | None:
        if side.indices is None:
            return None
        key = device, side is self._keys
        if key not in self._indices:
            self._indices[key] = side.indices.to(device)
        return self._indices[key]

    def _layout(self, of_q: Side, step: int, q_rows: Tensor, k_rows: Tensor) -> Layout:
        """The vectors of a call."""
        key = step, q_rows.shape[0], k_rows.shape[0], q_rows.device
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = _layout(of_q, self._keys, step, q_rows, k_rows)
        return layout


def rows_of(*tensors: Tensor, indices: Tensor | None, may_stride: bool) -> tuple[list[Tensor], int]:
    """Tensors (batch, length, heads, d) as (rows, heads, d), and the rows from one row of the batch to the next.

    Args:
        *tensors: of one batch and length.
        indices: the rows to gather.
        may_stride: what is laid out as a key-value cache, (batch, heads, length, d), need not be copied. Its positions
            are one row apart, so there are `heads` times as many rows, of which those between are not used. That is
            for inference only: gradients would have as many rows.
    """
    length = tensors[0].shape[1]
    if indices is not None:
        return [x.flatten(0, 1).index_select(0, indices) for x in tensors], length
    steps = {_step(x) for x in tensors}
    step = max(steps)
    if not may_stride or len(steps) > 1 or step == length:
        return [x.flatten(0, 1) for x in tensors], length
    rows = (tensors[0].shape[0] - 1) * step + length
    return [x.as_strided((rows, *x.shape[2:]), x.stride()[1:]) for x in tensors], step


def _step(x: Tensor) -> int:
    """The rows from one row of the batch to the next in memory; the tensor's length if they are not a whole number."""
    batch, length = x.shape[:2]
    if batch == 1 or length <= 1 or x.stride(1) == 0:
        return length
    step, rest = divmod(x.stride(0), x.stride(1))
    return step if rest == 0 and step > length else length


def _whole(batch: int, length: int) -> Side:
    """One sequence for every row of the batch."""
    return Side(torch.arange(batch) * length, torch.full((batch,), length), length)


def _layout(of_q: Side, of_k: Side, step: int, q_rows: Tensor, k_rows: Tensor) -> Layout:
    """The vectors of a call; `step` is that of the keys."""
    sides = (of_q, of_q.length, q_rows.shape[0]), (of_k, step, k_rows.shape[0])
    starts = [side.starts_in(rows, total) for side, rows, total in sides]
    # Rows before the first sequence are one of their own, none of which counts.
    front = [0] * any(not len(of_side) or int(of_side[0]) > 0 for of_side in starts)
    (cu_q, used_q, longest_q), (cu_k, used_k, longest_k) = (
        _vectors([*front, *of_side.tolist(), total], [*front, *side.counts.tolist()], q_rows.device)
        for (side, _, total), of_side in zip(sides, starts, strict=True)
    )
    return Layout(cu_q, cu_k, used_q, used_k, longest_q, longest_k)


def _vectors(ends: list[int], counts: list[int], device: torch.device) -> tuple[Tensor, Tensor | None, int]:
    """`cu_seqlens`, `seqused` and the length of the longest of sequences of so many positions between these ends."""
    cu_seqlens, used = (torch.tensor(values, dtype=torch.int32) for values in (ends, counts))
    seqused = None if torch.equal(cu_seqlens.diff(), used) else used.to(device)
    return cu_seqlens.to(device), seqused, max(counts, default=0)


def _side(labels: Tensor, documents: int) -> Side:
    """Where the sequences lie, (batch * documents) of them, some without a position. Labels ascend along a row."""
    batch, length = labels.shape
    begins_run = torch.ones(batch, length, dtype=torch.bool)
    begins_run[:, 1:] = labels[:, 1:] != labels[:, :-1]
    runs = begins_run.flatten().nonzero()[:, 0]
    extents = pad(runs, (0, 1), value=batch * length).diff()
    label = labels.flatten()[runs]
    shown = label != HIDDEN
    runs, extents = runs[shown], extents[shown]
    sequence = runs // max(length, 1) * documents + label[shown]
    counts = torch.zeros(batch * documents, dtype=torch.long).index_add(0, sequence, extents)
    runs_before = pad(sequence.bincount(minlength=batch * documents).cumsum(0), (1, 0))
    # A sequence without a position is put before the next one that has some.
    starts = pad(runs, (0, 1), value=batch * length)[runs_before[:-1]]
    is_gathered = bool((runs_before.diff() > 1).any())
    return Side(starts, counts, length, (labels != HIDDEN).flatten().nonzero()[:, 0] if is_gathered else None)
