"""The choice of tokens, beside its definition."""

from __future__ import annotations

import torch
from serving.requests import Request, Sampling
from serving.sampling import sample

ROWS, VOCABULARY = 64, 50


def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, VOCABULARY) * 3


def full(value: float) -> torch.Tensor:
    return torch.full((ROWS,), value)


def test_no_temperature_takes_the_largest() -> None:
    given = logits()
    chosen = sample(given, full(0.0), full(0.3), torch.rand(ROWS))
    assert torch.equal(chosen, given.argmax(1))


def test_a_small_top_p_takes_the_largest() -> None:
    given = logits()
    assert torch.equal(sample(given, full(5.0), full(1e-6), torch.rand(ROWS)), given.argmax(1))


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    """All places on the line, evenly: a token gets its part of what `top_p` keeps."""
    places = 20_000
    one = logits()[:1]
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.8), (2.0, 0.5)):
        uniform = (torch.arange(places) + 0.5) / places
        values = torch.full((places,), temperature), torch.full((places,), top_p)
        drawn = sample(one.expand(places, -1), *values, uniform).bincount(minlength=VOCABULARY) / places
        ordered, order = (one[0].double() / temperature).softmax(0).sort(descending=True)
        kept = VOCABULARY if top_p == 1 else int((ordered.cumsum(0) < top_p).sum()) + 1
        right = torch.zeros(VOCABULARY, dtype=torch.float64)
        right[order[:kept]] = ordered[:kept] / ordered[:kept].sum()
        assert (drawn - right).abs().max() < 2 / places
        assert set(drawn.nonzero()[:, 0].tolist()) <= set(order[:kept].tolist())


def test_tokens_without_probability_are_never_drawn() -> None:
    given = torch.full((ROWS, VOCABULARY), float("-inf"))
    given[:, 7:9] = 0.0
    for uniform, token in ((0.0, 7), (0.25, 7), (0.75, 8), (1 - 2**-24, 8)):
        assert (sample(given, full(1.0), full(1.0), full(uniform)) == token).all()


def test_rows_without_top_p_need_no_sorting() -> None:
    """The choice is the same, whether another row of the batch is cut or not."""
    given, uniform = logits(), torch.rand(ROWS)
    top_p = torch.where(torch.arange(ROWS) % 2 == 0, 1.0, 0.5)
    sorted_ = sample(given, full(1.0), top_p, uniform)
    unsorted = sample(given, full(1.0), top_p, uniform, cuts=False)
    assert torch.equal(sorted_[::2], unsorted[::2]) and not torch.equal(sorted_, unsorted)


def test_the_ends_of_the_line_are_tokens_that_are_kept() -> None:
    given = logits()
    last = 1 - 2**-24
    for uniform in (0.0, last):
        chosen = sample(given, full(1.0), full(0.6), full(uniform))
        ordered, order = given.softmax(1).sort(dim=1, descending=True)
        kept = (ordered.cumsum(1) < 0.6).sum(1) + 1
        rank = (order == chosen[:, None]).int().argmax(1)
        assert bool((rank < kept).all()) and bool(((rank == 0) if uniform == 0 else (rank == kept - 1)).all())


def test_a_row_does_not_depend_on_others() -> None:
    given, uniform = logits(), torch.rand(ROWS)
    together = sample(given, full(0.9), full(0.9), uniform)
    for row in range(0, ROWS, 7):
        part = slice(row, row + 1)
        assert sample(given[part], full(0.9)[part], full(0.9)[part], uniform[part])[0] == together[row]


def test_places_are_spread_evenly_and_repeat() -> None:
    def places(seed: int) -> list[float]:
        request = Request(0, [1, 2], 2, Sampling(9999, temperature=1.0, seed=seed), print)
        found = []
        for token in range(2000):
            found.append(request.uniform())
            request.tokens.append(token)
        return found

    one = places(1)
    assert one == places(1) and one != places(2) and all(0 <= place < 1 for place in one)
    assert abs(sum(one) / len(one) - 0.5) < 0.03 and len(set(one)) > 1990
    assert all(torch.tensor(place, dtype=torch.float32).item() == place for place in one)
