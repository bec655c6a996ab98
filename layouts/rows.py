"""From a problem, or a row of the shipped tables, to its scene."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from cuteflash.compile import BuildReport
from cuteflash.dispatch import KERNELS, MLA_E4M3_ROWS, MLA_ROWS, Choice, choose, choose_shipped, latent_rows, offers
from cuteflash.mla_problem import HEADS_MAX, LATENT_DIM, LATENT_DIM_V, AnyProblem, MlaProblem
from cuteflash.problem import (
    DTYPE_BYTES,
    FEATURES,
    MASK_KINDS,
    UNBOUNDED,
    BwdProblem,
    Dtype,
    Feature,
    FwdProblem,
    HalfDtype,
    Operation,
    Problem,
)
from cuteflash.traits import rows_cache_sm80, rows_few_sm90, rows_mla_e4m3, rows_mla_sm80, rows_mla_sm90
from cuteflash.traits.arch import ARCHS, Family, get_arch
from cuteflash.traits.bwd_sm80 import BwdTraitsSm80
from cuteflash.traits.bwd_sm90 import BwdTraitsSm90
from cuteflash.traits.bwd_two_pass_sm90 import BwdTwoPassTraitsSm90
from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from cuteflash.traits.cache_sm90 import FwdTraitsCacheSm90
from cuteflash.traits.few_sm90 import FwdTraitsFewSm90
from cuteflash.traits.fp8_sm90 import FwdTraitsFp8Sm90
from cuteflash.traits.length_class import LENGTH_CLASSES, LengthClass
from cuteflash.traits.mla_e4m3 import MlaTraitsE4m3
from cuteflash.traits.mla_mma import MlaTraitsMma
from cuteflash.traits.mla_sm80 import MlaTraitsSm80
from cuteflash.traits.mla_sm90 import MlaTraitsSm90
from cuteflash.traits.row import ROW_HEAD_DIMS, Row, TableKey, Traits
from cuteflash.traits.sm80 import FwdTraitsSm80
from cuteflash.traits.sm90 import FwdTraitsSm90
from cuteflash.traits.tables import CACHE_MODULES, CACHE_ROWS, FEW_ROWS, RowSet, row_sets, tables_of

from .banks import WARP, ways
from .budget import budget
from .dsl import context
from .scene import Scene, Step, Touch

Drawn = Problem | MlaProblem  # what a row that is drawn runs
MLA = "mla"
OPERATIONS: tuple[str, ...] = ("fwd", "bwd", MLA)  # whose rows are drawn
LATENT_MODULES: dict[Family, ModuleType] = {"sm80": rows_mla_sm80, "sm90": rows_mla_sm90}  # of caches of 16 bits
KERNELS_OWN: frozenset[Feature] = frozenset({"turned_v", "split", "e4m3_cache"})  # that a row's kernel always has
# How a problem of an operation is made, and the features that one may ask for.
ASKED: dict[Operation, tuple[Callable[..., Problem], tuple[str, ...]]] = {
    "fwd": (FwdProblem.dense, ("lse", "softcap")),
    "bwd": (BwdProblem.dense, ("softcap", "deterministic")),
}


class Part(NamedTuple):
    """One of the launches that make up a kernel, which has a scene of its own.

    Attributes:
        module, reader: what reads it.
        name: in ids and on the command line; empty if there is no other.
        title: in words.
        plan: the traits' property with its shared memory.
    """

    module: str
    reader: str
    name: str = ""
    title: str = ""
    plan: str = "smem_plan"


PARTS: dict[type[Any], tuple[Part, ...]] = {
    FwdTraitsSm80: (Part("read_sm80", "ReaderSm80"),),
    FwdTraitsCacheSm80: (Part("read_cache_sm80", "ReaderCacheSm80"),),
    FwdTraitsSm90: (Part("read_sm90", "ReaderSm90"),),
    FwdTraitsFp8Sm90: (Part("read_fp8_sm90", "ReaderFp8Sm90"),),
    FwdTraitsCacheSm90: (Part("read_cache_sm90", "ReaderCacheSm90"),),
    FwdTraitsFewSm90: (Part("read_few_sm90", "ReaderFewSm90"),),
    MlaTraitsSm80: (Part("read_mla_sm80", "ReaderMlaSm80"),),
    MlaTraitsE4m3: (Part("read_mla_e4m3", "ReaderMlaE4m3"),),
    MlaTraitsSm90: (Part("read_mla_sm90", "ReaderMlaSm90"),),
    BwdTraitsSm80: (Part("read_bwd_sm80", "ReaderBwdSm80"),),
    BwdTraitsSm90: (Part("read_bwd_sm90", "ReaderBwdSm90"),),
    BwdTwoPassTraitsSm90: (
        Part("read_two_pass_sm90", "ReaderDkv", "dkv", "pass for dK and dV"),
        Part("read_two_pass_sm90", "ReaderDq", "dq", "pass for dQ", "dq_smem_plan"),
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ShippedRow:
    """A shipped row, and a problem that it runs.

    Attributes:
        peers: the rows among which dispatch looked for it.
        masks, dtypes, lengths: those that the row serves and no row above it does; `problem` has the first mask and
            dtype.
        choice: that of the shipped tables for `problem` and the first of `lengths`.
        part: the name of one of its kernel's parts.
    """

    target: str
    family: Family
    problem: Drawn
    peers: RowSet
    masks: tuple[str, ...]
    dtypes: tuple[str, ...]
    lengths: tuple[str, ...]
    choice: Choice
    part: str = ""

    @property
    def features(self) -> tuple[str, ...]:
        """Those of `problem`."""
        return _features(self.problem)

    @property
    def name(self) -> str:
        """That of its scene, without the part."""
        return scene_id(self.problem, self.target, self.choice)


@functools.cache
def shipped_rows(operation: str = "fwd") -> tuple[ShippedRow, ...]:
    """Every part of every shipped row, with a problem that dispatch runs with the row on a machine without user tables.

    `operation` is one of `OPERATIONS`. The tables are searched once a process.
    """
    return tuple(_search(operation))


def _search(operation: str) -> Iterator[ShippedRow]:
    if operation == MLA:
        yield from _latent_rows()
        return
    for peers in (*row_sets(cast(Operation, operation)), *(_unswept_sets() if operation == "fwd" else ())):
        _, target, family = peers.table
        for row in peers.rows:
            for head_dim_v in _own_and_smaller(row.traits.head_dim_v):
                served = _served(row, head_dim_v, target, family)
                if served:
                    problems, classes, choices = zip(*served, strict=True)
                    masks = tuple(dict.fromkeys(problem.scores.mask for problem in problems))
                    dtypes = tuple(dict.fromkeys(problem.operands.qk_dtype for problem in problems))
                    lengths = tuple(one for one in LENGTH_CLASSES if one in classes)
                    for part in parts_of(row.traits):
                        found = (problems[0], peers, masks, dtypes, lengths, choices[0], part.name)
                        yield ShippedRow(target, family, *found)
                    break


def _unswept_sets() -> Iterator[RowSet]:
    """Those of e4m3 caches that no sweep knows: of few query rows, and of families whose every row is written by hand.

    Targets that do not convert e4m3 run none of them.
    """
    for table in tables_of("fwd"):
        if FEW_ROWS[table.family]:
            yield RowSet(table, (rows_few_sm90,), FEW_ROWS[table.family])
        if not CACHE_MODULES[table.family]:
            yield RowSet(table, (rows_cache_sm80,), CACHE_ROWS[table.family])


def _latent_rows() -> Iterator[ShippedRow]:
    """The rows of latent attention, which serve all lengths and both masks, with the query rows of a token."""
    for (target, arch), is_e4m3 in itertools.product(ARCHS.items(), (False, True)):
        problem = MlaProblem("bf16", is_e4m3=is_e4m3)
        for family in arch.families:
            rows = latent_rows((MLA_E4M3_ROWS if is_e4m3 else MLA_ROWS)[family])
            module = rows_mla_e4m3 if is_e4m3 else LATENT_MODULES[family]
            peers = RowSet(TableKey(cast(Any, MLA), target, family), (module,), rows)
            found = (_shipped_choice(problem, target, family, "decode", heads) for heads in range(1, HEADS_MAX + 1))
            choices = {choice.row: choice for choice in found if choice is not None}
            for row in (row for row in rows if row in choices):
                yield ShippedRow(target, family, problem, peers, MASK_KINDS[:2], row.dtypes, row.lengths, choices[row])


def latent_row(
    heads: int,
    dtype: HalfDtype = "bf16",
    target: str = "sm_90a",
    family: Family | None = None,
    is_e4m3: bool = False,
) -> tuple[Drawn, str, Choice]:
    """(problem, target, choice) of decoding a token of so many query heads, from an e4m3 cache or one of 16 bits.

    It is what dispatch runs.

    Raises:
        ValueError: no such target or family.
        NotImplementedError: the target does not run the family, or has no row.
    """
    problem = MlaProblem(dtype, is_e4m3=is_e4m3)
    return problem, target, choose(problem, target, family or ("sm80" if is_e4m3 else None), "decode", heads)


def _own_and_smaller(head_dim_v: int) -> Iterator[int]:
    """A row's own head_dim_v, then those it may lend its tile to, in case another row serves its own."""
    return (size for size in reversed(ROW_HEAD_DIMS) if size <= head_dim_v)


def _served(row: Row, head_dim_v: int, target: str, family: Family) -> list[tuple[Problem, str, Choice]]:
    """The problems that the row runs at its head_dim and this head_dim_v, bf16 and long first, with length class and
    choice.

    Problems with a feature count only if the row runs no other.
    """
    dense, extras = ASKED[cast(Operation, row.traits.operation)]
    dtypes = sorted(row.dtypes, key=lambda name: name != "bf16")
    few, arch = query_rows(row.traits), get_arch(target)
    for extra in ({}, *({name: True} for name in extras)):
        served: list[tuple[Problem, str, Choice]] = []
        for dtype, mask in itertools.product(dtypes, row.masks):
            problem = dense(dtype, row.traits.head_dim, head_dim_v, mask, **extra)
            problem = problem.asking((problem.features | KERNELS_OWN) & row.traits.features)
            for lengths in cast(tuple[LengthClass, ...], row.lengths[::-1]):
                # The row alone first: to look through its whole table takes longer, most of all if none of it serves.
                if any(reason is None for _, _, reason in offers((row,), problem, lengths, arch, few or UNBOUNDED)):
                    choice = choose_shipped(problem, target, family, lengths, few)
                    if choice.row == row:
                        served.append((problem, lengths, choice))
        if served:
            return served
    return []


def query_rows(traits: Traits) -> int | None:
    """The most query rows of a tile that traits are made for, if these are few; else None."""
    few: Any = traits
    return int(few.tile_m) if isinstance(few, FwdTraitsFewSm90) else None


def _shipped_choice(
    problem: AnyProblem, target: str, family: Family, lengths: LengthClass, tile_rows: int | None
) -> Choice | None:
    """The choice of the shipped tables; None if none of their rows runs the problem."""
    try:
        return choose_shipped(problem, target, family, lengths, tile_rows)
    except NotImplementedError:
        return None


class Named(NamedTuple):
    """What a page calls a problem.

    Attributes:
        mask: one, or those that the same code has.
        words: of ids and titles, behind the head dims.
    """

    dtype: Dtype
    head_dim: int
    head_dim_v: int
    mask: str
    words: tuple[str, ...]


def named(problem: Drawn, choice: Choice) -> Named:
    """Names for a problem, as the dispatcher chose to run it."""
    if isinstance(problem, MlaProblem):
        latent = cast("MlaTraitsMma | MlaTraitsSm90", choice.traits)
        words = problem.dtype, *_features(problem), f"{latent.tile_m}x{latent.tile_n}"
        return Named(problem.dtype, LATENT_DIM, LATENT_DIM_V, ", ".join(MASK_KINDS[:2]), words)
    operands, mask = problem.operands, problem.scores.mask
    lengths = choice.row.lengths if choice.row.lengths != LENGTH_CLASSES else ()
    few = query_rows(choice.traits)
    of_few = () if few is None else (f"{few}-rows",)
    words = (mask, operands.qk_dtype, *_features(problem), *of_few, *lengths)
    return Named(operands.qk_dtype, operands.head_dim, operands.head_dim_v, mask, words)


def _features(problem: Drawn) -> tuple[str, ...]:
    """Those in use by which problems differ that are drawn: all of latent attention split keys and have pages."""
    shown = ("e4m3_cache",) if isinstance(problem, MlaProblem) else FEATURES
    return tuple(name for name in shown if name in problem.features)


def make_scene(
    problem: Drawn, target: str, choice: Choice, report: BuildReport | None = None, part: str | None = None
) -> Scene:
    """The scene of a problem on a target.

    Args:
        choice: the dispatcher's.
        report: the compiler's numbers, if the kernel has been compiled for the target.
        part: which part of the kernel; None is the first.

    Raises:
        ValueError: the kernel does not have that part.
    """
    traits, arch = choice.traits, get_arch(target)
    module, name = KERNELS[type(traits)]
    chosen, words = part_named(traits, part), named(problem, choice)
    with context(target):
        kernel = choice.kernel_cls(traits, problem)
        turn_threads = getattr(kernel, "turn_threads", 0)
        reader = getattr(importlib.import_module(f".{chosen.module}", __package__), chosen.reader)(kernel)
        fragments = reader.fragments()
        title = [chosen.title] if chosen.title else []
        return Scene(
            id=scene_id(problem, target, choice, chosen.name),
            title=" · ".join((name, *title, target, f"head dim {_dims(words)}", *words.words)),
            kernel={
                "name": name,
                "module": module,
                "operation": problem.operation,
                "element_bytes": DTYPE_BYTES[words.dtype],
                "family": choice.family,
                "arch": target,
                "dtype": words.dtype,
                "head_dim": words.head_dim,
                "head_dim_v": words.head_dim_v,
                "mask": words.mask,
                "features": list(_features(problem)),
                "lengths": list(choice.row.lengths),
                "query_rows": query_rows(traits),
                "source": choice.source,
                "part": chosen.title,
                "traits": dataclasses.asdict(traits),
                "threads": traits.num_threads + turn_threads,
            },
            sizes=reader.frame.sizes,
            loop=reader.loop,
            roles=reader.roles(),
            tiles=reader.tiles(),
            fragments=fragments,
            steps=reader.steps(),
            budget=budget(traits, arch, fragments, report, getattr(traits, chosen.plan), turn_threads),
        )


def parts_of(traits: Traits) -> tuple[Part, ...]:
    """The parts of the kernel of these traits. NotImplementedError: it is not drawn."""
    if type(traits) not in PARTS:
        raise NotImplementedError(f"layouts of {type(traits).__name__} are not drawn")
    return PARTS[type(traits)]


def part_named(traits: Traits, name: str | None) -> Part:
    """The part of that name, the first if it is None. ValueError if there is none."""
    parts = parts_of(traits)
    found = parts[0] if name is None else next((part for part in parts if part.name == name), None)
    if found is None:
        _, kernel = KERNELS[type(traits)]
        names = ", ".join(part.name for part in parts if part.name)
        raise ValueError(f"part is {name!r}; {kernel} has {f'the parts {names}' if names else 'no parts'}")
    return found


def scene_id(problem: Drawn, target: str, choice: Choice, part: str = "") -> str:
    """The name of the scene of a row's part in links and file names."""
    words = named(problem, choice)
    operation, parts = () if problem.operation == "fwd" else (problem.operation,), (part,) if part else ()
    return "-".join((target, choice.family, *operation, _dims(words), *words.words, *parts))


def _dims(words: Named) -> str:
    wide, narrow = words.head_dim, words.head_dim_v
    return f"{wide}" if wide == narrow else f"{wide}x{narrow}"


def touch_ways(scene: Scene, step: Step, touch: Touch, swizzled: bool = True) -> np.ndarray[Any, Any]:
    """Ways of every phase of a shared-memory access: (instructions, warps, phases). Stage 0 stands for all.

    Raises ValueError if the touch has no bank model.
    """
    if touch.lane_bytes is None:
        raise ValueError(f"{step.id} touches {touch.id} not by lanes of shared memory")
    tile = scene.tile(touch.id)
    offsets = tile.offsets(swizzled).reshape(-1)  # stage 0 comes first
    first = touch.elements()[:, 0, :]  # a lane's first element
    instructions, threads = first.shape
    addresses = tile.base + offsets[first] * tile.element_bytes
    warps = addresses.reshape(instructions, threads // WARP, WARP)
    asynchronous = step.kind == "cp.async"
    return np.array([[ways(lanes, touch.lane_bytes, asynchronous) for lanes in instruction] for instruction in warps])


def worst_ways(scene: Scene) -> int:
    """The most passes that a phase of any instruction takes."""
    banked = ((step, touch) for step in scene.steps for touch in step.touches if touch.lane_bytes)
    return max((int(touch_ways(scene, step, touch).max()) for step, touch in banked), default=1)
