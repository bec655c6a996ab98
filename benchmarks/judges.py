"""What a cell's implementations read, and how their results are judged."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch

from cuteflash.tune import accuracy, gradients
from cuteflash.tune.accuracy import Errors
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.fp8_accuracy import COARSEST, Fp8Reference
from cuteflash.tune.gradients import BwdInputs, Gradients, make_bwd_inputs

from .packed import PackedCell, PackedInputs, checked_places, make_packed_bwd_inputs, make_packed_inputs


class Judge(Protocol):
    """The inputs of one cell with all that their results are compared with.

    Attributes:
        inputs: what the implementations read.
        facts: of the cell, as JSON values.
        flops: floating-point operations of one call.
    """

    inputs: Any
    facts: dict[str, Any]
    flops: float

    def poison(self) -> None:
        """Leave NaN in the memory that the next results are allocated in."""

    def measured(self, result: Any) -> dict[str, Any]:
        """Errors of a result, as JSON values."""

    def complaint(self, result: Any, other: Any) -> str | None:
        """None for a right result, else what is wrong with it; `other` is a result believed right, or None."""

    def imprecision(self, result: Any) -> str | None:
        """None if a result is as precise as ours have to be, else by how much it is not."""

    def kept(self, result: Any) -> Any:
        """A result that later calls do not write to."""


class OutputJudge:
    """Judges the output of a forward."""

    def __init__(self, inputs: Inputs | PackedInputs, reference: accuracy.Reference):
        self.inputs, self.reference = inputs, reference
        self.flops: float = inputs.cell.flops
        low, allowed = reference.low_precision, reference.tolerance
        self.facts = {
            **facts_of(inputs.cell),
            "torch_error": low.maximum,
            "tolerance": allowed.maximum,
            "torch_rms": low.rms,
        }

    @classmethod
    def of(cls, cell: Cell, device: torch.device) -> Self:
        """The judge of a cell on fresh inputs."""
        inputs = make_inputs(cell, device)
        return cls(inputs, accuracy.make_reference(inputs))

    @classmethod
    def of_packed(cls, cell: PackedCell, device: torch.device) -> Self:
        """The judge of packed sequences on fresh inputs."""
        inputs = make_packed_inputs(cell, device)
        tensors = inputs.q, inputs.k, inputs.v
        return cls(inputs, accuracy.reference_of(tensors, checked_places(inputs), cell.window))

    def poison(self) -> None:
        """See `Judge`, as for the other methods."""
        accuracy.poison(self.inputs.q)

    def measured(self, out: torch.Tensor) -> dict[str, Any]:
        errors = accuracy.errors(out, self.reference)
        return {"error": errors.maximum, "rms": errors.rms, "rms_ratio": self.reference.rms_ratio(errors)}

    def complaint(self, out: torch.Tensor, other: torch.Tensor | None) -> str | None:
        return accuracy.complaint(out, self.reference, other)

    def imprecision(self, out: torch.Tensor) -> str | None:
        return accuracy.imprecision(out, self.reference)

    def kept(self, out: torch.Tensor) -> torch.Tensor:
        return out.clone()


class ModelledJudge:
    """Judges the output of a forward on 8-bit operands, or on what they stand for, by the modelled errors.

    Kernels may accumulate in one level or two, under maxima that move or are kept: what `COARSEST` is allowed, all are.
    """

    def __init__(self, cell: Cell, device: torch.device):
        self.inputs = make_inputs(cell, device)
        self.reference = Fp8Reference(self.inputs, accuracy.HEADS_CHECKED)
        self.flops: float = cell.flops
        allowed = self.reference.allowed(COARSEST)
        self.facts = {**facts_of(cell), "tolerance": allowed.maximum, "allowed_rms": allowed.rms}

    def poison(self) -> None:
        """See `Judge`, as for the other methods."""
        accuracy.poison(self.inputs.empty_out())

    def measured(self, out: torch.Tensor) -> dict[str, Any]:
        errors = self.reference.errors(out)
        return {"error": errors.maximum, "rms": errors.rms, "relative": errors.rms / self.reference.size}

    def complaint(self, out: torch.Tensor, other: torch.Tensor | None) -> str | None:
        return self.reference.complaint(out, other)

    def imprecision(self, out: torch.Tensor) -> str | None:
        return self.reference.imprecision(out, COARSEST)

    def kept(self, out: torch.Tensor) -> torch.Tensor:
        return out.clone()


class GradientJudge:
    """Judges the gradients of Q, K and V that a backward of given products, in those of the forward, computes."""

    products: ClassVar[float] = 2.5  # five for two

    def __init__(self, inputs: BwdInputs[Inputs] | BwdInputs[PackedInputs], reference: gradients.Reference):
        self.inputs, self.reference = inputs, reference
        self.flops = self.products * inputs.forward.cell.flops
        low, allowed = reference.low_precision, reference.tolerance
        torchs = {
            name: {"torch_error": low[name].maximum, "tolerance": allowed[name].maximum, "torch_rms": low[name].rms}
            for name in Gradients._fields
        }
        self.facts = {**facts_of(inputs.forward.cell), "gradients": torchs}

    @classmethod
    def of(cls, cell: Cell, device: torch.device) -> Self:
        """The judge of a cell on fresh inputs."""
        inputs = make_bwd_inputs(cell, device)
        return cls(inputs, gradients.make_reference(inputs))

    @classmethod
    def of_packed(cls, cell: PackedCell, device: torch.device) -> Self:
        """The judge of packed sequences on fresh inputs."""
        inputs = make_packed_bwd_inputs(cell, device)
        tensors = inputs.forward.q, inputs.forward.k, inputs.forward.v, inputs.dout
        return cls(inputs, gradients.reference_of(tensors, checked_places(inputs.forward), cell.window))

    def poison(self) -> None:
        """See `Judge`, as for the other methods."""
        accuracy.poison(self.inputs.forward.q, self.inputs.forward.k, self.inputs.forward.v)

    def measured(self, found: Gradients) -> dict[str, Any]:
        def figures(name: str, errors: Errors) -> dict[str, float]:
            ratio = errors.rms / self.reference.low_precision[name].rms
            return {"error": errors.maximum, "rms": errors.rms, "rms_ratio": ratio}

        each = {name: figures(name, errors) for name, errors in self.reference.errors(found).items()}
        return {"rms_ratio": max(one["rms_ratio"] for one in each.values()), "gradients": each}

    def complaint(self, found: Gradients, other: Gradients | None) -> str | None:
        return gradients.complaint(found, self.reference, other)

    def imprecision(self, found: Gradients) -> str | None:
        return gradients.imprecision(found, self.reference)

    def kept(self, found: Gradients) -> Gradients:
        return found  # new tensors each time, as autograd returns them


class TrainingJudge(GradientJudge):
    """Judges the gradients of a forward and a backward together."""

    products = 3.5


def facts_of(cell: Cell | PackedCell) -> dict[str, Any]:
    """What a result says of its cell."""
    return {
        "label": cell.label,
        "head_dim": cell.head_dim,
        "mask": cell.mask,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "heads": cell.heads,
        **({"inputs": cell.inputs, "seqlen": cell.seqlen} if isinstance(cell, Cell) else {}),
    }
