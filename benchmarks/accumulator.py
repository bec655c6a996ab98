"""Measures what the tensor cores keep of a sum of 8-bit products, and compares it with the project's model.

    python -m benchmarks.accumulator

A chain of WGMMA computes C + A Bᵀ from e4m3 operands into fp32. From sums of powers of two it shows how many fraction
bits are kept, whether the rest is cut or rounded, whether C loses bits even if A is 0, and how many products are
aligned together. On random operands the result is compared bit for bit with `cuteflash.reference.fp8_accumulator`. The
exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuteflash.compile import compiled
from cuteflash.reference.fp8_accumulator import FRACTION_BITS, PRODUCTS, accumulate
from cuteflash.tune.timing import first_call

from .command import current_gpu
from .implementations import target_of

TARGET = "sm_90a"
FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 64, 8  # of the smallest instruction
EXPONENT = 12  # of the large terms: a product of two 64s
FP32_BITS = 23
CHAINS = ((0, 32), (3, 32), (3, 256), (6, 1024))  # of random operands: how far their exponents spread, their products

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]  # C (64, 8) fp32, A (64, k), B (8, k) e4m3 → C + A Bᵀ


class Findings(NamedTuple):
    """What a sum of 8-bit products keeps.

    Attributes:
        fraction_bits: below the leading one of the largest term.
        truncates: what lies below them is cut toward zero, in every term by itself.
        cuts_c: C is cut even if all products are 0.
        products: aligned together, to the largest of them and of C; 0 is more than 256.
        equal: of each of `CHAINS` the share of results that the model predicts bit for bit.
    """

    fraction_bits: int
    truncates: bool
    cuts_c: bool
    products: int
    equal: tuple[float, ...]

    @property
    def as_modelled(self) -> bool:
        """Whether the model describes these tensor cores."""
        return self == Findings(FRACTION_BITS, True, True, PRODUCTS, (1.0,) * len(CHAINS))


def probe(multiply: Multiply) -> Findings:
    """What sums that `multiply` computes keep."""
    large = 2.0**EXPONENT

    def total(c: float, products: Sequence[float], places: Sequence[int] | None = None, k: int = PRODUCTS) -> float:
        """C plus products at given places of a chain."""
        a, b = torch.zeros(ROWS, k), torch.zeros(COLUMNS, k)
        for place, product in zip(places or range(len(products)), products, strict=True):
            a[:, place], b[:, place] = _factors(product)
        found = multiply(torch.full((ROWS, COLUMNS), c), a.to(FP8), b.to(FP8))
        if not bool((found == found[0, 0]).all()):
            raise RuntimeError(f"equal sums differ: {c} + {list(products)}")
        return found[0, 0].item()

    seen = [j for j in range(1, FP32_BITS + 1) if total(large, [large / 2**j]) != large]
    bits = max(seen, default=0)
    unit = large / 2**bits
    below = [total(large, [0.75 * unit]), total(large, [-0.75 * unit]), total(large, [unit / 2] * 16)]
    cut_c = total(large + unit / 2, [])
    groups = [2**i for i in range(1, 9)]
    kept = [place for place in groups if total(0.0, [large, -large, unit / 8], (0, 1, place), 2 * groups[-1]) != 0]
    return Findings(
        fraction_bits=bits,
        truncates=all(sum_ == large for sum_ in below),
        cuts_c=bits < FP32_BITS and cut_c == large,
        products=min(kept, default=0),
        equal=tuple(_equal(multiply, spread, k) for spread, k in CHAINS),
    )


def _factors(product: float) -> tuple[float, float]:
    """Two e4m3 numbers with this product: one a power of two, the other in [1, 2) times a power of two."""
    mantissa, exponent = torch.frexp(torch.tensor(product))
    first = int(exponent.item()) // 2
    return 2.0**first, mantissa.item() * 2.0 ** (int(exponent.item()) - first)


def _equal(multiply: Multiply, spread: int, k: int) -> float:
    """The share of a random product that is what the model predicts."""
    generator = torch.Generator().manual_seed(k)

    def operand(rows: int) -> Tensor:
        scale = torch.randint(-spread, spread + 1, (rows, k), generator=generator)
        return (torch.randn(rows, k, generator=generator) * torch.exp2(scale)).to(FP8)

    a, b = operand(ROWS), operand(COLUMNS)
    c = torch.randn(ROWS, COLUMNS, generator=generator) * 8
    return float((multiply(c, a, b).double() == accumulate(c, a.float(), b.float())).double().mean())


def on_gpu(device: torch.device) -> Multiply:
    """The product of a GPU's tensor cores."""
    from .accumulator_kernel import AccumulatorProbe, Shape  # imports the compiler

    shape = Shape(ROWS, COLUMNS)
    kernel = compiled(AccumulatorProbe, shape, shape, TARGET)

    def multiply(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        given = [x.to(device) for x in (c, a.view(torch.uint8), b.view(torch.uint8))]

        def run(calls: int) -> Tensor:
            out = torch.full_like(given[0], float("nan"))
            for _ in range(calls):
                kernel(out, *given)
            return out

        return first_call(run, device).cpu()

    return multiply


def describe(found: Findings) -> str:
    """The findings in words."""
    chains = zip(CHAINS, found.equal, strict=True)
    return "\n".join(
        [
            f"fraction bits kept of a sum's largest term: {found.fraction_bits}",
            f"what lies below is {'cut toward zero, in each term' if found.truncates else 'not just cut'}",
            f"C {'is cut, too, even if A is 0' if found.cuts_c else 'keeps its bits if A is 0'}",
            f"products that are aligned together: {found.products}",
            *(
                f"random chain of {k} products, exponents spread by {spread}: {share:.2%} as modelled, bit for bit"
                for (spread, k), share in chains
            ),
            f"the model of {FRACTION_BITS} bits, cut, {PRODUCTS} products, "
            f"{'describes' if found.as_modelled else 'DOES NOT describe'} these tensor cores",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the model differs, 2 without a Hopper GPU, else 0."""
    about = "what a sum of 8-bit products keeps"
    argparse.ArgumentParser(prog=f"python -m {__package__}.accumulator", description=about).parse_args(argv)
    device = current_gpu("the accumulator")
    if device is None:
        return 2
    if target_of(device) != TARGET:
        print(f"measuring the accumulator needs {TARGET}; this GPU is {target_of(device)}", file=sys.stderr)
        return 2
    found = probe(on_gpu(device))
    print(f"{torch.cuda.get_device_name(device)}\n{describe(found)}")
    return 0 if found.as_modelled else 1


if __name__ == "__main__":
    sys.exit(main())
