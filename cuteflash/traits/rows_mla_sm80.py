"""Rows of the kernel that decodes latent attention with mma.sync: the first that fits is taken.

Tiles of 64 rows and steps of 64 keys need the shared memory of sm_80, and launches that overlap need Hopper, for which
a kernel of 64 rows takes more registers.
"""

from __future__ import annotations

from cuteflash.traits.mla_sm80 import MlaTraitsSm80

ROWS: tuple[MlaTraitsSm80, ...] = (
    MlaTraitsSm80(64, 32, least_rows=33, k_parts=2, q_kept=5, early_launch=True),
    MlaTraitsSm80(64, 32, least_rows=33, k_parts=2, q_kept=6),
    MlaTraitsSm80(32, 64, least_rows=17, k_parts=2, q_kept=9, early_launch=True),
    MlaTraitsSm80(32, 64, least_rows=17, k_parts=2, q_kept=9),
    MlaTraitsSm80(32, 32, least_rows=17, k_parts=2, q_kept=9),
    MlaTraitsSm80(16, 64, chains=2, early_launch=True),
    MlaTraitsSm80(16, 64, chains=2),
    MlaTraitsSm80(16, 32, num_warps=4, q_kept=14, chains=2),
)
