"""The training loop of one model: steps, validation, timing, checkpoints that resume bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuteflash.files import replace_file
from cuteflash.nn import MHA
from cuteflash.output import make_directory

from .corpus import Batch, Batches, Corpus
from .model import GPT, nudge
from .settings import Settings

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BETAS, WEIGHT_DECAY, GRADIENT_NORM = (0.9, 0.95), 0.1, 1.0
WARM_UP, FINAL_LR = 0.05, 0.1  # of the steps; of the highest learning rate
BLOCK_STEPS = 10  # steps between two looks at the losses, each of which synchronises with the GPU
VALIDATION_BATCHES, VALIDATIONS = 8, 10  # batches of one validation; validations of one run


@dataclasses.dataclass(slots=True)
class History:
    """What a run has measured so far.

    Attributes:
        losses: of every training batch, before its step, nats a byte.
        validation: (steps done, loss on the held-out batches).
        rates, step_ms: tokens a second and milliseconds a step of each block of steps; the first of a process includes
            compilation.
        peak_bytes: the most that tensors took on the GPU; 0 on a CPU.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """What a run asks and tells while it trains.

    Attributes:
        stopped: asked between steps; if true, the run saves a checkpoint and ends.
        progress: told the history after each block of steps.
    """

    stopped: Callable[[], bool] = lambda: False
    progress: Callable[[History], None] = lambda history: None


class Trainer:
    """A model, its optimiser and its history.

    Args:
        settings: of the run.
        corpus: what it reads.
        attention: `cuteflash.nn.MHA` or a subclass.
        nudged: if not 0, initial weights are nudged with this seed.
        checkpoint: the file to save to every `every` steps, at the end and if stopped; None saves nothing.
        every: steps between checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        attention: type[MHA],
        *,
        nudged: int = 0,
        checkpoint: pathlib.Path | None = None,
        every: int = 100,
    ) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.model = GPT(settings, attention)
        if nudged:
            nudge(self.model, TORCH_DTYPES[settings.dtype], nudged)
        self.model.to(self.device)
        self.history = History()
        if settings.compile:
            torch.compiler.reset()  # what was compiled for another run has that run's attention
        self._forward = torch.compile(self.model) if settings.compile else self.model
        self._optimiser = torch.optim.AdamW(_groups(self.model), lr=settings.lr, betas=BETAS, fused=True)
        self._scaler = torch.amp.GradScaler(settings.device, enabled=settings.dtype == "fp16")
        of_batches = settings.context, settings.batch, settings.seed, settings.packed
        self._training = Batches(corpus.training, *of_batches)
        self._validation = Batches(corpus.validation, *of_batches)
        self._digest = corpus.digest
        self._checkpoint, self._every = checkpoint, every

    @property
    def steps_done(self) -> int:
        return len(self.history.losses)

    def run(self, watch: Watch) -> bool:
        """Train until the last step; False if stopped before."""
        settings = self.settings
        if self._on_gpu:
            gc.collect()  # what an earlier run left is not part of this one's peak
            torch.cuda.reset_peak_memory_stats()
        while self.steps_done < settings.steps and not watch.stopped():
            self._block(watch)
            watch.progress(self.history)
            if self.steps_done % _validation_interval(settings) == 0 or self.steps_done == settings.steps:
                self.history.validation.append((self.steps_done, self.validate()))
            if self.steps_done % self._every == 0:
                self.save()
        if self.steps_done % self._every:
            self.save()
        return self.steps_done == settings.steps

    def _block(self, watch: Watch) -> None:
        """Steps up to the next one after which something else happens."""
        settings, begin = self.settings, self.steps_done
        intervals = (BLOCK_STEPS, self._every, _validation_interval(settings))
        end = min(settings.steps, *(begin - begin % interval + interval for interval in intervals))
        losses: list[Tensor] = []
        tokens, started = 0, time.perf_counter()
        for step in range(begin, end):
            batch = self._training.at(step)
            losses.append(self._step(step, batch.to(self.device)))
            tokens += batch.inputs.numel()
            if watch.stopped():
                break
        found = torch.stack(losses).tolist()
        seconds = time.perf_counter() - started
        self.history.rates.append(tokens / seconds)
        self.history.step_ms.append(1000 * seconds / len(losses))
        self.history.losses += found
        if self._on_gpu:
            self.history.peak_bytes = max(self.history.peak_bytes, torch.cuda.max_memory_allocated())
        if not all(map(math.isfinite, found)):
            raise FloatingPointError(f"the loss of step {begin} or one of the next {len(found) - 1} is not finite")

    def _step(self, step: int, batch: Batch) -> Tensor:
        for group in self._optimiser.param_groups:
            group["lr"] = learning_rate(self.settings, step)
        loss = self._loss(batch)
        self._optimiser.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self._optimiser)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        with self.autocast():
            logits = self._forward(batch.inputs, batch.cu_seqlens)
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the run."""
        dtype = TORCH_DTYPES[self.settings.dtype]
        return torch.autocast(self.settings.device, dtype, enabled=dtype != torch.float32)

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the first held-out batches, nats a byte."""
        batches = (self._validation.at(step).to(self.device) for step in range(VALIDATION_BATCHES))
        return float(torch.stack([self._loss(batch) for batch in batches]).mean())

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if self._checkpoint is None:
            return
        state = {
            "settings": dataclasses.asdict(self.settings),
            "corpus": self._digest,
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "scaler": self._scaler.state_dict(),
            "generators": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if self._on_gpu else [])],
            "history": dataclasses.asdict(self.history),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        make_directory(self._checkpoint.parent)
        replace_file(self._checkpoint, buffer.getvalue())

    def resume(self) -> None:
        """Continue from the checkpoint; the position in the data is the number of steps done.

        Raises:
            ValueError: the checkpoint is of another run.
        """
        if self._checkpoint is None:
            raise ValueError("resume needs a checkpoint")
        state = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        difference = self.settings.difference(state["settings"])
        if difference is None and state["corpus"] != self._digest:
            difference = f"the corpus is {self._digest}, and was {state['corpus']}"
        if difference:
            raise ValueError(f"{self._checkpoint} is of another run: {difference}")
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._scaler.load_state_dict(state["scaler"])
        cpu, *gpus = state["generators"]
        torch.set_rng_state(cpu)
        if self._on_gpu:
            torch.cuda.set_rng_state_all(gpus)
        self.history = History(**state["history"])

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine."""
    warm_up = max(1, round(WARM_UP * settings.steps))
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def _groups(model: GPT) -> list[dict[str, Any]]:
    """Parameters with and without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def _validation_interval(settings: Settings) -> int:
    return max(1, settings.steps // VALIDATIONS)
