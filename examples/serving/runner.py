"""The model with its cache: one call computes a step, and chooses the next tokens.

Steps are replayed from CUDA graphs. If every row has one token, there is a graph for each of a few numbers of rows;
otherwise for each of a few numbers of tokens. A graph's further rows have tokens that go to a scratch page, or none. A
step may be launched before the chosen tokens of the one before have been read: it takes them from where that one leaves
them on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from serving.caches import Layout, Probe, Step
from serving.pages import PagePool
from serving.sampling import sample
from serving.scheduler import Chunk, Limits
from serving.staging import Staging

LAYER_TYPES = ("full_attention", "sliding_attention")
SHARED_ROPE = ("dynamic", "longrope")  # their frequencies depend on the longest sequence of a call


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache's size.

    Attributes:
        page_size: tokens of a page.
        tokens: that it holds at least; None is 65,536 on a CPU, and on a GPU what `memory` allows.
        memory: the part of the GPU's memory that model, activations and cache may take.
        keeps_prefixes: whether the pages of a prefix are found again.
    """

    page_size: int = 64
    tokens: int | None = None
    memory: float = 0.85
    keeps_prefixes: bool = True

    def check(self) -> None:
        """Raise ValueError if a value is not allowed."""
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; allowed: positive numbers")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}; allowed: positive numbers")
        if not 0 < self.memory < 1:
            raise ValueError(f"memory is {self.memory}; allowed: between 0 and 1")


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A captured step of `staging.rows` rows and `staging.tokens` tokens."""

    graph: torch.cuda.CUDAGraph
    staging: Staging
    logits: Tensor


class Chosen:
    """The tokens that a step chooses, on their way to the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._rows = 0

    def copy(self, tokens: Tensor) -> None:
        """Begin to bring (rows,) int32 to the host."""
        self._rows = tokens.shape[0]
        self._host[: self._rows].copy_(tokens, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def tolist(self) -> list[int]:
        """Wait for the step; the token of each row."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host[: self._rows].tolist()
        return tokens


class Runner:
    """A model and its pages.

    Args:
        model: a causal language model of transformers, in evaluation mode, whose attention is `attention.NAME`.
        limits: of the engine.
        cache: the cache's size.

    Raises:
        ValueError: the model is not supported, a size is not allowed, or there is no memory for the cache.
    """

    def __init__(self, model: torch.nn.Module, limits: Limits, cache: CacheSettings) -> None:
        limits.check()
        cache.check()
        config: Any = model.config
        _check_supported(config)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and limits.length > longest:
            raise ValueError(f"length is {limits.length}; allowed: up to {longest}, the model's positions")
        self.model, self.limits = model, limits
        self.vocabulary: int = config.vocab_size
        self.device = next(model.parameters()).device
        width = -(-limits.length // cache.page_size)
        self._staging = Staging(limits.batch_tokens, limits.requests, width, self.device)
        self._tokens = torch.zeros(limits.requests, dtype=torch.int32, device=self.device)  # chosen by the last step
        self._chosen = [Chosen(limits.requests, self.device) for _ in range(2)]  # a step begins before one is read
        layouts = self._probe()
        for layout in set(layouts):
            layout.check(cache.page_size, self.device)
        pages = 1 + self._pages(layouts, cache)
        self.pool = PagePool(pages, cache.page_size, cache.keeps_prefixes)
        with torch.inference_mode():
            self.caches = [layout.make(pages, cache.page_size, self.device) for layout in layouts]
        self._captures_prompts = all(layout.captures_prompts for layout in layouts)
        self._graphs: dict[tuple[int, int], Graph] = {}  # by rows and tokens

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Chosen:
        """Begin to compute the chunks.

        Returns:
            The token that follows each, to be read before the call after the next one.
        """
        rows, count = len(chunks), sum(chunk.count for chunk in chunks)
        graph = self._graph_for(rows, count)
        staging = self._staging if graph is None else graph.staging
        staging.fill(chunks, rows if graph is None else staging.rows, spare=int(count == rows))
        if graph is None:
            starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
            logits = self._take_greedy(self._forward(staging, starts, counts))
        else:
            graph.graph.replay()
            logits = graph.logits[:rows]
        tokens = self._tokens[:rows]
        if staging.draws:
            rest = staging.temperature[:rows], staging.top_p[:rows], staging.uniform[:rows]
            tokens.copy_(sample(logits.float(), *rest, cuts=staging.cuts))
        self._chosen.reverse()
        self._chosen[0].copy(tokens)
        return self._chosen[0]

    def _take_greedy(self, logits: Tensor) -> Tensor:
        """Leave the most probable token of each row where the next step finds it; returns `logits`."""
        self._tokens[: logits.shape[0]].copy_(logits.argmax(dim=-1))
        return logits

    @torch.inference_mode()
    def capture(self) -> Iterator[tuple[int, int]]:
        """Capture the graphs, the largest first; yields the rows and the tokens of each that is done."""
        torch.cuda.empty_cache()  # graphs have memory of their own
        pool = torch.cuda.graph_pool_handle()
        for rows, tokens in reversed(self.sizes()):
            self._graphs[rows, tokens] = self._capture(rows, tokens, pool)
            yield rows, tokens

    def sizes(self) -> list[tuple[int, int]]:
        """Rows and tokens of the graphs, ascending: of rows with one token each, then of any with all rows."""
        most = self.limits.requests
        sizes = [(rows, rows) for rows in buckets(most)]
        if self._captures_prompts:
            sizes += [(most, tokens) for tokens in token_buckets(self.limits.batch_tokens) if tokens > most]
        return sizes

    def _replayable(self, rows: int, tokens: int) -> tuple[Staging, Callable[[], Tensor]]:
        """A buffer, and the step of what will be in it; returns the logits. See `Step` of starts and counts."""
        staging = Staging(tokens, rows, self._staging.page_table.shape[1], self.device)
        staging.fill([], rows, spare=int(tokens == rows))
        counts = [1] * rows if tokens == rows else [0] * (rows - 1) + [tokens]
        starts = [max(self.limits.length - count, 0) for count in counts]
        return staging, lambda: self._take_greedy(self._forward(staging, starts, counts))

    def _capture(self, rows: int, tokens: int, pool: Any) -> Graph:
        staging, forward = self._replayable(rows, tokens)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and makes what libraries allocate once
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = forward()
        return Graph(graph, staging, logits)

    def _graph_for(self, rows: int, tokens: int) -> Graph | None:
        """The smallest graph that a step fits into, one for rows of one token each if it has no others."""
        of_one = rows == tokens
        fitting = [size for size in self._graphs if size[0] >= rows and size[1] >= tokens]
        smallest = min((size for size in fitting if (size[0] == size[1]) == of_one), default=None)
        return None if smallest is None else self._graphs[smallest]

    def _forward(self, staging: Staging, starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The logits after the last token of each row, (rows, vocabulary); see `Step` of starts and counts."""
        rows, tokens = len(counts), sum(counts)
        step = Step(
            staging.positions[:tokens],
            staging.cu_seqlens[: rows + 1],
            staging.cached[:rows],
            staging.used[:rows],
            staging.page_table[:rows],
            starts,
            counts,
            self.caches,
        )
        return self._logits(staging, rows, tokens, step)

    def _logits(self, staging: Staging, rows: int, tokens: int, step: Step | Probe) -> Tensor:
        ids = staging.ids[:tokens]
        ids = torch.where(ids < 0, self._tokens[(-1 - ids).clamp(min=0)], ids)
        output = self.model(
            input_ids=ids[None],
            position_ids=staging.positions[None, :tokens],
            use_cache=False,
            logits_to_keep=staging.last[:rows],
            step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _probe(self) -> list[Layout]:
        """The layers' layouts, found by the largest step that there can be, without attention."""
        probe = Probe()
        self._logits(self._staging, self.limits.requests, self.limits.batch_tokens, probe)
        if not probe.layouts or sorted(probe.layouts) != list(range(len(probe.layouts))):
            raise ValueError(
                f"{type(self.model).__name__} has layers whose attention does not go through transformers' attention "
                "interface; allowed: decoders in which that of all layers does"
            )
        return [probe.layouts[index] for index in range(len(probe.layouts))]

    def _pages(self, layouts: Sequence[Layout], cache: CacheSettings) -> int:
        """Pages of the cache, without the scratch page."""
        tokens = cache.tokens
        if tokens is None and self.device.type == "cuda":
            size = torch.cuda.get_device_properties(self.device).total_memory
            room = size * cache.memory - torch.cuda.max_memory_reserved(self.device)
            tokens = int(room) // sum(layout.bytes_per_token for layout in layouts) // cache.page_size * cache.page_size
            if tokens < self.limits.length:
                raise ValueError(
                    f"memory is {cache.memory}, which leaves the cache room for {max(tokens, 0)} tokens; allowed: what "
                    f"leaves room for the {self.limits.length} tokens of the longest request"
                )
        return -(-(65536 if tokens is None else tokens) // cache.page_size)


def buckets(requests: int) -> list[int]:
    """Rows of the graphs for up to `requests` rows, ascending."""
    sizes = [1, 2, 4, *range(8, min(requests, 64), 8), *range(64, requests, 32)]
    return [*(size for size in sizes if size < requests), requests]


def token_buckets(batch_tokens: int) -> list[int]:
    """Tokens of the graphs of steps with prompts, ascending: every eighth of the most that a step has."""
    return [-(-batch_tokens * part // 8) for part in range(1, 9)]


def _check_supported(config: Any) -> None:
    """Raise ValueError if requests of a batch would not be independent, or a layer is not attention."""
    strange = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if strange:
        raise ValueError(f"the model has layers of type {', '.join(sorted(strange))}; allowed: {LAYER_TYPES}")
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in SHARED_ROPE:
            raise ValueError(
                f"the model's rope_type is {kind}: its frequencies depend on the longest sequence of a call, "
                "so that requests would change each other's answers; allowed: types with fixed frequencies"
            )


def _rope_types(parameters: Any) -> Iterator[str]:
    """Types of rotary embeddings; a configuration has one, or one for each type of layer."""
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)
