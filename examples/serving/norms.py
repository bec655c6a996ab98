"""Norms in one kernel each: transformers' norms take eight, and a decoding step consists of small kernels."""

from __future__ import annotations

import copy
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of results of a few


@torch.no_grad()
def use_fused_norms(model: torch.nn.Module) -> None:
    """Replace the modules that compute ``weight * x / rms(x)``, in place, by torch's, which share their weights.

    They are found by what they give for random numbers, so that norms of other kinds, such as those with
    ``1 + weight``, are left alone.
    """
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and _is_plain(module):
                fused = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon, device="meta")  # type: ignore[arg-type]
                fused.weight = module.weight  # type: ignore[assignment]
                setattr(parent, name, fused)


def _is_plain(norm: Any) -> bool:
    """Whether the norm is torch's, for random weights and inputs."""
    trial = copy.deepcopy(norm)
    weight = trial.weight.uniform_(0.5, 1.0)
    x = torch.randn(4, *weight.shape, dtype=weight.dtype, device=weight.device)
    fused = torch.nn.functional.rms_norm(x, weight.shape, weight, trial.variance_epsilon)
    return bool((trial(x) - fused).abs().max() <= TOLERANCE[weight.dtype])
