"""Text that every machine has: the sources of Python's standard library, with their documentation, as bytes.

A document is a file. Its path decides whether it is held out, so that training never sees a validation document. The
order of the data follows from the seed and the number of the step alone: a run that resumes needs to know no more.
"""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 256
SEPARATOR = 0  # the byte after each document; none contains it
HELD_OUT = 20  # one document in so many is for validation
# Not every installation has its tests, and what else was installed differs between machines.
LEFT_OUT = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


class Corpus(NamedTuple):
    """Documents, each followed by the separator, in two streams of bytes, uint8.

    Attributes:
        documents: how many there are.
        digest: of all names and bytes; machines with the same Python have the same.
    """

    training: Tensor
    validation: Tensor
    documents: int
    digest: str


class Batch(NamedTuple):
    """Inputs and the bytes that follow them, int64, both (batch, context), or packed both (total,).

    Attributes:
        cu_seqlens: of packed documents, int32 (batch + 1,); otherwise None.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """On `device`; a GPU copies while the host goes on."""

        def moved(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

        cu_seqlens = None if self.cu_seqlens is None else moved(self.cu_seqlens)
        return Batch(moved(self.inputs), moved(self.targets), cu_seqlens)


def documents(root: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """(path below `root`, content) of every Python source, in the order of the paths."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        below = path.relative_to(root)
        if not LEFT_OUT.intersection(below.parts):
            content = path.read_bytes()
            if content and SEPARATOR not in content:
                yield below.as_posix(), content


def read(root: pathlib.Path | None = None) -> Corpus:
    """The corpus below `root`; None is Python's standard library.

    Raises:
        ValueError: one of the two streams would be empty.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    digest = hashlib.sha256()
    for name, content in documents(root):
        path_digest = hashlib.sha256(name.encode()).digest()
        held_out = int.from_bytes(path_digest[:4], "big") % HELD_OUT == 0
        parts[held_out].append(content + bytes([SEPARATOR]))
        digest.update(path_digest + content)
    if not all(parts):
        raise ValueError(f"{root} has {sum(map(len, parts))} Python sources; allowed: enough to hold some out")
    training, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(training, validation, sum(map(len, parts)), digest.hexdigest()[:16])


class Batches:
    """The batches of a stream, by step: pieces of it, each once an epoch, in an order drawn for each epoch.

    Args:
        stream: uint8 (bytes,).
        context: bytes of a piece. Packed, a piece ends with its document, too.
        batch: pieces of a step.
        seed: of the orders.
        packed: pieces are put one after the other, each a sequence of its own, instead of side by side.

    Raises:
        ValueError: the stream is shorter than one piece.
    """

    def __init__(self, stream: Tensor, context: int, batch: int, seed: int, packed: bool = False) -> None:
        self._stream, self._batch, self._seed, self._packed = stream, batch, seed, packed
        self._starts, self._lengths = _packed_pieces(stream, context) if packed else _pieces(stream, context)
        if not len(self._starts):
            raise ValueError(f"context is {context}; allowed: less than the {len(stream)} bytes of the stream")
        self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> Batch:
        """The batch of a step, on the CPU."""
        pieces = torch.tensor([self._piece(step * self._batch + i) for i in range(self._batch)])
        starts, lengths = self._starts[pieces], self._lengths[pieces]
        ends = lengths.cumsum(0)
        where = torch.arange(int(ends[-1])) + (starts - ends + lengths).repeat_interleave(lengths)
        inputs, targets = self._stream[where].long(), self._stream[where + 1].long()
        if self._packed:
            return Batch(inputs, targets, torch.nn.functional.pad(ends, (1, 0)).int())
        return Batch(inputs.view(self._batch, -1), targets.view(self._batch, -1), None)

    def _piece(self, number: int) -> int:
        epoch, place = divmod(number, len(self._starts))
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(len(self._starts), generator=generator)
        return int(self._order[1][place])


def _pieces(stream: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of equal pieces; each has a byte after it."""
    starts = torch.arange(0, max(len(stream) - context, 0), context)
    return starts, torch.full_like(starts, context)


def _packed_pieces(stream: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of pieces of documents; the separator is the byte after a document's last piece."""
    ends = (stream == SEPARATOR).nonzero().flatten()
    begins = torch.cat((ends.new_zeros(1), ends[:-1] + 1))
    counts = (ends - begins + context - 1) // context
    firsts = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    starts = begins.repeat_interleave(counts) + firsts * context
    return starts, torch.minimum(ends.repeat_interleave(counts) - starts, torch.tensor(context))
