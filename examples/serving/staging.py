"""What a step needs on the device, in one buffer that one copy fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from serving.pages import SCRATCH
from serving.scheduler import Chunk

ALIGNED = 64  # elements; of 4 bytes each
FLOATS = ("temperature", "top_p", "uniform")


class Staging:
    """Vectors of up to `tokens` tokens and `rows` rows, int32 but for those of `FLOATS`, fp32.

    Attributes:
        ids, positions: of tokens.
        cu_seqlens, cached, used, page_table: see `attention.Step`.
        last: the last token of each row.
        temperature, top_p, uniform: of rows, see `sampling.sample`.
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
        self._arrays: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            for buffer in (self._host, self._device):
                view = buffer[places[name] : places[name] + int(np.prod(shape))].view(shape)
                view = view.view(torch.float32) if name in FLOATS else view
                if buffer is self._host:
                    self._arrays[name] = view.numpy()
            setattr(self, name, view)

    def fill(self, chunks: Sequence[Chunk], rows: int) -> None:
        """Put the chunks in, then rows of one token in the scratch page until there are `rows`, and copy."""
        to = self._arrays
        end = 0
        for row, chunk in enumerate(chunks):
            request, begin = chunk.request, end
            end += chunk.count
            stop = chunk.start + chunk.count
            to["ids"][begin:end] = request.tokens[chunk.start : stop]
            to["positions"][begin:end] = range(chunk.start, stop)
            to["cached"][row], to["used"][row] = chunk.start, stop
            to["cu_seqlens"][row + 1], to["last"][row] = end, end - 1
            to["page_table"][row, : len(request.pages)] = request.pages
            to["temperature"][row], to["top_p"][row] = request.sampling.temperature, request.sampling.top_p
            to["uniform"][row] = request.uniform()
        for row in range(len(chunks), rows):
            to["ids"][end] = to["positions"][end] = to["cached"][row] = to["temperature"][row] = 0
            to["used"][row] = to["top_p"][row] = 1
            to["page_table"][row, 0], to["last"][row] = SCRATCH, end
            end += 1
            to["cu_seqlens"][row + 1] = end
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
