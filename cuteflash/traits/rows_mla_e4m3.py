"""Rows of the kernel that decodes latent attention from an e4m3 cache: the first that fits is taken.

Steps of 64 keys need the shared memory of Hopper; a tile of 32 rows and one of 16 fit into that of Ada, too.
"""

from __future__ import annotations

from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3

ROWS: tuple[MlaTraitsE4m3, ...] = (
    MlaTraitsE4m3(64, 64, least_rows=33, q_kept=0),
    MlaTraitsE4m3(32, 64, least_rows=17, q_kept=12),
    MlaTraitsE4m3(16, 64, num_warps=4, q_kept=28, chains=2, blocks_per_sm=2),
    MlaTraitsE4m3(32, 32, least_rows=17, num_warps=4, q_kept=12),
    MlaTraitsE4m3(16, 32, num_warps=4, q_kept=28, chains=2),
)
