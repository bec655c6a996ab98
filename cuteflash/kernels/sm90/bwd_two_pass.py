"""FlashAttention backward for Hopper in two passes, each of which sums its gradients in registers.

    prepare   delta = rowsum(dO O) - dLSE
    dK, dV    by key tiles: S, dP, dV, dK   (`bwd_dkv.py`)
    dQ        by query tiles: S, dP, dQ     (`bwd_dq.py`)

Seven products instead of five, but no sum in memory: for wide heads, whose one-pass tiles are so small that adding dQ
to memory takes longer than the products, and bitwise repeatable. Each launch begins where the one before it ends; the
pass for dQ, which reads nothing of the other, works beside its last blocks.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import cutlass
import cutlass.cute as cute

from cuteflash.arguments import BwdArguments
from cuteflash.core.bwd_signature import bwd_fake_args
from cuteflash.core.launch import batched
from cuteflash.kernels.common.bwd_prepare import BwdPrepare
from cuteflash.kernels.common.workspace import workspace_of
from cuteflash.kernels.sm90.bwd_dkv import DkvPass
from cuteflash.kernels.sm90.bwd_dq import DqPass
from cuteflash.problem import BwdProblem
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90


@dataclasses.dataclass(frozen=True)
class FlashBwdTwoPassSm90:
    """The sm90 backward in two passes for one problem and one set of traits."""

    traits: cutlass.Constexpr[BwdTwoPassTraitsSm90]
    problem: cutlass.Constexpr[BwdProblem]

    family: ClassVar[str] = "sm90"

    def fake_args(self) -> tuple:
        """The arguments that this kernel is compiled with: fakes of `BwdArguments`."""
        return bwd_fake_args(self.problem)

    @cute.jit
    def __call__(self, *arguments):
        has_sinks = self.problem.scores.sink is not None
        tensors, packed, scalars, sinks, stream = BwdArguments.of(arguments, has_sinks)
        tensors = batched(tensors, self.problem.storage)
        workspace = workspace_of(self.traits, tensors, packed)
        BwdPrepare(self.traits, self.problem).launch(tensors, packed, sinks, workspace, stream)
        for one_pass in (DkvPass(self.traits, self.problem), DqPass(self.traits, self.problem)):
            one_pass.launch(tensors, packed, workspace, scalars, stream)
