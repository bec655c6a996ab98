"""Kernels of ours that a benchmark is going to run, compiled in parallel before it begins."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cuteflash.compile import build
from cuteflash.dispatch import choices, choose, kernel_class
from cuteflash.mla_problem import AnyProblem
from cuteflash.problem import BwdProblem, FwdProblem, Operands, Scores
from cuteflash.traits.length_class import length_class_of
from cuteflash.tune.cells import Cell

from .names import FP8_VT, OURS, base_of, family_of, is_deterministic, is_fp8, is_ours

Kernel = tuple[Any, AnyProblem]  # traits and what they are compiled for


def compile_all(kernels: Iterable[Kernel], target: str, jobs: int) -> None:
    """All kernels of attention into the disk cache, see `build_all`."""
    build_all(((kernel_class(traits), traits, problem) for traits, problem in dict.fromkeys(kernels)), target, jobs)


def build_all(kernels: Iterable[tuple[Any, Any, Any]], target: str, jobs: int) -> None:
    """All kernels into the disk cache, in processes that never touch the GPU; one that fails is met again when run.

    The processes import `cuteflash` alone: this package may have been loaded from a folder that is not on their path.

    Args:
        kernels: class, traits and problem of each.
        target: what they are compiled for.
        jobs: processes.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for future in [pool.submit(build, *kernel, target) for kernel in kernels]:
            future.exception()


def kernels_with_gradients(cells: Iterable[Cell], names: Sequence[str], target: str) -> Iterator[Kernel]:
    """What forward and backward of cells run, by the tables, with however many blocks; what no row serves is left out.

    That fails when it is run.
    """
    for cell in cells:
        operands = cell.dtype, cell.head_dim, cell.head_dim_v, cell.mask
        for name in filter(is_ours, names):
            backward = BwdProblem.dense(*operands, deterministic=is_deterministic(name))
            for problem in (FwdProblem.dense(*operands, lse=True), backward):
                with contextlib.suppress(NotImplementedError):
                    lengths = length_class_of(cell.seqlen_q, cell.seqlen, problem.operation)
                    for choice in choices(problem, target, family_of(name), lengths):
                        yield choice.traits, problem


def fp8_kernels(cells: Iterable[Cell], names: Sequence[str], target: str) -> Iterator[Kernel]:
    """What forwards of cells run by the tables, those with 8-bit operands and our 16-bit ones beside them."""
    for cell in cells:
        for name in (name for name in names if base_of(name) in OURS):
            operands = Operands.of("e4m3" if is_fp8(name) else cell.dtype, cell.head_dim, cell.head_dim_v)
            operands = dataclasses.replace(operands, transposed_v=name.endswith(FP8_VT))
            problem = FwdProblem(operands, Scores(cell.mask))
            with contextlib.suppress(NotImplementedError):
                yield choose(problem, target, base_of(name), cell.lengths).traits, problem
