"""The implementations that are compared, each as a runner over given inputs.

Names: `sm90` and `sm80` are this project's kernel families, `fa2` and `cudnn` torch's SDPA backends, `fa4` the
flash-attn-4 package. Peers see the same memory in the layout they want.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuteflash
from cuteflash.compile import BuildReport, build
from cuteflash.dispatch import forward_kernel
from cuteflash.traits.arch import FAMILIES, Family, arch_of_capability, get_arch
from cuteflash.traits.base import FwdTraits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.tune.cells import Cell, Inputs
from cuteflash.tune.launch import direct_runner
from cuteflash.tune.timing import Runner

OURS = ("sm90", "sm80")
PEERS = ("fa4", "cudnn", "fa2")
NAMES = OURS + PEERS

TRAITS: dict[Family, type[FwdTraitsSm80] | type[FwdTraitsSm90]] = {"sm80": FwdTraitsSm80, "sm90": FwdTraitsSm90}


def unavailable(name: str, device: torch.device) -> str | None:
    """None where the implementation can run on `device`, else the reason in words."""
    if name not in NAMES:
        return f"implementation is {name!r}; allowed: {', '.join(NAMES)}"
    if name == "fa4" and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn-4 is not installed"
    if device.type != "cuda":
        return None if name == "fa2" else "needs a CUDA device"
    if name in OURS:
        arch = arch_of_capability(*torch.cuda.get_device_capability(device))
        if name not in arch.families:
            return f"{arch.name} does not run the {name} family"
    return None


def runner(name: str, inputs: Inputs) -> Runner:
    """The implementation called `name` through its public interface."""
    causal = inputs.cell.mask == "causal"
    if name in OURS:
        call = functools.partial(cuteflash.flash_attn_func, inputs.q, inputs.k, inputs.v, causal=causal, family=name)
        return _repeated(call)
    if name == "fa4":
        from flash_attn.cute import flash_attn_func

        call = functools.partial(flash_attn_func, inputs.q, inputs.k, inputs.v, causal=causal)
        return _repeated(call, lambda result: result[0])
    return _sdpa(inputs, {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name])


def _repeated(call: Callable[[], Any], output: Callable[[Any], torch.Tensor] = lambda result: result) -> Runner:
    def run(calls: int) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(calls):
                result = call()
        return output(result)

    return run


def _sdpa(inputs: Inputs, backend: SDPBackend) -> Runner:
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))  # (b, h, s, d) views
    causal = inputs.cell.mask == "causal"

    def run(calls: int) -> torch.Tensor:
        with torch.no_grad(), sdpa_kernel(backend):
            for _ in range(calls):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2)

    return run


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """Traits to try in place of the shipped row; fields left out keep the traits' defaults.

    Attributes:
        family: kernel family the traits belong to.
        fields: trait fields; `head_dim` and `head_dim_v` default to the cell's.
        mask: the mask the variant is meant for; None is any.
    """

    family: Family
    fields: Mapping[str, Any]
    mask: str | None = None

    def applies(self, cell: Cell) -> bool:
        """Whether the variant is meant for `cell`."""
        return self.mask in (None, cell.mask) and self.fields.get("head_dim", cell.head_dim) == cell.head_dim

    def traits(self, cell: Cell) -> FwdTraits:
        """The traits for `cell`; TypeError names a field that the family does not have."""
        fields = {"head_dim": cell.head_dim, "head_dim_v": cell.head_dim_v} | dict(self.fields)
        return TRAITS[self.family](**fields)

    @property
    def label(self) -> str:
        fields = {key: value for key, value in self.fields.items() if key not in ("head_dim", "head_dim_v")}
        short = {"tile_m": "m", "tile_n": "n"}
        return " ".join(f"{short.get(key, key)}={_terse(value)}" for key, value in fields.items()) or "defaults"


def _terse(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def parse_variants(text: str, family: str | None = None) -> list[Variant]:
    """Variants from JSON text, or from the file named after an "@".

    A list of objects of trait fields, with `family` (unless given for all) and optionally `mask` among them.
    """
    rows = json.loads(pathlib.Path(text[1:]).read_text() if text.startswith("@") else text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("variants: a JSON list of objects is wanted")
    variants = []
    for row in rows:
        fields = dict(row)
        own_family, mask = fields.pop("family", family), fields.pop("mask", None)
        if own_family not in FAMILIES:
            raise ValueError(f"family is {own_family!r} in {row}; allowed: {', '.join(FAMILIES)}")
        if mask not in (None, "full", "causal"):
            raise ValueError(f"mask is {mask!r} in {row}; allowed: full, causal")
        variants.append(Variant(own_family, fields, mask))
    return variants


def build_variant(variant: Variant, cell: Cell, target: str) -> BuildReport:
    """Compile a variant into the disk cache; what it costs. ValueError where its traits do not fit."""
    traits = variant.traits(cell)
    reason = traits.check(get_arch(target))
    if reason:
        raise ValueError(reason)
    return build(forward_kernel(variant.family), traits, cell.problem, target)


def variant_runner(variant: Variant, inputs: Inputs, target: str) -> Runner:
    """A variant launched directly, without the operator around it."""
    return direct_runner(variant.traits(inputs.cell), inputs, target)


def target_of(device: torch.device) -> str:
    """The compile target of a CUDA device."""
    return arch_of_capability(*torch.cuda.get_device_capability(device)).name


def runners_for(inputs: Inputs, names: Sequence[str], overrides: Sequence[Variant] = ()) -> dict[str, Runner]:
    """A runner for each name; one of our families runs the last override that applies to the cell."""
    found = {}
    for name in names:
        override = next((v for v in reversed(overrides) if v.family == name and v.applies(inputs.cell)), None)
        found[name] = variant_runner(override, inputs, target_of(inputs.q.device)) if override else runner(name, inputs)
    return found
