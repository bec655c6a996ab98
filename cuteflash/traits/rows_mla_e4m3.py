"""Rows of the kernel that decodes latent attention from an e4m3 cache: the first that fits is taken.

Steps of 64 keys need the shared memory of Hopper, where launches may overlap, too; those of 32 fit into Ada's.
"""

from __future__ import annotations

from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3

ROWS: tuple[MlaTraitsE4m3, ...] = (
    MlaTraitsE4m3(64, 64, least_rows=33, trades_rows=True, q_kept=0, early_launch=True),
    MlaTraitsE4m3(32, 64, least_rows=17, trades_rows=True, q_kept=10, early_launch=True),
    MlaTraitsE4m3(16, 64, num_warps=4, q_kept=28, chains=2, blocks_per_sm=2, early_launch=True),
    MlaTraitsE4m3(32, 32, least_rows=17, k_parts=2, q_kept=8),
    MlaTraitsE4m3(16, 32, num_warps=4, kv_stage=3, k_parts=2, q_kept=18),
)
