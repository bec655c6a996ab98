"""Is an output of attention on 8-bit operands right? Against the definition in fp32, by the hardware's modelled errors.

Torch has nothing to compare with, so the yardstick is `cuteflash.reference.fp8_accumulator`, which rounds P and cuts
sums as the tensor cores do. The root mean square of all errors is at most 1.3 times the modelled one, plus the rounding
of O. No element is farther off than if every key's weight were rounded in the same direction, twice as coarsely as e4m3
does it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cuteflash.problem import UNBOUNDED
from cuteflash.reference.fp8_accumulator import WARP_ROWS, FixedMaxima, KernelModel, modelled_attention
from cuteflash.traits.fp8_sm90 import FIXED_P_OFFSET, FwdTraitsFp8Sm90
from cuteflash.tune.accuracy import Errors, chosen_heads, errors_of, masked_scores, rms
from cuteflash.tune.cells import Inputs

TIMES_MODELLED = 1.3  # how many times the modelled rms error
OUT_ROUNDING = 2.0**-9  # of O to bf16, relative: half a unit in the last place
P_ROUNDING = 2.0**-3  # of a weight, relative: a whole unit in e4m3's last place
P_SMALLEST = 2.0**-9 * 2.0**-FIXED_P_OFFSET  # of the largest weight, which is 1: e4m3's smallest number
AGREEMENT = 3.0  # times the modelled rms error, by which two right outputs may differ on a head
SAMPLED_ROWS = 64  # of each sampled part of a head: its first rows, those in the middle and its last ones
# A judge that does not know a kernel's traits allows what this one is allowed.
COARSEST = KernelModel(128, FIXED_P_OFFSET, is_two_level=False, fixed=FixedMaxima(128, masked=True))


def allowed_rms(modelled: Tensor, exact: Tensor) -> float:
    """The rms error that an output may have which rounding and accumulation are modelled to turn into `modelled`."""
    return TIMES_MODELLED * rms(modelled - exact) + OUT_ROUNDING * rms(exact)


def kernel_model(traits: FwdTraitsFp8Sm90) -> KernelModel:
    """What the errors of a kernel with these traits depend on."""
    fixed = FixedMaxima(traits.tile_m, traits.masked_by_fixed_max) if traits.fixed_max else None
    return KernelModel(traits.tile_n, traits.p_offset, traits.two_level, fixed)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows of a head: their exact output, and by how much each of its elements may be wrong."""

    batch: int
    head: int
    rows: slice
    exact: Tensor
    bound: Tensor

    def of(self, out: Tensor) -> Tensor:
        """These rows of an output, in fp32."""
        return out[self.batch, self.rows, self.head].float()


class Fp8Reference:
    """What outputs of a cell are judged by.

    Args:
        inputs: of 8 bits.
        heads: how many of them are compared with fp32; if these are not all, only some rows of each are.
    """

    def __init__(self, inputs: Inputs, heads: int):
        self.inputs = inputs
        cell = inputs.cell
        every = heads >= cell.batch * cell.heads
        rows = [slice(0, cell.seqlen_q)] if every else sampled_rows(cell.seqlen_q)
        places = [(int(batch), int(head)) for batch, _, head in chosen_heads(cell, heads)]  # type: ignore[arg-type]
        self._values = inputs.values()
        self.parts = [self._part(batch, head, some) for batch, head in places for some in rows]
        self._allowed: dict[KernelModel, float] = {}

    def allowed(self, model: KernelModel) -> Errors:
        """The largest error of any element, and the rms error of such a kernel."""
        if model not in self._allowed:
            modelled = torch.cat([self._modelled(part, model) for part in self.parts])
            self._allowed[model] = allowed_rms(modelled, torch.cat([part.exact for part in self.parts]))
        return Errors(max(part.bound.max().item() for part in self.parts), self._allowed[model])

    @property
    def size(self) -> float:
        """The root mean square of the exact outputs that are compared."""
        return rms(torch.cat([part.exact for part in self.parts]))

    def errors(self, out: Tensor) -> Errors:
        """Of the judged rows; NaN counts as infinite."""
        return errors_of(torch.cat([part.of(out) - part.exact for part in self.parts]))

    def complaint(self, out: Tensor, other: Tensor | None) -> str | None:
        """As `accuracy.complaint`."""
        if not bool(torch.isfinite(out).all()):
            return "output has NaN or infinite elements"
        for part in self.parts:
            error = (part.of(out) - part.exact).abs()
            worst = int((error - part.bound).argmax())
            found, most = error.flatten()[worst].item(), part.bound.flatten()[worst].item()
            if found > most:
                return f"error {found:.2e} over {most:.2e}"
        if other is not None:
            apart = (out.float() - other.float()).square().mean(dim=(1, 3)).sqrt().max().item()
            most = AGREEMENT * self.allowed(COARSEST).rms
            if apart > most:
                return f"differs from another implementation by {apart:.2e} over {most:.2e} (rms of a head)"
        return None

    def imprecision(self, out: Tensor, model: KernelModel) -> str | None:
        """None if the rms error is small enough for such a kernel, else by how much it is too large."""
        found, allowed = self.errors(out).rms, self.allowed(model).rms
        return None if found <= allowed else f"rms error {found:.2e} over {allowed:.2e}, that of the modelled hardware"

    def _keys(self, rows: slice) -> slice:
        """The keys that rows may see, so that the last row is aligned to the last key."""
        cell = self.inputs.cell
        after = cell.window[1]
        return slice(0, cell.seqlen if after >= UNBOUNDED else cell.seqlen - (cell.seqlen_q - rows.stop) + after)

    def _part(self, batch: int, head: int, rows: slice) -> Part:
        q, k, v = self._values
        keys = self._keys(rows)
        q, k, v = q[batch, rows, head], k[batch, keys, head], v[batch, keys, head]
        scores = masked_scores(q, k, slice(None), self.inputs.cell.window)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = weights.sum(-1, keepdim=True)
        slack = P_ROUNDING * weights + weights.clamp(max=P_SMALLEST)
        exact, bound = weights @ v / total, slack @ v.abs() / total
        return Part(batch, head, rows, exact, bound + 2 * OUT_ROUNDING * exact.abs())

    def _modelled(self, part: Part, model: KernelModel) -> Tensor:
        inputs, keys = self.inputs, self._keys(part.rows)
        assert inputs.scales is not None
        batch, head = slice(part.batch, part.batch + 1), slice(part.head, part.head + 1)
        left, right = (-1 if side >= UNBOUNDED else side for side in inputs.cell.window)
        modelled = modelled_attention(
            inputs.q[batch, part.rows, head],
            inputs.k[batch, keys, head],
            inputs.rows_of_v()[batch, keys, head],
            [scale[batch, head] for scale in inputs.scales[:3]],
            (inputs.cell.head_dim**-0.5, left, right),
            model,
        )
        return modelled[0, :, 0].float()


def sampled_rows(rows: int) -> list[slice]:
    """The first, middle and last rows of so many, from whole warps on."""
    last = -(-max(0, rows - SAMPLED_ROWS) // WARP_ROWS) * WARP_ROWS
    middle = last // 2 // WARP_ROWS * WARP_ROWS
    return [slice(start, min(start + SAMPLED_ROWS, rows)) for start in dict.fromkeys((0, middle, last))]
