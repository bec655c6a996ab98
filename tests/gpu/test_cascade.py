"""examples/cascade.py on a GPU: the shared prefix read once, with pages in place."""

from __future__ import annotations

import cascade as example
import pytest
import torch
from cascade import Sizes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_two_ways_are_right(
    device: torch.device, queries: int, page_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = Sizes(5, 256, 90, queries, 8, 2, 64, page_size)
    step = example.make_step(sizes, torch.bfloat16, device)
    with torch.inference_mode():
        assert example.report(step, rounds=1) == 0
    assert ("ms" in capsys.readouterr().out) == (device.type == "cuda")
