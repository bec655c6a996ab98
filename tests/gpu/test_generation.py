"""transformers' generation with ours on a GPU, in bf16: dynamic, static and paged caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from serving.presets import make_model  # noqa: E402

from cuteflash.integrations.transformers import register  # noqa: E402
from tests.serving_parts import make_prompts  # noqa: E402

pytestmark = pytest.mark.gpu

ANSWER = 20
BUSY_CLOCKS = 200_000_000  # a tenth of a second
PROMPTS = make_prompts(3, 40, 1, 70, 300)
each_preset = pytest.mark.parametrize("preset", ["tiny", "tiny-qwen3", "tiny-mistral"])


@functools.cache
def model(preset: str, device: torch.device, attention: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Weights rounded to bf16, the same for every kind of attention and every dtype."""
    register()
    return make_model(preset, torch.bfloat16, device, attention=attention).to(dtype)


def check(
    preset: str, device: torch.device, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> None:
    """The tokens are the most probable ones, as far as bf16 can tell."""

    def logits(dtype: torch.dtype, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(preset, device, "eager", dtype)(torch.tensor([tokens], device=device)).logits
        return found[0].float()

    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == ANSWER
        right = logits(torch.float32, [*prompt, *answer])
        error = (logits(torch.bfloat16, [*prompt, *answer]) - right).abs().max()
        after = right[len(prompt) - 1 : -1]
        chosen = after.gather(1, torch.tensor(answer, device=device)[:, None])[:, 0]
        assert (after.amax(1) - chosen).max() <= 4 * error  # twice torch's error, of two logits


def generated(preset: str, device: torch.device, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """`generate` of one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    out = model(preset, device, "cuteflash").generate(
        ids, attention_mask=mask, max_new_tokens=ANSWER, do_sample=False, eos_token_id=[], pad_token_id=0, **options
    )
    answers: list[list[int]] = out[:, longest:].tolist()
    return answers


@each_preset
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate(device: torch.device, preset: str, cache: str, padded: bool) -> None:
    prompts = PROMPTS[1:4] if padded else PROMPTS[3:4]
    options = {"cache_implementation": cache, "disable_compile": True}
    check(preset, device, prompts, generated(preset, device, prompts, **options))


@pytest.mark.slow
def test_generate_compiles_steps_with_a_static_cache(cuda: torch.device) -> None:
    """As transformers does on a GPU by itself."""
    check("tiny", cuda, PROMPTS[3:4], generated("tiny", cuda, PROMPTS[3:4], cache_implementation="static"))


@each_preset
def test_continuous_batching(device: torch.device, preset: str) -> None:
    """Twice with one manager: the second time its CUDA graphs are replayed with other lengths.

    The stream is busy on which transformers clears the inputs of a step, and not the one on which it copies them.
    """
    ours = model(preset, device, "cuteflash")
    generation = transformers.GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, max_requests_per_batch=8)
    for prompts in (PROMPTS, PROMPTS[1:3]):
        if device.type == "cuda":
            torch.cuda._sleep(BUSY_CLOCKS)
        results = ours.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
            progress_bar=False,
        )
        outputs = sorted(results.values(), key=lambda out: int(out.request_id.split("_")[1]))
        check(preset, device, prompts, [out.generated_tokens for out in outputs])
    ours.destroy_cached_continuous_batching_manager()
    assert ours.config._attn_implementation == "cuteflash"
