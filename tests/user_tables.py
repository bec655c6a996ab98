"""Tables of the user's own for tests: a config directory, and rows that somebody measured."""

from __future__ import annotations

import functools
import pathlib
import sys

from cuteflash import usertable
from cuteflash.calls import Known
from cuteflash.dispatch import choices, choose
from cuteflash.planning import Planner
from cuteflash.problem import Operation
from cuteflash.traits.arch import Family
from cuteflash.traits.row import TableKey
from cuteflash.usertable import MeasuredRow

SM80, SM86, SM89, SM80_HOPPER = (TableKey("fwd", target, "sm80") for target in ("sm_80", "sm_86", "sm_89", "sm_90a"))
SM90 = TableKey("fwd", "sm_90a", "sm90")
MEASURED = functools.partial(MeasuredRow, gpu="Card", date="2026-01-31", tflops=123.4)


class OwnTables:
    """The user's tables in a directory of the test; what has been read of them is forgotten after every change."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.forget()

    def write(self, target: str, family: Family, rows: list[MeasuredRow], operation: Operation = "fwd") -> pathlib.Path:
        path = usertable.write(TableKey(operation, target, family), rows)
        self.forget()
        return path

    def put(self, target: str, family: Family, content: str | bytes) -> pathlib.Path:
        """Any file in a table's place."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f"fwd-{target}-{family}.json"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.forget()
        return path

    def forget(self) -> None:
        """As a new process would start."""
        usertable.load.cache_clear()
        choose.cache_clear()
        choices.cache_clear()
        for name, module in list(sys.modules.items()):
            if name.startswith("cuteflash."):
                for value in vars(module).values():
                    forget_plans(value)


def forget_plans(value: object) -> None:
    """Empty what an object of a module, an operator's implementation for example, has planned."""
    if isinstance(value, Known):
        value._all.clear()
        value.last = None, None
    elif isinstance(value, Planner):
        value._plans.clear()
    elif isinstance(value, tuple):
        for item in value:
            forget_plans(item)
    elif type(value).__module__.startswith("cuteflash.") and not isinstance(value, type):
        for item in getattr(value, "__dict__", {}).values():
            if isinstance(item, (Known, Planner, tuple)):
                forget_plans(item)
