"""Comma-separated option values, checked: every error names the option, its value and what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import typer

from cuteflash.problem import BwdProblem, FwdProblem, Operation, Problem


class Usage:
    """Turns a ValueError or NotImplementedError of its block into one line on stderr and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ValueError | NotImplementedError):
            print(f"cuteflash: {error}", file=sys.stderr)
            raise typer.Exit(2) from error


def names(option: str, text: str | None, allowed: Iterable[str]) -> list[Any]:
    """The items of a comma-separated list, each one of `allowed`; none if the option is not given."""
    known = list(allowed)
    items = list(dict.fromkeys(item.strip() for item in text.split(","))) if text is not None else []
    for item in items:
        if item not in known:
            raise ValueError(f"{option} is {item!r}; allowed: {', '.join(known)}")
    return items


def flags(option: str, text: str) -> list[bool]:
    """`0`, `1` or `0,1`."""
    return [item == "1" for item in names(option, text, ("0", "1"))]


def head_dims(head_dim: str | None, head_dim_v: str | None) -> list[tuple[int, int]]:
    """(head_dim, head_dim_v) pairs; a problem checks the values themselves."""
    columns = integers("head_dim", head_dim or "")
    columns_v = integers("head_dim_v", head_dim_v) or columns
    if len(columns_v) == 1:
        columns_v = columns_v * len(columns)
    if len(columns) != len(columns_v):
        raise ValueError(f"head_dim_v has {len(columns_v)} values; allowed: one, or {len(columns)} as head_dim has")
    return list(dict.fromkeys(zip(columns, columns_v, strict=True)))


def problem_of(
    operation: Operation,
    dtype: Any,
    dims: tuple[int, int],
    mask: Any,
    *,
    softcap: bool,
    lse: bool,
    deterministic: bool,
) -> Problem:
    """A dense problem; `lse` of a backward is a gradient into the log-sum-exp."""
    if operation == "bwd":
        return BwdProblem.dense(dtype, *dims, mask, softcap=softcap, dlse=lse, deterministic=deterministic)
    if deterministic:
        raise ValueError(f"deterministic is given for kernel {operation}; allowed: with kernel bwd")
    return FwdProblem.dense(dtype, *dims, mask, softcap=softcap, lse=lse)


def integers(option: str, text: str | None) -> list[int]:
    """The items of a comma-separated list; none if the option is not given."""
    if text is None:
        return []
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; allowed: comma-separated integers") from None
