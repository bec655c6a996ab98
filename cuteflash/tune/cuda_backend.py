"""The real backend of a sweep: this project's compiler and disk cache, and the current CUDA device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import torch

from cuteflash.compile import BuildReport, build, cache_dir, lookup
from cuteflash.compile.cache import key_digest
from cuteflash.compile.key import cache_key, source_fingerprint
from cuteflash.dispatch import kernel_class, kernel_modules
from cuteflash.mla_problem import AnyProblem
from cuteflash.traits.bwd_candidates import HELD_DQ_NARROW
from cuteflash.traits.row import Traits, holds
from cuteflash.tune import accuracy, machine
from cuteflash.tune.backend import Backend, Machine
from cuteflash.tune.cells import Cell
from cuteflash.tune.inputs import PLAIN
from cuteflash.tune.operations import SPECS, form_of
from cuteflash.tune.timing import HangError, Runner, Sampler, clock_for, first_call
from cuteflash.tune.trials import TRIALS, Trial

SAMPLE_MS = 5.0  # device time of one sample: hundreds of candidates share minutes
# On which kernels may be wrong that are right on plain ones. Fixed maxima know a sink that a tile begins with; they are
# repaired at one in the middle, and all along scores that rise to the last key.
GATE_INPUTS = ("sink:30", "sink:8:middle", "sink:30:middle", "ramp:-60", "peaked")
LATENT_HEADS = 128, 40, 16  # of the gate's cells, where a problem does not say: two tiles, a part of one, few rows
REPEATS = 3  # runs of the gate, which have to agree: what is read too early differs sooner or later


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

    def build(self, traits: Traits, problem: AnyProblem) -> BuildReport:
        """Compiles into the disk cache; what the compiler said, now or when the kernel came there.

        Raises if it does not compile or cannot be kept.
        """
        return build(kernel_class(traits), traits, problem, self.target)

    def usable(self) -> bool:
        """A compiler that only raised can go on."""
        return True


def gate_cells(problem: AnyProblem, traits: Traits | None = None) -> tuple[Cell, ...]:
    """Small cells whose lengths are multiples of nothing: one beyond the window, one of a few queries, and one for each
    of `GATE_INPUTS`. Of few queries they have the most that traits hold, and no cell in place of one that they do not.
    Traits with code of their own for short sequences have such cells, too.
    """

    form = form_of(problem)
    is_latent = form != "" and SPECS[form].latent_dims is not None
    groups = LATENT_HEADS if is_latent else (problem.operands.packed_heads,)

    def cell(queries: int, keys: int, batch: int, inputs: str = PLAIN, group: int = groups[0]) -> Cell:
        return Cell(
            problem.operands.head_dim,
            problem.scores.mask,
            keys,
            problem.operands.qk_dtype,
            head_dim_v=problem.operands.head_dim_v,
            seqlen_q=queries,
            tokens=batch * keys,
            hidden=(1 if is_latent else 2) * group * problem.operands.head_dim,
            inputs=inputs,
            operation=problem.operation,
            transposed_v=problem.operands.transposed_v,
            form=form,
            group=group,
        )

    if not form:
        general = cell(1111, 1363, 1), cell(5, 299, 3), *(cell(277, 1363, 1, kind) for kind in GATE_INPUTS)
        if traits is None or not getattr(traits, "lone_tiles", False):
            return general
        lengths = traits.tile_n - 5, traits.tile_m * min(getattr(traits, "held_dq", 0), HELD_DQ_NARROW) - 5
        short = (pair for n in lengths if n > 0 for pair in ((n, n, 5), (3, n, 3)))
        return *general, *(cell(*one) for one in short)
    # A single query, if the mask has it; a tile with so many rows that its blocks meet; two tiles of a head.
    least = 2 if problem.scores.mask == "causal" else 1
    plain = itertools.product(((least, 1363, 3), (5, 299, 3), (16, 1363, 1)), (PLAIN,), groups)
    found: dict[Cell, None] = {}
    for (queries, keys, batch), kind, group in (*plain, *(((3, 1363, 1), kind, groups[0]) for kind in GATE_INPUTS)):
        count = _held(traits, queries, least, group)
        if count is not None:
            found[cell(count, keys, batch, kind, group)] = None
    return tuple(found)


def _held(traits: Traits | None, queries: int, least: int, group: int) -> int | None:
    """The most queries, up to so many and `least` of them, with whose rows traits run; None if there are none."""
    if traits is None:
        return queries
    return next((count for count in range(queries, least - 1, -1) if holds(traits, count * group)), None)


@dataclasses.dataclass(slots=True)
class Scene:
    """A cell with everything that its runs share."""

    cell: Cell
    trial: Trial  # what is read, written and compared with
    sampler: Sampler  # times the runs
    # the first result that was found right; compared with every later one if not all heads have a reference
    right: Any = None
    # by traits, or a peer's name; each has run and was right
    runners: dict[Traits | str, Runner] = dataclasses.field(default_factory=dict)


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
        self._gate: tuple[AnyProblem, dict[Cell, Scene]] | None = None
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

    def check(self, traits: Traits, problem: AnyProblem) -> dict[str, Any]:
        """Of each tensor of each gate cell the largest error, what is allowed, the rms error, what is allowed.

        WrongResult names what is wrong.
        """
        if self._gate is None or self._gate[0] != problem:
            self._gate = problem, {}
        scenes, found = self._gate[1], {}
        for cell in gate_cells(problem, traits):
            if cell not in scenes:
                scenes[cell] = self._scene(cell, heads=None)
            scene = scenes[cell]
            run = self._runner(traits, scene)
            results = [scene.trial.kept(self._run_once(run, scene)) for _ in range(REPEATS)]
            for result in results:
                self._judge(traits, result, scene)
            if not all(scene.trial.repeats(traits, results[0], other) for other in results[1:]):
                raise WrongResult(f"{scene.cell.label}: runs of the same inputs differ")
            for name, errors in scene.trial.errors(traits, results[0]).items():
                found[f"{scene.cell.label} {name}"] = errors
        return {"errors": found}

    def sample(self, subject: Traits | str, cell: Cell) -> float:
        """Milliseconds per call of a batch. A subject's first output of a cell is judged before it is timed."""
        if self._cell is None or self._cell.cell != cell:
            self._cell = None  # its memory first
            self._cell = self._scene(cell)
        scene = self._cell
        if subject not in scene.runners:
            run = self._runner(subject, scene)
            result = self._run_once(run, scene)
            self._judge(subject, result, scene)
            if scene.right is None:
                scene.right = scene.trial.kept(result)
            scene.runners[subject] = run
        return scene.sampler(scene.runners[subject])

    def _scene(self, cell: Cell, heads: int | None = accuracy.HEADS_CHECKED) -> Scene:
        trial = TRIALS[cell.task](cell, self.device, cell.batch * cell.heads if heads is None else heads)
        return Scene(cell, trial, Sampler(clock_for(self.device), SAMPLE_MS))

    def _runner(self, subject: Traits | str, scene: Scene) -> Runner:
        if isinstance(subject, str):
            return scene.trial.peer(subject)
        if lookup(kernel_class(subject), subject, scene.cell.problem, self.target) is None:
            raise LookupError(f"the compiled kernel is not in the disk cache {cache_dir()}")
        return scene.trial.kernel(subject, self.target)

    def _run_once(self, run: Runner, scene: Scene) -> Any:
        for tensor in scene.trial.written:
            tensor.fill_(float("nan"))
        try:
            return first_call(run, self.device)
        except HangError:
            self._hung = True
            raise

    def _judge(self, subject: Traits | str, result: Any, scene: Scene) -> None:
        complaint = scene.trial.complaint(result, scene.right)
        if complaint is None and not isinstance(subject, str):
            complaint = scene.trial.imprecision(subject, result)
        if complaint is not None:
            raise WrongResult(f"{scene.cell.label}: {complaint}")
