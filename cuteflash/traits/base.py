"""What every kernel's traits have in common: padded head dims, shared-memory size, a reason why not."""

from __future__ import annotations

from typing import Protocol

from cuteflash.traits.arch import ArchSpec, Family

ELEMENT_BYTES = 2  # fp16 and bf16


class FwdTraits(Protocol):
    """A forward kernel's tunable numbers (frozen; implementations in `sm80.py` and `sm90.py`)."""

    @property
    def family(self) -> Family: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...

    def check(self, arch: ArchSpec) -> str | None:
        """None where the row can run on `arch`, else the reason in words."""
        ...


def ceil_to(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step
