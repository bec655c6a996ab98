"""Rows of the kernel that decodes latent attention on Hopper: the first that fits is taken."""

from __future__ import annotations

from cuteflash.traits.mla_sm90 import MlaTraitsSm90

ROWS: tuple[MlaTraitsSm90, ...] = (MlaTraitsSm90(),)
