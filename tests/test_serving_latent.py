"""Models with latent attention keep rows of 576 numbers a token, and answer as eager generation, token for token."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from serving import latent_cache
from serving.engine import Engine
from serving.latent_attention import MODELS, LatentAttention, use_latents
from serving.latent_cache import LatentLayout
from serving.presets import load_model, make_config
from serving.requests import Sampling
from serving.runner import CacheSettings, Runner
from serving.scheduler import Limits
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.serving_parts import ANSWER, CPU, Client, eager_answers, make_prompts, model, run

PRESET, PAGE = "tiny-deepseek", 64
GREEDY = Sampling(ANSWER)
PROMPTS = make_prompts(5, 40, 170, 210, 1, 66)
PROMPTS.append([*PROMPTS[3][:200], 1, 2, 3])


def make_engine(budget: int = 300, tokens: int = 2048) -> Engine:
    return Engine(Runner(model(PRESET), Limits(budget, 4, 256), CacheSettings(PAGE, tokens)))


@pytest.mark.parametrize(
    ("absorbed", "block", "budget", "tokens"),
    [
        (128, 4096, 16, 640),  # absorbed only
        (6, 64, 70, 640),  # both in a step, earlier chunks a page at a time
        (6, 100, 90, 1024),  # blocks that are not whole pages
        (128, 4096, 300, 2048),  # the numbers that are served
    ],
)
def test_answers_are_those_of_eager_generation(
    monkeypatch: pytest.MonkeyPatch, absorbed: int, block: int, budget: int, tokens: int
) -> None:
    monkeypatch.setattr(latent_cache, "ABSORBED", absorbed)
    monkeypatch.setattr(latent_cache, "BLOCK", block)
    engine = make_engine(budget, tokens)
    assert engine.generate(PROMPTS, [GREEDY] * len(PROMPTS)) == eager_answers(PRESET, PROMPTS)
    assert engine.runner.pool.available == engine.runner.pool.capacity


@pytest.mark.parametrize("absorbed", [2, 128])
def test_a_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch, absorbed: int) -> None:
    """What follows it attends to its rows in both forms."""
    monkeypatch.setattr(latent_cache, "ABSORBED", absorbed)
    engine = make_engine()
    (prompt,) = make_prompts(3 * PAGE)
    for length, cached in ((3 * PAGE, 0), (3 * PAGE, 2 * PAGE), (PAGE + 9, PAGE)):
        client = Client(engine, prompt[:length])
        run(engine)
        assert client.events[-1].cached_tokens == cached
        assert client.tokens == eager_answers(PRESET, [prompt[:length]])[0]


def test_the_youngest_gives_way_and_goes_on_later() -> None:
    engine = make_engine(tokens=4 * PAGE)
    prompts = make_prompts(2 * PAGE - 5, 2 * PAGE - 4)
    assert engine.generate(prompts, [GREEDY] * 2) == eager_answers(PRESET, prompts)
    assert engine.scheduler.preemptions


def test_a_token_takes_one_row_in_each_layer() -> None:
    caches = make_engine(tokens=640).runner.caches
    assert [cache.rows.shape for cache in caches] == [(11, PAGE, 1, 576)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", MODELS)
def test_models_like_it_are_served(kind: str) -> None:
    """Other sizes of heads, with YaRN, and rotated pairs that are not neighbours."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    config = make_config(PRESET).to_dict()
    options = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn["original_max_position_embeddings"] = 512
    options |= {"rope_parameters": yarn, "rope_interleave": kind != "youtu", "qk_nope_head_dim": 96, "v_head_dim": 160}
    made: Any = CONFIG_MAPPING[kind](**options)
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(made), attn_implementation="paged_cache").eval()
    ours.load_state_dict(eager.state_dict())
    use_latents(ours)
    (prompt,) = make_prompts(150)
    given = torch.tensor([prompt])
    expected = eager.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=ANSWER, do_sample=False, eos_token_id=[]
    )
    engine = Engine(Runner(ours, Limits(140, 2, 256), CacheSettings(PAGE, 512)))
    assert engine.generate([prompt], [GREEDY]) == [expected[0, 150:].tolist()]


def test_other_page_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size is 8; allowed for latent attention: multiples of 64"):
        Runner(model(PRESET), Limits(16, 4, 256), CacheSettings(8, 640))


def test_no_gpu_is_refused_for_its_kind() -> None:
    """Each has a kernel that decodes latents, or `flash_mla_decode` says that it has none."""
    LatentLayout(torch.bfloat16).check(PAGE, torch.device("cuda"))


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256 and qk_rope_head_dim is 64; allowed: 512 and 64"),
        ({"qk_nope_head_dim": 256}, "qk_nope_head_dim is 256; allowed"),
    ],
)
def test_other_sizes_are_refused_by_name(sizes: dict[str, int], complaint: str) -> None:
    config = make_config(PRESET)
    for name, value in sizes.items():
        setattr(config, name, value)
    attention = copy.deepcopy(model(PRESET, "eager").model.layers[0].self_attn)
    with pytest.raises(ValueError, match=complaint):
        LatentAttention(attention, config)


def test_a_checkpoint_is_served(tmp_path: pathlib.Path) -> None:
    model(PRESET, "eager").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, CPU)
    assert isinstance(loaded.model.layers[0].self_attn, LatentAttention)  # type: ignore[union-attr,index]
    engine = Engine(Runner(loaded, Limits(300, 4, 256), CacheSettings(PAGE, 640)))
    assert engine.generate(PROMPTS[:2], [GREEDY] * 2) == eager_answers(PRESET, PROMPTS[:2])
