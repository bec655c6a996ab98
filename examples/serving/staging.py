"""What a step needs on the device, in one buffer that one copy fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from serving.pages import SCRATCH
from serving.requests import Request
from serving.scheduler import Chunk

ALIGNED = 64  # elements; of 4 bytes each
FLOATS = ("temperature", "top_p", "uniform")


class Staging:
    """Vectors of up to `tokens` tokens and `rows` rows, int32 but for those of `FLOATS`, fp32.

    Attributes:
        ids, positions: of tokens; an id below 0 stands for what the step before chooses, see `requests.Request`.
        cu_seqlens, cached, used, page_table: see `attention.Step`.
        last: the last token of each row.
        temperature, top_p, uniform: of rows, see `sampling.sample`.
        draws, cuts: whether a row has a temperature, and whether one of them has a `top_p` below 1.
    """

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    cached: Tensor
    used: Tensor
    page_table: Tensor
    last: Tensor
    temperature: Tensor
    top_p: Tensor
    uniform: Tensor

    def __init__(self, tokens: int, rows: int, width: int, device: torch.device) -> None:
        self.tokens, self.rows = tokens, rows
        shapes = {"ids": (tokens,), "positions": (tokens,), "cu_seqlens": (rows + 1,), "page_table": (rows, width)}
        shapes |= dict.fromkeys(("cached", "used", "last", *FLOATS), (rows,))
        places, size = {}, 0
        for name, shape in shapes.items():
            places[name] = size
            size += -(-int(np.prod(shape)) // ALIGNED) * ALIGNED
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._arrays: dict[str, np.ndarray] = {}
        self._pages_of: list[tuple[Request, int, int] | None] = [None] * rows
        self._followed: tuple[list[Request], int] | None = None  # requests of the last call, if each had one token
        self.draws = self.cuts = False
        for name, shape in shapes.items():
            for buffer in (self._host, self._device):
                view = buffer[places[name] : places[name] + int(np.prod(shape))].view(shape)
                view = view.view(torch.float32) if name in FLOATS else view
                if buffer is self._host:
                    self._arrays[name] = view.numpy()
            setattr(self, name, view)

    def fill(self, chunks: Sequence[Chunk], rows: int, spare: int = 1) -> None:
        """Put the chunks in, then rows of `spare` tokens in the scratch page until there are `rows`, and copy.

        With `spare` 0 tokens may follow the last one that is put in; they are those of some step before.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copy for a step that is under way, which nearly always has been made
        requests = [chunk.request for chunk in chunks]
        if not self._advance(chunks, requests, rows):
            self._fill_anew(chunks, rows, spare)
            self._followed = (requests, rows) if all(chunk.count == 1 for chunk in chunks) else None
        if self.draws:
            self._arrays["uniform"][: len(chunks)] = [request.uniform() for request in requests]
        self._fill_pages(requests, rows - len(chunks))
        if self._copied is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._copied.record()

    def _advance(self, chunks: Sequence[Chunk], requests: Sequence[Request], rows: int) -> bool:
        """Put in the next token of each request of the last call, which is what most calls are; False if it is not."""
        if self._followed != (requests, rows):
            return False
        to, count = self._arrays, len(chunks)
        starts = to["used"][:count]
        if not np.array_equal([chunk.start for chunk in chunks], starts) or any(chunk.count > 1 for chunk in chunks):
            return False
        to["cached"][:count] = starts
        to["positions"][:count] = starts
        starts += 1
        to["ids"][:count] = [chunk.request.tokens[chunk.start] for chunk in chunks]
        return True

    def _fill_anew(self, chunks: Sequence[Chunk], rows: int, spare: int) -> None:
        """Put in all but the pages and the places of sampling."""
        empty = rows - len(chunks)
        counts = [chunk.count for chunk in chunks] + [spare] * empty
        starts = [chunk.start for chunk in chunks] + [0] * empty
        ends = np.cumsum(counts)
        to = self._arrays
        to["cu_seqlens"][1 : rows + 1] = ends
        to["last"][:rows] = ends - 1
        to["cached"][:rows] = starts
        to["used"][:rows] = np.add(starts, counts)
        ids: list[int] = []
        for chunk in chunks:
            ids += chunk.request.tokens[chunk.start : chunk.start + chunk.count]
        to["ids"][: ends[-1]] = ids + [0] * (spare * empty)
        to["positions"][: ends[-1]] = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        samplings = [chunk.request.sampling for chunk in chunks]
        to["temperature"][:rows] = [sampling.temperature for sampling in samplings] + [0] * empty
        to["top_p"][:rows] = [sampling.top_p for sampling in samplings] + [1] * empty
        self.draws = any(sampling.temperature for sampling in samplings)
        self.cuts = any(sampling.temperature and sampling.top_p < 1 for sampling in samplings)

    def _fill_pages(self, requests: Sequence[Request], empty: int) -> None:
        """The page table; rows that have not changed are left alone."""
        table = self._arrays["page_table"]
        for row, request in enumerate(requests):
            key = request, request.preemptions, len(request.pages)
            if self._pages_of[row] != key:
                table[row, : len(request.pages)] = request.pages
                self._pages_of[row] = key
        for row in range(len(requests), len(requests) + empty):
            table[row, 0], self._pages_of[row] = SCRATCH, None
