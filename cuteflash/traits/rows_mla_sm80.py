"""Rows of the kernel that decodes latent attention on Ampere and Ada: the first that fits is taken.

Tiles of 64 rows and steps of 64 keys need the shared memory of sm_80; with that of Hopper less of Q has to be kept in
registers, of which ptxas needs more there.
"""

from __future__ import annotations

from cuteflash.traits.mla_sm80 import MlaTraitsSm80

ROWS: tuple[MlaTraitsSm80, ...] = (
    MlaTraitsSm80(64, 32, least_rows=33, kv_stage=3, k_parts=2, overlap=True, q_kept=2, chains=1),
    MlaTraitsSm80(64, 32, least_rows=33, kv_stage=3, k_parts=2, overlap=True, q_kept=4, chains=1),
    MlaTraitsSm80(32, 64, least_rows=17, k_parts=2, q_kept=9, chains=1),
    MlaTraitsSm80(32, 32, least_rows=17, k_parts=2, q_kept=9, chains=1),
    MlaTraitsSm80(16, 64, chains=4),
    MlaTraitsSm80(16, 32, num_warps=4, q_kept=14),
)
