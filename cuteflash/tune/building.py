"""Kernels into the disk cache, in parallel processes that never touch a GPU; ptxas' word on each.

`compile_all` is the sweep's compile stage; `complaints` judges kernels that no sweep times. A process each for `jobs`
compilers, because the compiler is not thread-safe, may crash, and must not see a CUDA context. A kernel that takes its
process down is rejected for it; the next one gets another process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import queue
from collections.abc import Generator, Iterable, Sequence

from cuteflash.compile import BuildReport, cache_dir
from cuteflash.mla_problem import AnyProblem
from cuteflash.problem_names import problem_id
from cuteflash.traits.row import Traits
from cuteflash.tune.backend import Backend
from cuteflash.tune.plan import Candidate, Group, Limits, Plan
from cuteflash.tune.progress import Display
from cuteflash.tune.store import Stage, Store, Verdict
from cuteflash.tune.worker import RequestFailed, Worker

Kernel = tuple[Traits, AnyProblem]


def compile_all(plan: Plan, groups: Sequence[Group], store: Store, watch: Display, backend: Backend) -> list[Group]:
    """The groups with those of their candidates whose compiled kernel is in the disk cache, without a complaint.

    What was compiled or judged before is not compiled again. With `plan.from_cache` nothing is: what the cache lacks
    is counted and left out.
    """
    # Every group's most promising ones first, so that a sweep that is stopped has something of each.
    ranked = [entry for group in groups for entry in enumerate(group.candidates)]
    everything = [candidate for _, candidate in sorted(ranked, key=lambda entry: entry[0])]
    watch.begin("compile", len(everything))
    kept: set[tuple[str, str]] = set()
    todo, missing = [], []

    def judged(candidate: Candidate, verdict: Verdict) -> None:
        goes_on = _goes_on(verdict, candidate)
        kept.update([(candidate.id, candidate.key)] if goes_on else [])
        watch.step("compile", "kept" if goes_on else "rejected")

    for candidate in everything:
        verdict = _known(plan, candidate, store, backend)
        if verdict is not None:
            judged(candidate, verdict)
        elif plan.from_cache:
            missing.append(candidate)
            watch.step("compile", "missing")
        else:
            todo.append(candidate)
    kernels = [(candidate.traits, candidate.problem) for candidate in todo]
    with contextlib.closing(_build(kernels, plan.jobs, plan.limits.compile, backend)) as built:  # ends the processes
        for place, found in built:
            verdict = _judge(plan, todo[place], found)
            store.record(verdict)
            judged(todo[place], verdict)
    watch.end("compile")
    if missing:
        first = missing[0]
        watch.say(
            f"{len(missing)} kernels are not in the cache {cache_dir()} and are left out, the first for "
            f"{problem_id(first.problem)}: {first.traits}; a sweep with --compile-only makes them, of the same sources"
        )
    return [
        dataclasses.replace(group, candidates=tuple(one for one in group.candidates if (one.id, one.key) in kept))
        for group in groups
    ]


def complaints(
    wanted: Iterable[Kernel], stage: str, jobs: int, watch: Display, backend: Backend
) -> dict[Kernel, str | None]:
    """What speaks against each kernel, None if nothing does: ptxas' complaints, or why it does not compile.

    Compiles what the disk cache lacks. One that does not compile is in no cache, and is tried again the next time.

    Args:
        stage: what `watch` is told to be at.
        jobs: compiling processes.

    Raises:
        StartFailed: there are no such processes.
        OSError: a kernel cannot be kept.
    """
    reports = {kernel: backend.report(*kernel) for kernel in wanted}
    todo = [kernel for kernel, report in reports.items() if report is None]
    known = ((kernel, report) for kernel, report in reports.items() if report is not None)
    found: dict[Kernel, str | None] = {}
    watch.begin(stage, len(reports))
    with contextlib.closing(_build(todo, jobs, Limits().compile, backend)) as built:
        for kernel, answer in itertools.chain(known, ((todo[place], answer) for place, answer in built)):
            found[kernel] = _complaint(answer)
            watch.step(stage, "clean" if found[kernel] is None else "with complaints")
    watch.end(stage)
    return found


def _goes_on(verdict: Verdict, candidate: Candidate) -> bool:
    """A row that dispatch has now is measured also if ptxas complains; what does not compile cannot be."""
    return verdict.ok or (candidate.always and "registers" in verdict.details)


def _known(plan: Plan, candidate: Candidate, store: Store, backend: Backend) -> Verdict | None:
    """The verdict of an earlier run, or from the disk cache; None if the kernel has to be compiled.

    A kernel that passed has to be in the cache as well, because it is about to be loaded.
    """
    verdict = store.verdict(*_names(plan, candidate))
    if verdict is not None and not _goes_on(verdict, candidate):
        return verdict
    report = backend.report(candidate.traits, candidate.problem)
    if report is None:
        return None
    if verdict is None:
        verdict = _judge(plan, candidate, report)
        store.record(verdict)
    return verdict


def _judge(plan: Plan, candidate: Candidate, found: BuildReport | RequestFailed) -> Verdict:
    reason = _complaint(found)
    details = {}
    if isinstance(found, BuildReport):
        details = {**dataclasses.asdict(found.resources), "seconds": found.seconds}
    return Verdict(*_names(plan, candidate), reason is None, reason, details)


def _complaint(found: BuildReport | RequestFailed) -> str | None:
    return str(found) if isinstance(found, RequestFailed) else "; ".join(found.complaints) or None


def _names(plan: Plan, candidate: Candidate) -> tuple[str, str, str, Stage, str]:
    return candidate.id, plan.target, problem_id(candidate.problem), "compile", candidate.key


def _build(
    todo: Sequence[Kernel], jobs: int, seconds: float, backend: Backend
) -> Generator[tuple[int, BuildReport | RequestFailed]]:
    """Compiles in `jobs` processes: (place in `todo`, report or failure), in the order of completion.

    Each kernel may take `seconds`. Stopping early ends the processes.
    """
    workers = [Worker(backend.builder) for _ in range(min(jobs, len(todo)))]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def compile_one(kernel: Kernel) -> BuildReport | RequestFailed:
        worker = idle.get()
        try:
            report: BuildReport = worker.call("build", *kernel, seconds=seconds)
        except RequestFailed as failure:
            return failure
        finally:
            idle.put(worker)
        if backend.report(*kernel) is None:
            raise OSError(f"a kernel that was just compiled is not in the disk cache {cache_dir()}: no space left?")
        return report

    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(max(1, len(workers))))
        for worker in workers:
            stack.callback(worker.stop)  # before the threads are waited for: it wakes those that wait for an answer
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        futures = {threads.submit(compile_one, kernel): place for place, kernel in enumerate(todo)}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
