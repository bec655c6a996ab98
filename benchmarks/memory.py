"""Peak memory of forward + backward, beside attention whose score matrix lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuteflash.problem import Dtype
from cuteflash.tune.cells import Cell
from cuteflash.tune.gradients import make_bwd_inputs
from cuteflash.tune.timing import Runner

from .contest import one_line
from .implementations import training_runner

SEQLENS = (1024, 4096, 16384)  # one sequence each; score matrices of 16 heads take 8 GiB at the longest
HEAD_DIM = 128


def peaks(names: Sequence[str], device: torch.device, dtype: Dtype) -> list[dict[str, Any]]:
    """Of each length the MiB by implementation; one that fails (runs out of memory, say) has a problem in words."""
    found = []
    for seqlen in SEQLENS:
        cell = Cell(HEAD_DIM, "causal", seqlen, dtype, tokens=seqlen)
        inputs = make_bwd_inputs(cell, device)
        entry: dict[str, Any] = {"label": cell.label, "batch": cell.batch, "heads": cell.heads}
        entry |= {"mib": {}, "problems": {}}
        for name in names:
            try:
                run = training_runner(name, inputs)
                run(1)  # compiles, and makes what a library keeps
                entry["mib"][name] = peak_bytes(run, device) / 2**20
            except Exception as failure:
                entry["problems"][name] = one_line(failure)
            torch.cuda.empty_cache()
        found.append(entry)
    return found


def peak_bytes(run: Runner, device: torch.device) -> int:
    """The most that torch's allocator held during one call, beyond what it held before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(1)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
