"""The command on a page that compiles its kernel: the CLI draws the same row by it."""

from __future__ import annotations

import json
import shlex

import pytest

from cuteflash.traits.cache_sm80 import FwdTraitsCacheSm80
from layouts.rows import ShippedRow, make_scene, query_rows, shipped_rows
from tests.layouts.test_cli_layouts import call
from tests.layouts.test_web_views import budget

# The family has to be named where another one is the target's best, and the head dim of V, which is not that of K.
IN_BYTES = [
    row
    for row in shipped_rows()
    if isinstance(row.choice.traits, FwdTraitsCacheSm80)
    and row.choice.traits.head_dim_v == 64 < row.choice.traits.head_dim
]
FEW = [row for row in shipped_rows() if query_rows(row.choice.traits)]


@pytest.mark.parametrize("row", [*shipped_rows("mla"), *FEW, *IN_BYTES], ids=lambda row: row.name)
def test_the_command_of_a_page_draws_its_row(row: ShippedRow) -> None:
    command = budget("CF.budget.compileCommand(data)", make_scene(row.problem, row.target, row.choice).kernel)
    program, name, *options = shlex.split(command)
    assert (program, name, options[-3:]) == ("cuteflash", "layouts", ["--compile", "-o", "row.html"])
    result = call(*options[:-3], "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["id"] == row.name
