"""A forward kernel with given traits launched directly, without the dispatcher and the operator around it."""

from __future__ import annotations

import torch

from cuteflash.compile import compiled
from cuteflash.dispatch import forward_kernel
from cuteflash.traits.arch import get_arch
from cuteflash.traits.base import FwdTraits
from cuteflash.tune.cells import Inputs
from cuteflash.tune.timing import Runner


def direct_runner(traits: FwdTraits, inputs: Inputs, target: str) -> Runner:
    """A runner of `traits` over a cell's inputs, into one output that starts as NaN.

    Compiles what the disk cache does not have. ValueError where the traits cannot run on `target`.
    """
    reason = traits.check(get_arch(target))
    if reason:
        raise ValueError(reason)
    kernel = compiled(forward_kernel(traits.family), traits, inputs.cell.problem, target)
    out = inputs.empty_out()
    num_sms = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    scale = inputs.cell.head_dim**-0.5
    arguments = (inputs.q, inputs.k, inputs.v, out, None, scale, 0.0, *inputs.cell.window, num_sms)

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            kernel(*arguments)
        return out

    return run
