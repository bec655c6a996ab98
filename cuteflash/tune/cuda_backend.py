"""The real backend of a sweep: this project's compiler and disk cache, and the current CUDA device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from cuteflash.arguments import FwdOptions, FwdTensors
from cuteflash.compile import BuildReport, build, cache_dir, compiled, lookup
from cuteflash.compile.cache import key_digest
from cuteflash.compile.key import cache_key, source_fingerprint
from cuteflash.dispatch import kernel_class, kernel_modules
from cuteflash.planning import fwd_scalars
from cuteflash.problem import Operation
from cuteflash.traits.arch import get_arch
from cuteflash.traits.row import FwdRowTraits
from cuteflash.tune import accuracy, machine
from cuteflash.tune.backend import Backend, Machine
from cuteflash.tune.cells import Cell, Inputs, make_inputs
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.operations import Problem
from cuteflash.tune.peers import peer_runner
from cuteflash.tune.timing import HangError, Runner, Sampler, clock_for, first_call

SAMPLE_MS = 5.0  # device time of one sample: hundreds of candidates share minutes
# On which kernels may be wrong that are right on plain ones. Fixed maxima know a sink that a tile begins with; they are
# repaired at one in the middle, and all along scores that rise to the last key.
GATE_INPUTS = ("sink:30", "sink:8:middle", "sink:30:middle", "ramp:-60", "peaked")
REPEATS = 3  # runs of the gate, which have to agree bitwise: what is read too early differs sooner or later


class WrongResult(RuntimeError):
    """A kernel ran, and its output is wrong."""


def backend(target: str) -> Backend:
    """The compiler, disk cache and GPU for a compile target. ValueError without a disk cache."""
    if cache_dir() is None:
        raise ValueError(
            "there is no disk cache, where a sweep keeps its compiled kernels: CUTEFLASH_CACHE turns it off, or a "
            "CacheWarning has said why it is not used"
        )

    return Backend(
        target,
        source=lambda operation: source_fingerprint(kernel_modules(operation)),
        key=lambda traits, problem: key_digest(cache_key(kernel_class(traits), traits, problem, target)),
        report=lambda traits, problem: lookup(kernel_class(traits), traits, problem, target),
        builder=functools.partial(CacheBuilder, target),
        bench=functools.partial(TorchBench, target),
    )


class CacheBuilder:
    """A compiler in a process of its own, which never touches a GPU."""

    def __init__(self, target: str):
        self.target = target

    def build(self, traits: FwdRowTraits, problem: Problem) -> BuildReport:
        """Compiles into the disk cache; what the compiler said, now or when the kernel came there.

        Raises if it does not compile or cannot be kept.
        """
        return build(kernel_class(traits), traits, problem, self.target)

    def usable(self) -> bool:
        """A compiler that only raised can go on."""
        return True


def gate_cells(problem: Problem) -> tuple[Cell, ...]:
    """Small cells whose lengths are multiples of nothing: one beyond the window, one of a few queries, and one for each
    of `GATE_INPUTS`."""

    def cell(queries: int, keys: int, batch: int, inputs: str = PLAIN) -> Cell:
        return Cell(
            problem.operands.head_dim,
            problem.scores.mask,
            keys,
            problem.operands.qk_dtype,
            head_dim_v=problem.operands.head_dim_v,
            seqlen_q=queries,
            tokens=batch * keys,
            hidden=2 * problem.operands.head_dim,
            inputs=inputs,
            operation=problem.operation,
        )

    return cell(1111, 1363, 1), cell(5, 299, 3), *(cell(277, 1363, 1, kind) for kind in GATE_INPUTS)


@dataclasses.dataclass(slots=True)
class Scene:
    """A cell with everything that its runs share."""

    inputs: Inputs
    reference: accuracy.Reference  # in fp32, of some heads
    out: torch.Tensor  # (batch, seqlen_q, heads, head_dim_v), written by each run of ours
    sampler: Sampler  # times them
    # the first output that was found right; compared with every later one if not all heads have a reference
    right: torch.Tensor | None = None
    # by traits, or a peer's name; each has run and was right
    runners: dict[FwdRowTraits | str, Runner] = dataclasses.field(default_factory=dict)


class TorchBench:
    """One device. One cell's inputs and one problem's gate are held at a time.

    Nothing is compiled here: what is not in the disk cache is an error.

    Args:
        target: compile target of the kernels.
        device: None is the current CUDA device.

    Raises:
        RuntimeError: torch finds no GPU.
    """

    def __init__(self, target: str, device: torch.device | None = None):
        if device is None and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU; --dry-run and --compile-only work without one")
        self.target = target
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._hung = False
        self._gate: tuple[Problem, list[Scene]] | None = None
        self._cell: Scene | None = None

    def machine(self) -> Machine:
        """Which GPU this is."""
        return machine.this_machine(self.device)

    def matmul_tflops(self) -> float:
        """Rate of the 8192³ bf16 matrix product: what this GPU reaches now."""
        return machine.make_matmul(self.device).tflops(self.device)

    def usable(self) -> bool:
        """Whether the context is still there."""
        if self._hung:
            return False
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def check(self, traits: FwdRowTraits, problem: Problem) -> dict[str, Any]:
        """Of each gate cell the largest error, what is allowed, the rms error, what is allowed.

        WrongResult names what is wrong.
        """
        if self._gate is None or self._gate[0] != problem:
            self._gate = problem, [self._scene(cell, heads=None) for cell in gate_cells(problem)]
        found = {}
        for scene in self._gate[1]:
            run = self._runner(traits, scene)
            outs = [self._run_once(run, scene).clone() for _ in range(REPEATS)]
            self._judge(traits, outs[0], scene)
            if not all(torch.equal(outs[0], out) for out in outs[1:]):
                raise WrongResult(f"{scene.inputs.cell.label}: runs of the same inputs differ")
            errors, allowed = accuracy.errors(outs[0], scene.reference), scene.reference.tolerance
            found[scene.inputs.cell.label] = [errors.maximum, allowed.maximum, errors.rms, allowed.rms]
        return {"errors": found}

    def sample(self, subject: FwdRowTraits | str, cell: Cell) -> float:
        """Milliseconds per call of a batch. A subject's first output of a cell is judged before it is timed."""
        if self._cell is None or self._cell.inputs.cell != cell:
            self._cell = None  # its memory first
            self._cell = self._scene(cell)
        scene = self._cell
        if subject not in scene.runners:
            run = self._runner(subject, scene)
            out = self._run_once(run, scene)
            self._judge(subject, out, scene)
            if scene.right is None:
                scene.right = out.clone()
            scene.runners[subject] = run
        return scene.sampler(scene.runners[subject])

    def _scene(self, cell: Cell, heads: int | None = accuracy.HEADS_CHECKED) -> Scene:
        trial = TRIALS[cell.operation]
        inputs = trial.inputs(cell, self.device)
        reference = trial.reference(inputs, cell.batch * cell.heads if heads is None else heads)
        return Scene(inputs, reference, inputs.empty_out(), Sampler(clock_for(self.device), SAMPLE_MS))

    def _runner(self, subject: FwdRowTraits | str, scene: Scene) -> Runner:
        trial = TRIALS[scene.inputs.cell.operation]
        if isinstance(subject, str):
            return trial.peer(subject, scene.inputs)
        kernel, problem = kernel_class(subject), scene.inputs.cell.problem
        if lookup(kernel, subject, problem, self.target) is None:
            raise LookupError(f"the compiled kernel is not in the disk cache {cache_dir()}")
        return trial.runner(subject, scene.inputs, self.target, scene.out)

    def _run_once(self, run: Runner, scene: Scene) -> torch.Tensor:
        scene.out.fill_(float("nan"))
        try:
            out: torch.Tensor = first_call(run, self.device)
            return out
        except HangError:
            self._hung = True
            raise

    def _judge(self, subject: FwdRowTraits | str, out: torch.Tensor, scene: Scene) -> None:
        complaint = accuracy.complaint(out, scene.reference, scene.right)
        if complaint is None and not isinstance(subject, str):
            complaint = accuracy.imprecision(out, scene.reference)
        if complaint is not None:
            raise WrongResult(f"{scene.inputs.cell.label}: {complaint}")


def direct_runner(traits: FwdRowTraits, inputs: Inputs, target: str, out: torch.Tensor | None = None) -> Runner:
    """A forward kernel over a cell's inputs, without the dispatcher and the operator around it.

    Compiles what the disk cache does not have. `out`: where it writes; by default a tensor of its own, full of NaN.
    ValueError if the traits cannot run on `target`.
    """
    reason = traits.check(get_arch(target))
    if reason:
        raise ValueError(reason)
    kernel = compiled(kernel_class(traits), traits, inputs.cell.problem, target)
    written = inputs.empty_out() if out is None else out
    scalars = fwd_scalars(FwdOptions(), inputs.cell.window, inputs.cell.head_dim, inputs.q.device)
    arguments = (*FwdTensors(inputs.q, inputs.k, inputs.v, written, None), *scalars)

    def run(calls: int) -> torch.Tensor:
        for _ in range(calls):
            kernel(*arguments)
        return written

    return run


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """How an operation's kernels are run on a cell and judged."""

    inputs: Callable[[Cell, torch.device], Inputs]  # (cell, device) → the tensors to read
    reference: Callable[[Inputs, int], accuracy.Reference]  # (inputs, how many heads) → what outputs are judged by
    # (traits, inputs, target, out) → what repeats a kernel, which writes to `out`
    runner: Callable[[FwdRowTraits, Inputs, str, torch.Tensor], Runner]
    peer: Callable[[str, Inputs], Runner]  # (name, inputs) → what repeats another implementation


TRIALS: dict[Operation, Trial] = {"fwd": Trial(make_inputs, accuracy.make_reference, direct_runner, peer_runner)}
