"""The compile stage: kernels into the disk cache, in parallel processes that never touch a GPU; ptxas' word on each.

A process each for `jobs` compilers, because the compiler is not thread-safe, may crash, and must not see a CUDA
context. A kernel that takes its process down is rejected for it; the next one gets another process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import queue
from collections.abc import Generator, Sequence

from cuteflash.compile import BuildReport, cache_dir
from cuteflash.tune.backend import Backend
from cuteflash.tune.plan import Candidate, Group, Plan
from cuteflash.tune.progress import Watch
from cuteflash.tune.store import Stage, Store, Verdict, problem_id
from cuteflash.tune.worker import RequestFailed, Worker


def compile_all(plan: Plan, groups: Sequence[Group], store: Store, watch: Watch, backend: Backend) -> list[Group]:
    """The groups with those of their candidates whose compiled kernel is in the disk cache and is no bad one.

    What was compiled or judged before is not compiled again. With `plan.from_cache` nothing is: what the cache lacks
    is counted and left out.
    """
    # Every group's most promising ones first, so that a sweep that is stopped has something of each.
    ranked = [entry for group in groups for entry in enumerate(group.candidates)]
    everything = [candidate for _, candidate in sorted(ranked, key=lambda entry: entry[0])]
    watch.begin("compile", len(everything))
    verdicts: dict[tuple[str, str], Verdict] = {}
    todo, missing = [], []
    for candidate in everything:
        verdict = _known(plan, candidate, store, backend)
        if verdict is not None:
            verdicts[candidate.id, candidate.key] = verdict
            _count(verdict, candidate, watch)
        elif plan.from_cache:
            missing.append(candidate)
            watch.step("compile", "missing")
        else:
            todo.append(candidate)
    with contextlib.closing(_build(plan, todo, backend)) as built:  # whatever happens, the processes end
        for candidate, verdict in built:
            store.record_verdict(verdict)
            verdicts[candidate.id, candidate.key] = verdict
            _count(verdict, candidate, watch)
    watch.end("compile")
    if missing:
        first = missing[0]
        watch.say(
            f"{len(missing)} kernels are not in the cache {cache_dir()} and are left out, the first for "
            f"{problem_id(first.problem)}: {first.traits}; a sweep with --compile-only makes them, of the same sources"
        )

    def stays(candidate: Candidate) -> bool:
        verdict = verdicts.get((candidate.id, candidate.key))
        return verdict is not None and _goes_on(verdict, candidate)

    return [dataclasses.replace(group, candidates=tuple(filter(stays, group.candidates))) for group in groups]


def _goes_on(verdict: Verdict, candidate: Candidate) -> bool:
    """A row that dispatch has now is measured also where ptxas complains; what does not compile cannot be."""
    return verdict.ok or (candidate.always and "registers" in verdict.details)


def _count(verdict: Verdict, candidate: Candidate, watch: Watch) -> None:
    watch.step("compile", "kept" if _goes_on(verdict, candidate) else "rejected")


def _known(plan: Plan, candidate: Candidate, store: Store, backend: Backend) -> Verdict | None:
    """The verdict of an earlier run, or from the disk cache; None where the kernel has to be compiled.

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
        store.record_verdict(verdict)
    return verdict


def _judge(plan: Plan, candidate: Candidate, report: BuildReport) -> Verdict:
    details = {**dataclasses.asdict(report.resources), "seconds": report.seconds}
    reason = "; ".join(report.complaints) or None
    return Verdict(*_names(plan, candidate), reason is None, reason, details)


def _names(plan: Plan, candidate: Candidate) -> tuple[str, str, str, Stage, str]:
    return candidate.id, plan.target, problem_id(candidate.problem), "compile", candidate.key


def _build(plan: Plan, todo: Sequence[Candidate], backend: Backend) -> Generator[tuple[Candidate, Verdict]]:
    """Compiles in `plan.jobs` processes; verdicts in the order of completion. Stopping early ends the processes."""
    workers = [Worker(backend.builder) for _ in range(min(plan.jobs, len(todo)))]
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def compile_one(candidate: Candidate) -> Verdict:
        worker = idle.get()
        try:
            report = worker.call("build", candidate.traits, candidate.problem, seconds=plan.limits.compile)
        except RequestFailed as failure:
            return Verdict(*_names(plan, candidate), ok=False, reason=str(failure))
        finally:
            idle.put(worker)
        if backend.report(candidate.traits, candidate.problem) is None:
            raise OSError(f"a kernel that was just compiled is not in the disk cache {cache_dir()}: no space left?")
        return _judge(plan, candidate, report)

    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(max(1, len(workers))))
        for worker in workers:
            stack.callback(worker.stop)  # before the threads are waited for: it wakes those that wait for an answer
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        futures = {threads.submit(compile_one, candidate): candidate for candidate in todo}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
