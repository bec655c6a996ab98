"""What every kernel's traits have in common: padded head dims, a shared-memory plan, a check against an arch."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

from cuteflash.core.workspace import Workspace
from cuteflash.problem import Feature, Operation
from cuteflash.traits.arch import ArchSpec, Family

MERGE_LOADS = 32  # that a thread has in flight when it merges parts of a tile whose keys are split


@dataclasses.dataclass(frozen=True, slots=True)
class SmemRegion:
    """The place of one tensor in a block's shared memory; regions that are never live together may overlap.

    Attributes:
        start: byte offset.
        nbytes: bytes of all its stages together.
        stages: equal tiles that follow each other.
    """

    start: int
    nbytes: int
    stages: int = 1

    @property
    def end(self) -> int:
        """The first byte after the region."""
        return self.start + self.nbytes


class SharedTraits(Protocol):
    """What any traits say of a block's shared memory."""

    @property
    def smem_bytes(self) -> int: ...


class FwdTraits(SharedTraits, Protocol):
    """A forward kernel's tunable numbers (frozen; implementations in `sm80.py` and `sm90.py`).

    Attributes:
        element_bytes: of Q, K and V.
        dtypes: the element types of Q, K and V that the kernel takes.
    """

    operation: ClassVar[Operation]
    family: ClassVar[Family]
    element_bytes: ClassVar[int]
    dtypes: ClassVar[tuple[str, ...]]
    max_head_dim: ClassVar[int]

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
    def features(self) -> frozenset[Feature]: ...
    @property
    def smem_plan(self) -> dict[str, SmemRegion]: ...

    def check(self, arch: ArchSpec) -> str | None:
        """None if the row can run on `arch`, else the reason in words."""
        ...


class BwdTraits(FwdTraits, Protocol):
    """A backward kernel's tunable numbers.

    Attributes:
        first_stores: the first block that comes to a tile of dQ stores what the others add to; otherwise the sum is
            cleared before the kernel.
        early_launch: the kernels of a call begin where those before them end (programmatic dependent launch).
        turns_at_once: so many blocks of a head run at the same time in a deterministic call, if there are enough heads:
            fewer wait less for their turn at its dQ, but more heads take more of L2. 0 is any number.
        persistent: a block works on many tiles of a dense batch.
        lone_tiles: the only block of a sequence whose keys are one tile, and whose queries all see a key, stores dQ
            itself: nothing is summed up in memory.
        lone_blocks: such a block needs nothing prepared either.
        held_dq: a block takes all key tiles of a KV head of a dense batch, one after the other, and holds dQ of so many
            query tiles, if there are no more, until it stores it; 0 is none.
        in_turn: blocks add to a tile of dQ of a dense batch in a fixed order, as in deterministic calls.
        last_rounds: a block that finds that all others have added to a tile of dQ rounds and stores it.
    """

    first_stores: ClassVar[bool]
    early_launch: ClassVar[bool]

    @property
    def turns_at_once(self) -> int: ...
    @property
    def persistent(self) -> bool: ...
    @property
    def lone_tiles(self) -> bool: ...
    @property
    def lone_blocks(self) -> bool: ...
    @property
    def held_dq(self) -> int: ...
    @property
    def in_turn(self) -> bool: ...
    @property
    def last_rounds(self) -> bool: ...

    def workspace(self, batch: Any, heads: Any, seqlen_q: Any) -> Workspace:
        """The fp32 workspace of a call, for Python ints or traced values."""
        ...

    def workspace_packed(self, batch: Any, heads: Any, rows: Any) -> Workspace:
        """The same of `batch` packed sequences, in tensors of `rows` queries."""
        ...


def head_dims_complaint(traits: FwdTraits, arch: ArchSpec, step: int) -> str | None:
    """What speaks against a family on `arch`, or against head dims that have to be multiples of `step`."""
    if traits.family not in arch.families:
        return f"{arch.name} does not run the {traits.family} family"
    for name in ("head_dim", "head_dim_v"):
        value = getattr(traits, name)
        if value % step or not 0 < value <= traits.max_head_dim:
            return f"{name} {value} is not a multiple of {step} up to {traits.max_head_dim}"
    return None


def memory_complaint(traits: SharedTraits, arch: ArchSpec) -> str | None:
    """What speaks against the shared memory of a block."""
    if traits.smem_bytes > arch.smem_per_block:
        return f"needs {traits.smem_bytes} bytes of shared memory, {arch.name} has {arch.smem_per_block}"
    return None


def plan_bytes(plan: dict[str, SmemRegion]) -> int:
    """Bytes of shared memory that a plan takes."""
    return max(region.end for region in plan.values())
