"""Rows of the kernel that decodes latent attention on Hopper: the first that fits is taken.

Query tiles of a sequence read the same pages at the same time, out of L2 (docs/performance.md, "Latent attention").
"""

from __future__ import annotations

from cuteflash.traits.mla_sm90 import MlaTraitsSm90

ROWS: tuple[MlaTraitsSm90, ...] = (MlaTraitsSm90(),)
