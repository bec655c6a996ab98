"""The shipped rows: which traits run which forward problem on which target.

A row serves the head dims, padded up to `ROW_HEAD_DIMS`, that its traits are made for, and the mask kinds and dtypes it
names. Where no row is made for a pair (head_dim, head_dim_v), the square rows of the larger one lend their tile. The
first row whose traits pass `check` wins: a special row stands above the general one, a lender below. Tuning edits this
file and nothing else; it is no part of a compiled kernel's cache key.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cuteflash.problem import DTYPES, MASK_KINDS
from cuteflash.traits.arch import Family
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90

ROW_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class FwdRow:
    """One row; its head dims are those of its traits."""

    traits: FwdTraitsSm80 | FwdTraitsSm90
    masks: tuple[str, ...] = MASK_KINDS
    dtypes: tuple[str, ...] = DTYPES


ALL = MASK_KINDS
EVEN = ("full",)  # every query sees every key: one loop, with registers to spare
CAUSAL = ("causal",)
WINDOW = ("window",)  # two masked loops beside the plain one: the most registers


def _sm80(head_dim: int, tile_m: int, tile_n: int, num_warps: int, masks: tuple[str, ...] = ALL, **more: Any) -> FwdRow:
    return FwdRow(FwdTraitsSm80(tile_m, tile_n, head_dim, head_dim, num_warps=num_warps, **more), masks)


def _sm90(head_dim: int, tile_m: int, tile_n: int, masks: tuple[str, ...] = ALL, **more: Any) -> FwdRow:
    head_dim_v = more.pop("head_dim_v", head_dim)
    return FwdRow(FwdTraitsSm90(tile_m, tile_n, head_dim, head_dim_v, exp_rows_before_wait=1, **more), masks)


# Hopper. Three consumer warpgroups up to head dim 64, two beyond: the O accumulator grows with head_dim_v. Q stays in
# registers where they allow it. On the widest heads Q and O share their memory, which takes equal head dims; the
# smaller tile below lends itself to the rest.
SM90_ROWS = (
    _sm90(32, 192, 128, EVEN, q_in_regs=True),
    _sm90(32, 192, 112, q_in_regs=True),
    _sm90(64, 192, 128, EVEN, rescale_in_product=True),
    _sm90(64, 192, 96, q_in_regs=True, kv_stage=4),
    _sm90(96, 128, 128, q_in_regs=True),
    _sm90(128, 128, 128, q_in_regs=True),
    _sm90(160, 128, 96, EVEN, q_in_regs=True),
    _sm90(160, 128, 96),
    _sm90(192, 128, 112, head_dim_v=128, q_in_regs=True),  # multi-head latent attention
    _sm90(192, 128, 80, q_in_regs=True, rescale_in_product=True),
    _sm90(224, 128, 96, share_q_o=True, rescale_in_product=True),
    _sm90(224, 128, 64, rescale_in_product=True),
    _sm90(256, 128, 80, share_q_o=True, rescale_in_product=True),
    _sm90(256, 128, 48, rescale_in_product=True),
)

# A100, 163 KiB a block. Four warps on 128 rows read shared memory least, but run out of registers from head dim 96 on;
# so do windows (two masked loops) on wide heads.
SM80_ROWS = (
    _sm80(32, 128, 128, 8),
    _sm80(64, 128, 64, 4, EVEN, kv_stage=2, blocks_per_sm=2),
    _sm80(64, 128, 64, 4, CAUSAL, q_in_regs=True, blocks_per_sm=2),
    _sm80(64, 128, 64, 4, blocks_per_sm=2),
    _sm80(96, 128, 64, 8),
    _sm80(128, 64, 64, 4, kv_stage=2, q_in_regs=True, blocks_per_sm=2),
    _sm80(160, 128, 64, 8),
    _sm80(192, 128, 64, 8),
    _sm80(224, 64, 32, 4, WINDOW),
    _sm80(224, 128, 64, 8),
    _sm80(256, 64, 32, 4, WINDOW),
    _sm80(256, 128, 64, 8),
)

# The sm80 family on Hopper, 227 KiB a block: two blocks of the widest head fit into a multiprocessor.
SM80_ON_HOPPER_ROWS = (
    FwdRow(FwdTraitsSm80(128, 48, 128, 128, num_warps=4, kv_stage=2, blocks_per_sm=2), EVEN, ("bf16",)),
    _sm80(256, 64, 64, 4, EVEN + CAUSAL, blocks_per_sm=2, cutlass_symbol=True),
    *SM80_ROWS,
)

# RTX 30/40/50 and their workstation siblings, 99 KiB a block.
SM80_SMALL_SMEM_ROWS = (
    _sm80(32, 128, 128, 8),
    _sm80(64, 128, 64, 4, blocks_per_sm=2),
    _sm80(96, 128, 64, 8),
    _sm80(128, 64, 64, 4),
    _sm80(160, 64, 64, 4),
    _sm80(192, 128, 64, 8),
    _sm80(224, 64, 32, 4, WINDOW),
    _sm80(224, 64, 64, 4),
    _sm80(256, 64, 64, 4, EVEN),
    _sm80(256, 64, 32, 4),
)

FWD_ROWS: dict[tuple[str, Family], tuple[FwdRow, ...]] = {
    ("sm_90a", "sm90"): SM90_ROWS,
    ("sm_90a", "sm80"): SM80_ON_HOPPER_ROWS,
    ("sm_80", "sm80"): SM80_ROWS,
    ("sm_86", "sm80"): SM80_SMALL_SMEM_ROWS,
    ("sm_89", "sm80"): SM80_SMALL_SMEM_ROWS,
    ("sm_120", "sm80"): SM80_SMALL_SMEM_ROWS,
}
