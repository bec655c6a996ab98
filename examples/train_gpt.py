"""Trains a byte-level GPT with cuteflash's attention and with torch's, from the same seed, and compares the two.

    python examples/train_gpt.py                            # in miniature on a CPU, less than two minutes
    python examples/train_gpt.py --preset small --plot curves.png --json curves.json      # 10 million weights, on a GPU
    python examples/train_gpt.py --preset small --attention cuteflash --checkpoint run    # with --resume it continues
    python examples/train_gpt.py --preset small --attention cuteflash --fp8   # its loss with FP8 attention, too

The text is the source code of Python's standard library; a token is a byte. Ctrl-C saves a checkpoint if there is a
directory for it. The exit status is 1 if the loss curves do not agree within noise; gpt/curves.py says how that is
judged. It needs the packages of `pip install '.[bench]'`. On a CPU whose cores have other work, set OMP_NUM_THREADS=1:
torch's threads wait for each other in every operation, and a step then takes ten times as long or more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from gpt import corpus as corpora
from gpt import curves, fp8
from gpt.model import TorchMHA, sample
from gpt.settings import DEVICES, DTYPES, PRESETS, Settings
from gpt.training import History, Trainer, Watch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuteflash.cli.bar import progress_bar
from cuteflash.install import how_to_install
from cuteflash.nn import MHA
from cuteflash.output import check_directory, check_file, write_file
from cuteflash.tune.machine import versions

TORCHS, OURS = "sdpa", "cuteflash"
OVERRIDES = ("layers", "dim", "heads", "kv_heads", "context", "batch", "steps", "lr", "seed", "packed", "compile")
PROMPT, SAMPLED = b"def ", 160
NUDGED = "how often torch is trained again to measure the noise of rounding (default: 4)"


class Interrupt:
    """Notes Ctrl-C, so that a run ends between two steps; the second one ends the process at once."""

    pressed = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, *signalled: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if the loss curves do not agree; 130 after Ctrl-C. A wrong option raises SystemExit(2)."""
    parser = make_parser()
    options = parser.parse_args(argv)
    with errors_of(parser):
        settings = make_settings(options)
        if options.fp8:
            fp8.check(settings)
        check_outputs(options)
        corpus = corpora.read()
    names = [options.attention]
    if options.attention == "both":
        names = [TORCHS, *(f"{TORCHS} nudged {i + 1}" for i in range(options.nudged)), OURS]
    histories: dict[str, History] = {}
    interrupt = Interrupt()
    with interrupt.watching():
        for name in names:
            with errors_of(parser):
                trainer = make_trainer(name, settings, corpus, options)
            if not train(name, trainer, interrupt):
                return interrupted(name, trainer, options)
            histories[name] = trainer.history
    fp8_loss = validated_in_fp8(trainer) if options.fp8 else None
    return report(settings, corpus, histories, (continued(trainer), fp8_loss), options)


@contextlib.contextmanager
def errors_of(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A ValueError is a wrong option's."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_gpt", description="Trains a byte-level GPT with cuteflash and torch.")
    parser.add_argument("--attention", choices=(OURS, TORCHS, "both"), default="both")
    parser.add_argument("--nudged", type=int, default=4, metavar="N", help=NUDGED)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="of all that the next options replace")
    for name in ("layers", "dim", "heads", "kv-heads", "context", "batch", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int, metavar="N")
    parser.add_argument("--lr", type=float, metavar="RATE", help="the highest learning rate")
    parser.add_argument("--packed", action="store_const", const=True, help="pack documents with cu_seqlens")
    parser.add_argument("--compile", action="store_const", const=True, help="with torch.compile")
    parser.add_argument("--device", choices=DEVICES, help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="DIR", help="save checkpoints, a file for each run")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints that there are")
    parser.add_argument("--fp8", action="store_true", help="validate the last model with attention in FP8, too")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write all measurements")
    parser.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="draw the loss curves")
    return parser


def make_settings(options: argparse.Namespace) -> Settings:
    """The preset with what the options replace. ValueError if one is not allowed."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no GPU; allowed here: cpu")
    replaced = {name: getattr(options, name) for name in OVERRIDES if getattr(options, name) is not None}
    dtype = options.dtype or ("bf16" if device == "cuda" else "fp32")
    settings = dataclasses.replace(PRESETS[options.preset], device=device, dtype=dtype, **replaced)
    if options.heads is not None and options.kv_heads is None:
        settings = dataclasses.replace(settings, kv_heads=options.heads)
    settings.check()
    return settings


def check_outputs(options: argparse.Namespace) -> None:
    """ValueError if a file could not be written when the training is over."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"plot is given, but matplotlib, which draws it, is missing; {how_to_install('bench')}")
    for path in (options.json, options.plot):
        if path is not None:
            check_file(path)
    if options.checkpoint is not None:
        check_directory(options.checkpoint)
    elif options.resume:
        raise ValueError("resume is given without checkpoint; allowed with the directory of the checkpoints")
    if options.nudged <= 0:
        raise ValueError(f"nudged is {options.nudged}; allowed: positive numbers")
    if options.checkpoint_every <= 0:
        raise ValueError(f"checkpoint-every is {options.checkpoint_every}; allowed: positive numbers")


def make_trainer(name: str, settings: Settings, corpus: corpora.Corpus, options: argparse.Namespace) -> Trainer:
    """The trainer of a run, resumed if that is asked for and it has a checkpoint."""
    file = None if options.checkpoint is None else options.checkpoint / f"{name.replace(' ', '-')}.pt"
    trainer = Trainer(
        settings,
        corpus,
        MHA if name == OURS else TorchMHA,
        nudged=int(name.rpartition("nudged")[2]) if "nudged" in name else 0,
        checkpoint=file,
        every=options.checkpoint_every,
    )
    if options.resume and file is not None and file.is_file():
        trainer.resume()
    return trainer


def train(name: str, trainer: Trainer, interrupt: Interrupt) -> bool:
    """Train with a progress bar; False if interrupted."""
    with progress_bar() as bar, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        task = bar.add_task(name, total=trainer.settings.steps, completed=trainer.steps_done)

        def progress(history: History) -> None:
            text = f"{name}: loss {history.losses[-1]:.3f}, {history.rates[-1]:,.0f} tokens/s"
            bar.update(task, completed=len(history.losses), description=text)

        return trainer.run(Watch(lambda: interrupt.pressed, progress))


def interrupted(name: str, trainer: Trainer, options: argparse.Namespace) -> int:
    """Say what became of the run."""
    saved = f"{options.checkpoint} has it; continue with --resume" if options.checkpoint else "nothing was saved"
    print(f"train_gpt: interrupted after {trainer.steps_done} steps of {name}; {saved}", file=sys.stderr)
    return 130


def continued(trainer: Trainer) -> str:
    """A few bytes of what the model writes."""
    with trainer.autocast():
        written = sample(trainer.model, PROMPT, SAMPLED, trainer.settings.seed)
    return written.decode(errors="replace")


def validated_in_fp8(trainer: Trainer) -> float:
    """The validation loss with attention in FP8."""
    with fp8.inference(trainer.model):
        return trainer.validate()


def report(
    settings: Settings,
    corpus: corpora.Corpus,
    histories: Mapping[str, History],
    last: tuple[str, float | None],
    options: argparse.Namespace,
) -> int:
    """Print the results, and write the files that were asked for.

    `last`: of the last model, what it writes, and its validation loss with attention in FP8 if that was asked for.
    """
    text, fp8_loss = last
    torchs = [history for name, history in histories.items() if name != OURS]
    judgement = curves.judge(histories[OURS], torchs) if OURS in histories and torchs else None
    gpu = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
    console = Console()
    console.print(table(histories))
    if fp8_loss is not None:
        name, history = list(histories.items())[-1]
        trained = history.validation[-1][1]
        console.print(f"\n{name}, attention in FP8: validation loss {fp8_loss:.4f}, {fp8_loss - trained:+.4f} nats")
    console.print(f"\n{text}\n", style="dim", markup=False, highlight=False)
    if judgement is not None:
        console.print(str(judgement), style="green" if judgement.agree else "red", markup=False, highlight=False)
    if options.json is not None:
        result: dict[str, Any] = {
            "environment": {"gpu": gpu, "versions": versions()},
            "settings": dataclasses.asdict(settings),
            "corpus": {
                "documents": corpus.documents,
                "training_bytes": len(corpus.training),
                "validation_bytes": len(corpus.validation),
                "digest": corpus.digest,
            },
            "runs": {name: dataclasses.asdict(history) for name, history in histories.items()},
            "judgement": judgement
            and dataclasses.asdict(judgement) | {"allowed": judgement.allowed, "agree": judgement.agree},
            "sample": text,
            "fp8_validation": fp8_loss,
        }
        write_file(options.json, json.dumps(result) + "\n")
    if options.plot is not None:
        shape = f"{settings.layers} layers of {settings.dim}, context {settings.context}, {settings.dtype}"
        curves.plot(histories, options.plot, f"Loss of a byte-level GPT, {shape}, {gpu}")
    return 0 if judgement is None or judgement.agree else 1


def table(histories: Mapping[str, History]) -> Table:
    """A row for each run."""
    found = Table(box=None, pad_edge=False)
    found.add_column("attention")
    for column in ("training loss", "validation loss", "tokens/s", "ms a step", "peak memory"):
        found.add_column(column, justify="right")
    for name, history in histories.items():
        last = history.losses[-10:]
        found.add_row(
            name,
            f"{sum(last) / len(last):.4f}",
            f"{history.validation[-1][1]:.4f}",
            f"{median(history.rates):,.0f}",
            f"{median(history.step_ms):.1f}",
            f"{history.peak_bytes / 2**20:,.0f} MiB" if history.peak_bytes else "-",
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
