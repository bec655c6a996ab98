"""The products of the quantising kernels, lane by lane: their own code on numpy arrays of a warp's 32 threads.

The instruction itself is emulated from PTX's tables of fragments, which say where a thread has which element.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import pytest
import torch

from cuteflash.kernels.common import quantize_centred, quantize_held, quantize_products, quantize_turn
from cuteflash.kernels.common.quantize_centred import add_tile, products_less_than_mean
from cuteflash.kernels.common.quantize_held import Held
from cuteflash.kernels.common.quantize_products import Identity, signs_of
from cuteflash.kernels.common.quantize_split import SplitTile
from cuteflash.kernels.common.quantize_tile import Tile
from cuteflash.kernels.common.quantize_turn import Turner
from cuteflash.problem import Dtype
from cuteflash.quantize_problem import QuantizeProblem
from tests.quantized import rotated

LANES = np.arange(32)
TORCH_TYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
ANY_COUNT = np.int32(1000)


def elements(words: Any, kind: str) -> np.ndarray:
    """Both numbers of pairs of 16 bits, the first one first."""
    bits = np.asarray(words, np.uint32).reshape(-1, 1).view(np.uint16).copy()
    return torch.from_numpy(bits.view(np.int16)).view(TORCH_TYPES[kind]).double().numpy()


def emulated(shape: str, c: Any, a: Any, b: Any, use: str = "") -> tuple[np.ndarray, ...]:
    """`mma.sync` of a warp: every thread's registers, by the tables of the PTX documentation."""
    assert shape.startswith("m16n8k16")
    kind = "bf16" if ".bf16." in shape else "fp16"
    g, t = LANES // 4, LANES % 4
    one = np.ones(32, np.uint32)
    left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i in range(4):
        sums[g + 8 * (i // 2), 2 * t + i % 2] = c[i]
    for i, words in enumerate(a):
        for half in range(2):
            left[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = elements(words * one, kind)[:, half]
    for i, words in enumerate(b):
        for half in range(2):
            right[2 * t + half + 8 * i, g] = elements(words * one, kind)[:, half]
    with np.errstate(invalid="ignore"):
        found = ((left[:, :, None] * right[None]).sum(1) + sums).astype(np.float32)
    return tuple(found[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4))


def half_of(pair: np.ndarray, b: int, dtype: str) -> np.ndarray:
    return elements(pair, dtype)[:, b].astype(np.float32)


def pair_of(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    low, high = (torch.from_numpy(x).to(TORCH_TYPES[dtype]).view(torch.int16).numpy().view(np.uint16) for x in (a, b))
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a thread's number, makes registers or is an instruction: the same for all threads of a warp."""
    monkeypatch.setattr(quantize_products, "place_of_lane", lambda: (LANES % 4, LANES // 4))
    monkeypatch.setattr(quantize_products, "product", emulated)
    for module in (quantize_held, quantize_turn):
        monkeypatch.setattr(module, "half_of", half_of)
    monkeypatch.setattr(quantize_turn, "pair_of", pair_of)
    monkeypatch.setattr(quantize_products.cutlass, "select_", np.where)
    registers = types.SimpleNamespace(
        make_rmem_tensor=lambda shape, dtype: np.empty(shape, object),
        size=lambda tensor: tensor.size,
    )
    for module in (quantize_turn, quantize_centred):
        monkeypatch.setattr(module, "cute", registers)
        monkeypatch.setattr(module, "Float32", np.float32)
    for module in (quantize_products, quantize_held):
        monkeypatch.setattr(module, "Uint32", lambda x: np.asarray(x).astype(np.int64).astype(np.uint32))
    monkeypatch.setattr(quantize_centred, "four_of", lambda mean, x: tuple(mean[4 * x : 4 * x + 4]))


def words_of(values: torch.Tensor, columns: np.ndarray) -> list[np.ndarray]:
    """Of each thread's 8 columns of its row, from `columns` on, the pairs: values are (threads, columns)."""
    bits = values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    own = [bits[LANES, columns + e] for e in range(8)]
    return [own[e] | own[e + 1] << np.uint32(16) for e in range(0, 8, 2)]


def normal(*shape: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(TORCH_TYPES[dtype])


class TurnerOfLanes(Turner):
    """With cosines and sines from arrays (threads, parts, 8) in place of shared memory."""

    def _table(self, i: Any, which: int, j: int) -> Any:
        table: Any = self.angles
        return [table[which][:, j, e] for e in range(8)]


def rotated_by_lanes(problem: QuantizeProblem, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """Rows by the threads of a warp, `head_dim / 16 / parts` to a row."""
    head_dim, rotary_dim = problem.head_dim, problem.rotary_dim
    parts = 2 if head_dim == rotary_dim and head_dim > 64 and not problem.rotary_interleaved else 1
    lanes = head_dim // 16 // parts
    place = {"first": 0, "last": 31, "lane": LANES % lanes, "quad": LANES // lanes, "is_own": True, "rows": 1}
    if problem.rotary_interleaved:
        tile = Tile(**place)  # type: ignore[arg-type]
    else:
        is_whole = head_dim == rotary_dim
        tile = SplitTile(**place, parts=parts, half=rotary_dim // 16, is_whole=is_whole, spacing=32 // lanes)  # type: ignore[arg-type]
    chunks = [np.asarray(chunk) for chunk in tile.chunks()]
    own = LANES // lanes
    words = np.empty((8 * parts, 1), object)
    for n, word in enumerate(word for chunk in chunks for word in words_of(x[own], chunk * 8)):
        words[n, 0] = word
    last = rotary_dim // 16 - 1
    columns = [np.minimum(LANES % lanes * parts + j, last) * 8 for j in range(parts)]
    tables = [
        np.stack([[table[own, c + e].numpy() for e in range(8)] for c in columns]).transpose(2, 0, 1)
        for table in (cos, sin)
    ]
    signs = signs_of(problem.dtype) if problem.hadamard else None
    turner = TurnerOfLanes(problem, tile, None, signs, tables)  # type: ignore[arg-type]
    held = turner.turned(words, None)  # type: ignore[arg-type]
    found = np.empty((len(x), head_dim))
    with np.errstate(invalid="ignore"):
        for row in range(parts):
            for w, four in enumerate(held.scaled(row, np.float32(problem.hadamard_scale))):  # type: ignore[arg-type]
                chunk, half = divmod(4 * row + w, 2)
                for e, value in enumerate(four):
                    found[own, chunks[chunk] * 8 + 4 * half + e] = value
    return found


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "hadamard", "is_interleaved"),
    [
        (64, 64, 64, False),
        (128, 128, 64, False),
        (64, 64, 0, False),
        (128, 64, 0, False),
        (128, 96, 0, False),
        (64, 64, 64, True),
        (128, 32, 0, True),
    ],
)
def test_rotated_rows_are_those_of_the_definition(
    head_dim: int, rotary_dim: int, hadamard: int, is_interleaved: bool, dtype: Dtype
) -> None:
    options: dict[str, Any] = {"hadamard": hadamard, "rotary_dim": rotary_dim, "rotary_interleaved": is_interleaved}
    problem = QuantizeProblem(dtype, head_dim, head_dim, **options)
    assert problem.keeps_angles and problem.splits_columns is not is_interleaved
    x = normal(8 if head_dim == 64 or rotary_dim == 128 else 4, head_dim, dtype=dtype)
    angles = torch.rand(len(x), rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    wanted, doubt = (
        part[0, :, 0].numpy() for part in rotated(x[None, :, None], hadamard or None, cos, sin, is_interleaved)
    )
    found = rotated_by_lanes(problem, x, cos, sin)
    assert (np.abs(found - wanted) <= 2.0**-20 * np.abs(wanted).max() + doubt).all()


@pytest.mark.parametrize("element", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_row(element: float) -> None:
    """One infinity becomes two by the embedding, and these are infinities with the matrix's signs, or NaN."""
    x = normal(8, 64, dtype="bf16")
    x[3, 9] = element
    cos, sin = torch.full((8, 32), 0.6), torch.full((8, 32), 0.8)
    wanted = rotated(x[None, :, None], 64, cos, sin)[0][0, 3, 0].numpy()
    found = rotated_by_lanes(QuantizeProblem("bf16", 64, 64, hadamard=64, rotary_dim=64), x, cos, sin)
    assert np.isfinite(found[np.arange(8) != 3]).all()
    assert not np.isfinite(wanted).any() and np.array_equal(found[3], wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_that_were_not_turned_are_rotated_as_well(dtype: Dtype) -> None:
    """Four threads have 16 columns each of a row."""
    x = normal(8, 64, dtype=dtype)
    words = np.empty((8, 1), object)
    for j in range(2):
        for w, word in enumerate(words_of(x[LANES // 4], LANES % 4 * 16 + 8 * j)):
            words[4 * j + w, 0] = word
    held = Held(words, None, dtype, 64, signs_of(dtype))  # type: ignore[arg-type]
    found = np.empty((8, 64))
    for w, four in enumerate(held.scaled(0, np.float32(0.125))):  # type: ignore[arg-type]
        for e, value in enumerate(four):
            found[LANES // 4, LANES % 4 * 16 + 4 * w + e] = value
    wanted = rotated(x[None, :, None], 64)[0][0, :, 0].numpy()
    assert np.abs(found - wanted).max() < 2.0**-20 * np.abs(wanted).max()
    sizes = [np.abs(a) + np.abs(b) for a, b in zip(*held.halves(0, 2, "peak"), strict=True)]
    column = LANES % 4 * 16 + 8
    for b, size in enumerate(sizes):
        larger = np.maximum(*(np.abs(found[LANES // 4, column + 2 * x + b]) for x in range(2)))
        assert np.array_equal(size / 8, larger)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_mean_minus_elements_and_their_sums_stay_with_their_thread(dtype: Dtype) -> None:
    values = [[normal(32, 8, dtype=dtype) * (1 + i + 4 * j) for j in range(2)] for i in range(4)]
    words = np.empty((8, 4), object)
    for i, j in itertools.product(range(4), range(2)):
        for w, word in enumerate(words_of(values[i][j].contiguous(), np.zeros(32, np.int64))):
            words[4 * j + w, i] = word
    held = Held(words, types.SimpleNamespace(last=ANY_COUNT), dtype)  # type: ignore[arg-type]
    mean = [np.full(32, 0.5 + e, np.float32) for e in range(16)]
    found = products_less_than_mean(held, mean)  # type: ignore[arg-type]
    sums = np.empty(16, object)
    sums[:] = [np.float32(0)] * 16
    add_tile(sums, held, Identity.of(dtype, ANY_COUNT))  # type: ignore[arg-type]
    for j, e in itertools.product(range(2), range(8)):
        own = [values[i][j][:, e].double().numpy() for i in range(4)]
        for i in range(4):
            assert np.allclose(found[e, i, j], mean[8 * j + e] - own[i], rtol=0, atol=2.0**-20)
        assert np.allclose(sums[8 * j + e], sum(own), rtol=0, atol=2.0**-18)
