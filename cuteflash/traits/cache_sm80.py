"""Traits of the sm80 family for 16-bit Q and an e4m3 cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cuteflash.problem import Feature
from cuteflash.traits.arch import ArchSpec
from cuteflash.traits.sm80 import MMA_K, PLAIN_FEATURES, SPLIT_FEATURES, FwdTraitsSm80, copy_rows

CONVERTING_CAPABILITY = 8, 9  # whose instructions convert e4m3; those that fill such a cache need it as well
COLUMNS_STEP = 2 * MMA_K  # ldmatrix moves so many as pairs of bytes, which two products read
P_OFFSET = 8.0
CACHE_FEATURES: frozenset[Feature] = PLAIN_FEATURES | {"e4m3_cache"}


@dataclasses.dataclass(frozen=True, slots=True)
class FwdTraitsCacheSm80(FwdTraitsSm80):
    """One way to run the sm80 forward kernel on e4m3 caches: as `FwdTraitsSm80`, with tiles of bytes of K and V."""

    merge_loads: ClassVar[int] = 8  # see `MERGE_LOADS`: fragments of converted elements leave fewer registers

    @property
    def p_offset(self) -> float:
        """P is multiplied with 2 to this power: below 2^-14 fp16 loses bits, which the bf16 of other kernels has."""
        return P_OFFSET

    @property
    def features(self) -> frozenset[Feature]:
        """Those that the kernel implements."""
        return CACHE_FEATURES | SPLIT_FEATURES if self.splits else CACHE_FEATURES

    @property
    def loaded_columns(self) -> tuple[int, int]:
        """See `FwdTraitsSm80.loaded_columns`."""
        return self.head_dim // 2, self.head_dim_v // 2

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        if arch.capability < CONVERTING_CAPABILITY:
            return f"{arch.name} has no instruction that converts e4m3; sm_89 is the first that has"
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) % COLUMNS_STEP:
                return f"{name} {getattr(self, name)} is not a multiple of {COLUMNS_STEP}"
        if not (self.eager_loads and self.async_copy and self.fused_softmax):
            return "e4m3 caches need eager_loads, async_copy and fused_softmax"
        for columns in self.loaded_columns:
            rows = copy_rows(self, columns)
            if self.tile_n % rows:
                return f"{self.num_threads} threads copy {rows} rows at once: tile_n {self.tile_n} is not a multiple"
        return FwdTraitsSm80.check(self, arch)
