"""How a forward result is judged, on any device: a textbook reference, poisoned outputs, every element compared.

Errors against fp32 are compared with those of the same computation done by torch in the low precision. An output passes
if its largest error is at most twice torch's, plus the rounding of an addition at 0.3, and the root mean square of its
errors is at most one and a half times torch's. The reference builds the whole score matrix, element by element from the
definition of the mask, and shares nothing with the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import cuteflash
from cuteflash.tune.inputs import of_kind

# A language model in miniature, with grouped heads of 64 columns: arguments of transformers' LlamaConfig.
SMALL_LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
RUNS = 1000  # of what has to repeat


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `flash_attn_func`.

    Inputs are normal, `logits` multiplies Q, and `kind` makes them others (see `cuteflash.tune.inputs`), with a sink's
    key at `place`.
    """

    seqlen_q: int = 128
    seqlen_k: int | None = None
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bf16"
    batch: int = 2
    heads: int = 3
    kv_heads: int | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    pack_gqa: bool | None = None
    lse: bool = False
    logits: float = 1.0
    kind: str = "plain"
    place: int = 0
    attention_chunk: int = 0

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}={getattr(self, f.name)}".replace(" ", "") for f in changed) or "default"

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh Q, K and V, contiguous."""
        generator = torch.Generator(device).manual_seed(seed)
        seqlen_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        kv_heads, head_dim_v = self.kv_heads or self.heads, self.head_dim_v or self.head_dim
        shapes = (
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, seqlen_k, kv_heads, self.head_dim),
            (self.batch, seqlen_k, kv_heads, head_dim_v),
        )
        q, k, v = (torch.randn(shape, device=device, generator=generator) for shape in shapes)
        dtype = DTYPES[self.dtype]
        q, k, v = of_kind(self.kind, q * self.logits, k, v, self.scale, self.place)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    @property
    def bounds(self) -> tuple[int, int]:
        """Keys that a query sees before its own and after it, -1 for all."""
        left, right = self.window
        return left, 0 if self.causal else right

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attn_func`, without `family`."""
        return {
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "attention_chunk": self.attention_chunk,
            "pack_gqa": self.pack_gqa,
            "return_lse": self.lse,
        }


def visible(seqlen_q: int, seqlen_k: int, case: Case, device: torch.device) -> Tensor:
    """bool (seqlen_q, seqlen_k), True where a query sees a key."""
    left, right = case.bounds
    position = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if case.attention_chunk:
        seen &= key // case.attention_chunk == position // case.attention_chunk
    return seen


def reference(q: Tensor, k: Tensor, v: Tensor, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O (batch, seqlen_q, heads, head_dim_v) and LSE (batch, heads, seqlen_q), every step in `dtype`, as fp32."""
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if case.scale is None else case.scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # (b, h, s, d)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q * scale) @ k.transpose(2, 3)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    seen = visible(q.shape[2], k.shape[2], case, q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)  # an empty row's softmax is NaN
    return (weights @ v).transpose(1, 2).float(), torch.logsumexp(scores.float(), dim=-1)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every uninitialised tensor made inside with NaN, so that an element nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def call(q: Tensor, k: Tensor, v: Tensor, case: Case, family: str) -> tuple[Tensor, Tensor | None]:
    """O, and LSE where the case asks for it, from the public function into poisoned memory."""
    with poisoned(), torch.no_grad():
        result = cuteflash.flash_attn_func(q, k, v, family=family, **case.options())
    return result if case.lse else (result, None)


def rms(x: Tensor) -> float:
    """Root mean square of all elements."""
    return x.double().square().mean().sqrt().item()


def low_precision_errors(low: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """What torch's own result in the low precision is off by: the largest error, and the rms of all.

    If one key takes all the weight, torch copies a value and is off by nothing. Rounding such values costs about a
    quarter of the type's epsilon, in root mean squares; a fifth of that is the least that counts as torch's error, and
    half an epsilon then as its largest one.
    """
    error, eps = (low - exact).abs(), torch.finfo(dtype).eps
    least = eps / 20 * rms(exact)
    if rms(error) >= least:
        return error.max().item(), rms(error)
    return max(error.max().item(), eps / 2 * exact.abs().max().item()), least


def assert_right(inputs: tuple[Tensor, Tensor, Tensor], case: Case, out: Tensor, lse: Tensor | None = None) -> None:
    """Shapes, dtypes and every element of a result."""
    q, _, v = inputs
    exact, exact_lse = reference(*inputs, case, torch.float32)
    low, _ = reference(*inputs, case, q.dtype)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert_close_to(out, exact, low)
    if lse is not None:
        assert_lse_close_to(lse, exact_lse, case)


def assert_repeats(
    first: tuple[Tensor, ...],
    run: Callable[[], tuple[Tensor, ...]],
    names: tuple[str, ...] = ("dq", "dk", "dv"),
    runs: int = RUNS,
) -> None:
    """Every run gives what the first one gave, bit for bit: `runs` with it on a GPU, one more on a CPU."""
    differ = [torch.zeros_like(x, dtype=torch.bool) for x in first]
    counts, unwritten = torch.zeros(2, len(first), dtype=torch.int32, device=first[0].device)
    for _ in range(runs - 1 if counts.is_cuda else 1):
        for i, (x, y) in enumerate(zip(run(), first, strict=True)):
            changed = x != y
            differ[i] |= changed
            counts[i] += changed.any()  # not looked at before the end: runs follow each other without a gap
            unwritten[i] += x.isnan().any()
    for name, count, holes, where in zip(names, counts.tolist(), unwritten.tolist(), differ, strict=False):
        places = where.nonzero()
        spread = [len(places[:, mode].unique()) for mode in range(places.shape[1])]
        assert not count, (
            f"{name}: {count} runs, {holes} with NaN, give something else at {len(places)} places, from "
            f"{places[0].tolist()} to {places[-1].tolist()}, in {spread} of {list(where.shape)}"
        )


def assert_close_to(out: Tensor, exact: Tensor, low: Tensor) -> None:
    """Every element of a result, given the same in fp32 and as torch computes it in the result's precision."""
    assert torch.isfinite(out).all(), f"{(~torch.isfinite(out)).sum().item()} elements are not finite"
    low_error, low_rms = low_precision_errors(low, exact, out.dtype)
    tolerance = 2 * low_error + 2 * (exact + 0.3 - 0.3 - exact).abs().max().item()
    difference = (out.float() - exact).abs()
    worst = difference.max().item()
    where = tuple(x.item() for x in torch.unravel_index(difference.argmax(), difference.shape))
    assert worst <= tolerance, f"error {worst:.3e} at {where}, allowed {tolerance:.3e}"
    error = rms(difference)
    assert error <= 1.5 * low_rms, f"rms error {error:.3e}, {error / low_rms:.2f} times torch's own; allowed 1.5"


def assert_lse_close_to(lse: Tensor, exact: Tensor, case: Case) -> None:
    """Every element of a log-sum-exp."""
    assert lse.shape == exact.shape
    assert lse.dtype == torch.float32
    # The hardware's tanh is good to 2^-11, relatively.
    torch.testing.assert_close(lse, exact, atol=1e-3 + 1e-3 * case.softcap, rtol=1e-4)


def check(case: Case, family: str, device: torch.device, seed: int = 0) -> None:
    """Run a case on fresh inputs and judge it."""
    inputs = case.inputs(device, seed)
    out, lse = call(*inputs, case, family)
    assert_right(inputs, case, out, lse)
