"""The serving engine on a GPU: bf16, with and without CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from serving import latent_cache
from serving.engine import Engine
from serving.presets import make_model
from serving.requests import Sampling
from serving.runner import CacheSettings, Runner
from serving.scheduler import Limits

from tests.serving_parts import make_prompts

pytestmark = pytest.mark.gpu

LIMITS = Limits(batch_tokens=96, requests=6, length=256)
ANSWER = 24
PROMPTS = [*make_prompts(5, 40, 90, 150, 1, 33, 64)]
PROMPTS.append([*PROMPTS[3][:130], 1, 2, 3])


@functools.cache
def logits(preset: str, device: torch.device, dtype: torch.dtype, tokens: tuple[int, ...]) -> Tensor:
    """Those of transformers' eager attention with the weights that the engine has, rounded to bf16; fp32."""
    model = make_model(preset, torch.bfloat16, device, attention="eager").to(dtype)
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([tokens], device=device)).logits[0].float()
    return found


def check(preset: str, device: torch.device, answers: Sequence[Sequence[int]]) -> None:
    """The tokens are the most probable ones, as far as bf16 can tell."""
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == ANSWER
        tokens = (*prompt, *answer)
        right = logits(preset, device, torch.float32, tokens)
        error = (logits(preset, device, torch.bfloat16, tokens) - right).abs().max()
        after = right[len(prompt) - 1 : -1]
        chosen = after.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0]
        assert (after.amax(1) - chosen).max() <= 4 * error  # twice torch's error, of two logits


def make_engine(preset: str, device: torch.device, tokens: int, page_size: int, graphs: bool = False) -> Engine:
    model = make_model(preset, torch.bfloat16, device)
    runner = Runner(model, LIMITS, CacheSettings(page_size, tokens))
    if graphs:
        sizes = list(runner.capture())
        assert sizes[-4:] == [(6, 6), (4, 4), (2, 2), (1, 1)]
        prompts = [(6, tokens) for tokens in (96, 84, 72, 60, 48, 36, 24, 12)]
        assert sizes[:-4] == ([] if "deepseek" in preset else prompts)
    return Engine(runner)


@pytest.mark.parametrize(("tokens", "page_size"), [(4096, 64), (320, 5)])
def test_answers_are_the_most_probable_tokens(device: torch.device, tokens: int, page_size: int) -> None:
    engine = make_engine("tiny", device, tokens, page_size)
    check("tiny", device, engine.generate(PROMPTS, [Sampling(ANSWER)] * len(PROMPTS)))
    assert engine.runner.pool.available == engine.runner.pool.capacity
    assert (engine.runner.pool.evictions > 0) == (tokens < 4096)


def test_windows(device: torch.device) -> None:
    engine = make_engine("tiny-mistral", device, 1024, 64)
    check("tiny-mistral", device, engine.generate(PROMPTS, [Sampling(ANSWER)] * len(PROMPTS)))


@pytest.mark.parametrize("absorbed", [128, 6])
def test_latents(hopper: torch.device, monkeypatch: pytest.MonkeyPatch, absorbed: int) -> None:
    """Without experts, since which of them a token has may depend on rounding; with six, in both forms."""
    monkeypatch.setattr(latent_cache, "ABSORBED", absorbed)
    engine = make_engine("tiny-deepseek-dense", hopper, 1024, 64)
    check("tiny-deepseek-dense", hopper, engine.generate(PROMPTS, [Sampling(ANSWER)] * len(PROMPTS)))


def test_latents_and_experts_are_captured(hopper_gpu: torch.device) -> None:
    engine = make_engine("tiny-deepseek", hopper_gpu, 2048, 64, graphs=True)
    first, second, third = (engine.generate(PROMPTS[:5], [Sampling(ANSWER)] * 5) for _ in range(3))
    assert [len(answer) for answer in first] == [ANSWER] * 5 and second == third


def test_graphs_of_latents_give_answers_as_good(hopper_gpu: torch.device) -> None:
    engine = make_engine("tiny-deepseek-dense", hopper_gpu, 1024, 64, graphs=True)
    check("tiny-deepseek-dense", hopper_gpu, engine.generate(PROMPTS, [Sampling(ANSWER)] * len(PROMPTS)))


@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3"])
def test_graphs_give_answers_as_good(cuda: torch.device, preset: str) -> None:
    """With batches of all sizes, since requests end one after the other."""
    engine = make_engine(preset, cuda, 1024, 64, graphs=True)
    lengths = [ANSWER] * len(PROMPTS)
    check(preset, cuda, engine.generate(PROMPTS, [Sampling(length) for length in lengths]))
    answers = engine.generate(PROMPTS[:5], [Sampling(3 * (i + 1)) for i in range(5)])
    again = engine.generate(PROMPTS[:5], [Sampling(3 * (i + 1)) for i in range(5)])
    assert [len(answer) for answer in answers] == [3, 6, 9, 12, 15] and answers == again


def test_a_replayed_step_allocates_nothing(cuda: torch.device) -> None:
    engine = make_engine("tiny", cuda, 1024, 64, graphs=True)
    engine.submit(PROMPTS[0], Sampling(ANSWER), lambda event: None)
    for _ in range(3):
        engine.step()
    before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
    engine.step()
    assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] == before


def test_sampling_repeats(device: torch.device) -> None:
    hot = [Sampling(ANSWER, temperature=1.0, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]
    one, two = (make_engine("tiny", device, 1024, 64).generate(PROMPTS, hot) for _ in range(2))
    assert one == two
