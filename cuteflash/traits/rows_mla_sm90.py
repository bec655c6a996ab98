"""Rows of the kernel that decodes latent attention on Hopper: the first that fits is taken.

Query tiles of a sequence read the same pages at the same time, out of L2. Two blocks that load them for each other
(`cluster=2`) are 1 % slower, for they wait for each other, too.
"""

from __future__ import annotations

from cuteflash.traits.mla_sm90 import MlaTraitsSm90

ROWS: tuple[MlaTraitsSm90, ...] = (MlaTraitsSm90(),)
