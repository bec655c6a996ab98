"""Serves a language model over HTTP with continuous batching, a paged K/V cache and cuteflash's attention.

    python examples/serve.py --preset tiny                       # random weights, in miniature, also on a CPU
    python examples/serve.py --model /models/llama --port 8000   # a local checkpoint, on a GPU
    curl localhost:8000/v1/completions -d '{"prompt": "Hello", "max_tokens": 8, "stream": true}'

Any client of OpenAI's completions and chat completions can talk to it. docs/engine.md says how it works. It needs the
packages of `pip install '.[serve]'`.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys
from collections.abc import Sequence

import torch
import uvicorn
from serving.engine import Engine
from serving.presets import PRESETS, load_model, make_model
from serving.runner import CacheSettings, Runner
from serving.scheduler import Limits
from serving.text import ByteTokenizer, HubTokenizer, Tokenizer
from serving.web import Served, make_app

SWITCH_SECONDS = 5e-4  # for which connections may keep the engine's thread waiting, once its step is done
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C; returns 0. A wrong option raises SystemExit(2)."""
    parser = make_parser()
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        served = make_served(options)
    except ValueError as error:
        parser.error(str(error))
    sys.setswitchinterval(SWITCH_SECONDS)
    served.engine.start()
    try:
        uvicorn.run(make_app(served), host=options.host, port=options.port, timeout_graceful_shutdown=5)
    finally:
        served.engine.stop()
    return 0


def make_parser() -> argparse.ArgumentParser:
    limits, cache = Limits(), CacheSettings()
    parser = argparse.ArgumentParser(prog="serve", description="Serves a language model over HTTP with cuteflash.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=pathlib.Path, metavar="DIR", help="a checkpoint of transformers")
    source.add_argument("--preset", choices=PRESETS, help="random weights; tokens are bytes")
    parser.add_argument("--name", help="of the model, as clients call it (default: the directory's, or the preset's)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--length", type=int, help="tokens of a request, at most (default: 4096, or the model's)")
    parser.add_argument("--requests", type=int, default=limits.requests, help="that run at the same time")
    parser.add_argument("--waiting", type=int, default=limits.waiting, help="requests that wait, at most")
    parser.add_argument("--batch-tokens", type=int, default=limits.batch_tokens, help="that a step computes, at most")
    parser.add_argument("--page-size", type=int, default=cache.page_size, help="tokens of a page of the cache")
    parser.add_argument("--cache-tokens", type=int, help="of the cache (default: what the GPU's memory allows)")
    parser.add_argument("--memory", type=float, default=cache.memory, help="part of the GPU's memory that is used")
    parser.add_argument("--no-prefixes", action="store_true", help="compute every prompt anew")
    parser.add_argument("--no-graphs", action="store_true", help="use no CUDA graphs")
    return parser


def make_served(options: argparse.Namespace) -> Served:
    """The engine with its model. ValueError if an option is not allowed."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU; allowed here: cpu")
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    if device.type == "cuda" and dtype is torch.float32:
        raise ValueError("dtype is fp32; allowed on a GPU: bf16, fp16")
    tokenizer: Tokenizer
    if options.preset is not None:
        model, tokenizer, name = make_model(options.preset, dtype, device), ByteTokenizer(), options.preset
    else:
        model = load_model(options.model, dtype, device)
        tokenizer, name = HubTokenizer(options.model, model), options.model.resolve().name
    runner = Runner(model, make_limits(options, model), make_cache(options))
    if device.type == "cuda" and not options.no_graphs:
        for rows, tokens in runner.capture():
            print(f"captured a step of {rows} rows and {tokens} tokens", file=sys.stderr)
    return Served(Engine(runner), tokenizer, options.name or name)


def make_limits(options: argparse.Namespace, model: torch.nn.Module) -> Limits:
    """The engine's limits; without an option, requests are as long as the model allows, up to the default."""
    length = options.length
    if length is None:
        length = min(Limits().length, getattr(model.config, "max_position_embeddings", Limits().length))
    return Limits(options.batch_tokens, options.requests, length, options.waiting)


def make_cache(options: argparse.Namespace) -> CacheSettings:
    return CacheSettings(options.page_size, options.cache_tokens, options.memory, not options.no_prefixes)


if __name__ == "__main__":
    sys.exit(main())
