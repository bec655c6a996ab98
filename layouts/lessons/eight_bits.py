"""The lesson on 8-bit operands: the order of keys that makes P an operand, and what sums of 8-bit products lose."""

from __future__ import annotations

from typing import Any

import torch

from cuteflash.dispatch import Choice, choose_shipped
from cuteflash.problem import E4M3_MAX, FwdProblem
from cuteflash.reference.fp8 import GROUP, permuted_keys
from cuteflash.reference.fp8_accumulator import FRACTION_BITS, PRODUCTS, accumulate
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90

HEAD_DIM = 128
TARGET = "sm_90a"
LENGTHS = (128, 512, 2048, 8192, 16384)  # keys of the sums
LEVEL = 128  # keys after which a sum in two levels starts anew
ROWS, COLUMNS = 4, 4  # of the sums' output


def fp8_row() -> tuple[FwdProblem, str, Choice]:
    """The shipped row of full attention that turns V as it is stored."""
    problem = FwdProblem.dense("e4m3", HEAD_DIM, HEAD_DIM)
    return problem, TARGET, choose_shipped(problem, TARGET, "sm90")


def row_traits() -> FwdTraitsFp8Sm90:
    """Traits of that row."""
    _, _, choice = fp8_row()
    if not isinstance(choice.traits, FwdTraitsFp8Sm90):
        raise TypeError(f"the 8-bit row of head dim {HEAD_DIM} has traits {choice.traits!r}")
    return choice.traits


def losses() -> list[dict[str, float]]:
    """By number of keys, the share of P V that is lost: in one level, and with a new sum every `LEVEL` keys.

    P is uniform between 0 and 1, V has a mean of 1 as its spread; both are e4m3, so that products are exact.
    """
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(ROWS, LENGTHS[-1], generator=generator).to(torch.float8_e4m3fn).double()
    v = (1 + torch.randn(COLUMNS, LENGTHS[-1], generator=generator)).to(torch.float8_e4m3fn).double()
    one = two = exact = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    found, zero = [], torch.zeros_like(exact)
    for start in range(0, LENGTHS[-1], LEVEL):
        part = slice(start, start + LEVEL)
        one, two = accumulate(one, p[:, part], v[:, part]), two + accumulate(zero, p[:, part], v[:, part])
        exact = exact + p[:, part] @ v[:, part].T
        if part.stop in LENGTHS:
            shares = [((sums - exact).norm() / exact.norm()).item() for sums in (one, two)]
            found.append({"keys": part.stop, "one": round(shares[0], 6), "two": round(shares[1], 6)})
    return found


def fp8_data() -> dict[str, Any]:
    """The key at each position of a group, the sums' losses, and the numbers of the shipped row and the hardware."""
    return {
        "keys": permuted_keys(torch.arange(GROUP)).tolist(),
        "losses": losses(),
        "level": LEVEL,
        "products": PRODUCTS,
        "fraction_bits": FRACTION_BITS,
        "offset_log2": row_traits().p_offset,
        "largest": int(E4M3_MAX),
    }
