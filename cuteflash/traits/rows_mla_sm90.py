"""Rows of the kernel that decodes latent attention on Hopper: the first that fits is taken.

Query tiles of a sequence read the same pages; two blocks that load them for each other halve what they ask of L2.
"""

from __future__ import annotations

from cuteflash.traits.mla_sm90 import MlaTraitsSm90

ROWS: tuple[MlaTraitsSm90, ...] = (
    MlaTraitsSm90(cluster=2),
    MlaTraitsSm90(),
)
