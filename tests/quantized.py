"""What quantising Q, K and V to FP8 should give, from its definition in fp64, element by element.

It shares nothing with the package. The tests of the reference and those of the kernels compare with it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuteflash import quantize_qkv
from cuteflash.quantize import QuantizedQKV

FP8 = torch.float8_e4m3fn
LARGEST, BLOCK = 448.0, 128
SUM_ERROR = 6e-7  # of sums in fp32 over a row, relative to its largest element
DESCALE_ERROR = 2e-6
ROTARY_ERROR = 2.0**-22  # of a rotary embedding in fp32, relative to the magnitudes of what it adds


def data(
    seqlen: int = 300,
    seqlen_k: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal Q, K and V; V's columns have means."""
    generator = torch.Generator(device).manual_seed(0)
    keys = seqlen if seqlen_k is None else seqlen_k
    shapes = (batch, seqlen, heads, head_dim), (batch, keys, kv_heads, head_dim)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device)
        for shape in (*shapes, (batch, keys, kv_heads, head_dim_v or head_dim))
    )
    return q.to(dtype), k.to(dtype), (v + torch.linspace(-2, 2, v.shape[-1], device=device)).to(dtype)


def tables(seqlen: int, rotary_dim: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> dict[str, Tensor]:
    """Cosines and sines as arguments of `quantize_qkv`."""
    positions = torch.arange(seqlen, device=device)[:, None]
    angles = positions * 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    return {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}


def rotated(
    x: Tensor,
    hadamard: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Q or K after its rotations, fp64, and by how much each may be off.

    An embedding's result is rounded to the element type of `x`, and may be either way if it is near a tie.
    """
    dtype, x = x.dtype, x.double()
    doubt = torch.zeros_like(x)
    if rotary_cos is not None and rotary_sin is not None:
        half = rotary_cos.shape[1]
        step = 2 if rotary_interleaved else 1
        first = torch.arange(half, device=x.device) * step
        second = first + (1 if rotary_interleaved else half)
        cos, sin = (table[: x.shape[1]].double()[:, None] for table in (rotary_cos, rotary_sin))
        a, b = x[..., first], x[..., second]
        x = x.clone()
        for columns, value, size in (
            (first, a * cos - b * sin, (a * cos).abs() + (b * sin).abs()),
            (second, a * sin + b * cos, (a * sin).abs() + (b * cos).abs()),
        ):
            low, high = ((value + way * ROTARY_ERROR * size).to(dtype).double() for way in (-1, 1))
            x[..., columns] = value.to(dtype).double()
            doubt[..., columns] = (high - low).nan_to_num(0.0, 0.0, 0.0)
    if hadamard:
        matrix = torch.tensor(
            [[(-1.0) ** (i & j).bit_count() for j in range(hadamard)] for i in range(hadamard)], dtype=torch.float64
        )
        blocks = x.unflatten(-1, (x.shape[-1] // hadamard, hadamard))
        x = (blocks @ matrix.to(x.device) / hadamard**0.5).flatten(-2)
        of_blocks = doubt.unflatten(-1, (-1, hadamard)).sum(-1) / hadamard**0.5
        doubt = of_blocks.repeat_interleave(hadamard, -1)
    return x, doubt


def wanted_descale(x: Tensor, kv_heads: int, by_block: bool, dtype: torch.dtype = FP8) -> Tensor:
    """The descale of exact values."""
    batch, seqlen, heads, _ = x.shape
    magnitudes = torch.where(x.isfinite(), x.abs(), 0.0)
    blocks = [slice(i, i + BLOCK) for i in range(0, seqlen, BLOCK)] if by_block else [slice(0, seqlen)]
    result = torch.ones(batch, kv_heads, len(blocks), dtype=torch.float64, device=x.device)
    group = heads // kv_heads
    for head, (i, block) in itertools.product(range(kv_heads), enumerate(blocks)):
        part = magnitudes[:, block, head * group : (head + 1) * group].flatten(1)
        peak = part.amax(1) if part.shape[1] else part.new_zeros(batch)
        result[:, head, i] = torch.where(peak > 0, (peak / torch.finfo(dtype).max).clamp_min(2.0**-126), 1.0)
    return result if by_block else result[..., 0]


def of_elements(descale: Tensor, x: Tensor) -> Tensor:
    """The descale of each element, (batch, seqlen, heads, 1)."""
    heads = torch.arange(x.shape[2], device=x.device) // max(x.shape[2] // descale.shape[1], 1)
    if descale.dim() == 2:
        return descale[:, None, heads, None].double()
    rows = torch.arange(x.shape[1], device=x.device) // BLOCK
    return descale[:, heads][:, :, rows].transpose(1, 2)[..., None].double()


@functools.cache
def numbers(device: torch.device, dtype: torch.dtype) -> Tensor:
    """All finite numbers of a type of 8 bits, ascending."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return every[every.isfinite()].unique().to(device)


def natural(vt: Tensor, seqlen: int) -> Tensor:
    """V of V^T; checks what pads it."""
    order = [0] * 16  # key → position
    for t, j, b in itertools.product(range(4), range(2), range(2)):
        order[8 * j + 2 * t + b] = 4 * t + 2 * j + b
    keys = vt.shape[3]
    assert keys == -(-seqlen // BLOCK) * BLOCK
    bits = vt.view(torch.uint8).unflatten(3, (keys // 16, 16))[..., order].flatten(3)
    assert not bits[..., seqlen:].any()
    return bits[..., :seqlen].permute(0, 3, 1, 2).contiguous().view(vt.dtype)


def assert_nearest(name: str, found: Tensor, exact: Tensor, doubt: Tensor, descale: Tensor) -> None:
    """Each e4m3 is the one nearest to its value, or either one near a tie; NaN for NaN."""
    wanted = exact / of_elements(descale, exact)
    assert torch.equal(found.float().isnan(), wanted.isnan()), f"{name}: NaN"
    largest = torch.finfo(found.dtype).max
    wanted = wanted.nan_to_num(0.0, largest, -largest).clamp(-largest, largest)
    values = found.double().nan_to_num(0.0)
    grid = numbers(found.device, found.dtype)
    above = torch.searchsorted(grid, wanted).clamp(1, len(grid) - 1)
    nearest = torch.minimum((wanted - grid[above - 1]).abs(), (grid[above] - wanted).abs())
    slack = SUM_ERROR * wanted.abs().amax(-1, keepdim=True).clamp_min(2.0**-9)
    slack = slack + 2 * doubt / of_elements(descale, exact)  # of what is rounded, and of how near it is
    wrong = (values - wanted).abs() > nearest + slack
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


def check(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> QuantizedQKV:
    """Call `quantize_qkv` and compare all of its result; returns that."""
    result = quantize_qkv(q, k, v, **options)
    judge(result, q, k, v, **options)
    return result


def judge(result: QuantizedQKV, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Compare all of a result with its definition."""
    rotations = {name: x for name, x in options.items() if name == "hadamard" or name.startswith("rotary")}
    exact_q, exact_k = (rotated(x, **rotations) for x in (q, k))
    exact_v = v.double()
    if options.get("smooth_v"):
        assert result.v_mean is not None
        finite = torch.where(exact_v.isfinite(), exact_v, 0.0)
        mean = finite.sum(1) / max(v.shape[1], 1)
        largest = finite.abs().amax(1) if v.shape[1] else mean
        assert ((result.v_mean.double() - mean).abs() <= 1e-6 * largest).all()
        exact_v = exact_v - result.v_mean[:, None].double()
    if result.vt is None:
        assert result.v is not None
        found_v = result.v
    else:
        assert result.v is None
        found_v = natural(result.vt, v.shape[1])
    exact_of_v = exact_v, torch.zeros_like(exact_v)
    found = {"q": (result.q, *exact_q), "k": (result.k, *exact_k), "v": (found_v, *exact_of_v)}
    for name, (values, exact, doubt) in found.items():
        descale = getattr(result, f"{name}_descale")
        given = options.get(f"{name}_descale")
        if given is None:
            by_block = options.get("granularity") == "block"
            low, high = (
                wanted_descale(size, k.shape[2], by_block, values.dtype)
                for size in ((exact.abs() - doubt).clamp_min(0.0), exact.abs() + doubt)
            )
            assert ((descale >= low * (1 - DESCALE_ERROR)) & (descale <= high * (1 + DESCALE_ERROR))).all(), name
        else:
            assert descale is given
        assert values.dtype == options.get("dtype", FP8) and values.shape == exact.shape
        assert_nearest(name, values, exact, doubt, descale)


def check_packed(
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Sequence[int], Sequence[int]],
    used: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    **options: Any,
) -> QuantizedQKV:
    """Call `quantize_qkv` with packed sequences; each is what it is alone, and all else is 0. Returns the result.

    Args:
        tensors: Q, K and V, (rows, heads, head_dim).
        lengths: of the sequences of Q and of K.
        used: how many of their rows count.
        options: of the call; descales that are given are packed, too.
    """
    device = tensors[0].device
    vectors = {
        f"cu_seqlens_{side}": torch.tensor([0, *itertools.accumulate(some)], dtype=torch.int32, device=device)
        for side, some in zip("qk", lengths, strict=True)
    }
    for side, count in zip("qk", used, strict=True):
        vectors |= {} if count is None else {f"seqused_{side}": torch.tensor(count, dtype=torch.int32, device=device)}
    result = quantize_qkv(*tensors, **vectors, **options)
    by_block = options.get("granularity") == "block"
    counted = [torch.zeros(len(x), dtype=torch.bool, device=device) for x in tensors]
    keys = torch.zeros(0 if result.vt is None else result.vt.shape[2], dtype=torch.bool, device=device)
    begins = [list(itertools.accumulate(some, initial=0)) for some in lengths]
    for i in range(len(lengths[0])):
        parts, blocks = [], []
        for begin, some, count in zip(begins, lengths, used, strict=True):
            rows = some[i] if count is None else count[i]
            parts.append(slice(begin[i], begin[i] + rows))
            first = begin[i] // BLOCK + i
            blocks.append(slice(first, first - (-rows // BLOCK)))
        of_q, of_k = parts
        for rows, part in zip(counted, (of_q, of_k, of_k), strict=True):
            rows[part] = True

        def descale(x: Tensor, block: slice, i: int = i) -> Tensor:
            return x[:, :, block] if by_block else x[i : i + 1]

        of_vt = slice(blocks[1].start * BLOCK, blocks[1].stop * BLOCK)
        alone = QuantizedQKV(
            q=result.q[None, of_q],
            k=result.k[None, of_k],
            v=None if result.v is None else result.v[None, of_k],
            vt=None if result.vt is None else result.vt[None, ..., of_vt],
            q_descale=descale(result.q_descale, blocks[0]),
            k_descale=descale(result.k_descale, blocks[1]),
            v_descale=descale(result.v_descale, blocks[1]),
            v_mean=None if result.v_mean is None else result.v_mean[i : i + 1],
        )
        own = options | {name: getattr(alone, name) for name in options if name.endswith("_descale")}
        judge(alone, *(x[None, part] for x, part in zip(tensors, (of_q, of_k, of_k), strict=True)), **own)
        if result.vt is not None:
            keys[of_vt] = True
    for x, rows in zip((result.q, result.k, result.v), counted, strict=True):
        if x is not None:
            assert not x.view(torch.uint8)[~rows].any()
    if result.vt is not None:
        assert not result.vt.view(torch.uint8)[..., ~keys].any()
    return result
