"""Where the blocks of launches that split keys begin: what that depends on, and the launch that computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from cuteflash.compile import compiled
from cuteflash.core.split_slots import metadata_size
from cuteflash.problem import MaskKind
from cuteflash.schedule_problem import ScheduleProblem, ScheduleScalars
from cuteflash.traits.schedule import ScheduleTraits


def kernel_of(problem: ScheduleProblem, target: str) -> Callable[..., object]:
    """The compiled kernel of a problem."""
    from cuteflash.kernels.common.split_schedule import SplitSchedule  # imports the compiler

    return compiled(SplitSchedule, ScheduleTraits(), problem, target)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of launches on one device, whatever the lengths.

    Attributes:
        blocks: of a launch; 0 if it does not split keys.
        mask: of the calls.
        scalars: see there.
        target: of the device.
    """

    blocks: int
    mask: MaskKind
    scalars: ScheduleScalars
    target: str

    @property
    def size(self) -> int:
        """Words of the metadata."""
        return metadata_size(self.blocks)

    def compute(self, seqused_k: Tensor, cu_seqlens_q: Tensor | None, cache_leftpad: Tensor | None) -> Tensor:
        """The metadata of sequences of these lengths, (size,) int32, by a launch on the current stream."""
        metadata = torch.empty(self.size, dtype=torch.int32, device=seqused_k.device)
        if self.size:
            problem = ScheduleProblem(self.mask, cu_seqlens_q is not None, cache_leftpad is not None)
            kernel_of(problem, self.target)(metadata, seqused_k, cu_seqlens_q, cache_leftpad, *self.scalars)
        return metadata

    def check(
        self, metadata: Tensor, seqused_k: Tensor, cu_seqlens_q: Tensor | None, cache_leftpad: Tensor | None
    ) -> None:
        """Raise ValueError if metadata are not those of these lengths. Waits for the device."""
        if not torch.equal(metadata, self.compute(seqused_k, cu_seqlens_q, cache_leftpad)):
            raise ValueError(
                "scheduler_metadata is not what get_scheduler_metadata returns for the lengths, sizes and options of "
                "this call; allowed: that, computed after the lengths were set"
            )


def check_metadata_size(metadata: Tensor | None, size: int) -> None:
    """Raise ValueError if metadata, if any, do not have the size of those of a call."""
    if metadata is not None and metadata.shape[0] != size:
        what = "the size" if size else "none, as the call does not split keys: the size"
        raise ValueError(
            f"scheduler_metadata.shape is {tuple(metadata.shape)}; allowed: ({size},), {what} that "
            "get_scheduler_metadata returns for a call with these sizes and options"
        )
