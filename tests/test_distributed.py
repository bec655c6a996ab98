"""DDP and FSDP2 over our attention, two processes on the CPU through gloo: the weights are those of one process."""

from __future__ import annotations

import pathlib

import pytest
import torch.distributed
import torch.multiprocessing

from tests import distributed_worker


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_training_shared_by_two_processes(tmp_path: pathlib.Path) -> None:
    torch.multiprocessing.spawn(distributed_worker.main, (tmp_path,), nprocs=distributed_worker.WORLD)
