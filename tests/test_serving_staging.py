"""What a step has on the device is what a new buffer would have, whatever was in the buffer before."""

from __future__ import annotations

import random

import pytest
import torch
from serving.pages import PagePool
from serving.requests import Request, Sampling
from serving.scheduler import Limits, Scheduler
from serving.staging import Staging

CPU = torch.device("cpu")
PAGE, WIDTH = 4, 16
NAMES = ("cu_seqlens", "cached", "used", "last", "temperature", "top_p")


def make_requests(choose: random.Random) -> list[Request]:
    requests = []
    for number in range(12):
        tokens = [choose.randrange(100) for _ in range(choose.randrange(1, 12))]
        sampling = Sampling(choose.randrange(2, 29), choose.choice((0.0, 0.0, 1.0)), choose.choice((0.5, 1.0)), number)
        requests.append(Request(number, tokens, len(tokens), sampling, lambda event: None))
    return requests


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pages", [11, 60])  # few, so that requests are preempted; enough for all
def test_a_used_buffer_equals_a_new_one(seed: int, pages: int) -> None:
    choose = random.Random(seed)
    scheduler = Scheduler(PagePool(pages, PAGE, keeps_prefixes=False), Limits(8, 5, WIDTH * PAGE))
    kept = [Staging(8, rows, WIDTH, CPU) for rows in (5, 8)]  # two that are used in turn, as graphs are
    waiting, advanced = make_requests(choose), 0
    while waiting or not scheduler.is_idle:
        if waiting and choose.random() < 0.2:
            scheduler.add(waiting.pop())
        chunks = scheduler.plan()
        if not chunks:
            continue
        is_step = all(chunk.count == 1 for chunk in chunks)
        used = kept[0] if not is_step or choose.random() < 0.7 else kept[1]
        rows = used.rows if is_step else len(chunks)
        new = Staging(used.tokens, used.rows, WIDTH, CPU)
        advanced += used._followed == ([chunk.request for chunk in chunks], rows)
        for staging in (used, new):
            staging.fill(chunks, rows)
        tokens = int(new.cu_seqlens[rows])
        for name in ("ids", "positions"):
            assert torch.equal(getattr(used, name)[:tokens], getattr(new, name)[:tokens]), name
        for name in NAMES:
            count = rows + (name == "cu_seqlens")
            assert torch.equal(getattr(used, name)[:count], getattr(new, name)[:count]), name
        if new.draws:
            assert torch.equal(used.uniform[: len(chunks)], new.uniform[: len(chunks)])
        for row, chunk in enumerate(chunks):
            pages_of = len(chunk.request.pages)
            assert used.page_table[row, :pages_of].tolist() == chunk.request.pages
        assert not used.page_table[len(chunks) : rows, 0].any()
        assert (used.draws, used.cuts) == (new.draws, new.cuts)
        scheduler.advance(chunks)
        scheduler.commit(chunks, [choose.randrange(100) for _ in chunks])
    assert advanced > 10
    assert (scheduler.preemptions > 0) == (pages < 60)
