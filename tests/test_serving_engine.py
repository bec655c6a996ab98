"""The engine's answers are those of eager generation, token for token, however the requests meet."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from serving.engine import BusyError, Engine
from serving.presets import make_config
from serving.requests import Sampling
from serving.runner import CacheSettings, Chosen, Graph, Runner, _check_supported, buckets
from serving.scheduler import Limits

from tests.serving_parts import (
    ANSWER,
    LIMITS,
    PAGE,
    Client,
    eager_answers,
    make_engine,
    make_prompts,
    model,
    run,
)

GREEDY = Sampling(ANSWER)
PRESETS = ("tiny", "tiny-qwen2", "tiny-qwen3", "tiny-mistral", "tiny-gpt-oss")


@pytest.fixture(params=PRESETS)
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_answers_are_those_of_eager_generation(preset: str) -> None:
    """Six prompts in batches of four, chunks of 16 tokens, windows of 24, a small cache, a common prefix."""
    prompts = make_prompts(5, 40, 17, 60, 1)
    prompts.append([*prompts[3][:50], 1, 2, 3])
    engine = make_engine(preset, tokens=96)
    assert engine.generate(prompts, [GREEDY] * 6) == eager_answers(preset, prompts)
    assert engine.scheduler.preemptions and engine.runner.pool.evictions
    assert engine.runner.pool.available == engine.runner.pool.capacity


class Replayed:
    """In place of a CUDA graph: computes what a step makes of a buffer, which may hold rests of other steps."""

    def __init__(self, runner: Runner, rows: int, tokens: int) -> None:
        self.staging, self._forward = runner._replayable(rows, tokens)
        self.staging.ids.fill_(1)
        self.logits = torch.zeros(rows, runner.vocabulary)
        self.count = 0

    def replay(self) -> None:
        self.logits.copy_(self._forward())
        self.count += 1


@pytest.mark.parametrize("graphs", ["tiny", "tiny-mistral", "tiny-gpt-oss"])
def test_steps_padded_to_those_of_graphs_give_the_same_answers(graphs: str) -> None:
    prompts = make_prompts(5, 40, 17, 60, 1, 33)
    engine = make_engine(graphs, tokens=96)
    runner = engine.runner
    replayed = {size: Replayed(runner, *size) for size in runner.sizes()}
    runner._graphs = {size: Graph(one, one.staging, one.logits) for size, one in replayed.items()}  # type: ignore[arg-type]
    assert engine.generate(prompts, [GREEDY] * 6) == eager_answers(graphs, prompts)
    assert engine.scheduler.preemptions and sum(one.count for one in replayed.values()) == engine.steps
    assert all(any(one.count for size, one in replayed.items() if (size[0] == size[1]) == of_one) for of_one in (0, 1))


@pytest.mark.parametrize("requests", [1, 3, 4])
def test_a_step_takes_the_smallest_graph_that_it_fits_into(requests: int) -> None:
    runner = make_engine(limits=Limits(32, requests, 256)).runner
    sizes = runner.sizes()
    assert sizes == sorted(sizes, key=lambda size: (size[0] != size[1], size))
    runner._graphs = {size: size for size in sizes}  # type: ignore[misc]
    for rows, tokens in itertools.product(range(1, requests + 1), range(1, 33)):
        if tokens < rows:
            continue
        found: Any = runner._graph_for(rows, tokens)
        assert found[0] >= rows and found[1] >= tokens and (found[0] == found[1]) == (rows == tokens)
        fitting = [one for one in sizes if one[0] >= rows and one[1] >= tokens]
        assert found == min(one for one in fitting if (one[0] == one[1]) == (rows == tokens))


@pytest.mark.parametrize("tokens", [88, 104, 200])
@pytest.mark.parametrize("budget", [4, 7, 100])
def test_neither_budget_nor_cache_change_answers(tokens: int, budget: int) -> None:
    prompts = make_prompts(30, 3, 70, 12, 8, 9)
    engine = make_engine(limits=Limits(budget, 4, 256), tokens=tokens)
    assert engine.generate(prompts, [GREEDY] * 6) == eager_answers("tiny", prompts)


def test_a_prefix_is_computed_once() -> None:
    engine = make_engine()
    (prompt,) = make_prompts(4 * PAGE)
    for length, cached in ((4 * PAGE, 0), (4 * PAGE, 3 * PAGE), (2 * PAGE + 1, 2 * PAGE), (PAGE - 1, 0)):
        client = Client(engine, prompt[:length])
        run(engine)
        assert client.events[-1].cached_tokens == cached
        assert client.tokens == eager_answers("tiny", [prompt[:length]])[0]


def test_an_answer_is_a_prefix_too() -> None:
    engine = make_engine()
    (prompt,) = make_prompts(2 * PAGE)
    (answer,) = engine.generate([prompt], [GREEDY])
    follow = [*prompt, *answer, 7]
    client = Client(engine, follow)
    run(engine)
    assert client.events[-1].cached_tokens == 3 * PAGE  # the answer's last token was never computed
    assert client.tokens == eager_answers("tiny", [follow])[0]


def test_without_prefixes_nothing_is_found() -> None:
    engine = make_engine(keeps_prefixes=False)
    (prompt,) = make_prompts(4 * PAGE)
    for _ in range(2):
        client = Client(engine, prompt)
        run(engine)
        assert client.events[-1].cached_tokens == 0


def test_the_youngest_gives_way_and_goes_on_later() -> None:
    engine = make_engine(tokens=5 * PAGE)
    clients = [Client(engine, prompt) for prompt in make_prompts(2 * PAGE, 2 * PAGE, 3)]
    run(engine)
    assert clients[0].request.preemptions == 0 and engine.scheduler.preemptions > 0
    assert [client.finish for client in clients] == ["length"] * 3
    prompts = [client.request.tokens[: client.request.prompt_tokens] for client in clients]
    assert [client.tokens for client in clients] == eager_answers("tiny", prompts)


def test_requests_join_while_others_answer() -> None:
    engine = make_engine()
    prompts = make_prompts(9, 33, 2)
    clients = []
    for prompt in prompts:
        clients.append(Client(engine, prompt))
        for _ in range(3):
            engine.step()
    run(engine)
    assert [client.tokens for client in clients] == eager_answers("tiny", prompts)


def test_a_step_stays_in_its_budget_and_answers_grow_in_each() -> None:
    engine = make_engine(tokens=4096)
    taken = []
    plan = engine.scheduler.plan

    def note() -> Any:
        taken.append(plan())
        return taken[-1]

    engine.scheduler.plan = note  # type: ignore[method-assign]
    first = Client(engine, make_prompts(3)[0])
    engine.step()
    Client(engine, make_prompts(100)[0])
    for _ in range(5):
        engine.step()
    assert all(sum(chunk.count for chunk in chunks) <= LIMITS.batch_tokens for chunks in taken)
    assert [chunk.count for chunk in taken[1]] == [1, 15] and len(first.tokens) == 5  # the sixth is under way
    run(engine)


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it() -> None:
    engine = make_engine()
    prompts = make_prompts(6)
    (answer,) = eager_answers("tiny", prompts)
    stop = answer[5]
    client = Client(engine, prompts[0], Sampling(ANSWER, stop_tokens=frozenset({stop})))
    run(engine)
    assert client.tokens == answer[: answer.index(stop)] and client.finish == "stop"


def test_a_step_begins_before_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    calls = []
    launch, read = engine.runner.launch, Chosen.tolist
    monkeypatch.setattr(engine.runner, "launch", lambda chunks: calls.append("launch") or launch(chunks))
    monkeypatch.setattr(Chosen, "tolist", lambda chosen: calls.append("read") or read(chosen))
    engine.generate([[1, 2]], [Sampling(4)])
    assert calls == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_a_request_that_stops_leaves_no_trace_in_the_step_that_has_begun() -> None:
    engine = make_engine()
    prompts = make_prompts(6, 13)
    answers = eager_answers("tiny", prompts)
    stop = answers[0][5]
    place = answers[0].index(stop)
    stopped = Client(engine, prompts[0], Sampling(ANSWER, stop_tokens=frozenset({stop})))
    other = Client(engine, prompts[1])
    while stopped.finish is None:
        engine.step()
    assert stopped.request.tokens == [*prompts[0], *answers[0][:place]]
    joined = Client(engine, prompts[0])  # may have the pages that the step under way still writes to
    run(engine)
    assert [other.tokens, joined.tokens] == [answers[1], answers[0]]
    assert len(stopped.events) == place + 1


def test_a_request_that_ends_gives_its_pages_before_another_gives_way() -> None:
    """Both need their third page in the step after the one that ends the first."""
    engine = make_engine(tokens=4 * PAGE, limits=Limits(64, 4, 256))
    prompts = make_prompts(2 * PAGE - 4, 2 * PAGE - 4)
    clients = [Client(engine, prompts[0], Sampling(5)), Client(engine, prompts[1])]
    run(engine)
    assert engine.scheduler.preemptions == 0
    answers = eager_answers("tiny", prompts)
    assert [client.tokens for client in clients] == [answers[0][:5], answers[1]]


def test_sampling_depends_on_the_seed_and_on_nothing_else() -> None:
    prompts = make_prompts(20, 9, 14)
    hot = [Sampling(ANSWER, temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 2, 3)]
    together = make_engine(tokens=104).generate(prompts, hot)
    alone = [make_engine(limits=Limits(5, 1, 256)).generate([p], [s])[0] for p, s in zip(prompts, hot, strict=True)]
    assert together == alone
    other = make_engine().generate(prompts[:1], [Sampling(ANSWER, temperature=0.8, top_p=0.9, seed=4)])
    assert other[0] != alone[0]
    mixed = make_engine().generate(prompts, [GREEDY, hot[1], GREEDY])
    assert [mixed[0], mixed[2]] == eager_answers("tiny", [prompts[0], prompts[2]]) and mixed[1] == alone[1]


def test_an_aborted_request_frees_its_pages_and_changes_no_other() -> None:
    engine = make_engine()
    prompts = make_prompts(30, 12, 25)
    clients = [Client(engine, prompt) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.abort(clients[1].request)
    engine.abort(clients[1].request)
    run(engine)
    assert clients[1].finish == "abort"
    assert [clients[0].tokens, clients[2].tokens] == eager_answers("tiny", [prompts[0], prompts[2]])
    waiting = Client(engine, prompts[0])
    engine.abort(waiting.request)
    run(engine)
    assert [event.finish for event in waiting.events] == ["abort"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ([], GREEDY, "the prompt has no token"),
        ([3, 259], GREEDY, "the prompt has the token 259; allowed: 0 to 258"),
        ([-1], GREEDY, "the prompt has the token -1"),
        ([1] * 250, GREEDY, "together 266; allowed: up to 256"),
        ([1], Sampling(0), "max_tokens is 0"),
        ([1], Sampling(4, temperature=-1), "temperature is -1"),
        ([1], Sampling(4, temperature=float("nan")), "temperature is nan"),
        ([1], Sampling(4, top_p=0), "top_p is 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompt: list[int], sampling: Sampling, complaint: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=complaint):
        engine.submit(prompt, sampling, print)
    assert not engine.step()


def test_the_longest_request_fills_the_cache() -> None:
    engine = make_engine(tokens=4 * PAGE)
    prompts = make_prompts(4 * PAGE - 15)
    assert engine.limit == 4 * PAGE + 1
    assert engine.generate(prompts, [GREEDY]) == eager_answers("tiny", prompts)
    with pytest.raises(ValueError, match="allowed: up to 33"):
        engine.submit([1] * 18, GREEDY, print)


def test_too_many_requests_are_told_to_come_later() -> None:
    engine = make_engine()
    clients = [Client(engine, [1, 2]) for _ in range(LIMITS.requests + LIMITS.waiting)]
    with pytest.raises(BusyError, match="12 requests run or wait"):
        engine.submit([1], GREEDY, print)
    run(engine)
    assert {client.finish for client in clients} == {"length"}
    Client(engine, [1])
    run(engine)


def test_a_failing_step_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(limits=Limits(16, 2, 256))
    prompts = make_prompts(5, 6, 7, 8)
    clients = [Client(engine, prompt) for prompt in prompts]
    engine.step()
    compute = engine.runner.launch

    def fail(chunks: Any) -> list[int]:
        monkeypatch.setattr(engine.runner, "launch", compute)
        raise MemoryError("no room")

    monkeypatch.setattr(engine.runner, "launch", fail)
    run(engine)
    assert [client.finish for client in clients] == ["error", "error", "length", "length"]
    assert clients[0].events[-1].error == "MemoryError: no room"
    assert [client.tokens for client in clients[2:]] == eager_answers("tiny", prompts[2:])


def test_a_failing_listener_disturbs_nobody() -> None:
    engine = make_engine()
    prompts = make_prompts(5, 6)

    def fail(event: object) -> None:
        raise OSError("gone")

    engine.submit(prompts[0], GREEDY, fail)
    client = Client(engine, prompts[1])
    run(engine)
    assert client.tokens == eager_answers("tiny", prompts[1:])[0]


def test_a_thread_serves_requests_of_others() -> None:
    engine = make_engine()
    prompts = make_prompts(5, 26, 7)
    ended = [threading.Event() for _ in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    engine.start()
    for prompt, answer, end in zip(prompts, answers, ended, strict=True):

        def listen(event: Any, answer: list[int] = answer, end: threading.Event = end) -> None:
            answer.extend([event.token] if event.token is not None else [])
            if event.finish:
                end.set()

        engine.submit(prompt, GREEDY, listen)
    assert all(end.wait(60) for end in ended)
    assert answers == eager_answers("tiny", prompts)
    engine.stop()
    with pytest.raises(BusyError, match="stopped"):
        engine.submit([1], GREEDY, print)


def test_stopping_aborts_what_is_left() -> None:
    engine: Engine = make_engine()
    client = Client(engine, [1, 2], Sampling(200))
    engine.start()
    engine.stop()
    assert client.finish == "abort"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type is dynamic"),
    ],
)
def test_models_that_are_not_supported_are_refused(options: dict[str, Any], complaint: str) -> None:
    config = make_config("tiny")
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=complaint):
        _check_supported(config)


def test_a_model_with_other_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="does not go through transformers' attention interface"):
        Runner(model("tiny", "eager"), LIMITS, CacheSettings(PAGE, 64))


@pytest.mark.parametrize(
    ("limits", "cache", "complaint"),
    [
        (Limits(2, 4), CacheSettings(), "batch_tokens is 2"),
        (Limits(length=0), CacheSettings(), "length is 0"),
        (Limits(length=4096), CacheSettings(), "length is 4096; allowed: up to 1024"),
        (LIMITS, CacheSettings(0), "page_size is 0"),
        (LIMITS, CacheSettings(8, 0), "tokens is 0"),
        (LIMITS, CacheSettings(memory=1.5), "memory is 1.5"),
    ],
)
def test_wrong_settings_are_refused(limits: Limits, cache: CacheSettings, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Runner(model("tiny"), limits, cache)


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 9, 64, 100, 256])
def test_every_batch_finds_a_graph(requests: int) -> None:
    sizes = buckets(requests)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == requests
