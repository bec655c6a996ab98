"""How an operation's kernels, and its peers', are run on a cell and judged, without dispatcher and operator."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cuteflash.arguments import BwdOptions, BwdTensors, FwdOptions, FwdTensors
from cuteflash.bwd_planning import bwd_scalars
from cuteflash.compile import compiled
from cuteflash.dispatch import kernel_class
from cuteflash.mla_planning import plan_of
from cuteflash.mla_problem import PAGE_ROWS
from cuteflash.planning import fwd_scalars
from cuteflash.split_planning import SplitLaunch, Tiles
from cuteflash.traits.arch import get_arch
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.row import Traits
from cuteflash.tune import accuracy, gradients
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.fp8_accuracy import Fp8Reference, kernel_model
from cuteflash.tune.gradients import BwdInputs, Gradients, Saved, make_bwd_inputs, saved_forward
from cuteflash.tune.operations import Task
from cuteflash.tune.peers import backward_runner, forward_runner, peer_attention
from cuteflash.tune.timing import Runner


class Trial(Protocol):
    """A cell on a device: what its runs read, where those of our kernels write, and what results are judged by."""

    def __init__(self, cell: Cell, device: torch.device, heads: int):
        """`heads`: how many of them are compared with fp32."""

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The memory that every run of our kernels writes to."""
        ...

    def kernel(self, traits: Any, target: str) -> Runner:
        """What repeats a kernel of ours, compiled for `target`. ValueError: traits cannot run there."""
        ...

    def peer(self, name: str) -> Runner:
        """What repeats another implementation. NotImplementedError: it does not have such a mask."""
        ...

    def complaint(self, result: Any, right: Any) -> str | None:
        """None for a right result, else what is wrong with it; `right` is a result believed right, or None."""
        ...

    def imprecision(self, traits: Any, result: Any) -> str | None:
        """None if a kernel's result is as precise as ours have to be, else by how much it is not."""
        ...

    def errors(self, traits: Any, result: Any) -> dict[str, list[float]]:
        """Of each tensor the largest error, what is allowed, the rms error, what is allowed."""
        ...

    def repeats(self, traits: Any, result: Any, other: Any) -> bool:
        """Whether two results of a kernel on the same inputs agree as far as they have to."""
        ...

    def kept(self, result: Any) -> Any:
        """A result that later runs do not write to."""
        ...


class OutputTrial:
    """What all forwards have in common."""

    def __init__(self, cell: Cell, device: torch.device):
        self.inputs = make_inputs(cell, device)
        self.out = self.inputs.empty_out()

    @property
    def written(self) -> tuple[Tensor, ...]:
        """See `Trial`, as for the other methods."""
        return (self.out,)

    def kernel(self, traits: Traits, target: str) -> Runner:
        return fwd_runner(traits, target, self.inputs, self.out)

    def repeats(self, traits: Traits, result: Tensor, other: Tensor) -> bool:
        return torch.equal(result, other)

    def kept(self, result: Tensor) -> Tensor:
        return result.clone()


class FwdTrial(OutputTrial):
    """A forward's output."""

    def __init__(self, cell: Cell, device: torch.device, heads: int):
        super().__init__(cell, device)
        self.reference = accuracy.make_reference(self.inputs, heads)

    def peer(self, name: str) -> Runner:
        inputs = self.inputs
        if inputs.cell.form:
            raise NotImplementedError(f"{name} is not timed on {inputs.cell.form}")
        return forward_runner(peer_attention(name, inputs.cell), inputs.q, inputs.k, inputs.v)

    def complaint(self, result: Tensor, right: Tensor | None) -> str | None:
        return accuracy.complaint(result, self.reference, right)

    def imprecision(self, traits: Any, result: Tensor) -> str | None:
        return accuracy.imprecision(result, self.reference)

    def errors(self, traits: Any, result: Tensor) -> dict[str, list[float]]:
        found, allowed = accuracy.errors(result, self.reference), self.reference.tolerance
        return {"o": [found.maximum, allowed.maximum, found.rms, allowed.rms]}


class MlaTrial(FwdTrial):
    """The output of decoding latent attention, whose cached rows lie in pages in any order."""

    def __init__(self, cell: Cell, device: torch.device, heads: int):
        super().__init__(cell, device, heads)
        self.cache = paged_latents(self.inputs)

    def kernel(self, traits: Any, target: str) -> Runner:
        """See `Trial`."""
        reason = traits.check(get_arch(target))
        if reason:
            raise ValueError(reason)
        q, out = self.inputs.q, self.out
        pages, table, lengths = self.cache
        plan = plan_of(q, pages, table, (self.inputs.cell.head_dim**-0.5, False, 0, traits.family), traits)

        def run(calls: int) -> Tensor:
            for _ in range(calls):
                plan(q, pages, table, lengths, None, out)
            return out

        return run


class Fp8Trial(OutputTrial):
    """The output of a forward on 8-bit operands."""

    def __init__(self, cell: Cell, device: torch.device, heads: int):
        super().__init__(cell, device)
        self.reference = Fp8Reference(self.inputs, heads)

    def peer(self, name: str) -> Runner:
        raise NotImplementedError(f"{name} takes no 8-bit operands with scales")

    def complaint(self, result: Tensor, right: Tensor | None) -> str | None:
        return self.reference.complaint(result, right)

    def imprecision(self, traits: FwdTraitsFp8Sm90, result: Tensor) -> str | None:
        return self.reference.imprecision(result, kernel_model(traits))

    def errors(self, traits: FwdTraitsFp8Sm90, result: Tensor) -> dict[str, list[float]]:
        found, allowed = self.reference.errors(result), self.reference.allowed(kernel_model(traits))
        return {"o": [found.maximum, allowed.maximum, found.rms, allowed.rms]}


class BwdTrial:
    """A backward's gradients of Q, K and V."""

    def __init__(self, cell: Cell, device: torch.device, heads: int):
        self.inputs = make_bwd_inputs(cell, device)
        self.reference = gradients.make_reference(self.inputs, heads)
        forward = self.inputs.forward
        self.saved = saved_forward(forward)
        self.gradients = Gradients(*map(torch.empty_like, (forward.q, forward.k, forward.v)))
        self.workspace = self.saved.lse.new_empty(0)  # of all candidates: at 16k tokens each takes some 130 MB

    @property
    def written(self) -> tuple[Tensor, ...]:
        """See `Trial`, as for the other methods."""
        return self.gradients

    def kernel(self, traits: Any, target: str) -> Runner:
        size = workspace_size(traits, self.inputs)
        if size > self.workspace.numel():
            self.workspace = self.workspace.new_empty(size)
        memory = BwdMemory(self.saved, self.gradients, self.workspace[:size].fill_(float("nan")))
        return bwd_runner(traits, target, self.inputs, memory)

    def peer(self, name: str) -> Runner:
        return backward_runner(peer_attention(name, self.inputs.forward.cell), self.inputs)

    def complaint(self, result: Gradients, right: Gradients | None) -> str | None:
        return gradients.complaint(result, self.reference, right)

    def imprecision(self, traits: Any, result: Gradients) -> str | None:
        return gradients.imprecision(result, self.reference)

    def errors(self, traits: Any, result: Gradients) -> dict[str, list[float]]:
        found, allowed = self.reference.errors(result), self.reference.tolerance
        return {name: [one.maximum, allowed[name].maximum, one.rms, allowed[name].rms] for name, one in found.items()}

    def repeats(self, traits: Any, result: Gradients, other: Gradients) -> bool:
        """Bitwise, but for a dQ that blocks add up in memory in any order."""
        in_memory = traits.workspace(1, 1, 1).head_dim > 0
        return all(
            torch.equal(one, again)
            for name, one, again in zip(Gradients._fields, result, other, strict=True)
            if not (in_memory and name == "dq")
        )

    def kept(self, result: Gradients) -> Gradients:
        return Gradients(*(tensor.clone() for tensor in result))


def fwd_runner(traits: Traits, target: str, inputs: Inputs, out: Tensor | None = None) -> Runner:
    """A forward kernel over a cell's inputs.

    Compiles what the disk cache does not have. `out`: where it writes; by default a tensor of its own, full of NaN.
    ValueError if the traits cannot run on `target`.
    """
    kernel = compiled_for(traits, target, inputs.cell)
    written = inputs.empty_out() if out is None else out
    parts = split_arguments(traits, inputs)
    scalars = fwd_scalars(FwdOptions(), inputs.cell.window, inputs.cell.head_dim, inputs.q.device)
    tensors = FwdTensors(inputs.q, inputs.k, inputs.v, written, None)
    arguments = (*tensors, *(inputs.scales or ()), *parts, *scalars)

    def run(calls: int) -> Tensor:
        for _ in range(calls):
            kernel(*arguments)
        return written

    return run


def split_arguments(traits: Any, inputs: Inputs) -> tuple[Any, ...]:
    """What a kernel gets that splits keys, all parts being NaN, as many as the heuristic makes; of others nothing."""
    cell, device = inputs.cell, inputs.q.device
    if not cell.form:
        return ()
    tiles = Tiles(cell.batch, cell.kv_heads, cell.group, cell.seqlen_q, cell.seqlen)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    launch = SplitLaunch.of(traits, tiles, cell.group, 0, num_sms, device)
    partials, *more = launch.arguments()
    return partials.fill_(float("nan")), *more


class Latents(NamedTuple):
    """The cached rows of a cell's sequences."""

    pages: Tensor  # (pages, 64, 1, head_dim); rows past a sequence's last one are NaN
    table: Tensor  # (batch, pages of a sequence) int32
    lengths: Tensor  # (batch,) int32


def paged_latents(inputs: Inputs, seed: int = 0) -> Latents:
    """K in pages, which lie in a random order."""
    batch, seqlen, *row = inputs.k.shape
    count, device = -(-seqlen // PAGE_ROWS), inputs.k.device
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(seed)).to(device)
    padded = inputs.k.new_full((batch, count * PAGE_ROWS, *row), float("nan"))
    padded[:, :seqlen] = inputs.k
    pages = torch.empty_like(padded).view(batch * count, PAGE_ROWS, *row)
    pages[order] = padded.view_as(pages)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=device)
    return Latents(pages, order.view(batch, count).to(torch.int32), lengths)


class BwdMemory(NamedTuple):
    """What a backward kernel gets beside its inputs."""

    saved: Saved  # what the forward left
    gradients: Gradients  # where it writes
    workspace: Tensor  # (`workspace_size`,) fp32, whatever it holds


def workspace_size(traits: Any, inputs: BwdInputs[Inputs]) -> int:
    """Elements of a backward's workspace."""
    batch, seqlen_q, heads, _ = inputs.forward.q.shape
    size: int = traits.workspace(batch, heads, seqlen_q).size
    return size


def bwd_runner(traits: Any, target: str, inputs: BwdInputs[Inputs], memory: BwdMemory | None = None) -> Runner:
    """A backward kernel over a cell's inputs, with its prepare and finish kernels.

    Compiles what the disk cache does not have. `memory` None computes the forward and makes tensors full of NaN.
    ValueError if the traits cannot run on `target`.
    """
    forward = inputs.forward
    kernel = compiled_for(traits, target, forward.cell)
    if memory is None:
        made = (torch.full_like(one, float("nan")) for one in (forward.q, forward.k, forward.v))
        saved = saved_forward(forward)
        workspace = saved.lse.new_full((workspace_size(traits, inputs),), float("nan"))
        memory = BwdMemory(saved, Gradients(*made), workspace)
    (out, lse), written, workspace = memory
    scalars = bwd_scalars(BwdOptions(), forward.cell.window, forward.cell.head_dim, forward.q.device)
    read = {"q": forward.q, "k": forward.k, "v": forward.v, "o": out, "lse": lse, "do": inputs.dout, "dlse": None}
    arguments = (*BwdTensors(**read, **written._asdict(), workspace=workspace), *scalars)

    def run(calls: int) -> Gradients:
        for _ in range(calls):
            kernel(*arguments)
        return written

    return run


def compiled_for(traits: Traits, target: str, cell: Cell) -> Any:
    """The kernel of traits for a cell. ValueError if they cannot run on `target`."""
    reason = traits.check(get_arch(target))
    if reason:
        raise ValueError(reason)
    problem = dataclasses.replace(cell, operation=traits.operation).problem
    return compiled(kernel_class(traits), traits, problem, target)


TRIALS: dict[Task, type[Trial]] = {
    "fwd": FwdTrial,
    "fwd e4m3": Fp8Trial,
    "fwd e4m3 vt": Fp8Trial,
    "bwd": BwdTrial,
    "decode": FwdTrial,
    "cache": FwdTrial,
    "mla": MlaTrial,
}
